"""Configuration of a namespace: source, validation, mailbox and retention (RFC-037)."""

from enum import StrEnum
from pathlib import Path
from typing import Literal

import msgspec

from postroom.application.ingest.broker_access import BrokerAccess, NatsAccess, without_secrets
from postroom.application.ingest.file_import import RecordMapping
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import InvalidRequest

ACK_WAIT_SECONDS = 30
MAX_ACK_PENDING = 10_000
MIN_PREFETCH = 1_000


class SchemaFormat(StrEnum):
    """Schema languages that payloads can be validated against."""

    PROTOBUF = "protobuf"
    JSON_SCHEMA = "json-schema"


class PayloadSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Schema of the payloads of a topic.

    Arguments:
        topic: exact name or glob (see `postroom.domain.search.topic_matches`).
        message_name: name of the protobuf message, with or without its package; not used for JSON Schema.
        file: a FileDescriptorSet or a JSON Schema; None validates nothing.
        validation: whether a payload that violates the schema is refused, logged or ignored.
        allows_unknown_fields: whether a protobuf payload may have fields that its descriptor lacks.
    """

    topic: str
    format: SchemaFormat
    message_name: str | None
    file: Path | None
    validation: ValidationMode
    allows_unknown_fields: bool


class NatsSource(NatsAccess, frozen=True, kw_only=True):
    """A JetStream subject, consumed by the durable consumer `consumer_group`.

    Arguments:
        url: of NATS, such as `nats://host:4222`; several servers are separated by commas.
        consumer_group: name of the durable consumer; created if it is missing.
        subject: may have the wildcards `*` and `>`.
        stream: None selects the stream that stores the subject.
        ack_wait_seconds: how long a delivery may stay unacknowledged before the message is redelivered.
        max_ack_pending: deliveries that may be unacknowledged at once.
        dead_letter_subject: subject for messages that can't be stored; None skips malformed ones
            with a warning.
    """

    url: str
    subject: str
    consumer_group: str
    stream: str | None = None
    ack_wait_seconds: int = ACK_WAIT_SECONDS
    max_ack_pending: int = MAX_ACK_PENDING
    dead_letter_subject: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_secrets(self.url)!r}, {self.subject!r})"


class RedisSource(BrokerAccess, frozen=True, kw_only=True):
    """A Redis stream, consumed by the consumer group `consumer_group`.

    Arguments:
        url: `redis://host:6379`, or `rediss://` with TLS.
        consumer_group: name of the consumer group; created if it is missing.
        stream: the stream's key.
        field: the field with the envelope; an entry with a single field may name it differently.
        ack_wait_seconds: how long a delivery may stay unacknowledged before the message is redelivered.
        dead_letter_stream: key of the stream for messages that can't be stored; None skips malformed ones
            with a warning.
    """

    url: str
    stream: str
    consumer_group: str
    field: str
    ack_wait_seconds: int = ACK_WAIT_SECONDS
    dead_letter_stream: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_secrets(self.url)!r}, {self.stream!r})"


class KafkaSource(BrokerAccess, frozen=True, kw_only=True):
    """A Kafka topic, consumed by the consumer group `consumer_group`.

    Arguments:
        topic: name of the topic.
        consumer_group: id of the consumer group.
        url: `kafka://host:9092`, or `kafka+ssl://` with TLS; several brokers are separated by commas.
        sasl_mechanism: how `user` is authenticated.
        ack_wait_seconds: how long a delivery may stay unacknowledged before the message is redelivered.
        max_ack_pending: deliveries that may be unacknowledged at once.
        dead_letter_topic: topic for messages that can't be stored; None skips malformed ones with a warning.
    """

    url: str
    topic: str
    consumer_group: str
    sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    ack_wait_seconds: int = ACK_WAIT_SECONDS
    max_ack_pending: int = MAX_ACK_PENDING
    dead_letter_topic: str | None = None


class RabbitmqSource(BrokerAccess, frozen=True, kw_only=True):
    """A queue or a stream of RabbitMQ.

    Arguments:
        url: `amqp://host:5672/vhost`, or `amqps://` with TLS.
        queue, stream: name of a quorum or classic queue, or of a stream; one of them.
        consumer_group: names the consumer and, of a stream, the offset that is stored.
        ack_wait_seconds: how long a delivery may stay unacknowledged before the message is redelivered.
        max_ack_pending: deliveries that may be unacknowledged at once.
        dead_letter_exchange: exchange for messages that can't be stored; empty for the default exchange.
        dead_letter_routing_key: their routing key, in the default exchange a queue; None skips malformed
            messages with a warning.

    Raises: InvalidRequest for settings that exclude or need each other.
    """

    url: str
    consumer_group: str
    queue: str | None = None
    stream: str | None = None
    ack_wait_seconds: int = ACK_WAIT_SECONDS
    max_ack_pending: int = MAX_ACK_PENDING
    dead_letter_exchange: str = ""
    dead_letter_routing_key: str | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({without_secrets(self.url)!r}, {(self.queue or self.stream)!r})"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.queue is None) == (self.stream is None):
            raise InvalidRequest("A RabbitMQ source has either a queue or a stream; name one.")
        if self.dead_letter_exchange and self.dead_letter_routing_key is None:
            raise InvalidRequest(
                "dead_letter_exchange needs dead_letter_routing_key; set it to the key of a bound queue."
            )


MessageSource = NatsSource | RedisSource | KafkaSource | RabbitmqSource


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of one namespace, with defaults resolved.

    Arguments:
        name, description: of the file.
        source: where the messages come from.
        envelope_validation: what happens to messages whose envelope is incomplete.
        mailbox: name of the archive mailbox that stores its messages.
        store: path of a SQLite file or URL of a PostgreSQL database.
        payload_schemas: in the order of the file; the first whose topic matches applies.
        batch_size: messages stored together.
        max_retries: retries of a batch before its messages are stored one by one.
        history_retention_ms: age at which messages are removed; None uses the mailbox's settings.
        max_store_bytes: size at which the oldest messages are removed; None is unlimited.
        mapping: maps messages that are any JSON, text or bytes; None expects CloudEvents and envelopes.
    """

    name: str
    description: str | None
    mailbox: str
    store: str
    source: MessageSource
    envelope_validation: ValidationMode
    payload_schemas: tuple[PayloadSchema, ...]
    batch_size: int
    max_retries: int
    history_retention_ms: int | None
    max_store_bytes: int | None
    mapping: RecordMapping | None = None

    @property
    def prefetch(self) -> int:
        """Return the number of messages requested ahead, which arrive while a batch is prepared."""
        return max(MIN_PREFETCH, 2 * self.batch_size)

    @property
    def limits(self) -> dict[str, int | None]:
        """Return the limits that the mailbox must have, by name."""
        limits = {
            "history_retention_ms": self.history_retention_ms,
            "max_store_bytes": self.max_store_bytes,
        }
        return {name: value for name, value in limits.items() if value}


