"""What reading logs takes in every database."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

ROWS_PER_BATCH = 20_000


def to_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    """Return rows that a Python driver fetched as an Arrow batch."""
    columns = zip(*rows, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def quoted(text: str) -> str:
    """Return text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"
