"""Headers extracted from a stored envelope for search (RFC-037 header table).

The envelope itself is stored byte for byte, unknown fields included.
"""

from base64 import b64decode, b64encode
from collections.abc import Mapping

import msgspec
from blake3 import blake3
from google.protobuf.message import DecodeError
from google.protobuf.timestamp_pb2 import Timestamp

from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest

__all__ = ["MailboxItem", "extension_bytes", "extension_text", "extract_mailbox_item", "parse_envelope"]

BINARY_PREFIX = "base64:"
LABELS = "observability.labels."
"""Prefix of custom headers indexed from `observability.labels`."""

# The range of google.protobuf.Timestamp: 0001-01-01 to 9999-12-31, UTC.
FIRST_SECOND = -62_135_596_800
LAST_SECOND = 253_402_300_799


class MailboxItem(msgspec.Struct, frozen=True, kw_only=True):
    """A stored envelope and its headers (RFC-037 `MailboxItem`).

    A header that is missing from the envelope is None. `timestamp` is in ms since 1970, UTC.

    Arguments:
        message_id: of the message.
        timestamp: when it was published, ms since 1970 UTC.
        topic: to which it was sent.
        content_type, schema_url, schema_version: media type and schema of the payload.
        encryption: algorithm, for a payload that its publisher has encrypted.
        correlation_id: shared by all messages of one request.
        principal: publisher.
        namespace: of its envelope.
        trace_id, span_id: of the trace, in hexadecimal.
        custom_headers: attributes, by name.
        envelope_blob: bytes of the PrismEnvelope, which has the payload.
    """

    message_id: str
    timestamp: int
    topic: str
    content_type: str | None = None
    schema_url: str | None = None
    schema_version: str | None = None
    encryption: str | None = None
    correlation_id: str | None = None
    principal: str | None = None
    namespace: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    custom_headers: dict[str, str] = {}
    envelope_blob: bytes

    def reconstruct_envelope(self) -> PrismEnvelope:
        """Return the envelope without the publisher's auth token (RFC-037 `ReconstructEnvelope`).

        Raises: InvalidRequest when the stored bytes are not an envelope.
        """
        envelope = parse_envelope(self.envelope_blob)
        if envelope.HasField("security"):
            envelope.security.ClearField("auth_token")
        return envelope

    def __repr__(self) -> str:
        # The envelope may contain an auth token, and a repr ends up in logs.
        shown = (
            f"<{len(self.envelope_blob)} bytes>" if name == "envelope_blob" else repr(getattr(self, name))
            for name in self.__struct_fields__
        )
        pairs = ", ".join(f"{name}={text}" for name, text in zip(self.__struct_fields__, shown, strict=True))
        return f"{type(self).__name__}({pairs})"


def extract_mailbox_item(
    blob: bytes, *, received_at: int = 0, envelope: PrismEnvelope | None = None
) -> MailboxItem:
    """Extract RFC-037's headers from an envelope.

    An envelope without a message id gets one derived from its bytes. Labels are indexed as custom headers
    named `observability.labels.<name>`, unless an extension has that name.

    Arguments:
        blob: the serialized envelope.
        received_at: ms since 1970, UTC; replaces a publish time that is missing or outside years 1 to 9999.
        envelope: the parsed `blob`, to avoid parsing it again.

    Raises: InvalidRequest when the bytes are not an envelope.
    """
    if envelope is None:
        envelope = parse_envelope(blob)
    # An absent sub-message reads as its defaults, so an absent field and an empty string are the same.
    metadata = envelope.metadata
    has_time = metadata.HasField("published_at") and is_valid_timestamp(metadata.published_at)
    schema_url = schema_version = encryption = principal = trace_id = span_id = None
    headers: dict[str, str] = {}
    has = envelope.HasField  # to ask costs less than to read the fields of an absent sub-message
    if has("schema"):
        schema = envelope.schema
        schema_url, schema_version = schema.schema_url or None, schema.schema_version or None
    if has("security"):
        security = envelope.security
        encryption, principal = security.encryption.algorithm or None, security.publisher_id or None
    if has("observability"):
        observability = envelope.observability
        trace_id, span_id = observability.trace_id or None, observability.span_id or None
        headers = _labels(observability.labels)
    if extensions := envelope.extensions:
        headers |= custom_headers(extensions)
    return MailboxItem(
        message_id=metadata.message_id or f"b3:{blake3(blob).hexdigest()}",
        timestamp=_unix_ms(metadata.published_at) if has_time else received_at,
        topic=metadata.topic,
        content_type=metadata.content_type or None,
        schema_url=schema_url,
        schema_version=schema_version,
        encryption=encryption,
        correlation_id=metadata.correlation_id or None,
        principal=principal,
        namespace=metadata.namespace or None,
        trace_id=trace_id,
        span_id=span_id,
        custom_headers=headers,
        envelope_blob=blob,
    )


def parse_envelope(blob: bytes) -> PrismEnvelope:
    """Parse an envelope; raise `InvalidRequest` when the bytes are not one."""
    try:
        return PrismEnvelope.FromString(blob)
    except DecodeError:
        # The parser's message contains nothing useful to a sender.
        raise InvalidRequest(
            f"The envelope of {len(blob)} bytes is not a PrismEnvelope; "
            "send the protobuf encoding of prism.envelope.v1.PrismEnvelope."
        ) from None


def custom_headers(extensions: Mapping[str, bytes]) -> dict[str, str]:
    """Return an envelope's extensions as text; see `extension_text`."""
    return {name: extension_text(extensions[name]) for name in extensions}


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    return {f"{LABELS}{name}": extension_text(labels[name].encode()) for name in labels}


def extension_text(value: bytes) -> str:
    """Return an extension's value as text: its UTF-8, or `base64:` followed by its base64.

    Text that begins with `base64:` or contains a NUL, which PostgreSQL's text type refuses, is written in
    base64 too. `extension_bytes` is the inverse.
    """
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return BINARY_PREFIX + b64encode(value).decode()
    if text.startswith(BINARY_PREFIX) or "\0" in text:
        return BINARY_PREFIX + b64encode(value).decode()
    return text


def extension_bytes(text: str) -> bytes:
    """Return the bytes of an extension; the inverse of `extension_text`."""
    if text.startswith(BINARY_PREFIX):
        return b64decode(text[len(BINARY_PREFIX) :])
    return text.encode()


def is_valid_timestamp(timestamp: Timestamp) -> bool:
    """Return whether a timestamp is in years 1 to 9999 and has 0 to 999,999,999 nanoseconds."""
    return FIRST_SECOND <= timestamp.seconds <= LAST_SECOND and 0 <= timestamp.nanos < 1_000_000_000


def _unix_ms(timestamp: Timestamp) -> int:
    return timestamp.seconds * 1_000 + timestamp.nanos // 1_000_000
