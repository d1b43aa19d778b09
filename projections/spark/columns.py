"""Columns of the data sources, with their Spark types and the comments that `DESCRIBE` shows.

They have the names of the log's columns; times are converted to timestamps.
"""

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

Kind = Literal["text", "number", "bytes", "time", "milliseconds", "map", "document"]
"""How the log stores a value: a time is log time in µs, a map is the text of a JSON object.

A document is text that a query may declare as the type of its JSON value.
"""

_ARROW_TYPES: dict[Kind, pa.DataType] = {
    "text": pa.string(),
    "number": pa.int64(),
    "bytes": pa.binary(),
    "time": pa.timestamp("us"),
    "milliseconds": pa.timestamp("us"),
    "map": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
    "document": pa.string(),
}


class SourceColumn(NamedTuple):
    """A column of a data source.

    Arguments:
        comment: one sentence about the value.
        required: whether it is never null.
        default: whether queries that declare no columns read it.
    """

    name: str
    kind: Kind
    comment: str
    required: bool = False
    default: bool = True


HEADERS = (
    SourceColumn("timestamp", "milliseconds", "When the message was published, according to its envelope."),
    SourceColumn("content_type", "text", "Media type of the payload."),
    SourceColumn("schema_url", "text", "Address of the payload's schema."),
    SourceColumn("schema_version", "text", "Version of the payload's schema."),
    SourceColumn("encryption", "text", "Encryption algorithm of the payload."),
    SourceColumn("correlation_id", "text", "Id shared by related messages."),
    SourceColumn("principal", "text", "Publisher of the message."),
    SourceColumn("namespace", "text", "Namespace in the envelope."),
    SourceColumn("trace_id", "text", "Id of the trace."),
    SourceColumn("span_id", "text", "Id of the span within the trace."),
    SourceColumn("custom_headers", "map", "The envelope's extensions and labels, as text."),
)
"""The headers of a message (RFC-037 header table) besides its id and topic."""

ENVELOPE = SourceColumn(
    "envelope",
    "bytes",
    "The PrismEnvelope as it was sent, with any auth token; read only if it is declared.",
    default=False,
)

_MAILBOX = SourceColumn("mailbox", "text", "Name of the mailbox, `namespace@proxy`.", required=True)
_MESSAGE_ID = SourceColumn("message_id", "text", "Id of the message, unique in its topic.", required=True)
_TOPIC = SourceColumn("topic", "text", "Topic of the message.", required=True)
_SENT_AT = SourceColumn("sent_at", "time", "Log time at which the message was sent.", required=True)
_POSITION = SourceColumn(
    "position", "number", "Number of the `MessageSent` in the mailbox's log.", required=True
)
EVENTS = (
    _MAILBOX,
    SourceColumn("position", "number", "Number of the event in the mailbox's log.", required=True),
    SourceColumn("event", "text", "Name of the event's type, such as `MessageSent`.", required=True),
    SourceColumn("at", "time", "Log time of the event.", required=True),
    SourceColumn(
        "message_id", "text", "Id of the message; null for an event of the mailbox, and after retention."
    ),
    SourceColumn("topic", "text", "Topic of the message, or of the policy or pause."),
    SourceColumn("shard", "number", "Number of the message's shard."),
    SourceColumn(
        "sent_position", "number", "Position of the message's `MessageSent`; null where `message_id` is."
    ),
    SourceColumn("sent_at", "time", "Log time at which the message was sent; null where `message_id` is."),
    SourceColumn("attempt", "number", "Number of the delivery."),
    SourceColumn("due", "time", "When the message may be delivered, or its delivery times out."),
    SourceColumn("expires_at", "time", "When the message or dead letter expires."),
    SourceColumn("reason", "text", "Why the message was requeued, dead-lettered or removed."),
    SourceColumn("last_error", "text", "Error that the consumer reported."),
    SourceColumn("consumer", "text", "Name of the consumer that received the message."),
    SourceColumn(
        "capability",
        "text",
        "Root nonce of the capability that received it, to which `principal` belongs.",
    ),
    SourceColumn("priority", "number", "Urgency of the message, 0 to 10."),
    SourceColumn("size", "number", "Size of the payload in bytes."),
    SourceColumn("idem_key", "text", "The sender's idempotency key."),
    SourceColumn("sticky_key", "text", "The sender's sticky key; null in logs from before it was stored."),
    SourceColumn("unique_key", "text", "The sender's unique key."),
    SourceColumn(
        "copy_of",
        "text",
        "Id of the message of which a subscription got this copy; unique only together with its topic, "
        "which the envelope has.",
    ),
    SourceColumn("note", "text", "Why an operator cancelled the message, or the id of what superseded it."),
    SourceColumn(
        "result",
        "bytes",
        "What the consumer returned with the ack, encrypted if the message is; read only if it is declared.",
        default=False,
    ),
    SourceColumn("result_type", "text", "Media type of the result."),
    SourceColumn(
        "traceback",
        "bytes",
        "Traceback that a dead letter keeps, encrypted if the message is; read only if it is declared.",
        default=False,
    ),
    *HEADERS,
    SourceColumn("version", "number", "Number of the event in its message's history.", required=True),
    SourceColumn("epoch", "number", "Epoch of the mailbox's owner.", required=True),
    SourceColumn("stream", "bytes", "Stream id of the message, 16 bytes.", required=True),
    SourceColumn("payload_hash", "bytes", "BLAKE3 of the payload."),
    SourceColumn("hash_chain", "bytes", "Hash that chains the messages of the topic."),
    SourceColumn("envelope_hash", "bytes", "BLAKE3 of the envelope."),
    SourceColumn("chain", "bytes", "Chain hash of the event's commit.", required=True),
    ENVELOPE,
)
"""The columns of `postroom_events`: one row for each event."""

