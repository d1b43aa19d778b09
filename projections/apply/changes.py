"""Changes: what a batch of log records does to the rows of the read models.

A batch is folded together with the rows of the messages that it goes on about, which the read models have.
A small one is folded record by record, which costs little to begin; a large one in frames, which cost little
a record. `tests/properties/test_follow_agrees.py` holds both to the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from postroom.domain.record import Record
from postroom.projections import reference
from postroom.projections.cut import MailboxCut
from postroom.projections.fold import MESSAGES, derive, fold_pieces, fold_range, merged
from postroom.projections.models import messages
from postroom.projections.models.messages import Parked
from postroom.projections.parking import parking
from postroom.projections.projection import (
    EventProjection,
    MessageProjection,
    Projection,
    Row,
    merge_reference,
    merge_rows,
)

KNOWN = tuple(name for name in messages.PROJECTION.schema if name != "envelope_blob")
"""The columns of a known message that folding goes on from; its envelope stays where it is."""
CHANGING = ("status", "attempts", "redriven", "changed_at", "due", "deaths")
"""The columns of a message that change after it was sent."""
_CHANGED = ("id", *CHANGING)

KnownRow = tuple[Any, ...]
"""A known message: its columns `KNOWN`."""


@dataclass(frozen=True)
class Changes:
    """Say what becomes of the rows of each read model.

    Arguments:
        sent: new rows of messages.
        changed: `id` and the columns `CHANGING` of messages that were known.
        before, after: the rows that the touched messages gave and give to each `MessageProjection`, one a
            key.
        events: the rows of each `EventProjection`, to be merged into those that are there.
        parked: records that could not be folded.
    """

    sent: pl.DataFrame
    changed: pl.DataFrame
    before: Mapping[str, pl.DataFrame]
    after: Mapping[str, pl.DataFrame]
    events: Mapping[str, pl.DataFrame]
    parked: Sequence[Parked]


class Batch(Protocol):
    """Records that follow on those that the read models cover.

    Arguments:
        events: how many records there are.
        unsent: `mailbox` and `stream` of the messages that were sent before.
        parked: records that could not be folded, once `changes` was asked for.
    """

    events: int
    unsent: pl.DataFrame
    parked: list[Parked]

    def changes(self, known: Sequence[KnownRow]) -> Changes:
        """Return what the batch does.

        Arguments:
            known: those of the messages `unsent` that there are, and those that are delayed no longer.
        """


class RecordBatch:
    """A batch that is folded record by record, by the reference folds; see `Batch`."""

    def __init__(self, logs: Mapping[MailboxCut, Sequence[Record]], wanted: Mapping[str, Projection]) -> None:
        self.events = sum(map(len, logs.values()))
        self._logs = logs
        self.parked: list[Parked] = []
        self._wanted = parking(wanted, self.parked)
        unsent = [(cut.name, stream) for cut, records in logs.items() for stream in _unsent(records)]
        self.unsent = pl.DataFrame(unsent, {"mailbox": pl.String, "stream": pl.Binary}, orient="row")

    def changes(self, known: Sequence[KnownRow]) -> Changes:
        """Return what the batch does; see `Batch.changes`."""
        before: list[Row] = [dict(zip(KNOWN, row, strict=True)) for row in known]
        rows: list[Row] = []
        placed: list[tuple[MailboxCut, Record]] = []
        for cut, records in self._logs.items():
            of_mailbox = [row for row in before if row["mailbox"] == cut.name]
            folded, parked = messages.reference(cut, records, of_mailbox)
            rows += folded
            self.parked += parked
            placed += reference.placed(cut, records, of_mailbox)
        ids = {row["id"] for row in before}
        changed = [{name: row[name] for name in _CHANGED} for row in rows if row["id"] in ids]
        events = {
            name: _frame(each, (row for pair in placed for row in each.reference(*pair)))
            for name, each in self._wanted.items()
            if isinstance(each, EventProjection)
        }
        return Changes(
            pl.DataFrame([row for row in rows if row["id"] not in ids], messages.PROJECTION.schema),
            pl.DataFrame(changed, {name: messages.PROJECTION.schema[name] for name in _CHANGED}),
            self._derived(before),
            self._derived(rows),
            events,
            self.parked,
        )

    def _derived(self, rows: Sequence[Row]) -> dict[str, pl.DataFrame]:
        return {
            name: _frame(each, (derived for row in rows for derived in each.reference(row)))
            for name, each in self._wanted.items()
            if isinstance(each, MessageProjection)
        }


class FrameBatch:
    """A batch that is folded in frames; see `Batch`.

    Arguments:
        records: columns `columns_read` of the records, in order.
    """

    def __init__(
        self, cuts: Sequence[MailboxCut], records: pl.DataFrame, wanted: Mapping[str, Projection]
    ) -> None:
        self._cuts = cuts
        self.events = records.height
        self.parked: list[Parked] = []
        self._wanted = parking(wanted, self.parked)
        self._folded = fold_range(records, self._wanted, cuts)
        self.parked += self._folded.parked
        partials = self._folded.pieces[MESSAGES].filter(pl.col("id").is_null())
        self.unsent = partials.select(*messages.KEY)

    def changes(self, known: Sequence[KnownRow]) -> Changes:
        """Return what the batch does; see `Batch.changes`."""
        types = {name: messages.PROJECTION.schema[name] for name in KNOWN}
        before = pl.DataFrame(known, types, orient="row").with_columns(envelope_blob=pl.lit(b""))
        pieces = dict(self._folded.pieces)
        pieces[MESSAGES] = pl.concat([messages.as_partials(before), pieces[MESSAGES]])
        rest = fold_pieces(pieces, self._wanted, self._cuts)
        is_known = pl.col("id").is_in(before["id"].implode())
        rows = rest.rows[MESSAGES]
        event_models = {n: each for n, each in self._wanted.items() if isinstance(each, EventProjection)}
        message_models = {n: each for n, each in self._wanted.items() if isinstance(each, MessageProjection)}
        return Changes(
            pl.concat([self._folded.rows[MESSAGES], rows.filter(~is_known)]),
            rows.filter(is_known).select(*_CHANGED),
            {
                name: merge_rows(message_models[name], each)
                for name, each in derive(before, message_models).items()
            },
            {name: merge_rows(each, rest.rows[name]) for name, each in message_models.items()},
            merged([self._folded, rest], event_models),
            self.parked,
        )


def _unsent(records: Sequence[Record]) -> list[bytes]:
    """Return the streams of messages that these records go on about, without their sending."""
    first: dict[bytes, str] = {}
    for record in records:
        if record.type.partition(".")[0] in messages.KNOWN:
            first.setdefault(record.stream, record.type)
    return [stream for stream, type_ in first.items() if not type_.startswith("MessageSent.")]


def _frame(projection: Projection, rows: Any) -> pl.DataFrame:
    return pl.DataFrame(merge_reference(projection, rows), projection.schema)
