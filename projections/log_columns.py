"""The columns of the log that readers provide: one row for each event."""

from collections.abc import Sequence

import pyarrow as pa

from postroom.domain.message import Headers

LONG, TEXT, BYTES = pa.int64(), pa.string(), pa.binary()

HEADER_COLUMNS: dict[str, pa.DataType] = {
    name: LONG if name == "timestamp" else TEXT for name in Headers.__struct_fields__
}
"""Headers of a `MessageSent`; `custom_headers` is a JSON object, null when it is empty."""

EVENT_COLUMNS: dict[str, pa.DataType] = {
    "stream": BYTES,
    "version": LONG,
    "epoch": LONG,
    "event": TEXT,
    "at": LONG,
    "chain": BYTES,
    "topic": TEXT,
    "shard": LONG,
    "attempt": LONG,
    "due": LONG,
    "expires_at": LONG,
    "reason": TEXT,
    "last_error": TEXT,
    "consumer": TEXT,
    "capability": TEXT,
    "priority": LONG,
    "size": LONG,
    "idem_key": TEXT,
    "payload_hash": BYTES,
    "hash_chain": BYTES,
    "envelope_hash": BYTES,
    **HEADER_COLUMNS,
    "envelope": BYTES,
}
"""The columns of an event, null where its type has no such field.

`event` is the name of its type; `epoch`, `at` and `chain` are those of its commit; `envelope_hash` is the
BLAKE3 of the envelope. `principal` is that of the message, or of a delivery that of its consumer.
"""

COLUMNS: dict[str, pa.DataType] = {
    "place": LONG,
    "position": LONG,
    "mailbox_id": LONG,
    "mailbox": TEXT,
    "as_of": LONG,
    "distance": LONG,
    **EVENT_COLUMNS,
}
"""All columns that can be read; `as_of` is the log time (µs) at the end of the mailbox's extent.

`distance` is how many positions before an event the previous one of its message is, or 0.
"""


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """Return the Arrow schema of these columns."""
    return pa.schema([(name, COLUMNS[name]) for name in columns])
