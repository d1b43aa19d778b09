"""The backlog of an inbox, with the queues of ordered workers."""

from datetime import UTC, datetime
from typing import Any

from postroom.application.inbox.metrics import GetInboxBacklog, QueueBacklog
from postroom.application.ports.inbox import PartitionBacklog
from postroom.application.ports.outbox import Backlog

SECOND = 1_000_000


class Inbox:
    """An inbox with unsettled messages."""

    async def backlog(self) -> Backlog:
        return Backlog(2, None)

    async def queue_backlog(self, consumer: str | None = None) -> list[PartitionBacklog]:
        assert consumer is None
        return [
            PartitionBacklog("SHOP/sea", 3, 4, 10, 9 * SECOND),
            PartitionBacklog("SHOP/sea", 5, 7, 8, 6 * SECOND),
            PartitionBacklog("YARD/sea", 3, 1, 2, 7 * SECOND),
        ]


async def test_each_queue_is_counted_with_its_oldest_message_and_its_fullest_partition() -> None:
    inbox: Any = Inbox()
    backlog = await GetInboxBacklog(inbox, "sea")()
    assert (backlog.context, backlog.count, backlog.oldest_at) == ("sea", 2, None)
    assert backlog.queues == [
        QueueBacklog("SHOP/sea", 11, datetime(1970, 1, 1, 0, 0, 6, tzinfo=UTC), 2, 5, 7),
        QueueBacklog("YARD/sea", 1, datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC), 1, 3, 1),
    ]
