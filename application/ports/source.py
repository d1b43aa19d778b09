"""Port: where messages come from (RFC-037 message source slot; SDS-047 PORT-047-004 `JetStreamConsumer`)."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec


class SourceMessage(msgspec.Struct, frozen=True, gc=False):
    """One delivery of a message by a source.

    Arguments:
        delivered: which delivery of the message this is, counted from 1.
        sequence: its place in the source, for people and logs.
        token: what the source needs to settle this delivery.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    delivered: int
    sequence: str
    token: Any


class Source(Protocol):
    """Consume a stream durably: what was not acked comes again, also after a crash of either side.

    Every adapter passes `tests/conformance/source.py`.

    Raises: Unavailable while the source can't be reached, and after it try again; NotFound when what is
    consumed was deleted.
    """

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` messages, waiting up to `wait_ms` for the first; none when none came.

        One call at a time. What a cancelled call had got comes again later.
        """

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Settle deliveries for good; return once the source knows.

        A source that crashes may forget it, and deliver them again: whoever consumes must recognise that.
        """

    async def nak(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        """Ask for deliveries again after a while."""

    async def keep(self, messages: Sequence[SourceMessage]) -> None:
        """Say that work on deliveries goes on, so that they don't come again yet."""

    async def close(self) -> None:
        """Leave the source; what was not acked will come again. Closing twice is fine."""
