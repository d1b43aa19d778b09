"""Building of envelopes for senders, and opening of envelopes for consumers.

Both run once per message and are optimized for it: parts that messages have in common are encoded once, and
an opened envelope decodes each header on access.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import msgspec

from postroom.domain.envelope.headers import custom_headers, is_valid_timestamp, parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import DEFAULT_PRIORITY

__all__ = [
    "EnvelopeHeaders",
    "EnvelopeTemplate",
    "OpenedEnvelope",
    "make_template",
    "open_envelope",
    "without_auth_token",
    "without_payload",
]

ENVELOPE_VERSION = 1

TRACE_STATE = "tracestate"
"""Label with the `tracestate` of W3C, for which an envelope has no field."""
_NO_BAGGAGE: Mapping[str, str] = {}
_VERSION = bytes((0x08, ENVELOPE_VERSION))
# Tags of the maps of baggage, labels and extensions (field 99):
_BAGGAGE, _LABEL, _EXTENSION = b"\x2a", b"\x32", b"\x9a\x06"
_CACHED_SIZES = 4_096


class EnvelopeTemplate(msgspec.Struct, frozen=True, gc=False):
    """Encoder of the envelopes of messages that have the same headers; see `make_template`.

    Arguments:
        names, headers: encoded fields of the metadata before and after the time of publication.
        causality: encoded field of the metadata after the correlation id.
        contexts: encoded fields of the envelope after the payload.
        metadata: all of the metadata but the message id.
    """

    names: bytes
    headers: bytes
    causality: bytes
    contexts: bytes
    metadata: bytes = b""

    def at(self, published_at_us: int, correlation_id: str | None) -> "EnvelopeTemplate":
        """Return the template of messages of one call.

        Arguments:
            published_at_us: microseconds since 1970, UTC.
        """
        seconds, microseconds = divmod(published_at_us, 1_000_000)
        timestamp = _seconds(seconds) + _number(0x10, microseconds * 1_000)
        prefix, correlation = _prefix(0x22, len(timestamp)), b""
        if correlation_id:
            correlation = correlation_id.encode()
            correlation = _prefix(0x4A, len(correlation)) + correlation
        metadata = b"".join((self.names, prefix, timestamp, self.headers, correlation, self.causality))
        return EnvelopeTemplate(self.names, self.headers, self.causality, self.contexts, metadata)

    def build(self, message_id: str, payload: bytes, attrs: Mapping[str, bytes]) -> bytes:
        """Return the serialized envelope of a message.

        Arguments:
            payload: opaque bytes, `Any{type_url: ""}` on the wire.
            attrs: extensions.
        """
        id_, metadata = message_id.encode(), self.metadata
        prefix = _metadata_prefix(len(id_), len(metadata))
        parts = (prefix, id_, metadata, _payload_prefix(len(payload)), payload, self.contexts)
        if not attrs:
            return b"".join(parts)
        return b"".join([*parts, *[_entry(_EXTENSION, name, attrs[name]) for name in sorted(attrs)]])

    def build_all(self, message_ids: Sequence[str], payloads: Sequence[bytes]) -> list[bytes]:
        """Return the envelopes of messages without attributes; see `build`."""
        metadata, contexts = self.metadata, self.contexts
        ids = [each.encode() for each in message_ids]
        prefixes = [_metadata_prefix(len(each), len(metadata)) for each in ids]
        sizes = map(_payload_prefix, map(len, payloads))
        parts = zip(prefixes, ids, repeat(metadata), sizes, payloads, repeat(contexts))
        return list(map(b"".join, parts))


class EnvelopeHeaders(NamedTuple):
    """Headers of an envelope, which the caller has checked; None and empty text omit a field.

    Arguments:
        published_at_us: microseconds since 1970, UTC.
        priority: 0 to 10.
        ttl_seconds: seconds until the message expires; 0 means never.
        trace_flags: of W3C, 0 to 255: 1 if the sender records the trace.
        trace_state: `tracestate` of W3C, kept as a label of that name.
        baggage: entries that belong to the trace.
    """

    topic: str
    namespace: str
    published_at_us: int
    content_type: str | None = None
    correlation_id: str | None = None
    causality_parent: str | None = None
    principal: str | None = None
    priority: int = DEFAULT_PRIORITY
    ttl_seconds: int = 0
    trace_id: str | None = None
    span_id: str | None = None
    trace_flags: int = 0
    trace_state: str = ""
    baggage: Mapping[str, str] = _NO_BAGGAGE
    schema_url: str | None = None
    schema_version: str | None = None


def make_template(of: EnvelopeHeaders) -> EnvelopeTemplate:
    """Return the encoder of the envelopes of messages with these headers.

    The envelopes are what protobuf encodes, with the entries of maps in the order of their names.
    """
    headers = (
        _text(0x2A, of.content_type),
        _number(0x38, of.priority),
        _number(0x40, of.ttl_seconds),
    )
    observability = (
        _text(0x0A, of.trace_id),
        _text(0x12, of.span_id),
        _number(0x20, of.trace_flags),
        *(_entry(_BAGGAGE, name, of.baggage[name].encode()) for name in sorted(of.baggage)),
        _entry(_LABEL, TRACE_STATE, of.trace_state.encode()) if of.trace_state else b"",
    )
    schema = (_text(0x0A, of.schema_url), _text(0x12, of.schema_version))
    contexts = (
        _bytes(0x22, _text(0x0A, of.principal)),
        _bytes(0x2A, b"".join(observability)),
        _bytes(0x32, b"".join(schema)),
    )
    names = _text(0x12, of.topic) + _text(0x1A, of.namespace)
    causality = _text(0x52, of.causality_parent)
    template = EnvelopeTemplate(names, b"".join(headers), causality, b"".join(contexts))
    return template.at(of.published_at_us, of.correlation_id)


def _varint(number: int) -> bytes:
    """Return the variable-length encoding of an integer; one below zero is encoded as 64 bits."""
    encoded = []
    rest = number & 0xFFFF_FFFF_FFFF_FFFF
    while rest > 0x7F:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded)


def _number(tag: int, value: int) -> bytes:
    return bytes((tag,)) + _varint(value) if value else b""


def _text(tag: int, value: str | None) -> bytes:
    return _bytes(tag, value.encode()) if value else b""


def _bytes(tag: int, value: bytes) -> bytes:
    return _prefix(tag, len(value)) + value if value else b""


def _entry(tag: bytes, name: str, value: bytes) -> bytes:
    """Return an encoded entry of a map; name and value are encoded even if they are empty."""
    key = name.encode()
    before_name, before_value = _entry_prefixes(len(key), len(value))
    return b"".join((tag, before_name, key, before_value, value))


@lru_cache(16)
def _seconds(seconds: int) -> bytes:
    """Return the encoded seconds of a time; cached, as messages sent within a second have the same."""
    return _number(0x08, seconds)


# Prefixes of fields: their tags and sizes. Most messages of a sender have the same few sizes.


@lru_cache(_CACHED_SIZES)
def _prefix(tag: int, size: int) -> bytes:
    return bytes((tag,)) + _varint(size)


@lru_cache(_CACHED_SIZES)
def _metadata_prefix(id_size: int, size: int) -> bytes:
    """Return the bytes before a message's id: the version, and the tags of the metadata and the id."""
    id_ = _prefix(0x0A, id_size)
    return _VERSION + _prefix(0x12, len(id_) + id_size + size) + id_


