"""Incremental updates: cursors, the ranges of the next batch, and the changes that it makes to the rows.

A batch is folded together with the stored rows of the messages that its records belong to.
`tests/properties/test_follow_agrees.py` compares the result with the reference fold.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from logging import ERROR
from typing import Any, NamedTuple

import polars as pl

from postroom.application.telemetry import logger
from postroom.domain.errors import BrokenLog
from postroom.domain.search import BodyRules
from postroom.projections.fold import (
    MESSAGES,
    derive,
    fold_pieces,
    fold_range,
    merge_results,
    split_range,
    with_parking,
)
from postroom.projections.log_reader import LogExtent, Range
from postroom.projections.models import messages
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.projection import EventProjection, Projection


class Version(NamedTuple):
    """A version of the read models.

    Arguments:
        models: by projection, the version whose table contains it.
        status: `active`, or `building` until it becomes active.
        bodies: topics whose bodies are searched for words.
        archive: folder of the log archive that the version includes, or None.
    """

    number: int
    status: str
    models: dict[str, int]
    bodies: BodyRules
    archive: str | None


class Cursor(NamedTuple):
    """The last record applied from a mailbox: its position, and its log time `at` in µs.

    Arguments:
        chain: chain hash, in hex, of the commit with the record; empty if unknown.
        mailbox: name of the mailbox.
    """

    position: int
    at: int
    chain: str = ""
    mailbox: str = ""


START = Cursor(0, 0)
"""The cursor before the first record."""


class Head(NamedTuple):
    """The first and last position of a mailbox log; retention removed the records before `first`.

    Arguments:
        chain, at: chain hash in hex and log time (µs) of the commit at the position of a cursor; empty and 0
            if the log has none there.
    """

    id: int
    name: str
    first: int
    last: int
    chain: str = ""
    at: int = 0


def find_difference(cursor: Cursor, head: Head | None) -> str | None:
    """Return how a log differs from the one that a cursor was set in, or None.

    A commit that retention removed can't be compared. A cursor of an earlier release, which has no chain
    hash, is compared by log time.

    Arguments:
        head: of the mailbox with the cursor's id, at its position; None if the store has no such mailbox.
    """
    if cursor.position == 0:
        return None
    if head is None:
        return "the store has no such log now"
    if cursor.mailbox != head.name:
        return f"that log is one of {head.name} now"
    if head.first > cursor.position:
        return None
    if head.last < cursor.position:
        return f"its log ends at position {head.last} now"
    is_same = head.chain == cursor.chain if cursor.chain else head.chain and head.at == cursor.at
    return None if is_same else "its log has another commit there now"


def check_cursors(
    cursors: Mapping[int, Cursor], heads: Sequence[Head], where: str, command: str
) -> dict[int, Cursor]:
    """Check that no log was replaced, cut or renamed since its cursor was set.

    Arguments:
        cursors, heads: cursors by mailbox id, and the heads at their positions.
        where, command: of the read models with these cursors, and the command that rebuilds them.

    Returns: the cursors whose chain hash was unknown, with the hash that the log has there.
    Raises: BrokenLog for a log that differs.
    """
    ends = {head.id: head for head in heads}
    for id_, cursor in cursors.items():
        difference = find_difference(cursor, ends.get(id_))
        if difference is not None:
            raise BrokenLog(
                f"The read models {where} include position {cursor.position} of mailbox {cursor.mailbox}, "
                f"but {difference}: it was replaced or cut. Restore the store, or rebuild them with "
                f"`{command}`.",
                cursor.position,
            )
    return {
        id_: cursor._replace(chain=ends[id_].chain)
        for id_, cursor in cursors.items()
        if cursor.position and not cursor.chain and ends[id_].chain
    }


class Step(NamedTuple):
    """The advance of one mailbox from the cursor `start` to the end of `extent`."""

    start: Cursor
    extent: LogExtent

    @property
    def end(self) -> Cursor:
        """Return the cursor after the step."""
        return Cursor(self.extent.last, self.extent.at, self.extent.chain, self.extent.name)


MAX_EVENTS = 300_000
"""Maximum number of records in a batch; a message that is sent and settled within one is written once."""
INITIAL_EVENTS, MIN_EVENTS = 10_000, 1_000
"""The initial limit, and the lowest that it is reduced to."""
TARGET_SECONDS = 60.0
"""Duration of a batch that the limit aims at; progress becomes visible at its end."""
MAX_BYTES = 128 << 20
"""Size of records after which a batch reads no more."""

Positions = Mapping[str, int]
"""The last position to cover, by mailbox."""


class BatchSize:
    """The limit on the records of a batch, adapted to the duration and size of batches.

    Arguments:
        max_events: highest limit.
    """

    def __init__(self, max_events: int) -> None:
        self._max_events = max_events
        self.events = min(max_events, INITIAL_EVENTS)
        self.events_ahead = max_events
        """The limit for a batch that is folded ahead; the highest until the first batch has been timed."""

    def adapt(self, events: int, size: int, seconds: float) -> None:
        """Set the limit to what keeps to `TARGET_SECONDS` and `MAX_BYTES` at the rate of a batch.

        A batch that was not full only lowers the limit.

        Arguments:
            events: number of records in the batch.
            size: total size of its records in bytes.
            seconds: its duration.
        """
        share = max(seconds / TARGET_SECONDS, size / MAX_BYTES, 1e-6)
        if share > 1 or events >= self.events:
            self.events = min(self._max_events, max(MIN_EVENTS, int(events / share)))
        self.events_ahead = self.events

    def allows(self, events: int) -> bool:
        """Return whether a batch that was folded ahead is applied: it may be twice as large as the limit."""
        return events <= 2 * self.events


def next_ranges(
    heads: Sequence[Head], cursors: Mapping[int, Cursor], limit: int, through: Positions | None = None
) -> list[Range]:
    """Return the ranges to read next, with the limit divided among the mailboxes that are behind.

    Arguments:
        cursors: cursors by mailbox id.
        limit: maximum number of records.
        through: last position to cover, by mailbox; other mailboxes are left out. None for all records.
    """
    pending = []
    for head in heads:
        last = head.last if through is None else min(head.last, through.get(head.name, 0))
        position = cursors[head.id].position if head.id in cursors else 0
        if last > position:
            pending.append((last - position, head, position))
    ranges = []
    for number, (behind, head, position) in enumerate(sorted(pending)):
        share = min(behind, max(1, limit // (len(pending) - number)))
        extent = LogExtent(head.id, head.name, position + 1, position + share, 0)
        ranges.append(Range(extent, position + 1, position + share))
        limit -= share
        if limit <= 0:
            break
    return sorted(ranges, key=lambda range_: range_.extent.id)


def through_record(ranges: Sequence[Range], mailbox: str, position: int) -> list[Range]:
    """Return the ranges up to a record of one of them.

    Arguments:
        mailbox, position: of the record, in the last range that is returned.
    """
    names = [each.extent.name for each in ranges]
    *earlier, (extent, first, _) = ranges[: names.index(mailbox) + 1]
    return [*earlier, Range(extent, first, position)]


STORED_COLUMNS = tuple(messages.PROJECTION.stored_schema)
"""The columns of a stored message that the fold continues from: all but the envelope."""
CHANGEABLE_COLUMNS = ("status", "attempts", "redriven", "changed_at", "due", "dead_letterings")
"""The columns of a message that later events change."""

FEW_RECORDS = 1_000
"""Largest batch that is folded as a whole together with the stored rows."""

MAX_LINES = 10
"""Maximum number of lines logged about the records of a batch that can't be folded."""

