"""Settings of an inbox worker, its backlog, metrics and readiness (ADR 0088)."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter
from typing import Annotated, Final, NamedTuple, get_args

import msgspec
from msgspec import Meta

from postroom.application.inbox.delivery import EventDispatcher, Unhandled
from postroom.application.inbox.ordered_source import OrderedSource
from postroom.application.inbox.worker import DeliveryOutcome, InboxWorker
from postroom.application.messaging import BacklogGauges, backlog_monitor
from postroom.application.metrics import BACKLOG_SECONDS, Metric, Monitor
from postroom.application.ports.inbox import InboxRepository, PartitionBacklog
from postroom.application.ports.outbox import Backlog
from postroom.domain.arguments import check_text
from postroom.domain.errors import InvalidRequest, PostroomError
from postroom.domain.policy import DAY_MS, SECOND_MS

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
    """Return a monitor that measures a queue, too, without its counts while its database does not answer.

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
        count: messages whose delivery started.
        queues: messages of ordered workers, including ones whose delivery started.
    """

    context: str
    count: int
    oldest_at: datetime | None
    queues: Sequence[QueueBacklog]


class GetInboxBacklog:
    """The query for messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""

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


TIMEOUT_MS = 60_000
CONCURRENCY = 50


class InboxSettings(msgspec.Struct, frozen=True):
    """Configuration of an inbox: `[inbox]` of the settings file; times in ms.

    Arguments:
        handler: URL that events are posted to if `handlers` has none for their type.
        handlers: URLs by event type, or by pattern with `*`, `?` or `[...]`; see `EventDispatcher`.
        unhandled: what happens to an event whose type has no handler.
        allow: permitted handler URL prefixes, and their networks; a list, or text with commas
            between entries.
        signing_key, signing_key_file: key that signs requests, or the file that contains it.
        previous_signing_key, previous_signing_key_file: the previous key, while handlers still accept it.
        timeout_ms: how long the handler may take.
        batch: maximum number of messages that are posted together, as an array; 1 posts each alone.
        concurrency: maximum number of messages in progress, up to the consumer's `max_ack_pending`.
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff, which has full jitter.
        retention_ms: age at which processed messages are deleted; longer than the stream's.
        cleanup_every_ms: interval of cleanups by a worker; 0 leaves them to `postroom inbox cleanup`.
        keep_history: keep the histories of deleted messages in `aggregate_events`.
        consumer: name of the consumer in `[consumers]`; required if there are several.
        ordered: keep the order of each aggregate with any number of workers, through a queue in the database.
        lease_ms: how long an ordered worker keeps its partitions after it was killed or paused.
    """

    handler: str = ""
    handlers: dict[str, str] = {}
    unhandled: Unhandled = "dead-letter"
    allow: str | tuple[str, ...] = ()
    signing_key: str = ""
    signing_key_file: str = ""
    previous_signing_key: str = ""
    previous_signing_key_file: str = ""
    timeout_ms: Annotated[int, Meta(ge=1)] = TIMEOUT_MS
    batch: Annotated[int, Meta(ge=1, le=1_000)] = 1
    concurrency: Annotated[int, Meta(ge=1)] = CONCURRENCY
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 120 * SECOND_MS
    retention_ms: Annotated[int, Meta(ge=0)] = 14 * DAY_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False
    consumer: str = ""
    ordered: bool = False
    lease_ms: Annotated[int, Meta(ge=100)] = 15 * SECOND_MS

    def __repr__(self) -> str:
        # Other fields are secret.
        return f"InboxSettings(handler={self.handler!r}, handlers={self.handlers!r})"

    @property
    def urls(self) -> dict[str, str]:
        """Return the URLs of all handlers by event type or pattern; `handler` is the last one, of `*`.

        Raises: InvalidRequest without any, or if `*` has two.
        """
        if not self.handler and not self.handlers:
            raise InvalidRequest(
                "No handler is configured; pass --handler URL, or set handler or handlers under [inbox]."
            )
        if self.handler and "*" in self.handlers:
            raise InvalidRequest(
                "handler and the * of handlers under [inbox] are the same; set only one of them."
            )
        urls = self.handlers | ({"*": self.handler} if self.handler else {})
        return {event_type: check_text(f"handlers.{event_type}", url, 1) for event_type, url in urls.items()}

    @property
    def allowed(self) -> tuple[str, ...]:
        """Return the entries of the allow-list."""
        entries = self.allow.split(",") if isinstance(self.allow, str) else self.allow
        return tuple(entry.strip() for entry in entries if entry.strip())
