"""Turn what a sender asks for into a `Send` command: id, envelope, hashes, headers."""

from collections.abc import Callable, Mapping
from typing import Protocol

from postroom.application.messages import NewMessage
from postroom.domain.envelope.build import OpenedEnvelope, build_envelope
from postroom.domain.envelope.headers import extension_text, extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import hash_chain, payload_hash
from postroom.domain.mailbox.commands import Send
from postroom.domain.message import Headers
from postroom.domain.names import check_topic, given_id, mailbox_stream, message_stream

MAX_IDEM_KEY_CHARS = 255


class Id(Protocol):
    """A UUID, of whichever library."""

    @property
    def bytes(self) -> bytes:
        """Return its 16 bytes."""


NewId = Callable[[], Id]

Prepared = tuple[Send, str]
"""The command, and the message's id as its sender sees it."""

_NO_ATTRS: dict[str, bytes] = {}


class Preparer:
    """Prepare messages for one mailbox."""

    def __init__(self, mailbox: str, wall: Callable[[], int], new_id: NewId) -> None:
        """Take the mailbox's name, the wall clock in µs, and a source of UUIDv7s."""
        self._mailbox = mailbox
        self._namespace = mailbox.partition("@")[0]
        self._wall = wall
        self._new_id = new_id
        self._known_topics: set[str] = set()
        self._reserved = mailbox_stream(mailbox)

    def message(self, new: NewMessage) -> Prepared:
        """Return the command that sends a message, with an envelope built for it.

        Raises: InvalidRequest when a field is malformed or out of range.
        """
        self._check(new)
        if new.message_id is None:
            id_ = self._new_id()
            stream, shown, given = id_.bytes, str(id_), None
        else:
            stream, shown = self._stream(new.message_id), new.message_id
            given = given_id(shown)
        published = new.published_at_us if new.published_at_us is not None else self._wall()
        attrs = _as_bytes(new.attrs) if new.attrs else _NO_ATTRS
        envelope = build_envelope(
            message_id=shown,
            topic=new.topic,
            namespace=self._namespace,
            published_at_us=published,
            payload=new.payload,
            attrs=attrs,
            content_type=new.content_type,
            correlation_id=new.correlation_id,
            causality_parent=new.causality_parent,
            principal=new.principal,
            priority=new.priority,
            ttl_seconds=new.ttl_seconds,
            trace_id=new.trace_id,
            span_id=new.span_id,
            schema_url=new.schema_url,
            schema_version=new.schema_version,
        )
        headers = Headers(
            published // 1_000,
            given,
            new.content_type or None,
            new.schema_url or None,
            new.schema_version or None,
            None,
            new.correlation_id or None,
            new.principal or None,
            self._namespace,
            new.trace_id or None,
            new.span_id or None,
            {name: extension_text(value) for name, value in attrs.items()} if attrs else None,
        )
        digest = payload_hash(new.payload)
        command = Send(
            stream,
            new.topic,
            len(new.payload),
            digest,
            hash_chain(new.topic, published, new.idem_key, digest, attrs),
            headers,
            envelope,
            new.idem_key,
            new.sticky_key,
            new.deliver_after_ms,
            new.ttl_seconds * 1_000 if new.ttl_seconds else None,
            new.message_id is not None,
        )
        return command, shown

    def envelope(
        self,
        blob: bytes,
        envelope: PrismEnvelope,
        *,
        idem_key: str | None = None,
        sticky_key: str | None = None,
    ) -> Prepared:
        """Return the command that stores an envelope which came from outside, byte for byte (RFC-037).

        Arguments:
            envelope: what the bytes say.

        Raises: InvalidRequest when it lacks a usable topic.
        """
        item = extract_mailbox_item(blob, received_at=self._wall() // 1_000, envelope=envelope)
        self._check_topic(item.topic)
        opened = OpenedEnvelope(envelope)
        stream = self._stream(item.message_id)
        headers = Headers(
            item.timestamp,
            given_id(item.message_id),
            item.content_type,
            item.schema_url,
            item.schema_version,
            item.encryption,
            item.correlation_id,
            item.principal,
            item.namespace,
            item.trace_id,
            item.span_id,
            item.custom_headers or None,
        )
        digest = payload_hash(opened.payload)
        command = Send(
            stream,
            item.topic,
            len(opened.payload),
            digest,
            hash_chain(item.topic, opened.published_at_us, idem_key, digest, opened.extensions),
            headers,
            blob,
            idem_key,
            sticky_key,
            ttl_ms=opened.ttl_seconds * 1_000 if opened.ttl_seconds > 0 else None,
            outside_id=True,
        )
        return command, item.message_id

    def _check(self, new: NewMessage) -> None:
        self._check_topic(new.topic)
        if new.deliver_after_ms < 0:
            raise InvalidRequest(f"deliver_after_ms must not be negative; it was {new.deliver_after_ms}.")
        if new.idem_key is not None and not 0 < len(new.idem_key) <= MAX_IDEM_KEY_CHARS:
            raise InvalidRequest(
                f"An idempotency key must have 1 to {MAX_IDEM_KEY_CHARS} characters; it had "
                f"{len(new.idem_key)}."
            )

    def _check_topic(self, topic: str) -> None:
        if topic not in self._known_topics:
            check_topic(topic)
            if len(self._known_topics) < 10_000:  # a memo of checks already done, not a registry
                self._known_topics.add(topic)

    def _stream(self, message_id: str) -> bytes:
        stream = message_stream(self._mailbox, message_id)
        if stream == self._reserved:
            raise InvalidRequest(
                f"The message id {message_id} is reserved for the mailbox itself; use another."
            )
        return stream


def _as_bytes(attrs: Mapping[str, str | bytes]) -> dict[str, bytes]:
    return {name: value if isinstance(value, bytes) else value.encode() for name, value in attrs.items()}
