"""Shared parts of outbox and inbox: monitors of their backlogs, cleanup, and the codec of their events."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, get_args
from uuid import UUID

import msgspec
from msgspec.structs import astuple, fields

from postroom.application.metrics import BACKLOG_SECONDS, Metric, Monitor, Progress
from postroom.application.ports.event_log import Clock
from postroom.application.ports.outbox import Backlog
from postroom.application.ports.read_models import ContextBacklog
from postroom.application.telemetry import logger
from postroom.application.threads import repeating
from postroom.domain.errors import BrokenLog, PostroomError
from postroom.domain.inbox import InboxEvent
from postroom.domain.outbox_events import OutboxChange
from postroom.domain.record import Event

US = 1_000_000


class BacklogGauges(NamedTuple):
    """Names and descriptions of the gauges of a backlog.

    Arguments:
        prefix: the gauges are named `{prefix}_backlog` and `{prefix}_oldest_seconds`.
        count_help: description of the number of unsettled items.
        oldest_help: description of the age of the oldest item.
    """

    prefix: str
    count_help: str
    oldest_help: str

    def metrics(self, labels: dict[str, str], backlog: Backlog, now: int) -> list[Metric]:
        """Return the metrics of a backlog; `now` is µs since 1970 UTC."""
        oldest = 0.0 if backlog.oldest_at is None else max(0.0, (now - backlog.oldest_at) / US)
        return [
            Metric(f"{self.prefix}_backlog", "gauge", self.count_help, [(labels, backlog.count)]),
            Metric(f"{self.prefix}_oldest_seconds", "gauge", self.oldest_help, [(labels, oldest)]),
        ]


def backlog_monitor(
    context: str,
    collect_counts: Callable[[dict[str, str]], Sequence[Metric]],
    gauges: BacklogGauges,
    get_backlog: Callable[[], Awaitable[Backlog]],
    wall: Callable[[], int],
    is_connected: Callable[[], bool],
    loop: tuple[str, Progress],
) -> Monitor:
    """Return the monitor of a loop between a stream and the database of a service.

    Arguments:
        collect_counts: returns the metrics that need no database; called with the labels.
        get_backlog: counts the unsettled items, over a connection of its own.
        wall: the wall clock, µs.
        is_connected: returns whether the stream can be reached.
        loop: the name of the loop in `/readyz`, and its progress.
    """
    labels = {"context": context}
    loop_name, progress = loop

    async def find_backlog() -> Backlog | None:
        try:
            async with asyncio.timeout(BACKLOG_SECONDS):
                return await get_backlog()
        except (PostroomError, TimeoutError):
            return None

    async def collect() -> list[Metric]:
        metrics = list(collect_counts(labels))
        backlog = await find_backlog()
        return metrics if backlog is None else metrics + gauges.metrics(labels, backlog, wall())

    async def find_missing() -> list[str]:
        missing = [] if is_connected() else ["nats"]
        if await find_backlog() is None:
            missing.append("database")
        if not progress.is_made:
            missing.append(loop_name)
        return missing

    return Monitor(collect, find_missing)


EVERY_SECONDS = 5.0
Count = Callable[[], Sequence[ContextBacklog]]
"""Count the backlog in the service's own database."""
Save = Callable[[Sequence[ContextBacklog]], None]
"""Store counts with the read models, unless newer ones are stored."""


class ContextBacklogRefresher:
    """Refresher of the stored backlog of one context.

    The backlog is counted in the tables of outbox and inbox, which have partial indexes of unsettled rows. It
    can't be folded from their events: these have no total order, and rows inserted by plain SQL have none
    until a relay reads them.
    """

    def __init__(self, count: Count, save: Save, context: str) -> None:
        self._count = count
        self._save = save
        self._context = context

    def refresh(self) -> Sequence[ContextBacklog]:
        """Count the backlog, store the counts, and return them.

        Raises: Unavailable when either database can't be used.
        """
        counts = self._count()
        self._save(counts)
        return counts

    @contextmanager
    def refreshing(self, every_seconds: float = EVERY_SECONDS) -> Iterator[None]:
        """Refresh periodically in a thread for the duration of the context; failures are logged."""
        with repeating(
            "postroom contexts", self.refresh, every_seconds, "contexts.not_refreshed", context=self._context
        ):
            yield


BATCH = 1_000
PAUSE_SECONDS = 0.05
"""Maximum pause between two batches, in which other work can use the database."""


Delete = Callable[[int, int], Awaitable[int | None]]
"""Delete rows settled before a time (µs UTC), up to a limit; None if another process holds the lock."""


