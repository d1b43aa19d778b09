"""Reading and writing the fields of a message that may name its subject or be encrypted."""

from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.subject_policy import ATTRS


def read_field(envelope: PrismEnvelope, field: str) -> bytes:
    """Return the value of a field; empty if the message has none."""
    if field.startswith(ATTRS):
        return envelope.extensions.get(field.removeprefix(ATTRS), b"")
    text: str = envelope.security.publisher_id if field == "principal" else getattr(envelope.metadata, field)
    return text.encode()


def write_field(envelope: PrismEnvelope, field: str, value: str) -> None:
    """Replace the value of a field."""
    if field.startswith(ATTRS):
        envelope.extensions[field.removeprefix(ATTRS)] = value.encode()
    elif field == "principal":
        envelope.security.publisher_id = value
    else:
        setattr(envelope.metadata, field, value)
