"""Follow: apply new log records to the read models, batch by batch.

One process at a time follows a store; others stand by. The cursor is committed together with the rows, so the
next process continues where the previous one stopped, even after a crash.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from postroom.application.metrics import Metric, Monitor, Progress
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.projections.fold import MESSAGES, columns_read
from postroom.projections.incremental import (
    MAX_BYTES,
    MAX_EVENTS,
    START,
    Batch,
    BatchSize,
    Cursor,
    FollowCounts,
    Head,
    Positions,
    Step,
    Version,
    check_cursors,
    next_ranges,
    through_record,
)
from postroom.projections.log_reader import LogExtent, LogReader, Range
from postroom.projections.ports.read_model_store import ReadModelUpdater
from postroom.projections.projection import Projection, arrow_schema, load_projections

FEW_EVENTS = 500
"""Larger batches are read and folded while the previous batch is applied."""
POLL_MIN_SECONDS, POLL_MAX_SECONDS = 0.025, 0.2
"""Pause between small batches, so that records accumulate: even the smallest batch takes about 20 ms."""
LOST_SECONDS = 5
"""Time after which a follower looks for commits without a notification; it checks for a stop each second."""
STANDBY_SECONDS = 0.5
PASS_SECONDS = 300.0
"""Time without a pass after which the follower is not ready; a large batch takes a while."""
RETRY_BASE_SECONDS, RETRY_MAX_SECONDS = 0.25, 15.0
"""Bounds of the backoff while the store is unavailable."""


class _PreparedBatch(NamedTuple):
    """A batch ready to be applied, with the step of each mailbox and the size of its records in bytes."""

    steps: list[Step]
    batch: Batch
    size: int


class Follower:
    """A process that advances the read models of a store to the end of its log.

    Arguments:
        updater: updater of the read models; closed with the follower.
        open_log: opens the log, given the archive folder that the version includes, or None.
        version: the version to advance; None for the version that is active at the time of each batch.
        max_events: maximum number of records in a batch.
        few_events: batches with more records are folded ahead.
        max_bytes: reading a batch ends with the records that exceed this size.
    """

    def __init__(
        self,
        updater: ReadModelUpdater,
        open_log: Callable[[str | None], LogReader],
        *,
        version: int | None = None,
        max_events: int = MAX_EVENTS,
        few_events: int = FEW_EVENTS,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        if max_events < 1:
            raise InvalidRequest(f"The batch size is {max_events}; give at least 1 record.")
        self.counts = FollowCounts()
        self.progress = Progress(PASS_SECONDS)
        """Passes over the log; a follower that stands by makes progress."""
        self._updater = updater
        self._open_log = open_log
        self._number = version
        self._version: Version | None = None
        self._log: LogReader
        self._opened = ExitStack()
        """Closes the connections of the log reader."""
        self._projections: dict[str, Projection] = {}
        self._columns: tuple[str, ...] = ()
        self._cursors: dict[int, Cursor] = {}
        self._first: dict[int, int] = {}
        self._few_events = few_events
        self._max_bytes = max_bytes
        self._size = BatchSize(max_events)
        self._pool = ThreadPoolExecutor(1, "follow")
        self._next_fold: tuple[list[Range], Future[_PreparedBatch]] | None = None

    def close(self) -> None:
        """Close the connections; does nothing when already closed."""
        self._pool.shutdown()
        self._opened.close()
        self._updater.close()

    def run(self, stop: Event, *, once: bool = False) -> None:
        """Follow until stopped; wait for the first rebuild, and after outages of the store.

        A stop undoes the current batch.

        Arguments:
            once: return when all present records are applied, and raise when the store is unavailable.

        Raises, with `once`: NotFound before the first rebuild, Unavailable when the store can't be used.
        """
        failures, is_standing_by = 0, False
        while not stop.is_set():
            try:
                with self._updater.leader_lock() as is_leader:
                    if is_leader:
                        (self._catch_up if once else self._keep_up)(stop)
                        return
                if not is_standing_by:
                    logger().warning("follow.standing_by", read_models=self._updater.where)
                is_standing_by = True
                self.progress.succeeded()
                stop.wait(STANDBY_SECONDS)
                failures = 0
            except (Unavailable, NotFound) as error:
                self._version = None
                if once:
                    raise
                failures += 1
                self.progress.failed()
                self.counts.outages += 1
                pause = random.random() * min(RETRY_MAX_SECONDS, RETRY_BASE_SECONDS * 2 ** min(failures, 10))
                logger().retry("follow.unavailable", error=str(error), pause_ms=int(pause * 1_000))
                stop.wait(pause)

    def advance(self, through: Positions | None = None, stop: Event | None = None) -> None:
        """Apply batches until all records, or those up to the given positions, are applied.

        Arguments:
            through: last position by mailbox; other mailboxes are not advanced. None for all records.
        """
        while self.step(through, stop) and not (stop is not None and stop.is_set()):
            pass

    def step(self, through: Positions | None = None, stop: Event | None = None) -> bool:
        """Apply one batch, unless another process applied it; return False when there are no new records.

        Arguments:
            stop: undoes the batch when it is set meanwhile.

        Raises: NotFound before the first rebuild, Unavailable when the store can't be used.
        """
        version = self._current_version()
        heads, unknown = self._heads()
        self.counts.update_lags(heads, self._cursors)
        self.progress.succeeded()
        if self._remove_truncated(version, heads):
            return True
        start_time = time.monotonic()
        next_batch = self._take_next_fold(through)
        if next_batch is None:
            ranges = next_ranges(heads, self._cursors, self._size.events, through)
            if not ranges and not unknown:
                return False
            next_batch = self._fold(self._log, ranges, self._cursors)
            self._heads()  # the log is still the same one after the read
        moved = {step.extent.id for step in next_batch.steps}
        steps = next_batch.steps + [
            _standstill(id_, cursor) for id_, cursor in unknown.items() if id_ not in moved
        ]
        cursors = self._cursors | {step.extent.id: step.end for step in steps}
        self._start_next_fold(next_ranges(heads, cursors, self._size.events_ahead, through), cursors)
        if not self._updater.apply(version, steps, next_batch.batch, stop):
            self._version = None  # stopped, or another process moved the cursor, or changed the version
            return True
        self._cursors = cursors
        seconds = time.monotonic() - start_time
        self.counts.count_batch(next_batch.batch, seconds)
        self._size.adapt(next_batch.batch.events, next_batch.size, seconds)
        self.counts.update_lags(heads, cursors)
        return True

    def ends(self) -> dict[str, int]:
        """Return the last position of each log, by mailbox."""
        self._current_version()
        return {head.name: head.last for head in self._heads()[0]}

    def positions(self) -> dict[str, int]:
        """Return the last applied position of the version, by mailbox."""
        self._version = None
        self._current_version()
        return {
            head.name: self._cursors[head.id].position
            for head in self._heads()[0]
            if head.id in self._cursors
        }

    def _catch_up(self, stop: Event) -> None:
        self.advance(self.ends(), stop)

    def _keep_up(self, stop: Event) -> None:
        pause = POLL_MIN_SECONDS
        while not stop.is_set():
            if self.step(stop=stop):
                pause = POLL_MIN_SECONDS
                if self.counts.last_events > self._few_events:
                    continue
            else:
                pause = min(pause * 1.5, POLL_MAX_SECONDS)
            is_told = self._wait_for_commit(stop) if pause == POLL_MAX_SECONDS else None
            if is_told is None:
                stop.wait(pause)
            elif is_told:
                pause = POLL_MIN_SECONDS

    def _wait_for_commit(self, stop: Event) -> bool | None:
        for _ in range(LOST_SECONDS):
            is_told = self._updater.wait_for_commit(1.0)
            if is_told is not False or stop.is_set():
                return is_told
        return False

    def _current_version(self) -> Version:
        if self._version is None:
            number = self._number
            version = self._updater.active() if number is None else self._updater.version(number)
            if version is None:
                raise NotFound(
                    f"The read models {self._updater.where} were never built; build them with `postroom "
                    "views rebuild`."
                )
            self._projections = _projections_of(version, self._updater.where)
            has_envelopes = self._updater.stores_envelopes or bool(version.bodies.topics)
            self._columns = columns_read(self._projections, envelopes=has_envelopes)
            self._cursors = self._updater.cursors(version)
            self._opened.close()
            self._log = self._opened.enter_context(self._open_log(version.archive).connected())
            self._next_fold = None
            if version.number != self.counts.version:
                self._first = {}
            self._version = version
            self.counts.version = version.number
        return self._version

    def _heads(self) -> tuple[list[Head], dict[int, Cursor]]:
        """Return the ends of the logs after checking the cursors, and those whose chain hash was unknown.

        Raises: BrokenLog when a log was replaced or cut since its cursor.
        """
        heads = self._updater.heads(self._cursors)
        where, command = self._updater.where, self._updater.rebuild_command
        return heads, check_cursors(self._cursors, heads, where, command)

    def _remove_truncated(self, version: Version, heads: Sequence[Head]) -> bool:
        """Remove messages that retention removed from the log, unless the version includes their archive."""
        if version.archive is not None:
            return False
        for head in heads:
            first = self._first.get(head.id, 1)
            if head.first > first:
                base = LogExtent(head.id, head.name, 1, 1, 0)
                if not self._updater.remove(version, base.place(first), base.place(head.first)):
                    self._version = None
                    return True
                self._first[head.id] = head.first
        return False

    def _start_next_fold(self, ranges: list[Range], cursors: Mapping[int, Cursor]) -> None:
        """Start to read and fold the next batch in the background, if it is large."""
        self._next_fold = None
        if sum(each.size for each in ranges) > self._few_events:
            self._next_fold = ranges, self._pool.submit(self._fold, self._log, ranges, cursors)

    def _take_next_fold(self, through: Positions | None) -> _PreparedBatch | None:
        """Return the batch folded in the background, if it begins at the cursors and is not too large."""
        if self._next_fold is None:
            return None
        ranges, future = self._next_fold
        self._next_fold = None
        next_batch = future.result()
        for extent, first, last in ranges:
            start = self._cursors.get(extent.id, START)
            if first != start.position + 1 or (through is not None and last > through.get(extent.name, 0)):
                return None
        return next_batch if self._size.allows(next_batch.batch.events) else None

    def _fold(self, log: LogReader, ranges: Sequence[Range], cursors: Mapping[int, Cursor]) -> _PreparedBatch:
        """Read and fold ranges that begin at the cursors, or their beginning if the records are large."""
        columns = self._columns
        with_chain = tuple(dict.fromkeys((*columns, "chain")))
        batches, size = [], 0
        for each in log.read(ranges, with_chain):
            batches.append(each)
            size += each.nbytes
            if size > self._max_bytes:
                break
        records = pl.DataFrame(pa.Table.from_batches(batches, arrow_schema(with_chain)))
        if size > self._max_bytes:
            ranges = through_record(ranges, *records.select("mailbox", "position").row(-1))
        ends = records.group_by("mailbox").agg(pl.col("at", "chain").last())
        by_name = {name: (at, chain.hex()) for name, at, chain in ends.iter_rows()}
        steps = [_step(each, cursors, by_name.get(each.extent.name)) for each in ranges]
        batch = Batch([step.extent for step in steps], records.select(columns), self._projections)
        return _PreparedBatch(steps, batch, size)


def _step(range_: Range, cursors: Mapping[int, Cursor], end: tuple[int, str] | None) -> Step:
    """Return the step through a range.

    Arguments:
        end: log time (µs) and chain hash of its last record; None if retention removed all of them.
    """
    extent, first, last = range_
    start = cursors.get(extent.id, START)
    return Step(start, LogExtent(extent.id, extent.name, first, last, *(end or (start.at, ""))))


def _standstill(id_: int, cursor: Cursor) -> Step:
    """Return a step that changes nothing but the chain hash of a cursor."""
    extent = LogExtent(id_, cursor.mailbox, cursor.position + 1, cursor.position, cursor.at, cursor.chain)
    return Step(cursor, extent)


def _projections_of(version: Version, where: str) -> dict[str, Projection]:
    """Return the projections of a version.

    Raises: InvalidRequest when this process does not know one of them, or when the messages are missing.
    """
    projections = load_projections()
    missing = sorted(set(version.models) - set(projections))
    if missing:
        raise InvalidRequest(
            f"Version {version.number} of the read models {where} has {', '.join(missing)}, unknown to this "
            "process; name the module in POSTROOM_PROJECTIONS, or rebuild without it."
        )
    if MESSAGES not in version.models:
        raise InvalidRequest(
            f"Version {version.number} of the read models {where} was built by an earlier release, or "
            "without the messages, from which other models are updated; rebuild it completely."
        )
    return {name: each for name, each in projections.items() if name in version.models}


def follow_monitor(follower: Follower) -> Monitor:
    """Return the monitor of a follower."""

    async def collect() -> list[Metric]:
        return list(_metrics(follower.counts))

    async def find_missing() -> list[str]:
        return [] if follower.progress.is_made else ["read_models"]

    return Monitor(collect, find_missing)


def _metrics(counts: FollowCounts) -> Iterator[Metric]:
    lags = [({"mailbox": name}, lag) for name, lag in sorted(counts.lags.items())]
    yield Metric(
        "postroom_follow_lag_events",
        "gauge",
        "Log records that the read models are behind.",
        [(labels, lag.events) for labels, lag in lags],
    )
    yield Metric(
        "postroom_follow_lag_seconds",
        "gauge",
        "Upper bound of the age of the oldest of these records.",
        [(labels, round(lag.seconds, 3)) for labels, lag in lags],
    )
    for name, help_, value in (
        ("events", "Log records applied.", counts.events),
        ("batches", "Batches applied.", counts.batches),
        ("seconds", "Time spent applying batches, in seconds.", round(counts.seconds, 6)),
        ("parked", "Log records that could not be folded and were left out.", counts.parked),
        ("outages", "Number of times that the store was unavailable.", counts.outages),
    ):
        yield Metric(f"postroom_follow_{name}", "counter", help_, [({}, value)])
    for name, help_, value in (
        ("last_batch_events", "Log records in the last batch.", counts.last_events),
        ("last_batch_seconds", "Duration of the last batch in seconds.", round(counts.last_seconds, 6)),
        ("version", "Version of the read models that is updated.", counts.version),
    ):
        yield Metric(f"postroom_follow_{name}", "gauge", help_, [({}, value)])
