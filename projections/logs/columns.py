"""The columns of the log as readers see them: those that are stored, and those that follow from them."""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from postroom.projections.cut import MailboxCut


class Column(NamedTuple):
    """A column's type, for Spark and for Arrow."""

    spark: str
    arrow: pa.DataType


_LONG, _TEXT, _BYTES = (
    Column("bigint", pa.int64()),
    Column("string", pa.string()),
    Column("binary", pa.binary()),
)

STORED = {
    **dict.fromkeys(("place", "version", "epoch", "at", "shard", "attempt", "due", "timestamp"), _LONG),
    **dict.fromkeys(("stream", "state", "chain", "envelope"), _BYTES),
    **dict.fromkeys(("type", "topic", "reason", "message_id", "content_type", "schema_url"), _TEXT),
    **dict.fromkeys(("schema_version", "encryption", "correlation_id", "principal", "namespace"), _TEXT),
    **dict.fromkeys(("trace_id", "span_id", "custom_headers"), _TEXT),
}
"""What a store has of each record."""

COLUMNS = STORED | {
    "position": _LONG,
    "mailbox_id": _LONG,
    "mailbox": _TEXT,
    "event": _TEXT,
    "cut_at": _LONG,
    "death_state": _BYTES,
}
"""What may be asked for.

`mailbox` is the name, `event` the `type` without its schema version, `cut_at` the log time (µs) at the
mailbox's cut, and `death_state` the `state` of events that tell why a message died, null in all others: most
readers need no other, and a column that is hardly ever there costs next to nothing.
"""

DEATH = "MessageDeadLettered."
_MADE_OF = {"position": "place", "event": "type"}
_OF_THE_CUT = ("mailbox_id", "mailbox", "cut_at")


def columns_to_read(columns: Sequence[str]) -> list[str]:
    """Return what has to be read so that `complete` can make these columns of it."""
    needed = [_MADE_OF.get(name, name) for name in columns if name not in _OF_THE_CUT]
    return list(dict.fromkeys(needed)) or ["place"]


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([(name, COLUMNS[name].arrow) for name in columns])


def complete(batch: pa.RecordBatch, cut: MailboxCut, columns: Sequence[str]) -> pa.RecordBatch:
    """Return these columns of records of one mailbox, of which `columns_to_read` were read."""
    arrays = [_column(batch, cut, name) for name in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(columns))


def _column(batch: pa.RecordBatch, cut: MailboxCut, name: str) -> pa.Array:
    if name == "position":
        return pc.subtract(batch["place"], cut.place(0))
    if name == "event":
        kinds = batch["type"].dictionary_encode()
        events = [kind.partition(".")[0] for kind in kinds.dictionary.to_pylist()]
        return pa.array(events, pa.string()).take(kinds.indices)
    if name in _OF_THE_CUT:
        value = {"mailbox_id": cut.id, "mailbox": cut.name, "cut_at": cut.at}[name]
        return pa.repeat(pa.scalar(value, COLUMNS[name].arrow), batch.num_rows)
    return batch[name]
