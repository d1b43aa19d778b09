"""Exported messages as Parquet."""

from collections.abc import Sequence
from operator import attrgetter
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from postroom.application.queries.export_messages import ExportedMessage
from postroom.domain.message import Headers

_TEXT, _BYTES, _LONG = pa.string(), pa.binary(), pa.int64()
_COLUMNS = {
    "message_id": _TEXT,
    "timestamp": pa.timestamp("us", "UTC"),
    "topic": _TEXT,
    "mailbox": _TEXT,
    "position": _LONG,
    "shard": _LONG,
    "status": _TEXT,
    "attempts": _LONG,
    **dict.fromkeys(Headers.__struct_fields__[2:-1], _TEXT),
    "custom_headers": pa.map_(_TEXT, _TEXT),
    "envelope": _BYTES,
    "payload": _BYTES,
}
_REQUIRED = (
    *("message_id", "timestamp", "topic", "mailbox", "position", "shard", "status", "attempts"),
    "custom_headers",
)
_UNIQUE = ("message_id", "envelope", "payload")
"""Columns of mostly distinct values, written without a dictionary."""


class ParquetFile:
    """A Parquet file of messages that is being written.

    Arguments:
        file: the caller closes it.
        envelope, payload: include these columns.
    """

    def __init__(self, file: BinaryIO, envelope: bool, payload: bool) -> None:
        included = {"envelope": envelope, "payload": payload}
        self._schema = pa.schema(
            pa.field(name, kind, nullable=name not in _REQUIRED)
            for name, kind in _COLUMNS.items()
            if included.get(name, True)
        )
        repeating = [name for name in self._schema.names if name not in _UNIQUE]
        self._writer = pq.ParquetWriter(file, self._schema, compression="zstd", use_dictionary=repeating)

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages as a row group."""
        arrays = [pa.array(_column(field.name, messages), field.type) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


def _column(name: str, messages: Sequence[ExportedMessage]) -> list[object]:
    match name:
        case "envelope":
            return [each.envelope for each in messages]
        case "payload":
            return [each.payload for each in messages]
        case "timestamp":
            return [each.message.timestamp * 1_000 for each in messages]
        case "status":
            return [each.message.status.name.lower() for each in messages]
        case "custom_headers":
            return [list(each.message.custom_headers.items()) for each in messages]
        case _:
            return list(map(attrgetter(f"message.{name}"), messages))
