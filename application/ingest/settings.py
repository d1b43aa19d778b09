"""Settings and counts of an ingester."""

import msgspec

from postroom.application.ingest.file_import import RecordMapping
from postroom.domain.envelope.validation import ValidationMode


class IngestSettings(msgspec.Struct, frozen=True):
    """Settings of an ingester.

    Arguments:
        batch_size: messages stored together, at most.
        validation: how strictly envelopes are validated.
        max_retries: retries of a batch before its messages are stored one by one.
        mapping: maps messages that are any JSON, text or bytes; None expects CloudEvents and envelopes.
        has_places: whether a message has the same sequence in every delivery, as not in a queue of RabbitMQ.
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
