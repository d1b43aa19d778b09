"""Port: a stream that is read from any sequence on, without gaps."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from postroom.application.ports.source import SourceMessage


class StreamState(msgspec.Struct, frozen=True):
    """A consumer of a stream.

    Arguments:
        incarnation: differs if the stream or the consumer was deleted and recreated.
        floor: sequence up to which the consumer's messages are acknowledged.
        delivered: sequence up to which they were delivered.
    """

    incarnation: str
    floor: int
    delivered: int


class OrderedStream(Protocol):
    """Messages of a durable consumer, read in the order of the stream whoever has their deliveries.

    Raises: Unavailable while the stream can't be reached, NotFound when it or the consumer was deleted.
    """

    async def state(self) -> StreamState:
        """Return the state of the consumer."""

    async def read(self, after: int, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        """Return up to `limit` next messages after a sequence, in order and without gaps.

        Waits up to `wait_ms` for the first. Deliveries of messages up to `after` are acknowledged.
        """

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        """Acknowledge messages that are stored."""

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
