"""Settings of an ingester."""

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
