"""Building of envelopes for senders, and opening of envelopes for consumers.

Both run once per message and are optimized for it: setting fields one by one is faster in protobuf than
constructor arguments, and a sub-message is created only when it has a field.
"""

from collections.abc import Mapping

from postroom.domain.envelope.headers import (
    FIRST_SECOND,
    LAST_SECOND,
    custom_headers,
    is_valid_timestamp,
    parse_envelope,
)
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope, PrismMetadata
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import DEFAULT_PRIORITY, MAX_PRIORITY

__all__ = ["OpenedEnvelope", "build_envelope", "open_envelope", "without_auth_token"]

ENVELOPE_VERSION = 1

TRACE_STATE = "tracestate"
"""Label with the `tracestate` of W3C, for which an envelope has no field."""
_NO_BAGGAGE: Mapping[str, str] = {}

_FIRST_US = FIRST_SECOND * 1_000_000
_LAST_US = LAST_SECOND * 1_000_000 + 999_999


def build_envelope(
    *,
    message_id: str,
    topic: str,
    namespace: str,
    published_at_us: int,
    payload: bytes,
    attrs: Mapping[str, str | bytes],
    content_type: str | None = None,
    content_encoding: str | None = None,
    correlation_id: str | None = None,
    causality_parent: str | None = None,
    principal: str | None = None,
    encryption: str | None = None,
    priority: int = DEFAULT_PRIORITY,
    ttl_seconds: int = 0,
    trace_id: str | None = None,
    span_id: str | None = None,
    trace_flags: int = 0,
    trace_state: str = "",
    baggage: Mapping[str, str] = _NO_BAGGAGE,
    schema_url: str | None = None,
    schema_version: str | None = None,
) -> bytes:
    """Return the serialized envelope of a message; None and empty text both omit a field.

    Arguments:
        published_at_us: microseconds since 1970, UTC.
        payload: opaque bytes, `Any{type_url: ""}` on the wire.
        attrs: extensions; text is encoded as UTF-8.
        trace_flags: of W3C: 1 if the sender records the trace.
        trace_state: `tracestate` of W3C, kept as a label of that name.
        baggage: entries that belong to the trace.
        encryption: algorithm that the payload is encrypted with.
        priority: 0 to 10.
        ttl_seconds: seconds until the message expires; 0 means never.

    Raises: InvalidRequest for a value of the wrong type or range.
    """
    envelope = PrismEnvelope()
    try:
        envelope.envelope_version = ENVELOPE_VERSION
        metadata = envelope.metadata
        metadata.message_id = message_id
        metadata.topic = topic
        metadata.namespace = namespace
        _set_numbers(metadata, published_at_us, priority, ttl_seconds)
        envelope.payload.value = payload
        extensions = envelope.extensions
        for name, value in attrs.items():
            extensions[name] = value if isinstance(value, bytes) else value.encode()
        if content_type:
            metadata.content_type = content_type
        if content_encoding:
            metadata.content_encoding = content_encoding
        if correlation_id:
            metadata.correlation_id = correlation_id
        if causality_parent:
            metadata.causality_parent = causality_parent
        if principal:
            envelope.security.publisher_id = principal
        if encryption:
            envelope.security.encryption.algorithm = encryption
        if trace_id:
            envelope.observability.trace_id = trace_id
        if span_id:
            envelope.observability.span_id = span_id
        if trace_flags:
            envelope.observability.trace_flags = trace_flags
        if trace_state:
            envelope.observability.labels[TRACE_STATE] = trace_state
        if baggage:
            envelope.observability.baggage.update(baggage)
        if schema_url:
            envelope.schema.schema_url = schema_url
        if schema_version:
            envelope.schema.schema_version = schema_version
        return envelope.SerializeToString()
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidRequest(
            f"The headers of message {message_id!r} can't be encoded ({error}); "
            "send text for headers and bytes for the payload."
        ) from error


def _set_numbers(metadata: PrismMetadata, published_at_us: int, priority: int, ttl_seconds: int) -> None:
    if not _FIRST_US <= published_at_us <= _LAST_US:
        raise InvalidRequest(
            f"The publish time {published_at_us} us is outside years 1 to 9999; "
            "give microseconds since 1970-01-01 UTC."
        )
    published_at = metadata.published_at
    published_at.seconds, microseconds = divmod(published_at_us, 1_000_000)
    published_at.nanos = microseconds * 1_000
    if not 0 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"The priority is {priority}; give a number from 0 to 10.")
    metadata.priority = priority
    if ttl_seconds:
        if not 0 < ttl_seconds < 1 << 63:
            raise InvalidRequest(f"ttl_seconds is {ttl_seconds}; give whole seconds, or 0 for no expiry.")
        metadata.ttl_seconds = ttl_seconds


class OpenedEnvelope:
    """An envelope's payload and the headers that consumers need, each decoded on access.

    Missing text is None. The auth token is not accessible.
    """

    __slots__ = ("_envelope", "_metadata")

    def __init__(self, envelope: PrismEnvelope) -> None:
        self._envelope = envelope
        self._metadata = envelope.metadata

    @property
    def message_id(self) -> str:
        """The message id; empty when missing."""
        return self._metadata.message_id

    @property
    def topic(self) -> str:
        """The topic the message was published to; empty when missing."""
        return self._metadata.topic

    @property
    def namespace(self) -> str | None:
        """The tenant."""
        return self._metadata.namespace or None

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
        if not self._metadata.HasField("published_at"):
            return None
        published_at = self._metadata.published_at
        if not is_valid_timestamp(published_at):
            return None
        return published_at.seconds * 1_000_000 + published_at.nanos // 1_000

    @property
    def content_type(self) -> str | None:
        """The payload's media type."""
        return self._metadata.content_type or None

    @property
    def content_encoding(self) -> str | None:
        """The payload's compression."""
        return self._metadata.content_encoding or None

    @property
    def priority(self) -> int:
        """The publisher's priority, 0 to 10."""
        return self._metadata.priority

    @property
    def ttl_seconds(self) -> int:
        """Seconds from `published_at_us` to expiry; 0 or less means never."""
        return self._metadata.ttl_seconds

    @property
    def correlation_id(self) -> str | None:
        """Id shared by the messages of one request."""
        return self._metadata.correlation_id or None

    @property
    def causality_parent(self) -> str | None:
        """Id of the message that caused this one."""
        return self._metadata.causality_parent or None

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
    """Return an envelope without its auth token; without one, the same bytes.

    Every other field, including unknown ones, is preserved.

    Raises: InvalidRequest when the bytes are not an envelope.
    """
    envelope = parse_envelope(blob)
    if not envelope.security.auth_token:
        return blob
    envelope.security.ClearField("auth_token")
    return envelope.SerializeToString()
