"""Staging: what Spark's tasks wrote, as one stream in the order of a key."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

ROWS_PER_LOAD = 50_000


def in_order(folder: Path, key: str, columns: tuple[str, ...]) -> Iterator[pa.Table]:
    """Merge Parquet files that are each sorted by `key`, and yield their rows in its order.

    Appending to a SQLite table at its end fills its pages and touches each once; anywhere else it splits
    them.

    Arguments:
        folder: of the files of one Spark job.
        key: an integer column, unique over all files.
    """
    files = sorted(folder.glob("*.parquet"))
    size = max(1_000, ROWS_PER_LOAD // max(1, len(files)))
    streams = [pq.ParquetFile(file).iter_batches(batch_size=size, columns=list(columns)) for file in files]
    waiting: list[tuple[Iterator[pa.RecordBatch], pa.RecordBatch]] = []
    for stream in streams:
        _refill(stream, waiting)
    while waiting:
        # Everything up to the smallest last key can't be preceded by a row that is still unread.
        bound = min(batch[key][-1].as_py() for _, batch in waiting)
        ready, rest = [], []
        for stream, batch in waiting:
            count = pc.sum(pc.less_equal(batch[key], bound)).as_py()
            ready.append(batch.slice(0, count))
            if count < batch.num_rows:
                rest.append((stream, batch.slice(count)))
            else:
                _refill(stream, rest)
        waiting = rest
        yield pa.Table.from_batches(ready).sort_by(key)


def _refill(
    stream: Iterator[pa.RecordBatch], waiting: list[tuple[Iterator[pa.RecordBatch], pa.RecordBatch]]
) -> None:
    for batch in stream:
        if batch.num_rows:
            waiting.append((stream, batch))
            return