StoredRow = tuple[Any, ...]
"""The columns `STORED_COLUMNS` of a stored message."""


def stored_frame(rows: Sequence[StoredRow]) -> pl.DataFrame:
    """Return stored messages as rows of the projection, without envelopes."""
    return pl.DataFrame(rows, messages.PROJECTION.stored_schema, orient="row")


@dataclass(frozen=True)
class Changes:
    """The changes that a batch makes to the rows of each read model.

    Arguments:
        inserts: rows of new messages.
        updates: `id` and the columns `CHANGEABLE_COLUMNS` of messages that are already stored.
        before, after: rows that each `MessageProjection` derives from the affected messages before and after
            the batch, merged by key.
        events: rows of each `EventProjection`, to be merged into the stored ones.
        parked: records that could not be folded.
    """

    inserts: pl.DataFrame
    updates: pl.DataFrame
    before: Mapping[str, pl.DataFrame]
    after: Mapping[str, pl.DataFrame]
    events: Mapping[str, pl.DataFrame]
    parked: Sequence[ParkedRecord]


class Batch:
    """The log records after the cursors of the read models.

    Arguments:
        extents: the part of each mailbox log in the batch.
        records: columns `columns_read` of the records, in order, without envelopes if nothing stores them.
        projections: the projections of the version that is advanced.
    """

    def __init__(
        self, extents: Sequence[LogExtent], records: pl.DataFrame, projections: Mapping[str, Projection]
    ) -> None:
        self.events = records.height
        self.parked: list[ParkedRecord] = []
        """Records that could not be folded; complete after `changes`."""
        self._extents = extents
        self._projections = with_parking(projections, self.parked)
        if records.height <= FEW_RECORDS:
            self._result = split_range(records, self._projections)
        else:
            self._result = fold_range(records, self._projections, extents)
        self.parked += self._result.parked

    @property
    def earlier_messages(self) -> pl.DataFrame:
        """Return `mailbox` and `stream` of the messages that were sent before the batch."""
        pieces = self._result.pieces[MESSAGES]
        return pieces.filter(pl.col("id").is_null()).select(*messages.KEY)

    def changes(self, stored_rows: Sequence[StoredRow]) -> Changes:
        """Return the changes that the batch makes.

        Arguments:
            stored_rows: the `earlier_messages`, and those whose delay ends.
        """
        before = stored_frame(stored_rows)
        pieces = dict(self._result.pieces)
        if before.height:
            pieces[MESSAGES] = pl.concat([messages.as_partials(before), pieces[MESSAGES]])
        rest = fold_pieces(pieces, self._projections, self._extents)
        rows = rest.rows[MESSAGES]
        is_stored = rows["id"].is_in(before["id"].implode())
        event_projections = {
            name: each for name, each in self._projections.items() if isinstance(each, EventProjection)
        }
        rows_before = derive(before, self._projections)
        complete_rows = [self._result.rows[MESSAGES]] if MESSAGES in self._result.rows else []
        return Changes(
            pl.concat([*complete_rows, rows.filter(~is_stored)]).sort("id"),
            rows.filter(is_stored).select("id", *CHANGEABLE_COLUMNS).sort("id"),
            rows_before,
            {name: rest.rows[name] for name in rows_before},
            merge_results([self._result, rest], event_projections),
            self.parked,
        )


