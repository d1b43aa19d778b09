"""The query for the backlog of an inbox."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter

import msgspec

from postroom.application.ports.inbox_repository import InboxRepository, PartitionBacklog


class QueueBacklog(msgspec.Struct, frozen=True):
    """Backlog of the ordered workers of a consumer.

    Arguments:
        consumer: `STREAM/DURABLE`.
        count: messages in the queue.
        oldest_at: when the oldest was added.
        partitions: number of partitions with messages.
        fullest, fullest_count: the partition with the most messages, and their number.
    """

    consumer: str
    count: int
    oldest_at: datetime
    partitions: int
    fullest: int
    fullest_count: int


class InboxBacklog(msgspec.Struct, frozen=True):
    """Backlog of an inbox (SDS-047 QRY-051): unsettled messages, and when the oldest was received.

    Arguments:
        count: messages of which a delivery started.
        queues: messages of ordered workers, those of which a delivery started included.
    """

    context: str
    count: int
    oldest_at: datetime | None
    queues: Sequence[QueueBacklog]


class GetInboxBacklog:
    """The query for the messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""

    def __init__(self, inbox: InboxRepository, context: str) -> None:
        self._inbox = inbox
        self._context = context

    async def __call__(self) -> InboxBacklog:
        """Return the backlog of the context."""
        backlog = await self._inbox.backlog()
        partitions = await self._inbox.queue_backlog()
        oldest_at = None if backlog.oldest_at is None else _utc(backlog.oldest_at)
        queues = [_queue(*each) for each in groupby(partitions, key=attrgetter("consumer"))]
        return InboxBacklog(self._context, backlog.count, oldest_at, queues)


def _queue(consumer: str, partitions: Iterable[PartitionBacklog]) -> QueueBacklog:
    each = list(partitions)
    fullest = max(each, key=attrgetter("count"))
    return QueueBacklog(
        consumer,
        sum(partition.count for partition in each),
        _utc(min(partition.oldest_at for partition in each)),
        len(each),
        fullest.partition,
        fullest.count,
    )


def _utc(at: int) -> datetime:
    return datetime.fromtimestamp(at / 1e6, UTC)
