"""Port: a stream that messages are published to (SDS-047 PORT-047-003 `JetStreamPublisher`)."""

from collections.abc import Mapping
from typing import Protocol

import msgspec


class Published(msgspec.Struct, frozen=True):
    """Say where the stream stored a message, and whether it held one of the same `Nats-Msg-Id` already."""

    stream: str
    sequence: int
    duplicate: bool


class Publisher(Protocol):
    """Publish to a persistent stream; every adapter passes `tests/conformance/publisher.py`."""

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> Published:
        """Publish one message and return once the stream has stored it.

        Raises:
            InvalidRequest: the stream refuses this message and always will (no stream, too large).
            Unavailable: it is unknown whether the message was stored; publish it again.
        """

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
