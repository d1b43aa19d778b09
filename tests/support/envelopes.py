"""Envelopes as any other implementation writes them, with the protobuf library."""

from collections.abc import Mapping

from google.protobuf.message import Message

from postroom.domain.envelope.build import TRACE_STATE
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

CONTENT = ["content_type", "content_encoding", "correlation_id", "causality_parent"]
OBSERVABILITY = ["trace_id", "span_id", "trace_flags"]
SCHEMA = ["schema_url", "schema_version"]


def build_envelope(
    *,
    message_id: str,
    topic: str,
    namespace: str,
    published_at_us: int,
    payload: bytes,
    attrs: Mapping[str, str | bytes],
    priority: int = 5,
    ttl_seconds: int = 0,
    principal: str | None = None,
    encryption: str | None = None,
    trace_state: str = "",
    baggage: Mapping[str, str] | None = None,
    **headers: str | int | None,
) -> bytes:
    """Return the bytes of an envelope, its extensions by name; None, 0 and empty text omit a field."""
    envelope = PrismEnvelope(envelope_version=1)
    metadata = envelope.metadata
    metadata.message_id, metadata.topic, metadata.namespace = message_id, topic, namespace
    seconds, microseconds = divmod(published_at_us, 1_000_000)
    metadata.published_at.seconds, metadata.published_at.nanos = seconds, microseconds * 1_000
    metadata.priority, metadata.ttl_seconds = priority, ttl_seconds
    envelope.payload.value = payload
    if principal:
        envelope.security.publisher_id = principal
    if encryption:
        envelope.security.encryption.algorithm = encryption
    if trace_state:
        envelope.observability.labels[TRACE_STATE] = trace_state
    if baggage:
        envelope.observability.baggage.update(baggage)
    places: dict[str, Message] = dict.fromkeys(CONTENT, metadata)
    places |= dict.fromkeys(OBSERVABILITY, envelope.observability)
    places |= dict.fromkeys(SCHEMA, envelope.schema)
    for name, header in headers.items():
        if header:
            setattr(places[name], name, header)
    blob = envelope.SerializeToString(deterministic=True)
    # Not all at once: protobuf writes a name that begins with another one before it.
    for name in sorted(attrs):
        value = attrs[name]
        extension = {name: value if isinstance(value, bytes) else value.encode()}
        blob += PrismEnvelope(extensions=extension).SerializeToString()
    return blob
