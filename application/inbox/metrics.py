"""Metrics and readiness of an inbox worker, and of ordered workers (ADR 0088)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple, get_args

from postroom.application.inbox.dispatcher import EventDispatcher
from postroom.application.inbox.ordered_source import OrderedSource
from postroom.application.inbox.worker import DeliveryOutcome, InboxWorker
from postroom.application.messaging.backlog_monitor import BacklogGauges, backlog_monitor
from postroom.application.metrics import Metric
from postroom.application.monitor import BACKLOG_SECONDS, Monitor
from postroom.application.ports.inbox_repository import PartitionBacklog
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import PostroomError

_GAUGES: Final = BacklogGauges(
    "postroom_inbox",
    "Unsettled messages.",
    "Time since the oldest unsettled message was received; 0 without one.",
)


def inbox_monitor(
    worker: InboxWorker,
    context: str,
    handlers: EventDispatcher,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    stream_metrics: Callable[[], Sequence[Metric]],
    is_connected: Callable[[], bool],
) -> Monitor:
    """Return the monitor of an inbox worker; for the arguments, see `relay_monitor`."""

    def collect_counts(labels: dict[str, str]) -> list[Metric]:
        return [
            Metric(
                "postroom_inbox_deliveries",
                "counter",
                "Deliveries by outcome.",
                [
                    (labels | {"outcome": outcome}, worker.counts[outcome])
                    for outcome in get_args(DeliveryOutcome)
                ],
            ),
            Metric(
                "postroom_inbox_inflight", "gauge", "Messages in progress.", [(labels, worker.in_progress)]
            ),
            Metric(
                "postroom_inbox_handler_seconds",
                "histogram",
                "Duration of calls, by handler.",
                [(labels | {"handler": name}, seconds) for name, seconds in handlers.seconds.items()],
            ),
            Metric(
                "postroom_inbox_handler_calls",
                "counter",
                "Calls of handlers by outcome.",
                [
                    (labels | {"handler": name, "outcome": outcome}, outcomes[outcome])
                    for name, outcomes in handlers.outcomes.items()
                    for outcome in ("processed", "already_processed", "poison", "failed")
                ],
            ),
            Metric(
                "postroom_inbox_unhandled",
                "counter",
                "Events whose type has no handler.",
                [(labels, handlers.unhandled)],
            ),
            *stream_metrics(),
        ]

    return backlog_monitor(
        context, collect_counts, _GAUGES, get_backlog, wall, is_connected, ("worker", worker.progress)
    )


US = 1_000_000


class OrderedQueue(NamedTuple):
    """The queue of a consumer, as one of its workers measures it.

    Arguments:
        consumer: `STREAM/DURABLE`.
        get_backlog: counts the messages of its partitions, over a connection of its own.
        source: this worker's share of it.
    """

    consumer: str
    get_backlog: Callable[[], Awaitable[Sequence[PartitionBacklog]]]
    source: OrderedSource


def with_queue(monitor: Monitor, context: str, queue: OrderedQueue, wall: Callable[[], int]) -> Monitor:
    """Return a monitor that measures a queue, too; while its database does not answer, only what is owned.

    Arguments:
        wall: the wall clock, µs.
    """
    labels = {"context": context, "consumer": queue.consumer}

    async def collect() -> list[Metric]:
        metrics = [*await monitor.collect(), _partition_metric(labels, len(queue.source.partitions))]
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                partitions = await queue.get_backlog()
        except (PostroomError, TimeoutError):
            return metrics
        return metrics + _backlog(labels, partitions, wall())

    return Monitor(collect, monitor.find_missing)


def _partition_metric(labels: dict[str, str], count: int) -> Metric:
    return Metric("postroom_inbox_partitions", "gauge", "Partitions of this worker.", [(labels, count)])


def _backlog(labels: dict[str, str], partitions: Sequence[PartitionBacklog], now: int) -> list[Metric]:
    total = sum(each.count for each in partitions)
    metrics = [Metric("postroom_inbox_queued", "gauge", "Messages in the queue.", [(labels, total)])]
    if not partitions:
        return metrics
    by_partition = [(labels | {"partition": str(each.partition)}, each) for each in partitions]
    return [
        *metrics,
        Metric(
            "postroom_inbox_partition_queued",
            "gauge",
            "Messages in the queue by partition; no sample without any.",
            [(each_labels, each.count) for each_labels, each in by_partition],
        ),
        Metric(
            "postroom_inbox_partition_oldest_seconds",
            "gauge",
            "Time since the first message of the partition was added to the queue.",
            [(each_labels, max(0.0, (now - each.oldest_at) / US)) for each_labels, each in by_partition],
        ),
        Metric(
            "postroom_inbox_partition_first_sequence",
            "gauge",
            "Position in the stream of the first message of the partition.",
            [(each_labels, each.first_sequence) for each_labels, each in by_partition],
        ),
    ]