MESSAGES = (
    *(_MESSAGE_ID, _MAILBOX, _TOPIC),
    SourceColumn(
        "status",
        "text",
        "`ready`, `delayed`, `in_flight`, `acked`, `dead`, `expired` or `archived`.",
        required=True,
    ),
    _SENT_AT,
    SourceColumn("changed_at", "time", "Log time of the message's last event.", required=True),
    SourceColumn("due", "time", "When a ready or delayed message may be delivered."),
    SourceColumn("attempts", "number", "Deliveries since it was sent or last redriven.", required=True),
    SourceColumn("redriven", "number", "Number of redrives.", required=True),
    SourceColumn(
        "dead_letterings",
        "text",
        "JSON array of dead-letterings: at (µs), reason, attempt, last_error, redriven_at.",
    ),
    SourceColumn("shard", "number", "Number of the message's shard.", required=True),
    _POSITION,
    *HEADERS,
    SourceColumn("stream", "bytes", "Stream id of the message, 16 bytes.", required=True),
    SourceColumn(
        "envelope",
        "bytes",
        "The PrismEnvelope without its auth token; read only if it is declared.",
        default=False,
    ),
)
"""The columns of `postroom_messages`: one row for each message."""

PAYLOADS = (
    *(_MESSAGE_ID, _MAILBOX, _TOPIC, _POSITION, _SENT_AT),
    SourceColumn(
        "format", "text", "`json`, `protobuf`, `text`, `binary` or `encrypted`; null if there is no envelope."
    ),
    SourceColumn("payload", "document", "The payload as text; a protobuf message as JSON."),
    SourceColumn("reason", "text", "Why the payload could not be decoded, or how it violates its schema."),
    SourceColumn(
        "data", "bytes", "The payload's bytes, decompressed; read only if it is declared.", default=False
    ),
    SourceColumn("size", "number", "Size of the payload in bytes, as it was sent."),
    *HEADERS,
)
"""The columns of `postroom_payloads`: one row for each message."""


def spark_schema(columns: Iterable[SourceColumn]) -> "StructType":
    """Return the schema of these columns, with their comments."""
    from pyspark.sql.pandas.types import from_arrow_type
    from pyspark.sql.types import StructType

    schema = StructType()
    for column in columns:
        type_ = from_arrow_type(_ARROW_TYPES[column.kind], prefer_timestamp_ntz=False)
        schema.add(column.name, type_, not column.required, {"comment": column.comment})
    return schema


def arrow_schema(columns: Iterable[SourceColumn]) -> pa.Schema:
    """Return the Arrow schema of these columns; times have no time zone and are UTC."""
    return pa.schema([(column.name, _ARROW_TYPES[column.kind]) for column in columns])


def check_schema(source: str, columns: Collection[SourceColumn], schema: "StructType") -> None:
    """Raise InvalidRequest unless a data source has all columns of a schema with the same types."""
    types = {field.name: field.dataType.simpleString() for field in spark_schema(columns)}
    documents = {column.name for column in columns if column.kind == "document"}
    for field in schema:
        type_ = field.dataType.simpleString()
        if field.name not in types:
            raise InvalidRequest(f"{source} has no column {field.name}; it has {', '.join(types)}.")
        if types[field.name] != type_ and field.name not in documents:
            raise InvalidRequest(
                f"The column {field.name} of {source} is declared as {type_}; declare it as "
                f"{types[field.name]}."
            )


def select_columns(source: str, columns: Iterable[SourceColumn], names: str | None) -> list[SourceColumn]:
    """Return the columns that the option `columns` lists.

    Arguments:
        names: names separated by commas, or `*` for all; None for the default columns.

    Raises: InvalidRequest for an unknown name.
    """
    by_name = {column.name: column for column in columns}
    if names is None:
        return [column for column in by_name.values() if column.default]
    if names.strip() == "*":
        return list(by_name.values())
    selected = []
    for name in dict.fromkeys(each.strip() for each in names.split(",")):
        if name not in by_name:
            raise InvalidRequest(f"{source} has no column {name!r}; it has {', '.join(by_name)}.")
        selected.append(by_name[name])
    return selected


def convert(array: pa.Array, kind: Kind, type_: pa.DataType) -> pa.Array:
    """Convert a column of the log to its Spark type."""
    match kind:
        case "time":
            return array.cast(pa.int64()).cast(pa.timestamp("us")).cast(type_)
        case "milliseconds":
            return pc.multiply(array.cast(pa.int64()), 1_000).cast(pa.timestamp("us")).cast(type_)
        case "map":
            return _maps(array, type_)
    return array if array.type == type_ else array.cast(type_)


def _maps(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert JSON objects to maps, parsing each distinct text once."""
    encoded = texts.dictionary_encode()
    decode = msgspec.json.Decoder(dict[str, str]).decode
    objects: list[Any] = [list(decode(text).items()) for text in encoded.dictionary.to_pylist()]
    return pa.array(objects, type_).take(encoded.indices)
