"""Port: the service that handles events (SDS-047 PORT-047-005 `EventHandler`, section 12)."""

from typing import Any, Protocol

import msgspec

from postroom.domain.inbox import HandlerResult


class HandlerRequest(msgspec.Struct, frozen=True, omit_defaults=False):
    """What the handler is asked to deal with, with SDS-047's field names (section 12).

    Arguments:
        occurred_at: RFC 3339, UTC.
    """

    message_id: str
    subject: str
    event_type: str
    event_version: int
    occurred_at: str | None
    correlation_id: str | None
    causation_id: str | None
    payload: Any


class EventHandler(Protocol):
    """Hand events to the code that deals with them; see `tests/conformance/event_handler.py`."""

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Let the handler deal with an event and return what it said; not to answer is an answer too."""

    async def close(self) -> None:
        """Release connections; closing twice is fine."""
