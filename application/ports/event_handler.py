"""Port: the service that handles events (SDS-047 PORT-047-005 `EventHandler`, section 12)."""

from base64 import b64decode
from typing import Any, Protocol

import msgspec

from postroom.domain.inbox import HandlerResult


class HandlerRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Request to a handler, with SDS-047's field names (section 12).

    Arguments:
        occurred_at: RFC 3339, UTC.
        payload: JSON value; bytes if there is a `content_type`, in JSON as base64.
        attributes: of a CloudEvent; None, and not in the JSON, for messages of other formats.
        content_type: media type of a payload that is not JSON; None, and not in the JSON, of one that is.
    """

    message_id: str
    subject: str
    event_type: str
    event_version: int
    occurred_at: str | None
    correlation_id: str | None
    causation_id: str | None
    payload: Any
    attributes: dict[str, str] | None = None
    content_type: str | None = None

    def __post_init__(self) -> None:
        if self.content_type is not None and isinstance(self.payload, str):  # decoded from JSON
            msgspec.structs.force_setattr(self, "payload", b64decode(self.payload, validate=True))


class EventHandler(Protocol):
    """Code that handles events; every adapter passes `tests/conformance/event_handler.py`."""

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """Handle an event and return the result; a missing response is a failure."""

    async def close(self) -> None:
        """Release connections; closing twice is fine."""
