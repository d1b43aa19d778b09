"""Following: the read models are kept up to date, batch by batch, behind the log that grows.

One process at a time follows a store; others stand by. Whatever ends it, the next goes on where the cursor
stands, which moved in the transaction of the rows.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Event
from typing import NamedTuple

import polars as pl
import pyarrow as pa

from postroom.adapters.postgres.url import is_url
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.projections.apply import Cursor, Head, Step, Tables, Version, open_tables
from postroom.projections.apply.changes import Batch, FrameBatch, RecordBatch
from postroom.projections.cut import MailboxCut, Range
from postroom.projections.fold import MESSAGES, columns_read
from postroom.projections.logs import open_log
from postroom.projections.projection import Projection, projections

MOST_EVENTS = 50_000
"""Records of a batch, at most."""
FIRST_EVENTS, FEWEST_EVENTS = 10_000, 1_000
"""What a batch holds at first, and what it may hold in any case, however long batches take."""
LONGEST_SECONDS, LARGEST_BYTES = 2.0, 64 << 20
"""What a batch is to take, with its envelopes."""
FEW_EVENTS = 500
"""A batch of so many is folded record by record, a larger one in frames."""
POLL_MIN_SECONDS, POLL_MAX_SECONDS = 0.01, 0.1
STANDBY_SECONDS = 0.5
PAUSE_BASE_SECONDS, PAUSE_MAX_SECONDS = 0.25, 15.0
"""Between attempts to reach a store that is down."""

Positions = Mapping[str, int]
"""The last position wanted, by mailbox."""


class Lag(NamedTuple):
    """Say how far the read models of a mailbox are behind: records, and how long the oldest waits at most."""

    events: int
    seconds: float


@dataclass
class FollowCounts:
    """Count what a follower has done, and tell how far behind it was when it last looked.

    Arguments:
        seconds: that all batches took together. last_events, last_seconds: of the last one.
        outages: how often the store could not be used.
    """

    version: int = 0
    batches: int = 0
    events: int = 0
    seconds: float = 0.0
    last_events: int = 0
    last_seconds: float = 0.0
    parked: int = 0
    outages: int = 0
    lags: dict[str, Lag] = field(default_factory=dict)


class _Folded(NamedTuple):
    """A batch that waits to be applied: the way that each mailbox goes, and the bytes of its envelopes."""

    steps: list[Step]
    batch: Batch
    size: int


class Follower:
    """Bring the read models of a store up to its log; see the module.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        version: the one to bring up to date; None for the active one, whichever that is at the time.
        most_events: records of a batch, at most.
        few_events: how many are still folded record by record; more are folded in frames.
    """

    def __init__(
        self,
        store: str,
        *,
        version: int | None = None,
        most_events: int = MOST_EVENTS,
        few_events: int = FEW_EVENTS,
    ) -> None:
        if most_events < 1:
            raise InvalidRequest(f"A batch of {most_events} records brings nothing on; give at least 1.")
        self.counts = FollowCounts()
        self.store = store
        self._tables: Tables = open_tables(store)
        self._number = version
        self._version: Version | None = None
        self._wanted: dict[str, Projection] = {}
        self._covered: dict[int, Cursor] = {}
        self._first: dict[int, int] = {}
        self._caught_up: dict[int, float] = {}
        self._most_events = most_events
        self._few_events = few_events
        self._size = min(most_events, FIRST_EVENTS)
        self._pool = ThreadPoolExecutor(1, "follow")
        self._ahead: tuple[list[Range], Future[_Folded]] | None = None

    @property
    def where(self) -> str:
        """Return where the read models are, as it may be shown."""
        return self._tables.where

    @property
    def archive(self) -> str | None:
        """Return the folder of what retention removed, if the version has that too."""
        return self._known_version().archive

    def close(self) -> None:
        """Release what is held; closing twice is fine."""
        self._pool.shutdown()
        self._tables.close()

    def run(self, stop: Event, *, once: bool = False) -> None:
        """Follow until told to stop, through outages of the store; a batch under way is done first.

        Arguments:
            once: end when all is covered that was there, and do not wait for a store that is down.

        Raises: NotFound when nothing was built yet; Unavailable, with `once`, when the store can't be used.
        """
        self.lead(stop, self._catch_up if once else self._keep_up, once=once)

    def lead(self, stop: Event, work: Callable[[Event], None], *, once: bool = False) -> None:
        """Do some work as the one process that follows, again and again through outages of the store.

        Arguments:
            work: returns when it is done, or told to stop.
            once: do not go on through outages.
        """
        failures, stands_by = 0, False
        while not stop.is_set():
            try:
                with self._tables.leading() as leads:
                    if leads:
                        work(stop)
                        return
                if not stands_by:
                    logger().warning("follow.standing_by", read_models=self._tables.where)
                stands_by = True
                stop.wait(STANDBY_SECONDS)
                failures = 0
            except Unavailable as error:
                self._version = None
                if once:
                    raise
                failures += 1
                self.counts.outages += 1
                pause = random.random() * min(PAUSE_MAX_SECONDS, PAUSE_BASE_SECONDS * 2 ** min(failures, 10))
                logger().warning("follow.unavailable", error=str(error), pause_ms=int(pause * 1_000))
                stop.wait(pause)

    def advance(self, through: Positions | None = None, stop: Event | None = None) -> None:
        """Apply batch after batch until all records are covered, or those up to positions.

        Arguments:
            through: mailboxes that it does not name are left where they are; None for all there is at each
                look.
        """
        while self.step(through) and not (stop is not None and stop.is_set()):
            pass

    def step(self, through: Positions | None = None) -> bool:
        """Apply one batch, and tell whether there was anything to apply; another process may have done it.

        Raises: NotFound when nothing was built yet, Unavailable when the store can't be used.
        """
        version = self._known_version()
        heads = self._tables.heads(self._covered)
        self._note_lags(heads)
        if self._remove_truncated(version, heads):
            return True
        began = time.monotonic()
        folded = self._folded_ahead(through)
        if folded is None:
            ranges = take(heads, self._covered, self._size, through)
            if not ranges:
                return False
            folded = self._fold(version, ranges, self._covered)
        covered = self._covered | {step.cut.id: Cursor(step.cut.last, step.cut.at) for step in folded.steps}
        self._fold_ahead(version, take(heads, covered, self._size, through), covered)
        if not self._tables.apply(version, folded.steps, folded.batch):
            self._version = None  # another process moved the cursor, or another version is active
            return True
        self._covered = covered
        self._note(folded.batch, time.monotonic() - began, folded.size)
        self._note_lags(heads)
        return True

    def positions(self) -> dict[str, int]:
        """Return how far the version has come, by mailbox."""
        self._version = None
        self._known_version()
        return {
            head.name: self._covered[head.id].position
            for head in self._tables.heads(self._covered)
            if head.id in self._covered
        }

    def _catch_up(self, stop: Event) -> None:
        self._known_version()
        heads = self._tables.heads(self._covered)
        self.advance({head.name: head.last for head in heads}, stop)

    def _keep_up(self, stop: Event) -> None:
        pause = POLL_MIN_SECONDS
        while not stop.is_set():
            found = self.step()
            pause = POLL_MIN_SECONDS if found else min(pause * 1.5, POLL_MAX_SECONDS)
            if not found:
                stop.wait(pause)

    def _known_version(self) -> Version:
        if self._version is None:
            number = self._number
            version = self._tables.active() if number is None else self._tables.version(number)
            if version is None:
                raise NotFound(
                    f"The read models {self._tables.where} were never built; build them with "
                    "`postroom project rebuild`."
                )
            self._wanted = wanted(version, self._tables.where)
            self._covered = self._tables.cursors(version)
            self._ahead = None
            if version.number != self.counts.version:
                self._first = {}
            self._version = version
            self.counts.version = version.number
        return self._version

    def _remove_truncated(self, version: Version, heads: Sequence[Head]) -> bool:
        """Remove messages that retention removed from the log, unless the version reads their archive too."""
        if version.archive is not None:
            return False
        for head in heads:
            first = self._first.get(head.id, 1)
            if head.first > first:
                base = MailboxCut(head.id, head.name, 1, 1, 0)
                if not self._tables.remove(version, base.place(first), base.place(head.first)):
                    self._version = None
                    return True
                self._first[head.id] = head.first
        return False

    def _fold_ahead(self, version: Version, ranges: list[Range], covered: Mapping[int, Cursor]) -> None:
        """Have the batch after this one read and folded while this one is applied, if it is a large one."""
        self._ahead = None
        if _events(ranges) > self._few_events:
            self._ahead = ranges, self._pool.submit(self._fold, version, ranges, covered)

    def _folded_ahead(self, through: Positions | None) -> "_Folded | None":
        """Return what was folded ahead, if it is what is to be applied now."""
        if self._ahead is None:
            return None
        ranges, folding = self._ahead
        self._ahead = None
        folded = folding.result()
        for cut, first, last in ranges:
            begins = self._covered.get(cut.id, Cursor(0, 0))
            if first != begins.position + 1 or (through is not None and last > through.get(cut.name, 0)):
                return None
        return folded

    def _fold(self, version: Version, ranges: Sequence[Range], covered: Mapping[int, Cursor]) -> "_Folded":
        """Read and fold ranges that begin where a mailbox is covered to."""
        wanted = self._wanted
        if _events(ranges) <= self._few_events:
            read = [self._tables.records(cut.id, first, last) for cut, first, last in ranges]
            steps = [
                _step(range_, covered, records[-1].at if records else None)
                for range_, records in zip(ranges, read, strict=True)
            ]
            logs = {step.cut: records for step, records in zip(steps, read, strict=True)}
            size = sum(len(record.envelope or b"") for records in read for record in records)
            return _Folded(steps, RecordBatch(logs, wanted), size)
        columns = columns_read(wanted)
        # Not by ADBC from a SQLite file: two SQLites in one process undo each other's locks.
        log = open_log(self.store, "adbc" if is_url(self.store) else "python", version.archive)
        table = pa.Table.from_batches(log.read(ranges, columns), _schema(columns))
        records = pl.DataFrame(table)
        at = dict(records.group_by("mailbox").agg(pl.col("at").max()).iter_rows())
        steps = [_step(range_, covered, at.get(range_.cut.name)) for range_ in ranges]
        size = int(records["envelope"].bin.size().sum())
        return _Folded(steps, FrameBatch([step.cut for step in steps], records, wanted), size)

    def _note(self, batch: Batch, seconds: float, size: int) -> None:
        counts = self.counts
        counts.batches += 1
        counts.events += batch.events
        counts.parked += len(batch.parked)
        counts.seconds += seconds
        counts.last_events, counts.last_seconds = batch.events, seconds
        logger().info(
            "follow.applied", version=counts.version, events=batch.events, ms=round(seconds * 1_000, 1)
        )
        for each in batch.parked:
            logger().error("follow.parked", place=each.place, type=each.type, error=each.error)
        if seconds > LONGEST_SECONDS or size > LARGEST_BYTES:
            self._size = max(min(FEWEST_EVENTS, self._most_events), self._size // 2)
        elif seconds < LONGEST_SECONDS / 2 and size < LARGEST_BYTES // 2 and batch.events >= self._size:
            self._size = min(self._most_events, self._size * 2)

    def _note_lags(self, heads: Sequence[Head]) -> None:
        now = time.time()
        for head in heads:
            covered = self._covered.get(head.id, Cursor(0, 0))
            behind = head.last - covered.position
            if behind <= 0:
                self._caught_up[head.id] = now
            since = max(self._caught_up.get(head.id, 0.0), covered.at / 1e6)
            self.counts.lags[head.name] = Lag(max(0, behind), max(0.0, now - since) if behind > 0 else 0.0)


def catch_up(
    store: str,
    version: int,
    *,
    through: Positions | None = None,
    applied: Callable[[FollowCounts], None] = lambda _: None,
) -> dict[str, int]:
    """Bring a version, active or not, up to the log as it is now, or to exact positions.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        through: the positions, none before what is covered; mailboxes left out stay where they are.
        applied: called after each batch.

    Returns: how far the version has come, by mailbox.
    Raises: NotFound when there is no such version, Unavailable when the store can't be used.
    """
    follower = Follower(store, version=version)
    try:
        while follower.step(through):
            applied(follower.counts)
        return follower.positions()
    finally:
        follower.close()


def take(
    heads: Sequence[Head], covered: Mapping[int, Cursor], most: int, through: Positions | None = None
) -> list[Range]:
    """Return what to read next: at most so many records, shared by the mailboxes that need them.

    Arguments:
        through: see `Follower.advance`.
    """
    pending = []
    for head in heads:
        last = head.last if through is None else min(head.last, through.get(head.name, 0))
        position = covered[head.id].position if head.id in covered else 0
        if last > position:
            pending.append((last - position, head, position))
    ranges = []
    for number, (behind, head, position) in enumerate(sorted(pending)):
        share = min(behind, max(1, most // (len(pending) - number)))
        cut = MailboxCut(head.id, head.name, position + 1, position + share, 0)
        ranges.append(Range(cut, position + 1, position + share))
        most -= share
        if most <= 0:
            break
    return sorted(ranges, key=lambda range_: range_.cut.id)


def wanted(version: Version, where: str) -> dict[str, Projection]:
    """Return the projections whose tables a version has.

    Raises: InvalidRequest when one of them is not known here, or the messages are not among them.
    """
    known = projections()
    missing = sorted(set(version.models) - set(known))
    if missing:
        raise InvalidRequest(
            f"Version {version.number} of the read models {where} has {', '.join(missing)}, unknown to this "
            "process; name the module in POSTROOM_PROJECTIONS, or rebuild without it."
        )
    if MESSAGES not in version.models:
        raise InvalidRequest(
            f"Version {version.number} of the read models {where} was built by an earlier release, or "
            "without the messages, by which the others are brought up to date; rebuild all of it."
        )
    return {name: each for name, each in known.items() if name in version.models}


def _events(ranges: Sequence[Range]) -> int:
    return sum(last - first + 1 for _, first, last in ranges)


def _step(range_: Range, covered: Mapping[int, Cursor], at: int | None) -> Step:
    cut, first, last = range_
    begins = covered.get(cut.id, Cursor(0, 0))
    # Where retention removed all of it meanwhile, no time has passed.
    return Step(begins, MailboxCut(cut.id, cut.name, first, last, begins.at if at is None else at))


def _schema(columns: Sequence[str]) -> pa.Schema:
    from postroom.projections.logs.columns import arrow_schema

    return arrow_schema(columns)
