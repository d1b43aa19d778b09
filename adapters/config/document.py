"""Structure of a namespace file: the keys of RFC-037 and our additions."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from postroom.application.ingest.namespace import ACK_WAIT_SECONDS, MAX_ACK_PENDING, SchemaFormat
from postroom.domain.envelope.validation import ValidationMode

Positive = Annotated[int, msgspec.Meta(ge=1)]
PositiveNumber = Annotated[float, msgspec.Meta(gt=0)]
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
    """Validation of envelopes."""

    url: str | None = None
    version: Literal["v1"] = "v1"
    format: Literal["protobuf"] = "protobuf"
    message_name: Literal["prism.envelope.v1.PrismEnvelope"] = "prism.envelope.v1.PrismEnvelope"
    validation: ValidationMode = ValidationMode.STRICT


class TopicSchema(msgspec.Struct, frozen=True, kw_only=True):
    """The schema of one topic's payloads; missing keys have the defaults of `PayloadSchemas`."""

    topic: str
    message_name: str | None = None
    format: SchemaFormat | None = None
    file: Path | None = None
    validation: ValidationMode | None = None


class PayloadSchemas(msgspec.Struct, frozen=True, kw_only=True):
    """Validation of payloads."""

    url: str | None = None
    version: str | None = None
    format: SchemaFormat = SchemaFormat.PROTOBUF
    file: Path | None = None
    schemas: tuple[TopicSchema, ...] = ()
    validation: ValidationMode = ValidationMode.STRICT
    compatibility: Literal["backward", "forward", "full", "none"] = "backward"


class Schemas(msgspec.Struct, frozen=True, kw_only=True):
    """Validation of messages before they are stored."""

    envelope: EnvelopeSchema = EnvelopeSchema()
    payload: PayloadSchemas = PayloadSchemas()


class NatsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a NATS source."""

    url: str
    subject: str
    consumer_group: str
    durable: bool = True
    stream: str | None = None
    credentials: Path | None = None
    nkey: Path | None = None
    user: str | None = None
    password_file: Path | None = None
    token_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    tls_first: bool = False
    ack_wait_seconds: Positive = ACK_WAIT_SECONDS
    max_ack_pending: Positive = MAX_ACK_PENDING
    dead_letter_subject: str | None = None


class NatsSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="nats"):
    """The source slot with backend `nats`."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: NatsConfig


class RedisConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a Redis source."""

    url: str
    stream: str
    consumer_group: str
    durable: bool = True
    field: str = "data"
    user: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    ack_wait_seconds: Positive = ACK_WAIT_SECONDS
    dead_letter_stream: str | None = None


class RedisSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="redis"):
    """The source slot with backend `redis`."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: RedisConfig


class KafkaConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a Kafka source."""

    url: str
    topic: str
    consumer_group: str
    durable: bool = True
    user: str | None = None
    password_file: Path | None = None
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    ack_wait_seconds: Positive = ACK_WAIT_SECONDS
    max_ack_pending: Positive = MAX_ACK_PENDING
    dead_letter_topic: str | None = None


class KafkaSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="kafka"):
    """The source slot with backend `kafka`."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: KafkaConfig


class RabbitmqConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a RabbitMQ source."""

    url: str
    consumer_group: str
    queue: str | None = None
    stream: str | None = None
    durable: bool = True
    user: str | None = None
    password_file: Path | None = None
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    ack_wait_seconds: Positive = ACK_WAIT_SECONDS
    max_ack_pending: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = MAX_ACK_PENDING
    dead_letter_exchange: str = ""
    dead_letter_routing_key: str | None = None


class RabbitmqSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="rabbitmq"):
    """The source slot with backend `rabbitmq`."""

    interfaces: tuple[SourceInterface, ...] = ()
    config: RabbitmqConfig


class SqliteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of SQLite storage."""

    database_path: Path
    mailbox: str | None = None
    table_name: Literal["mailbox"] = "mailbox"
    indexed_headers: tuple[IndexedHeader, ...] = ()
    retention_days: Positive | None = None


class SqliteSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="sqlite"):
    """The storage slot with backend `sqlite`."""

    interfaces: tuple[Literal["TableWriterInterface"], ...] = ()
    config: SqliteConfig


class PostgresConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of PostgreSQL storage."""

    url: str
    mailbox: str | None = None
    table_name: Literal["mailbox"] = "mailbox"
    indexed_headers: tuple[IndexedHeader, ...] = ()
    retention_days: Positive | None = None


class PostgresSlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="postgres"):
    """The storage slot with backend `postgres`."""

    interfaces: tuple[Literal["TableWriterInterface"], ...] = ()
    config: PostgresConfig


class SqliteQueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of SQLite queries."""

    database_path: Path
    table_name: Literal["mailbox"] = "mailbox"


class SqliteQuerySlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="sqlite"):
    """The query slot with backend `sqlite`."""

    interfaces: tuple[Literal["TableReaderInterface"], ...] = ()
    config: SqliteQueryConfig


class PostgresQueryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of PostgreSQL queries."""

    url: str
    table_name: Literal["mailbox"] = "mailbox"


class PostgresQuerySlot(msgspec.Struct, frozen=True, kw_only=True, tag_field="backend", tag="postgres"):
    """The query slot with backend `postgres`."""

    interfaces: tuple[Literal["TableReaderInterface"], ...] = ()
    config: PostgresQueryConfig


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """The backends of a namespace."""

    message_source: NatsSlot | RedisSlot | KafkaSlot | RabbitmqSlot
    storage: SqliteSlot | PostgresSlot
    query: SqliteQuerySlot | PostgresQuerySlot | None = None


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the age and total size of stored messages."""

    max_age_days: Positive | None = None
    max_size_gb: PositiveNumber | None = None


class Behavior(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ingest and retention."""

    batch_size: Positive = 500
    auto_commit: bool = True
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 3
    retention_policy: RetentionPolicy = RetentionPolicy()


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Leases of the mailboxes of a namespace (RFC-049); durations such as `300s`."""

    ttl: str | None = None
    heartbeat_interval: str | None = None
    grace_period: str | None = None


class NamespaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a namespace besides its slots; the keys that RFC-049 computes are informational."""

    name: str
    pattern: Literal["mailbox"]
    pattern_version: str = "0.1.0"
    description: str | None = None
    schemas: Schemas = Schemas()
    behavior: Behavior = Behavior()
    lease: Lease = Lease()
    partition_strategy: Literal["consistent_hash"] = "consistent_hash"
    assigned_partition: Annotated[int, msgspec.Meta(ge=0)] | None = None
    assigned_proxy: str | None = None


class NamespaceEntry(NamespaceOptions, frozen=True, kw_only=True):
    """One namespace, with what ingestion needs."""

    slots: Slots


class NamespaceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of namespaces."""

    namespaces: tuple[NamespaceEntry, ...]


class LeaseNamespaceEntry(NamespaceOptions, frozen=True, kw_only=True):
    """One namespace, as an admin needs it."""

    slots: Slots | None = None


class LeaseNamespaceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of namespaces, as an admin needs it."""

    namespaces: tuple[LeaseNamespaceEntry, ...]
