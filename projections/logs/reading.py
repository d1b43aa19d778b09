"""What reading logs takes in every database."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from postroom.projections.cut import Range, split
from postroom.projections.logs.columns import DEATH, arrow_schema, columns_to_read, complete
from postroom.projections.logs.conditions import Condition, StartsWith, to_sql

POSITIONS_PER_READ = 50_000
"""Positions that one SQL statement covers: it bounds how long a read transaction lasts."""
ROWS_PER_BATCH = 20_000
ROWS_WITH_ENVELOPES = 4_000
"""An envelope may be large: fewer rows of them are in memory at once."""

Driver = Literal["auto", "adbc", "python"]
"""ADBC or the database's ordinary Python driver; `auto` takes ADBC where it is there and does no harm."""

Run = Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]
"""Yield the rows of a SELECT statement, which is a transaction by itself."""


def read_by_sql(
    run: Run,
    table: str,
    bytes_literal: Callable[[bytes], str],
    ranges: Iterable[Range],
    columns: Sequence[str],
    where: Sequence[Condition],
) -> Iterator[pa.RecordBatch]:
    """Yield records of ranges in the order of their positions, a short statement at a time.

    Arguments:
        table: what the log is called.
        bytes_literal: writes bytes as this database does.
        columns, where: as `Log.read` takes them.
    """
    stored = columns_to_read(columns)
    death = to_sql(StartsWith("type", DEATH), bytes_literal)
    selected = ", ".join(
        f"CASE WHEN {death} THEN state END AS death_state" if name == "death_state" else name
        for name in stored
    )
    conditions = "".join(f" AND {to_sql(condition, bytes_literal)}" for condition in where)
    for cut, first, last in split(ranges, POSITIONS_PER_READ):
        places = f"place BETWEEN {cut.place(first)} AND {cut.place(last)}"
        # In the order of the key, by which the rows are found anyway.
        statement = f"SELECT {selected} FROM {table} WHERE {places}{conditions} ORDER BY place"
        for batch in _one_ahead(run(statement, arrow_schema(stored))):
            yield complete(batch, cut, columns)


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield batches when the next one is there: with the last one, the transaction is over.

    However long a consumer takes, it holds nothing of the store between two statements.
    """
    ready = next(batches, None)
    for batch in batches:
        yield ready
        ready = batch
    if ready is not None:
        yield ready


def rows_per_batch(schema: pa.Schema) -> int:
    """Return how many rows with these columns are handed over at once."""
    return ROWS_WITH_ENVELOPES if "envelope" in schema.names else ROWS_PER_BATCH


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows that a Python driver fetched as an Arrow batch."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
