"""Port: the streams and consumers that a broker has."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from postroom.domain.streams import ConsumerDefinition, StreamDefinition


class ConsumerStatus(msgspec.Struct, frozen=True):
    """Say how far a consumer is.

    Arguments:
        waiting: messages not delivered yet. unsettled: delivered and not acked. redelivered: more than once.
    """

    durable: str
    waiting: int
    unsettled: int
    redelivered: int


class StreamStatus(msgspec.Struct, frozen=True):
    """Say what a stream holds, and who reads it."""

    name: str
    subjects: Sequence[str]
    messages: int
    bytes: int
    last_sequence: int
    consumers: Sequence[ConsumerStatus]


class Streams(Protocol):
    """Look at streams and consumers, make them and change them; nothing is ever deleted.

    Raises: Unavailable when the broker can't be reached or doesn't know.
    """

    async def find_stream(self, name: str) -> StreamDefinition | None:
        """Return what a stream is, or None where there is none."""

    async def find_consumer(self, stream: str, durable: str) -> ConsumerDefinition | None:
        """Return what a consumer is, or None where there is none."""

    async def create_stream(self, definition: StreamDefinition) -> None:
        """Make a stream; raise `InvalidRequest` where the broker refuses."""

    async def update_stream(self, definition: StreamDefinition) -> None:
        """Change what the definition mentions; raise `InvalidRequest` where the broker refuses."""

    async def create_consumer(self, definition: ConsumerDefinition) -> None:
        """Make a consumer; raise `InvalidRequest` where the broker refuses."""

    async def update_consumer(self, definition: ConsumerDefinition) -> None:
        """Change what the definition mentions; raise `InvalidRequest` where the broker refuses."""

    async def list_streams(self) -> Sequence[StreamStatus]:
        """Return all streams with their consumers, by name."""
