"""Batches: the changes that new log records make to the rows of the read models.

A batch is folded together with the stored rows of the messages that its records belong to.
`tests/properties/test_follow_agrees.py` compares the result with the reference fold.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from postroom.projections.fold import MESSAGES, derive, fold_pieces, fold_range, merge_results, split_range
from postroom.projections.log_extent import LogExtent
from postroom.projections.models import messages
from postroom.projections.models.messages import Parked
from postroom.projections.parking import with_parking
from postroom.projections.projection import EventProjection, Projection

STORED = tuple(name for name in messages.PROJECTION.schema if name != "envelope_blob")
"""The columns of a stored message that the fold continues from: all but the envelope."""
CHANGING = ("status", "attempts", "redriven", "changed_at", "due", "dead_letterings")
"""The columns of a message that later events change."""

FEW_RECORDS = 1_000
"""Largest batch that is folded as a whole together with the stored rows."""

StoredRow = tuple[Any, ...]
"""The columns `STORED` of a stored message."""


@dataclass(frozen=True)
class Changes:
    """The changes that a batch makes to the rows of each read model.

    Arguments:
        sent: rows of new messages.
        changed: `id` and the columns `CHANGING` of messages that are already stored.
        before, after: rows that each `MessageProjection` derives from the affected messages before and after
            the batch, merged by key.
        events: rows of each `EventProjection`, to be merged into the stored ones.
        parked: records that could not be folded.
    """

    sent: pl.DataFrame
    changed: pl.DataFrame
    before: Mapping[str, pl.DataFrame]
    after: Mapping[str, pl.DataFrame]
    events: Mapping[str, pl.DataFrame]
    parked: Sequence[Parked]


class Batch:
    """The log records after the cursors of the read models.

    Arguments:
        extents: the part of each mailbox log in the batch.
        records: columns `columns_read` of the records, in order.
        projections: the projections of the version that is advanced.
    """

    def __init__(
        self, extents: Sequence[LogExtent], records: pl.DataFrame, projections: Mapping[str, Projection]
    ) -> None:
        self.events = records.height
        self.parked: list[Parked] = []
        """Records that could not be folded; complete after `changes`."""
        self._extents = extents
        self._projections = with_parking(projections, self.parked)
        if records.height <= FEW_RECORDS:
            self._result = split_range(records, self._projections)
        else:
            self._result = fold_range(records, self._projections, extents)
        self.parked += self._result.parked

    @property
    def continued(self) -> pl.DataFrame:
        """Return `mailbox` and `stream` of the messages that were sent before the batch."""
        pieces = self._result.pieces[MESSAGES]
        return pieces.filter(pl.col("id").is_null()).select(*messages.KEY)

    def changes(self, stored: Sequence[StoredRow]) -> Changes:
        """Return the changes that the batch makes.

        Arguments:
            stored: the `continued` messages, and those whose delay ends.
        """
        types = {name: messages.PROJECTION.schema[name] for name in STORED}
        before = pl.DataFrame(stored, types, orient="row").with_columns(envelope_blob=pl.lit(b""))
        pieces = dict(self._result.pieces)
        if before.height:
            pieces[MESSAGES] = pl.concat([messages.as_partials(before), pieces[MESSAGES]])
        rest = fold_pieces(pieces, self._projections, self._extents)
        rows = rest.rows[MESSAGES]
        is_stored = rows["id"].is_in(before["id"].implode())
        of_events = {n: each for n, each in self._projections.items() if isinstance(each, EventProjection)}
        derived = derive(before, self._projections)
        complete = [self._result.rows[MESSAGES]] if MESSAGES in self._result.rows else []
        return Changes(
            pl.concat([*complete, rows.filter(~is_stored)]),
            rows.filter(is_stored).select("id", *CHANGING),
            derived,
            {name: rest.rows[name] for name in derived},
            merge_results([self._result, rest], of_events),
            self.parked,
        )