@lru_cache(_CACHED_SIZES)
def _payload_prefix(size: int) -> bytes:
    """Return the bytes before a payload: the tags of the payload and of its value."""
    if not size:
        return _prefix(0x1A, 0)
    value = _prefix(0x12, size)
    return _prefix(0x1A, len(value) + size) + value


@lru_cache(_CACHED_SIZES)
def _entry_prefixes(name_size: int, value_size: int) -> tuple[bytes, bytes]:
    """Return the bytes before the name and the value of a map entry, after the entry's tag."""
    name, value = _prefix(0x0A, name_size), _prefix(0x12, value_size)
    return _varint(len(name) + name_size + len(value) + value_size) + name, value


class OpenedEnvelope:
    """An envelope's payload and the headers that consumers need, each decoded on access.

    Missing text is None. The auth token is not accessible.
    """

    __slots__ = ("_envelope",)

    def __init__(self, envelope: PrismEnvelope) -> None:
        self._envelope = envelope

    @property
    def message_id(self) -> str:
        """The message id; empty when missing."""
        return self._envelope.metadata.message_id

    @property
    def topic(self) -> str:
        """The topic the message was published to; empty when missing."""
        return self._envelope.metadata.topic

    @property
    def namespace(self) -> str | None:
        """The tenant."""
        return self._envelope.metadata.namespace or None

    @property
    def payload(self) -> bytes:
        """The payload as published."""
        return self._envelope.payload.value

    @property
    def attrs(self) -> dict[str, str]:
        """The extensions as text; see `extension_text`."""
        return custom_headers(self._envelope.extensions)

    @property
    def extensions(self) -> dict[str, bytes]:
        """The extensions as bytes."""
        return dict(self._envelope.extensions)

    @property
    def published_at_us(self) -> int | None:
        """Publish time in microseconds since 1970, UTC; None when missing or out of range."""
        metadata = self._envelope.metadata
        if not metadata.HasField("published_at"):
            return None
        published_at = metadata.published_at
        if not is_valid_timestamp(published_at):
            return None
        return published_at.seconds * 1_000_000 + published_at.nanos // 1_000

    @property
    def content_type(self) -> str | None:
        """The payload's media type."""
        return self._envelope.metadata.content_type or None

    @property
    def content_encoding(self) -> str | None:
        """The payload's compression."""
        return self._envelope.metadata.content_encoding or None

    @property
    def priority(self) -> int:
        """The publisher's priority, 0 to 10."""
        return self._envelope.metadata.priority

    @property
    def ttl_seconds(self) -> int:
        """Seconds from `published_at_us` to expiry; 0 or less means never."""
        return self._envelope.metadata.ttl_seconds

    @property
    def correlation_id(self) -> str | None:
        """Id shared by the messages of one request."""
        return self._envelope.metadata.correlation_id or None

    @property
    def causality_parent(self) -> str | None:
        """Id of the message that caused this one."""
        return self._envelope.metadata.causality_parent or None

    @property
    def principal(self) -> str | None:
        """The publisher."""
        return self._envelope.security.publisher_id or None

    @property
    def encryption(self) -> str | None:
        """The algorithm that the payload is encrypted with."""
        return self._envelope.security.encryption.algorithm or None

    @property
    def trace_id(self) -> str | None:
        """The trace id, for distributed tracing."""
        return self._envelope.observability.trace_id or None

    @property
    def span_id(self) -> str | None:
        """The span id, for distributed tracing."""
        return self._envelope.observability.span_id or None

    @property
    def trace_flags(self) -> int:
        """The W3C trace flags: 1 if the sender records the trace."""
        return self._envelope.observability.trace_flags

    @property
    def trace_state(self) -> str:
        """The W3C `tracestate`; empty when missing."""
        return self._envelope.observability.labels.get(TRACE_STATE, "")

    @property
    def baggage(self) -> dict[str, str]:
        """The baggage of the trace."""
        return dict(self._envelope.observability.baggage)

    @property
    def schema_url(self) -> str | None:
        """The schema of the payload."""
        return self._envelope.schema.schema_url or None

    @property
    def schema_version(self) -> str | None:
        """The version of that schema."""
        return self._envelope.schema.schema_version or None


def open_envelope(blob: bytes) -> OpenedEnvelope:
    """Open a serialized envelope for reading; raise `InvalidRequest` when the bytes are not one."""
    return OpenedEnvelope(parse_envelope(blob))


def without_auth_token(blob: bytes) -> bytes:
    """Return an envelope without its auth token; the same bytes if it has no token.

    Every other field, including unknown ones, is preserved.

    Raises: InvalidRequest when the bytes are not an envelope.
    """
    envelope = parse_envelope(blob)
    if not envelope.security.auth_token:
        return blob
    envelope.security.ClearField("auth_token")
    return envelope.SerializeToString()


def without_payload(blob: bytes) -> bytes:
    """Return an envelope with headers only: without payload, auth token and unknown fields.

    Bytes that are not an envelope have no headers; the result is empty.
    """
    try:
        envelope = parse_envelope(blob)
    except InvalidRequest:
        return b""
    envelope.DiscardUnknownFields()
    if envelope.HasField("payload"):
        envelope.payload.ClearField("value")
    if envelope.HasField("security"):
        envelope.security.ClearField("auth_token")
    return envelope.SerializeToString()
