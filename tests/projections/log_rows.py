"""Records as rows of the log's columns, made one by one: what every reader is compared with."""

from typing import Any

import msgspec

from postroom.domain.message import MessageSent
from postroom.domain.record import Record
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import COLUMNS, HEADER_COLUMNS

Row = dict[str, Any]

_FIELDS: tuple[str, ...] = (
    "topic",
    "shard",
    "attempt",
    "due",
    "expires_at",
    "reason",
    "last_error",
    "consumer",
    "priority",
)
_FIELDS += (
    "size",
    "idem_key",
    "sticky_key",
    "unique_key",
    "copy_of",
    "note",
    "result",
    "result_type",
    "traceback",
    "payload_hash",
    "hash_chain",
    "envelope",
)


def log_row(extent: LogExtent, record: Record) -> Row:
    """Return every column of a record."""
    event = record.event
    row: Row = dict.fromkeys(COLUMNS) | {
        "place": extent.id * 2**40 + record.position,
        "mailbox_id": extent.id,
        "mailbox": extent.name,
        "as_of": extent.at,
        "position": record.position,
        "stream": record.stream,
        "version": record.version,
        "distance": record.distance,
        "epoch": record.epoch,
        "event": record.type,
        "at": record.at,
        "chain": record.chain,
    }
    row |= {name: getattr(event, name) for name in _FIELDS if hasattr(event, name)}
    if isinstance(event, MessageSent):
        custom = event.headers.custom_headers
        row |= {name: getattr(event.headers, name) for name in HEADER_COLUMNS}
        row["custom_headers"] = msgspec.json.encode(custom).decode() if custom else None
        row["envelope_hash"] = record.envelope_hash
    return row
