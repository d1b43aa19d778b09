"""Logs in memory, folded over frames as Spark's tasks fold them: range by range, then bucket by bucket."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl

from postroom.domain.record import Record
from postroom.projections.fold import (
    MESSAGES,
    RECORDS,
    columns_read,
    fold_pieces,
    fold_range,
    merge_results,
    record_schema,
)
from postroom.projections.log_reader import LogExtent
from postroom.projections.models.messages import PARTIAL
from postroom.projections.projection import COLUMNS, Projection, load_projections
from tests.projections.histories import Step, live, open_log, take_extents
from tests.projections.log_rows import log_row
from tests.projections.reference import ReadModels

Logs = dict[LogExtent, list[Record]]


def lived(taken: Sequence[Sequence[Step]]) -> Logs:
    """Return the logs of mailboxes in which these steps were taken, the second of them an archive."""
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        for number, history in enumerate(taken):
            live(store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
        logs: Logs = {}
        for extent in take_extents(store):
            with closing(open_log(store, extent.name, create_missing=False)) as log:
                logs[extent] = list(log.read())
        return logs


def log_of(name: str, records: Sequence[Record], id_: int = 1) -> Logs:
    """Return one mailbox's log, these records being at the positions they say."""
    last = records[-1]
    return {LogExtent(id_, name, records[0].position, last.position, last.at): list(records)}


def folded(
    logs: Logs,
    sizes: Sequence[int] = (1_000,),
    buckets: int = 1,
    wanted: Mapping[str, Projection] | None = None,
) -> ReadModels:
    """Return what the fold over ranges makes of logs: first the ranges, then the pieces, bucket by bucket.

    Arguments:
        sizes: records of a range, in turn.
    """
    wanted = load_projections() if wanted is None else wanted
    return fold_frames([frame(part, wanted) for part in ranges(logs, sizes)], list(logs), buckets, wanted)


def fold_frames(
    frames: Iterable[pl.DataFrame],
    extents: Sequence[LogExtent],
    buckets: int = 1,
    wanted: Mapping[str, Projection] | None = None,
) -> ReadModels:
    """Return what the fold makes of ranges of logs that have been read."""
    wanted = load_projections() if wanted is None else wanted
    parts = [fold_range(each, wanted, extents) for each in frames]
    empty = {MESSAGES: pl.DataFrame(schema=PARTIAL), RECORDS: pl.DataFrame(schema=record_schema(wanted))}
    pieces = {
        name: pl.concat([none, *(part.pieces[name] for part in parts if name in part.pieces)])
        for name, none in empty.items()
        if none.width
    }
    chosen = pl.col("stream").bin.encode("hex").hash() % buckets
    parts += [
        fold_pieces({name: rows.filter(chosen == bucket) for name, rows in pieces.items()}, wanted, extents)
        for bucket in range(buckets)
    ]
    rows = merge_results(parts, wanted)
    return ReadModels(
        {name: rows[name].sort(*each.key).to_dicts() for name, each in wanted.items()},
        sorted(parked for part in parts for parked in part.parked),
    )


def ranges(logs: Logs, sizes: Sequence[int]) -> Iterator[list[tuple[LogExtent, Record]]]:
    """Yield the records of all logs, as many at a time as the sizes say in turn."""
    records = [
        (extent, record)
        for extent, records in logs.items()
        for record in records
        if extent.first <= record.position <= extent.last
    ]
    turn = 0
    while records:
        size = sizes[turn % len(sizes)]
        yield records[:size]
        records, turn = records[size:], turn + 1


def frame(part: Sequence[tuple[LogExtent, Record]], wanted: Mapping[str, Projection]) -> pl.DataFrame:
    """Return records as the log's readers would."""
    schema = frame_schema(wanted)
    rows = (log_row(extent, record) for extent, record in part)
    return pl.DataFrame([{name: row[name] for name in schema} for row in rows], schema=schema)


def frame_schema(wanted: Mapping[str, Projection] | None = None) -> dict[str, pl.DataType]:
    """Return the columns and types that folds read of a log."""
    types = {"int64": pl.Int64(), "string": pl.String(), "binary": pl.Binary()}
    wanted = load_projections() if wanted is None else wanted
    return {name: types[str(COLUMNS[name])] for name in columns_read(wanted)}
