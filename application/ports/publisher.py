"""Port: publishing to a stream (SDS-047 PORT-047-003 `JetStreamPublisher`)."""

from collections.abc import Mapping
from typing import Protocol

import msgspec

from postroom.domain.errors import Unavailable


class PublishAck(msgspec.Struct, frozen=True):
    """Acknowledgement of a stream: the message's position, and whether its `Nats-Msg-Id` was a duplicate."""

    stream: str
    sequence: int
    duplicate: bool


class NotStored(Unavailable):
    """The target answered that it can't store a message now, such as a full stream; other names may work."""


class Publisher(Protocol):
    """Publisher to persistent streams; every adapter passes `tests/conformance/publisher.py`."""

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> PublishAck:
        """Publish one message and return once the stream has stored it.

        Raises:
            InvalidRequest: the stream refuses this message (no stream at the subject, too large).
            NotStored: the stream can't store this message now (it is full, or has no leader).
            Unavailable: it is unknown whether the message was stored; publish it again.
        """

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