class Cleanup:
    """Deletion of old settled rows; unsettled rows are never deleted.

    Concurrent cleanups: one takes the lock, the others return None.

    Arguments:
        table: name of the table, for log events.
        random: returns uniform random numbers in [0, 1).
        retention_ms: age at which settled rows are deleted.
        batch: number of rows deleted per transaction.
    """

    def __init__(
        self,
        table: str,
        delete: Delete,
        clock: Clock,
        random: Callable[[], float],
        *,
        retention_ms: int,
        batch: int = BATCH,
    ) -> None:
        self._table = table
        self._delete = delete
        self._clock = clock
        self._random = random
        self._retention_ms = retention_ms
        self._batch = batch

    async def clean(self) -> int | None:
        """Delete old rows and return their number; None while another cleanup runs.

        Raises: Unavailable when the database can't be used.
        """
        before = self._clock.wall() - self._retention_ms * 1_000
        deleted = 0
        while (count := await self._delete(before, self._batch)) is not None:
            deleted += count
            if count < self._batch:
                return deleted
            await asyncio.sleep(self._random() * PAUSE_SECONDS)
        return deleted or None

    async def run(self, every_ms: int) -> None:
        """Clean up at random intervals of `every_ms` on average; failures are logged."""
        while True:
            await asyncio.sleep((0.5 + self._random()) * every_ms / 1_000)
            try:
                deleted = await self.clean()
            except PostroomError as error:
                logger().warning(f"{self._table}.cleanup_failed", error=str(error))
            else:
                if deleted:
                    logger().info(f"{self._table}.cleaned", removed=deleted)


Upcaster = Callable[[list[Any]], list[Any]]

_FIRST_FIELD = len(Event.__struct_fields__)
_pack = msgspec.msgpack.Encoder(uuid_format="bytes").encode
_unpack = msgspec.msgpack.Decoder(list[Any]).decode


class _Kind(NamedTuple):
    cls: type[Event]
    decode: Callable[[bytes], tuple[Any, ...]]


class AggregateCodec:
    """Encoder of events as `(type, state)`, and decoder of every schema version.

    Arguments:
        kinds: classes of the events.
        upcasters: by type and the version to convert from, such as `OutboxEventRecorded.1`.
    """

    def __init__(self, kinds: Iterable[type[Event]], upcasters: Mapping[str, Upcaster] | None = None) -> None:
        self._upcasters = upcasters or {}
        self._names: dict[type[Event], str] = {}
        self._kinds: dict[str, _Kind] = {}
        for cls in kinds:
            version = 1
            while f"{cls.__name__}.{version}" in self._upcasters:
                version += 1
            name = f"{cls.__name__}.{version}"
            types = tuple(field.type for field in fields(cls)[_FIRST_FIELD:])
            state: Any = tuple[types] if types else tuple[()]  # type: ignore[valid-type]
            self._names[cls] = name
            self._kinds[name] = _Kind(cls, msgspec.msgpack.Decoder(state).decode)

    def to_row(self, event: Event) -> tuple[str, bytes]:
        """Return the type and the encoded state of an event."""
        return self._names[type(event)], _pack(astuple(event)[_FIRST_FIELD:])

    def to_event(self, stream: bytes, version: int, type_: str, at: int, state: bytes) -> Event:
        """Return the event of a row; `at` is in µs since 1970 UTC.

        Raises: BrokenLog for a type unknown to this version of Postroom.
        """
        name = type_
        while upcast := self._upcasters.get(name):
            state = _pack(upcast(_unpack(state)))
            cls, _, number = name.rpartition(".")
            name = f"{cls}.{int(number) + 1}"
        kind = self._kinds.get(name)
        if kind is None:
            raise BrokenLog(
                f"The history of {stream.hex()} holds an event of unknown type {type_} at version {version}; "
                "read it with the Postroom version that wrote it, or a newer one.",
                version,
            )
        return kind.cls(stream, version, at, *kind.decode(state))


CODEC = AggregateCodec(
    [*get_args(OutboxChange), *get_args(InboxEvent)],
    {
        "OutboxEventRecorded.1": lambda state: [*state, {}, False, None],
        "OutboxEventRecorded.2": lambda state: [
            *(str(UUID(bytes=value)) if isinstance(value, bytes) else value for value in state),
            None,
            None,
        ],
    },
)
"""Codec of all events in `aggregate_events`."""


def by_event_type(name: str, text: str, labels: Mapping[str, str], numbers: Mapping[str, int]) -> Metric:
    """Return a counter with a value for each event type."""
    return Metric(
        name,
        "counter",
        text,
        [({**labels, "event_type": each}, number) for each, number in sorted(numbers.items())],
    )
