"""Say what a namespace ingests, from where, into which mailbox, and what it keeps (RFC-037 configuration)."""

from enum import StrEnum
from pathlib import Path

import msgspec

from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.policy import MailboxLimits


class SchemaFormat(StrEnum):
    """Name the schema languages that payloads can be checked against."""

    PROTOBUF = "protobuf"
    JSON_SCHEMA = "json-schema"


class PayloadSchema(msgspec.Struct, frozen=True, kw_only=True):
    """Say which schema the payloads of a topic have, and what it leads to when they don't.

    Arguments:
        topic: exact name or glob (see `postroom.domain.search.topic_matches`).
        message_name: of the protobuf message, with or without its package; a JSON Schema needs none.
        file: a FileDescriptorSet or a JSON Schema; None where the namespace names none.
        allows_unknown_fields: whether a protobuf payload may have fields that its descriptor doesn't know.
    """

    topic: str
    format: SchemaFormat
    message_name: str | None
    file: Path | None
    validation: ValidationMode
    allows_unknown_fields: bool


class NatsSource(msgspec.Struct, frozen=True, kw_only=True):
    """Say which JetStream subject is consumed, by a durable consumer named `consumer_group`.

    Arguments:
        subject: may have the wildcards `*` and `>`.
        stream: None takes the stream that has the subject.
        credentials: path of a credentials file; None connects without.
        ack_wait_seconds: how long a delivery may stay unacknowledged before it comes again.
        max_ack_pending: deliveries that may be unacknowledged at once.
        dead_letter_subject: where messages go that can't be stored; None skips and logs them.
    """

    url: str
    subject: str
    consumer_group: str
    stream: str | None = None
    credentials: str | None = None
    ack_wait_seconds: int | None = None
    max_ack_pending: int | None = None
    dead_letter_subject: str | None = None


class RedisSource(msgspec.Struct, frozen=True, kw_only=True):
    """Say which Redis stream is consumed, by the consumer group `consumer_group`.

    Arguments:
        stream: the stream's key.
        field: of an entry, whose value is the envelope; an entry with one field only may name it as it likes.
        ack_wait_seconds: how long a delivery may stay unacknowledged before it comes again.
    """

    url: str
    stream: str
    consumer_group: str
    field: str
    ack_wait_seconds: int | None = None


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """Say what one namespace ingests and keeps, with everything worked out that its file leaves to defaults.

    Arguments:
        mailbox: where its messages are stored, an archive.
        store: path of a SQLite file or URL of a PostgreSQL database.
        payload_schemas: in the order of the file; the first whose topic matches counts.
        batch_size: messages stored together.
        max_retries: how often storing is tried again before a message counts as failed.
        history_retention_ms: age at which messages are removed; None leaves it to the mailbox's settings.
        max_store_bytes: size at which the oldest messages are removed; None for no bound.
    """

    name: str
    description: str | None
    mailbox: str
    store: str
    source: NatsSource | RedisSource
    envelope_validation: ValidationMode
    payload_schemas: tuple[PayloadSchema, ...]
    batch_size: int
    max_retries: int
    history_retention_ms: int | None
    max_store_bytes: int | None

    def limits(self, base: MailboxLimits) -> MailboxLimits:
        """Return the limits of its mailbox: those it names itself, and `base` for all others."""
        named = {
            "history_retention_ms": self.history_retention_ms,
            "max_store_bytes": self.max_store_bytes,
        }
        return msgspec.structs.replace(base, **{name: value for name, value in named.items() if value})
