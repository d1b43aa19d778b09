"""Port: the queue of ordered workers, in the inbox's database (SDS-047 PORT-047-002)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import msgspec

from postroom.application.ports.ordered_stream import StreamState
from postroom.application.ports.source import SourceMessage


class NewMessage(msgspec.Struct, frozen=True, gc=False):
    """A message to be added to the queue.

    Arguments:
        lane: hash of what keeps its order, 64 bits with sign.
    """

    partition: int
    lane: int
    message: SourceMessage


class QueuedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of the queue.

    Arguments:
        position: its place in the queue.
        epoch: that of its partition when it was read.
        failures: deliveries that failed.
    """

    position: int
    partition: int
    epoch: int
    lane: int
    failures: int
    message: SourceMessage


class Turn(msgspec.Struct, frozen=True):
    """The right to add to the queue for a time.

    Arguments:
        sequence: up to where the stream is in the queue.
        queued: length of the queue, up to the limit that the caller named.
    """

    sequence: int
    queued: int


class Retry(msgspec.Struct, frozen=True, gc=False):
    """A message that failed, to be delivered after `delay_ms`."""

    position: int
    partition: int
    epoch: int
    delay_ms: int


class Ownership(msgspec.Struct, frozen=True):
    """What a worker owns.

    Arguments:
        epochs: its partitions with their epochs.
        workers: live workers of the consumer, itself included.
    """

    epochs: Mapping[int, int]
    workers: int


class InboxQueue(Protocol):
    """Messages of one consumer in the order of its stream, and the partitions of one worker.

    Each method is one transaction. A partition has one owner, who keeps it until it releases it, or until it
    has not renewed its lease in time and another worker claims it. The tests are in
    `tests/integration/test_inbox_queue.py`.

    Raises: Unavailable when the database can't be used.
    """

    async def open(self, state: StreamState) -> None:
        """Open the queue; a recreated stream or consumer is read from its ack floor."""

    async def take_turn(self, ms: int, most: int) -> Turn | None:
        """Take or prolong the right to add, for `ms`; None while another worker has it.

        Arguments:
            most: count the messages of the queue up to this number.
        """

    async def add(self, after: int, last: int, messages: Sequence[NewMessage]) -> bool:
        """Add the messages of the stream after one sequence up to another.

        Returns: False, and changes nothing, if the queue has the stream up to another sequence than `after`.
        """

    async def renew(self, ms: int) -> None:
        """Renew the lease of this worker's partitions for `ms`."""

    async def claim(self) -> Ownership:
        """Claim partitions without a live owner, up to this worker's share of them."""

    async def release(self, partitions: Collection[int]) -> None:
        """Give up partitions; messages of theirs must not be in hand."""

    async def leave(self) -> None:
        """Give up all partitions, and the turn."""

    async def next(
        self, limit: int, in_hand: Collection[int], draining: Collection[int]
    ) -> Sequence[QueuedMessage]:
        """Return the first messages of each of this worker's partitions, in the order of the queue.

        A message that waits for its retry keeps back the later ones of its lane.

        Arguments:
            limit: maximum number of messages; of one partition, a part of that may be returned.
            in_hand: positions of messages to pass over.
            draining: partitions to pass over.
        """

    async def settle(self, settled: Collection[int], retries: Collection[Retry]) -> None:
        """Remove messages, and postpone others whose partition still has the epoch."""

    async def close(self) -> None:
        """Disconnect; closing twice is fine."""
