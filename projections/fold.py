"""The fold of a log, range by range, without a shuffle (ADR 0021).

Each range is folded where it is read. Most messages are sent and settled within one range: their rows are
complete. Other messages, and records whose message was sent in an earlier range, become *pieces*. When all
ranges are done, all pieces of a message are folded together.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import polars as pl
import pyarrow as pa

from postroom.domain.errors import BrokenProjection
from postroom.projections.log_reader import LogExtent
from postroom.projections.models import messages
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.projection import (
    COLUMNS,
    POLARS,
    EventProjection,
    Fold,
    MessageProjection,
    Projection,
    merge_rows,
    run_checked,
    run_fold,
)


def with_parking(projections: Mapping[str, Projection], parked: list[ParkedRecord]) -> dict[str, Projection]:
    """Return projections whose folds append records that make them raise to `parked`, and leave these out.

    An error does not identify the record that caused it, so the records are bisected.
    """
    return {name: _with_parking(each, parked) for name, each in projections.items()}


def _with_parking(projection: Projection, parked: list[ParkedRecord]) -> Projection:
    match projection:
        case EventProjection(fold=fold, reads=columns):

            def park_record(record: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(ParkedRecord(record["place"], record["event"], str(error)))

            bisecting = _bisecting(projection, lambda frame: fold(frame.select(columns)), park_record)
            reads = tuple(dict.fromkeys((*columns, "place", "event")))
            return replace(projection, reads=reads, fold=bisecting)
        case MessageProjection(derive=derive):

            def park_message(message: Mapping[str, Any], error: BrokenProjection) -> None:
                parked.append(ParkedRecord(message["id"], "MessageSent", str(error)))

            return replace(projection, derive=_bisecting(projection, derive, park_message))
        case _:
            return projection


def _bisecting(
    projection: Projection, fold: Fold, park: Callable[[Mapping[str, Any], BrokenProjection], None]
) -> Fold:
    def fold_or_park(rows: pl.DataFrame) -> pl.DataFrame:
        try:
            return run_checked(projection, fold, rows)
        except BrokenProjection as error:
            if rows.height <= 1:
                if rows.height:
                    park(rows.row(0, named=True), error)
                return pl.DataFrame(schema=projection.schema)
        half = rows.height // 2
        return pl.concat([fold_or_park(rows.head(half)), fold_or_park(rows.tail(rows.height - half))])

    return fold_or_park


MESSAGES = messages.PROJECTION.name
RECORDS = "records"
"""The name of the pieces that are records; the others are partials of messages."""

_POLARS = {pa.int64(): POLARS["int"], pa.string(): POLARS["text"], pa.binary(): POLARS["bytes"]}


@dataclass
class FoldResult:
    """Rows of read models, and pieces that remain to be folded.

    Arguments:
        rows: by projection; rows of messages are final, others are merged with rows of the same key.
        pieces: partials of messages as `MESSAGES`, and records whose message was sent in another range as
            `RECORDS`.
        parked: records that could not be folded.
    """

    rows: dict[str, pl.DataFrame] = field(default_factory=dict)
    pieces: dict[str, pl.DataFrame] = field(default_factory=dict)
    parked: list[ParkedRecord] = field(default_factory=list)


def columns_read(projections: Mapping[str, Projection], *, envelopes: bool = True) -> tuple[str, ...]:
    """Return the columns of the log that these projections are folded from.

    Arguments:
        envelopes: whether messages have their envelopes; otherwise these are empty.
    """
    names = messages.READS if envelopes else [name for name in messages.READS if name != "envelope"]
    return tuple(dict.fromkeys((*names, *record_columns(projections))))


def record_columns(projections: Mapping[str, Projection]) -> tuple[str, ...]:
    """Return the columns of the log that the projections of records are folded from."""
    reads = [each.reads for each in projections.values() if isinstance(each, EventProjection)]
    if not reads:
        return ()
    needed = ("place", *messages.KEY, "event", "topic", "shard")
    return tuple(dict.fromkeys((*needed, *(name for names in reads for name in names))))


def record_schema(projections: Mapping[str, Projection]) -> dict[str, pl.DataType]:
    """Return the columns and types of the pieces that are records."""
    return {name: _POLARS[COLUMNS[name]] for name in record_columns(projections)}


def piece_schemas(projections: Mapping[str, Projection]) -> dict[str, dict[str, pl.DataType]]:
    """Return the columns and types of the pieces, by name."""
    records = record_schema(with_parking(projections, []))
    return {MESSAGES: messages.PARTIAL, **({RECORDS: records} if records else {})}


def fold_range(
    records: pl.DataFrame, projections: Mapping[str, Projection], extents: Sequence[LogExtent]
) -> FoldResult:
    """Fold a range of the log.

    Arguments:
        records: columns `columns_read` of the records of a range, in order.
        extents: the part of each mailbox log that is read.
    """
    result = split_range(records, projections)
    partials = result.pieces[MESSAGES]
    is_complete = partials.select(messages.is_complete()).to_series()
    result.rows[MESSAGES] = messages.finish(partials.filter(is_complete), extents)
    result.pieces[MESSAGES] = partials.filter(~is_complete)
    if record_columns(projections):
        candidates = _with_topic(result.pieces[RECORDS], partials)
        result.rows |= _fold_records(candidates.filter(_has_topic()), projections)
        result.pieces[RECORDS] = candidates.filter(~_has_topic())
    return result


def split_range(records: pl.DataFrame, projections: Mapping[str, Projection]) -> FoldResult:
    """Return all of a range as pieces; faster than `fold_range` for a few records.

    Arguments:
        records: as for `fold_range`.
    """
    records = records.rechunk()  # polars is slow on many small chunks
    partials, parked = messages.fold(records)
    result = FoldResult({}, {MESSAGES: partials}, parked)
    if columns := record_columns(projections):
        result.pieces[RECORDS] = records.select(columns).filter(~messages.is_unknown())
    return result


def fold_pieces(
    pieces: Mapping[str, pl.DataFrame], projections: Mapping[str, Projection], extents: Sequence[LogExtent]
) -> FoldResult:
    """Fold all pieces of some messages, after all ranges have been folded.

    Arguments:
        pieces: pieces that `fold_range` returned for all ranges; all events of each message.
    """
    partials = messages.merge(pieces[MESSAGES])
    rows = messages.finish(partials, extents)
    result = FoldResult({MESSAGES: rows, **derive(rows, projections)})
    if record_columns(projections):
        candidates = _with_topic(pieces[RECORDS].sort("place"), partials)
        result.rows |= _fold_records(candidates.filter(_has_topic()), projections)
    return result


def derive(rows: pl.DataFrame, projections: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    """Return the rows of each `MessageProjection` for the unsettled of these messages, merged by key."""
    rows = rows.filter(~pl.col("status").is_in(messages.SETTLED)).select(*messages.PROJECTION.stored_schema)
    return {
        name: _run(each, each.derive, rows)
        for name, each in projections.items()
        if isinstance(each, MessageProjection)
    }


def merge_results(
    results: Iterable[FoldResult], projections: Mapping[str, Projection]
) -> dict[str, pl.DataFrame]:
    """Return the rows of several folds, merged by key."""
    parts = list(results)
    rows_by_name = {}
    for name, each in projections.items():
        rows = [part.rows[name] for part in parts if name in part.rows and part.rows[name].height]
        if len(rows) > 1:
            rows = [merge_rows(each, pl.concat(rows))]
        rows_by_name[name] = rows[0] if rows else pl.DataFrame(schema=each.schema)
    return rows_by_name


def _has_topic() -> pl.Expr:
    """Return whether the topic of records is known; records of the mailbox itself have none."""
    return pl.col("topic").is_not_null() | ~messages.is_message()


def _with_topic(records: pl.DataFrame, partials: pl.DataFrame) -> pl.DataFrame:
    """Return the records, in order, with topic and shard of their message's latest `MessageSent`, if any."""
    if not (records["topic"].has_nulls() or records["shard"].has_nulls()):
        return records
    sent = partials.filter(pl.col("id").is_not_null())
    sent = sent.select(*messages.KEY, pl.col("id").alias("place"), "topic", "shard").sort("place")
    matches = records.join_asof(sent, on="place", by=messages.KEY, suffix="_sent", check_sortedness=False)
    # Other records may have the stream id of a message: senders choose message ids.
    columns = (
        pl.when(messages.is_message()).then(pl.coalesce(name, f"{name}_sent")).otherwise(name).alias(name)
        for name in ("topic", "shard")
    )
    return matches.with_columns(*columns).select(records.columns)


def _fold_records(records: pl.DataFrame, projections: Mapping[str, Projection]) -> dict[str, pl.DataFrame]:
    return {
        name: _run(each, each.fold, records)
        for name, each in projections.items()
        if isinstance(each, EventProjection)
    }


def _run(projection: Projection, fold: Fold, frame: pl.DataFrame) -> pl.DataFrame:
    return run_fold(projection, fold, frame) if frame.height else pl.DataFrame(schema=projection.schema)


def check_folds(projections: Mapping[str, Projection]) -> None:
    """Run every fold on an empty frame, so that a broken projection is reported at the start.

    Raises: BrokenProjection when a fold fails, or returns other columns than declared.
    """
    for each in projections.values():
        match each:
            case EventProjection(fold=fold, reads=reads):
                run_fold(each, fold, pl.DataFrame(schema=record_schema(projections)).select(*reads))
            case MessageProjection(derive=derive_rows):
                run_fold(each, derive_rows, pl.DataFrame(schema=messages.PROJECTION.stored_schema))
