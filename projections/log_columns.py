"""The columns of the log that readers provide: stored columns, and columns derived from them."""

from collections.abc import Sequence
from typing import NamedTuple, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from postroom.domain.record import Record
from postroom.projections.log_extent import LogExtent


class Column(NamedTuple):
    """Type of a column in Spark and in Arrow."""

    spark: str
    arrow: pa.DataType


_LONG, _TEXT, _BYTES = (
    Column("bigint", pa.int64()),
    Column("string", pa.string()),
    Column("binary", pa.binary()),
)
_TYPES = ((int, _LONG), (str, _TEXT), (bytes, _BYTES))

STORED_COLUMNS = {
    "place" if name == "position" else name: next(
        column for type_, column in _TYPES if hint in (type_, type_ | None)
    )
    for name, hint in get_type_hints(Record).items()
}
"""The columns that are stored for each record."""

COLUMNS = STORED_COLUMNS | {
    "position": _LONG,
    "mailbox_id": _LONG,
    "mailbox": _TEXT,
    "event": _TEXT,
    "as_of": _LONG,
    "dead_letter_state": _BYTES,
}
"""All columns that can be read.

`mailbox` is the mailbox's name, `event` the `type` without its schema version, `as_of` the log time (µs) at
the end of the mailbox's extent, and `dead_letter_state` the `state` of `MessageDeadLettered` events, null for
all other events: projections that need no other state read far less with it.
"""

DEAD_LETTERED = "MessageDeadLettered."
_SOURCE_COLUMNS = {"position": "place", "event": "type"}
_EXTENT_COLUMNS = ("mailbox_id", "mailbox", "as_of")


def columns_to_read(columns: Sequence[str]) -> list[str]:
    """Return the stored columns that `complete` needs to derive these columns."""
    names = [_SOURCE_COLUMNS.get(name, name) for name in columns if name not in _EXTENT_COLUMNS]
    return list(dict.fromkeys(names)) or ["place"]


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([(name, COLUMNS[name].arrow) for name in columns])


def complete(batch: pa.RecordBatch, extent: LogExtent, columns: Sequence[str]) -> pa.RecordBatch:
    """Return these columns of one mailbox's records, derived from a batch with `columns_to_read`."""
    arrays = [_column(batch, extent, name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _column(batch: pa.RecordBatch, extent: LogExtent, name: str) -> pa.Array:
    if name == "position":
        return pc.subtract(batch["place"], extent.place(0))
    if name == "event":
        types = batch["type"].dictionary_encode()
        events = [type_.partition(".")[0] for type_ in types.dictionary.to_pylist()]
        return pa.array(events, pa.string()).take(types.indices)
    if name in _EXTENT_COLUMNS:
        value = {"mailbox_id": extent.id, "mailbox": extent.name, "as_of": extent.at}[name]
        return pa.repeat(pa.scalar(value, COLUMNS[name].arrow), batch.num_rows)
    return batch[name]
