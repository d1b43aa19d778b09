"""The fold of a log, range by range, without a shuffle (ADR 0021).

What a range tells is folded where it is read. Most messages live and end within one range: their rows are
complete. Of the others, and of records whose message was sent in an earlier range, *pieces* are left, which
are folded once all ranges are done, all pieces of a message together.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from postroom.projections.cut import MailboxCut
from postroom.projections.models import messages
from postroom.projections.models.messages import Parked
from postroom.projections.projection import (
    POLARS,
    EventProjection,
    MessageProjection,
    Projection,
    merge_rows,
)

MESSAGES = messages.PROJECTION.name
RECORDS = "records"
"""What the pieces that are records, not partials of messages, are called."""

_LOG_TYPES = {
    **dict.fromkeys(("place", "mailbox_id", "position", "version", "epoch", "at", "shard", "attempt"), "int"),
    **dict.fromkeys(("due", "timestamp", "cut_at"), "int"),
    **dict.fromkeys(("stream", "state", "death_state", "chain", "envelope"), "bytes"),
}


@dataclass
class Folded:
    """Rows of read models, by the name of the projection, and what else folding left.

    Arguments:
        rows: those of the messages are final. Others are to be merged with rows of the same key.
        pieces: partials of messages, by `MESSAGES`, and records whose message was sent elsewhere, by `RECORDS`.
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
    return tuple(
        dict.fromkeys(
            (*messages.KEY, "event", "topic", "shard", *(name for names in reads for name in names))
        )
    )


def record_schema(wanted: Mapping[str, Projection]) -> dict[str, pl.DataType]:
    """Return the columns and types of the pieces that are records."""
    return {name: POLARS[_LOG_TYPES.get(name, "text")] for name in record_columns(wanted)}  # type: ignore[index]


def fold_range(records: pl.DataFrame, wanted: Mapping[str, Projection], cuts: Sequence[MailboxCut]) -> Folded:
    """Return what a range of the log tells.

    Arguments:
        records: columns `columns_read` of the records of a range, in order.
        cuts: where each mailbox is read to.
    """
    partials, parked = messages.fold(records)
    is_complete = partials.select(messages.is_complete()).to_series()
    folded = Folded(
        {MESSAGES: messages.finish(partials.filter(is_complete), cuts)},
        {MESSAGES: partials.filter(~is_complete)},
        parked,
    )
    if columns := record_columns(wanted):
        placed = _placed(records.select(columns), partials)
        is_placed = pl.col("topic").is_not_null() | ~pl.col("event").str.starts_with("Message")
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
        placed = _placed(pieces[RECORDS], partials)
        folded.rows |= _fold_records(placed.filter(pl.col("topic").is_not_null()), wanted)
    return folded


def derive(rows: pl.DataFrame, wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    """Return the rows that these messages give to the read models made of unsettled messages."""
    return {
        name: each.derive(rows).select(*each.schema)
        for name, each in wanted.items()
        if isinstance(each, MessageProjection)
    }


def merged(folded: Iterable[Folded], wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    """Return the rows of several folds, one a key."""
    parts = list(folded)
    return {
        name: merge_rows(each, pl.concat([part.rows[name] for part in parts if name in part.rows]))
        for name, each in wanted.items()
    }


def _placed(records: pl.DataFrame, partials: pl.DataFrame) -> pl.DataFrame:
    """Return records with topic and shard of their messages' sending, as far as it is known."""
    sent = partials.filter(pl.col("id").is_not_null()).select(*messages.KEY, "topic", "shard")
    found = records.join(sent, messages.KEY, "left", suffix="_sent", maintain_order="left")
    filled = (pl.coalesce(name, f"{name}_sent").alias(name) for name in ("topic", "shard"))
    return found.with_columns(*filled).select(records.columns)


def _fold_records(records: pl.DataFrame, wanted: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    return {
        name: each.fold(records).select(*each.schema)
        for name, each in wanted.items()
        if isinstance(each, EventProjection)
    }
