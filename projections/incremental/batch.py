"""Batches: the changes that new log records make to the rows of the read models.

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
from postroom.projections.fold import MESSAGES, derive, fold_pieces, fold_range, merge_results, split_range
from postroom.projections.incremental.cursors import START, Cursor, Head
from postroom.projections.log_reader import LogExtent
from postroom.projections.models import messages
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.parking import with_parking
from postroom.projections.projection import EventProjection, Projection

STORED_COLUMNS = tuple(messages.PROJECTION.stored_schema)
"""The columns of a stored message that the fold continues from: all but the envelope."""
CHANGEABLE_COLUMNS = ("status", "attempts", "redriven", "changed_at", "due", "dead_letterings")
"""The columns of a message that later events change."""

FEW_RECORDS = 1_000
"""Largest batch that is folded as a whole together with the stored rows."""

MAX_LINES = 10
"""Lines that are logged of the records of a batch that can't be folded."""

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
