"""The fold of a log, range by range, without a shuffle (ADR 0021).

What a range tells is folded where it is read. Most messages live and end within one range: their rows are
complete. Of the others, and of records whose message was sent in an earlier range, *pieces* are left, which
are folded once all ranges are done, all pieces of a message together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl
import pyarrow as pa

from postroom.projections.cut import MailboxCut
from postroom.projections.logs.columns import COLUMNS
from postroom.projections.models import messages
from postroom.projections.models.messages import Parked
from postroom.projections.projection import (
    POLARS,
    EventProjection,
    MessageProjection,
    Projection,
    checked,
    merge_rows,
)

MESSAGES = messages.PROJECTION.name
RECORDS = "records"
"""What the pieces that are records, not partials of messages, are called."""

_POLARS = {pa.int64(): POLARS["int"], pa.string(): POLARS["text"], pa.binary(): POLARS["bytes"]}


@dataclass
class Folded:
    """Rows of read models, by the name of the projection, and what else folding left.

    Arguments:
        rows: those of the messages are final. Others are to be merged with rows of the same key.
        pieces: partials of messages, by `MESSAGES`; records whose message was sent elsewhere, by `RECORDS`.
        parked: records that could not be folded.
    """

    rows: dict[str, pl.DataFrame] = field(default_factory=dict)
    pieces: dict[str, pl.DataFrame] = field(default_factory=dict)
    parked: list[Parked] = field(default_factory=list)


def columns_read(wanted: Mapping[str, Projection]) -> tuple[str, ...]:
    """Return which columns of the log these projections are folded from."""
    return tuple(dict.fromkeys((*messages.READS, *record_columns(wanted))))


def record_columns(wanted: Mapping[str, Projection]) -> tuple[str, ...]:
    """Return which columns of the log the projections of records are folded from."""
    reads = [each.reads for each in wanted.values() if isinstance(each, EventProjection)]
    if not reads:
        return ()
    needed = ("place", *messages.KEY, "event", "topic", "shard")
    return tuple(dict.fromkeys((*needed, *(name for names in reads for name in names))))


def record_schema(wanted: Mapping[str, Projection]) -> dict[str, pl.DataType]:
    """Return the columns and types of the pieces that are records."""
    return {name: _POLARS[COLUMNS[name].arrow] for name in record_columns(wanted)}


def fold_range(records: pl.DataFrame, wanted: Mapping[str, Projection], cuts: Sequence[MailboxCut]) -> Folded:
    """Return what a range of the log tells.

    Arguments:
        records: columns `columns_read` of the records of a range, in order.
        cuts: where each mailbox is read to.
    """
    records = records.rechunk()  # many small batches cost more than what they hold
    partials, parked = messages.fold(records)
    is_complete = partials.select(messages.is_complete()).to_series()
    folded = Folded(
        {MESSAGES: messages.finish(partials.filter(is_complete), cuts)},
        {MESSAGES: partials.filter(~is_complete)},
        parked,
    )
    if columns := record_columns(wanted):
        known = records.select(columns).filter(~messages.is_unknown())
        placed = _placed(known, partials)
        is_placed = pl.col("topic").is_not_null() | ~messages.is_message()
        folded.rows |= _fold_records(placed.filter(is_placed), wanted)
        folded.pieces[RECORDS] = placed.filter(~is_placed)
    return folded


def fold_pieces(
    pieces: Mapping[str, pl.DataFrame], wanted: Mapping[str, Projection], cuts: Sequence[MailboxCut]
) -> Folded:
    """Return what all pieces of some messages amount to, once no range is left to be read.

    Arguments:
        pieces: as `fold_range` left them, of all ranges, for messages of which no piece is missing.
    """
    partials = messages.merge(pieces[MESSAGES])
    rows = messages.finish(partials, cuts)
    folded = Folded({MESSAGES: rows, **derive(rows, wanted)})
    if record_columns(wanted):
        placed = _placed(pieces[RECORDS].sort("place"), partials)
        folded.rows |= _fold_records(placed.filter(pl.col("topic").is_not_null()), wanted)
    return folded


def derive(rows: pl.DataFrame, wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    """Return the rows that these messages give to the read models made of unsettled messages."""
    return {
        name: checked(each, each.derive, rows)
        for name, each in wanted.items()
        if isinstance(each, MessageProjection)
    }


def merged(folded: Iterable[Folded], wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    """Return the rows of several folds, one a key."""
    parts = list(folded)
    return {
        name: merge_rows(each, pl.concat([none, *(part.rows[name] for part in parts if name in part.rows)]))
        for name, each in wanted.items()
        for none in [pl.DataFrame(schema=each.schema)]
    }


def _placed(records: pl.DataFrame, partials: pl.DataFrame) -> pl.DataFrame:
    """Return records, in order, with topic and shard of their messages' latest sending, where it is known."""
    sent = partials.filter(pl.col("id").is_not_null())
    sent = sent.select(*messages.KEY, pl.col("id").alias("place"), "topic", "shard").sort("place")
    found = records.join_asof(sent, on="place", by=messages.KEY, suffix="_sent", check_sortedness=False)
    # What is no message's may still have the id of one: senders choose theirs.
    filled = (
        pl.when(messages.is_message()).then(pl.coalesce(name, f"{name}_sent")).otherwise(name).alias(name)
        for name in ("topic", "shard")
    )
    return found.with_columns(*filled).select(records.columns)


def _fold_records(records: pl.DataFrame, wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    return {
        name: checked(each, each.fold, records)
        for name, each in wanted.items()
        if isinstance(each, EventProjection)
    }


def check_folds(wanted: Mapping[str, Projection]) -> None:
    """Fold nothing at all with every projection, so that one that can't be is told of before work begins.

    Raises: BrokenProjection when a fold fails, or returns other columns than its projection declares.
    """
    nothing = pl.DataFrame(schema={name: _POLARS[COLUMNS[name].arrow] for name in columns_read(wanted)})
    folded = fold_range(nothing, wanted, [])
    fold_pieces(folded.pieces, wanted, [])