class Lag(NamedTuple):
    """Lag of a mailbox's read models: number of records, and an upper bound of the oldest one's age (s)."""

    events: int
    seconds: float


@dataclass
class FollowCounts:
    """Counters of a follower, and its lag at the last poll.

    Arguments:
        version: the version that is advanced.
        seconds: total duration of all batches.
        last_events, last_seconds: number of records and duration of the last batch.
        outages: number of times the store was unavailable.
        lags: by mailbox.
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
    _caught_up: dict[int, float] = field(default_factory=dict)

    def count_batch(self, batch: Batch, seconds: float) -> None:
        """Count a batch that was applied, and log it.

        Of the records that fail alike, one line is logged, and another only after some minutes.
        """
        self.batches += 1
        self.events += batch.events
        self.parked += len(batch.parked)
        self.seconds += seconds
        self.last_events, self.last_seconds = batch.events, seconds
        logger().info(
            "follow.applied", version=self.version, events=batch.events, ms=round(seconds * 1_000, 1)
        )
        alike: dict[tuple[str, str], list[int]] = {}
        for each in batch.parked:
            alike.setdefault((each.type, each.error), []).append(each.place)
        for (type_, error), places in islice(alike.items(), MAX_LINES):
            logger().retry(
                "follow.parked", ERROR, place=places[0], count=len(places), type=type_, error=error
            )

    def update_lags(self, heads: Sequence[Head], cursors: Mapping[int, Cursor]) -> None:
        """Update the lag of each mailbox."""
        now = time.time()
        for head in heads:
            cursor = cursors.get(head.id, START)
            behind = head.last - cursor.position
            if behind <= 0:
                self._caught_up[head.id] = now
            since = max(self._caught_up.get(head.id, 0.0), cursor.at / 1e6)
            self.lags[head.name] = Lag(max(0, behind), max(0.0, now - since) if behind > 0 else 0.0)
