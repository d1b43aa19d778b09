"""Reading logs by SQL in any database."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

import pyarrow as pa

from postroom.projections.log_columns import DEAD_LETTERED, arrow_schema, columns_to_read, complete
from postroom.projections.log_conditions import (
    Bucket,
    Compare,
    Condition,
    IsIn,
    IsNull,
    Not,
    StartsWith,
    Value,
)
from postroom.projections.log_extent import Range, split
from postroom.projections.ports.log_reader import POSITIONS_PER_READ

ROWS_PER_BATCH = 20_000
ROWS_WITH_ENVELOPES = 4_000
"""Batch size for rows with envelopes, which may be large."""

Driver = Literal["auto", "adbc", "python"]
"""ADBC or the database's ordinary Python driver; `auto` uses ADBC if it is installed and safe."""

Run = Callable[[str, pa.Schema], Iterator[pa.RecordBatch]]
"""A function that runs a SELECT statement in its own transaction and yields the rows."""


def read_by_sql(
    run: Run,
    table: str,
    bytes_literal: Callable[[bytes], str],
    ranges: Iterable[Range],
    columns: Sequence[str],
    where: Sequence[Condition],
) -> Iterator[pa.RecordBatch]:
    """Yield records of ranges in the order of their positions, by several short statements.

    Arguments:
        table: the name of the log.
        bytes_literal: returns bytes as a literal in the database's dialect.
        columns, where: as for `LogReader.read`.
    """
    stored = columns_to_read(columns)
    is_dead_lettered = to_sql(StartsWith("type", DEAD_LETTERED), bytes_literal)
    selected = ", ".join(
        f"CASE WHEN {is_dead_lettered} THEN state END AS dead_letter_state"
        if name == "dead_letter_state"
        else name
        for name in stored
    )
    conditions = "".join(f" AND {to_sql(condition, bytes_literal)}" for condition in where)
    for extent, first, last in split(ranges, POSITIONS_PER_READ):
        places = f"place BETWEEN {extent.place(first)} AND {extent.place(last)}"
        # The order of the primary key, whose index is used anyway.
        statement = f"SELECT {selected} FROM {table} WHERE {places}{conditions} ORDER BY place"
        for batch in _one_ahead(run(statement, arrow_schema(stored))):
            yield complete(batch, extent, columns)


def _one_ahead(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield each batch after reading the next one, and the last one after the transaction has ended.

    However slow the consumer is, no cursor, lock or transaction stays open between statements.
    """
    previous = next(batches, None)
    for batch in batches:
        yield previous
        previous = batch
    if previous is not None:
        yield previous


def rows_per_batch(schema: pa.Schema) -> int:
    """Return the batch size for rows with these columns."""
    return ROWS_WITH_ENVELOPES if "envelope" in schema.names else ROWS_PER_BATCH


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows that a Python driver fetched as an Arrow batch."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def to_sql(condition: Condition, bytes_literal: Callable[[bytes], str]) -> str:
    """Return a condition in SQL, which is the same for SQLite and PostgreSQL except for literals of bytes."""
    match condition:
        case IsIn(column, values):
            return f"{column} IN ({', '.join(map(literal, values))})"
        case StartsWith(column, prefix):
            return f"substr({column}, 1, {len(prefix)}) = {literal(prefix)}"
        case Compare(column, operator, value):
            return f"{column} {operator} {literal(value)}"
        case IsNull(column):
            return f"{column} IS NULL"
        case Not(inner):
            return f"NOT ({to_sql(inner, bytes_literal)})"
        case Bucket(column, low, high):
            last = f"substr({column}, 16, 1)"
            below = f" AND {last} < {bytes_literal(bytes([high]))}" if high < 256 else ""
            return f"({last} >= {bytes_literal(bytes([low]))}{below})"


def literal(value: Value) -> str:
    """Return a number or text as an SQL literal."""
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
