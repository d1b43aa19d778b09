"""Settings of an ingester."""

import msgspec

from postroom.domain.envelope.validation import ValidationMode


class IngestSettings(msgspec.Struct, frozen=True):
    """Settings of an ingester.

    Arguments:
        batch_size: messages stored together, at most.
        validation: how strictly envelopes are validated.
        max_retries: retries of a batch before its messages are stored one by one.
        has_encoded_headers: whether the values of headers are percent-encoded in CloudEvents, as in NATS.
    """

    batch_size: int = 500
    validation: ValidationMode = ValidationMode.STRICT
    max_retries: int = 3
    has_encoded_headers: bool = False