class IngestSettings(msgspec.Struct, frozen=True):
    """Settings of an ingester.

    Arguments:
        batch_size: messages stored together, at most.
        validation: how strictly envelopes are validated.
        max_retries: retries of a batch before its messages are stored one by one.
        mapping: maps messages that are any JSON, text or bytes; None expects CloudEvents and envelopes.
        has_places: whether a message has the same sequence in every delivery; not so in a queue of RabbitMQ.
        has_encoded_headers: whether the values of headers are percent-encoded in CloudEvents, as in NATS.
    """

    batch_size: int = 500
    validation: ValidationMode = ValidationMode.STRICT
    max_retries: int = 3
    has_encoded_headers: bool = False
    mapping: RecordMapping | None = None
    has_places: bool = True


class IngestCounts(msgspec.Struct):
    """Numbers of messages by outcome; a redelivered message is counted again.

    Arguments:
        received: fetched from the source.
        stored: new to the log.
        duplicates: already in the log.
        skipped: malformed, logged and acknowledged.
        dead_lettered: published to the dead-letter subject because they could not be stored.
        deferred: could not be stored; the source redelivers them later.
        retries: attempts to store a batch after the first.
    """

    received: int = 0
    stored: int = 0
    duplicates: int = 0
    skipped: int = 0
    dead_lettered: int = 0
    deferred: int = 0
    retries: int = 0
