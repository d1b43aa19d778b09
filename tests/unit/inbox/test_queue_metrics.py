"""What a monitor measures of the queue of ordered workers."""

from collections.abc import Sequence
from typing import Any

from postroom.application.inbox.metrics import OrderedQueue, with_queue
from postroom.application.metrics import Metric, Monitor
from postroom.application.ports.inbox import PartitionBacklog
from postroom.domain.errors import PostroomError, Unavailable

SECOND = 1_000_000
OTHER = Metric("postroom_inbox_backlog", "gauge", "Unsettled messages.", [({}, 3)])
LABELS = {"context": "sea", "consumer": "SHOP/sea"}


class Share:
    """A worker's share of the queue."""

    partitions = frozenset({1, 2, 5})


async def measure(partitions: Sequence[PartitionBacklog] | PostroomError) -> dict[str, Any]:
    """Return the samples of each metric."""

    async def get_backlog() -> Sequence[PartitionBacklog]:
        if isinstance(partitions, PostroomError):
            raise partitions
        return partitions

    async def collect() -> list[Metric]:
        return [OTHER]

    async def find_missing() -> list[str]:
        return ["database"]

    share: Any = Share()
    queue = OrderedQueue("SHOP/sea", get_backlog, share)
    monitor = with_queue(Monitor(collect, find_missing), "sea", queue, lambda: 10 * SECOND)
    assert await monitor.find_missing() == ["database"]
    return {each.name: each.samples for each in await monitor.collect()}


OWN = {OTHER.name: OTHER.samples, "postroom_inbox_partitions": [(LABELS, 3)]}


async def test_partitions_with_messages_have_samples() -> None:
    fuller = PartitionBacklog("SHOP/sea", 5, 7, 41, 8 * SECOND)
    later = PartitionBacklog("SHOP/sea", 9, 1, 50, 11 * SECOND)  # by a clock that is ahead
    five, nine = LABELS | {"partition": "5"}, LABELS | {"partition": "9"}
    assert await measure([fuller, later]) == OWN | {
        "postroom_inbox_queued": [(LABELS, 8)],
        "postroom_inbox_partition_queued": [(five, 7), (nine, 1)],
        "postroom_inbox_partition_oldest_seconds": [(five, 2.0), (nine, 0.0)],
        "postroom_inbox_partition_first_sequence": [(five, 41), (nine, 50)],
    }


async def test_an_empty_queue_has_no_samples_by_partition() -> None:
    assert await measure([]) == OWN | {"postroom_inbox_queued": [(LABELS, 0)]}


async def test_without_the_database_only_the_workers_own_partitions_are_measured() -> None:
    assert await measure(Unavailable("The database can't be reached.")) == OWN
