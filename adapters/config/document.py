"""What a namespace file may say, key by key as RFC-037 has it, and as much of our own as it leaves open."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from postroom.application.ingest.namespace import SchemaFormat
from postroom.domain.envelope.validation import ValidationMode

Positive = Annotated[int, msgspec.Meta(ge=1)]
Above0 = Annotated[float, msgspec.Meta(gt=0)]
IndexedHeader = Literal[
    "message_id",
    "timestamp",
    "topic",
    "content_type",
    "schema_id",
    "schema_url",
    "schema_version",
    "encryption",
    "correlation_id",
    "principal",
    "namespace",
    "trace_id",
    "span_id",
    "custom_headers",
]
SourceInterface = Literal["QueueInterface", "PubSubInterface"]


class EnvelopeSchema(msgspec.Struct, frozen=True, kw_only=True):
    """How envelopes are checked."""

    url: str | None = None
    version: Literal["v1"] = "v1"
    format: Literal["protobuf"] = "protobuf"
    message_name: Literal["prism.envelope.v1.PrismEnvelope"] = "prism.envelope.v1.PrismEnvelope"
    validation: ValidationMode = ValidationMode.STRICT


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of one topic's payloads; what it leaves out is as for all topics."""

    topic: str
    message_name: str | None = None
    format: SchemaFormat | None = None
    file: Path | None = None
    validation: ValidationMode | None = None


class PayloadSchemas(msgspec.Struct, frozen=True, kw_only=True):
    """How payloads are checked."""

    url: str | None = None
    version: str | None = None
    format: SchemaFormat = SchemaFormat.PROTOBUF
    file: Path | None = None
    schemas: tuple[TopicSchema, ...] = ()
    validation: ValidationMode = ValidationMode.STRICT
    compatibility: Literal["backward", "forward", "full", "none"] = "backward"


class Schemas(msgspec.Struct, frozen=True, kw_only=True):
    """How messages are checked before they are stored."""

    envelope: EnvelopeSchema = EnvelopeSchema()
    payload: PayloadSchemas = PayloadSchemas()


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages come from, on NATS."""

    url: str
    subject: str
    consumer_group: str
    durable: bool = True
    stream: str | None = None
    credentials: Path | None = None
    ack_wait_seconds: Positive | None = None
    max_ack_pending: Positive | None = None
    dead_letter_subject: str | None = None


class NatsSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="nats"):
    """The message source, where that is NATS."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: NatsConfig


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages come from, on Redis."""

    url: str
    stream: str
    consumer_group: str
    durable: bool = True
    field: str = "data"
    ack_wait_seconds: Positive | None = None


class RedisSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="redis"):
    """The message source, where that is Redis."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: RedisConfig


class SqliteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages are stored, in SQLite."""

    database_path: Path
    mailbox: str | None = None
    table_name: Literal["mailbox"] = "mailbox"
    indexed_headers: tuple[IndexedHeader, ...] = ()
    retention_days: Positive | None = None


class SqliteSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="sqlite"):
    """The storage, where that is SQLite."""

    interfaces: tuple[Literal["TableWriterInterface"], ...] = ()
    config: SqliteConfig


class PostgresConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages are stored, in PostgreSQL."""

    url: str
    mailbox: str | None = None
    table_name: Literal["mailbox"] = "mailbox"
    indexed_headers: tuple[IndexedHeader, ...] = ()
    retention_days: Positive | None = None


class PostgresSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="postgres"):
    """The storage, where that is PostgreSQL."""

    interfaces: tuple[Literal["TableWriterInterface"], ...] = ()
    config: PostgresConfig


class SqliteQueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages are searched, in SQLite."""

    database_path: Path
    table_name: Literal["mailbox"] = "mailbox"


class SqliteQuerySlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="sqlite"):
    """The query slot, where that is SQLite."""

    interfaces: tuple[Literal["TableReaderInterface"], ...] = ()
    config: SqliteQueryConfig


class PostgresQueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where messages are searched, in PostgreSQL."""

    url: str
    table_name: Literal["mailbox"] = "mailbox"


class PostgresQuerySlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="postgres"):
    """The query slot, where that is PostgreSQL."""

    interfaces: tuple[Literal["TableReaderInterface"], ...] = ()
    config: PostgresQueryConfig


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """What the namespace is plugged into."""

    message_source: NatsSlot | RedisSlot
    storage: SqliteSlot | PostgresSlot
    query: SqliteQuerySlot | PostgresQuerySlot | None = None


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How long messages are kept, and how many bytes of them."""

    max_age_days: Positive | None = None
    max_size_gb: Above0 | None = None


class Behavior(msgspec.Struct, frozen=True, kw_only=True):
    """How messages are taken in and removed."""

    batch_size: Positive = 100
    auto_commit: bool = True
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 3
    retention_policy: RetentionPolicy = RetentionPolicy()


class NamespaceEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One namespace."""

    name: str
    pattern: Literal["mailbox"]
    pattern_version: str = "0.1.0"
    description: str | None = None
    schemas: Schemas = Schemas()
    slots: Slots
    behavior: Behavior = Behavior()


class NamespaceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of namespaces."""

    namespaces: tuple[NamespaceEntry, ...]
