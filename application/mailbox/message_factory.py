"""Factory of `Send` commands: ids, envelopes, hashes and headers of new messages."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import cast

import msgspec

from postroom.application.caller import is_limited
from postroom.application.mailbox.outgoing import (
    EXAMPLE,
    FIRST_US,
    HEADERS,
    LAST_US,
    NewId,
    OutgoingMessage,
    are_plain,
    check_attrs,
    have_same_headers,
)
from postroom.application.messages import NewMessage
from postroom.application.tracing import SAMPLED, TraceContext, current_corr_id, tracer
from postroom.domain.arguments import check_any_text, check_choice, check_int, check_text, check_type
from postroom.domain.envelope.build import EnvelopeHeaders, EnvelopeTemplate, OpenedEnvelope, make_template
from postroom.domain.envelope.headers import extension_text, extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import FrameTooLarge, InvalidRequest, Rejected
from postroom.domain.integrity import digests, hash_chain, hash_chains, payload_hash
from postroom.domain.mailbox.commands import Send
from postroom.domain.message import MAX_PRIORITY, ON_CONFLICT, Headers
from postroom.domain.names import check_topic, external_id, mailbox_stream, message_streams
from postroom.domain.policy import MAX_DURATION_MS, MAX_FRAME_BYTES, SECOND_MS

_NO_TRACE = TraceContext("", "", 0)


class SendRequest(msgspec.Struct, frozen=True, gc=False):
    """Command that sends a message, and the message's public id."""

    command: Send
    message_id: str


class _Call(msgspec.Struct, frozen=True):
    """Fields that the messages of one call take from their caller."""

    now: int
    corr_id: str | None
    trace: TraceContext | None


class _Common(msgspec.Struct, frozen=True):
    """What messages with the same headers have in common.

    Arguments:
        example: a message with the headers, without content.
        trace: of the caller.
        template, headers: of messages published at `published_at_us` with `correlation_id`; without the
            sender's own id and attributes.
    """

    example: NewMessage
    trace: TraceContext | None
    correlation_id: str | None
    published_at_us: int
    template: EnvelopeTemplate
    headers: Headers

    def at(self, published_at_us: int, correlation_id: str | None) -> "_Common":
        """Return the same for the messages of another call."""
        return _Common(
            self.example,
            self.trace,
            correlation_id,
            published_at_us,
            self.template.at(published_at_us, correlation_id),
            msgspec.structs.replace(
                self.headers, timestamp=published_at_us // 1_000, correlation_id=correlation_id
            ),
        )


class MessageFactory:
    """Factory of the commands that send messages into one mailbox."""

    def __init__(self, mailbox: str, wall: Callable[[], int], new_id: NewId) -> None:
        """Initialise with the mailbox's name, the wall clock in µs, and a generator of UUIDv7s."""
        self._mailbox = mailbox
        self._namespace = mailbox.partition("@")[0]
        self._wall = wall
        self._new_id = new_id
        self._valid_topics: set[str] = set()
        self._reserved = mailbox_stream(mailbox)
        self._example = EXAMPLE
        self._common: _Common | None = None

    def prepare(self, message: object) -> OutgoingMessage:
        """Return a message that `from_message` accepts, with an id.

        Raises: as `from_message`.
        """
        new = check_type("A message", message, NewMessage)
        self._check_headers(new)
        _check_content(new)
        if new.message_id is None:
            return OutgoingMessage(msgspec.structs.replace(new, message_id=str(self._new_id())), True)
        self._streams(new.message_id, new.topic)
        return OutgoingMessage(new, False)

    def from_message(self, message: object) -> SendRequest:
        """Return the command that sends a `NewMessage`.

        A message without a correlation id gets the id of the call or message being processed (svc-mailbox
        P-8), and one without a trace id gets the current trace context.

        Raises: InvalidRequest naming the field that is malformed, of a wrong type or out of range;
            FrameTooLarge for a payload that exceeds a frame.
        """
        return self.for_call()(message)

    def for_call(self) -> Callable[[object], SendRequest]:
        """Return `from_message` for the messages of one call, which are published at the same time."""
        return partial(self._make, _Call(self._wall(), current_corr_id(), tracer().current()))

    def from_batch(self, messages: Sequence[object]) -> list[SendRequest] | None:
        """Return what `from_message` returns for each message, built column by column.

        Returns: None if they differ in more than payloads and keys, or one of these needs `from_message`.
        """
        first = messages[0] if len(messages) > 1 else None
        if type(first) is not NewMessage or not have_same_headers(messages, first):
            return None
        try:
            example = self.from_message(first)
        except Rejected:
            return None
        common, others = self._common, cast("Sequence[NewMessage]", messages[1:])
        assert common is not None, "the first message was made with it"
        payloads, idem_keys = [each.payload for each in others], [each.idem_key for each in others]
        sticky_keys, unique_keys = [each.sticky_key for each in others], [each.unique_key for each in others]
        if (
            set(map(type, payloads)) != {bytes}
            or max(map(len, payloads)) > MAX_FRAME_BYTES
            or not (are_plain(idem_keys) and are_plain(sticky_keys) and are_plain(unique_keys))
        ):
            return None
        ids = [self._new_id() for _ in others]
        shown = list(map(str, ids))
        payload_hashes = digests(payloads)
        commands = map(
            Send,
            [each.bytes for each in ids],
            repeat(first.topic),
            map(len, payloads),
            payload_hashes,
            hash_chains(first.topic, common.published_at_us, idem_keys, payload_hashes),
            repeat(common.headers),
            common.template.build_all(shown, payloads),
            idem_keys,
            sticky_keys,
            repeat(0),
            repeat(example.command.ttl_ms),
            repeat(False),
            repeat(None),
            repeat(first.priority),
            repeat(None),
            unique_keys,
        )
        return [example, *map(SendRequest, commands, shown)]

    def from_event(self, message: NewMessage) -> SendRequest:
        """Return the command that sends a message of another system: it takes no ids from the caller.

        Raises: as `from_message`.
        """
        return self._make(_Call(self._wall(), None, None), message)

    def _make(self, call: _Call, message: object) -> SendRequest:
        new = check_type("A message", message, NewMessage)
        example = self._check_headers(new)
        correlation_id = new.correlation_id or call.corr_id
        common = self._common
        if common is None or common.example is not example or common.trace is not call.trace:
            common = self._common = self._make_common(example, call, correlation_id)
        attrs = _check_content(new)
        payload = new.payload
        published = call.now if new.published_at_us is None else new.published_at_us
        if published is not common.published_at_us or correlation_id is not common.correlation_id:
            common = self._common = common.at(published, correlation_id)
        headers = common.headers
        if new.message_id is None:
            id_ = self._new_id()
            stream, shown, other = id_.bytes, str(id_), None
        else:
            shown = new.message_id
            stream, other = self._streams(shown, new.topic)
            headers = msgspec.structs.replace(headers, message_id=external_id(stream, shown))
        if attrs:
            texts = {name: extension_text(value) for name, value in attrs.items()}
            headers = msgspec.structs.replace(headers, custom_headers=texts)
        (digest,) = digests((payload,))
        command = Send(
            stream,
            new.topic,
            len(payload),
            digest,
            hash_chain(new.topic, published, new.idem_key, digest, attrs),
            headers,
            common.template.build(shown, payload, attrs),
            new.idem_key,
            new.sticky_key,
            new.deliver_after_ms,
            new.ttl_seconds * SECOND_MS if new.ttl_seconds else None,
            new.message_id is not None,
            None,
            new.priority,
            other,
            new.unique_key,
            new.on_conflict,
        )
        return SendRequest(command, shown)

    def _make_common(self, new: NewMessage, call: _Call, correlation_id: str | None) -> _Common:
        trace = _trace_context(new) or call.trace or _NO_TRACE
        template = make_template(
            EnvelopeHeaders(
                new.topic,
                self._namespace,
                call.now,
                new.content_type,
                correlation_id,
                new.causality_parent,
                new.principal,
                new.priority,
                new.ttl_seconds,
                trace.trace_id,
                trace.span_id,
                trace.trace_flags,
                trace.trace_state,
                trace.baggage,
                new.schema_url,
                new.schema_version,
            )
        )
        headers = Headers(
            call.now // 1_000,
            None,
            new.content_type or None,
            new.schema_url or None,
            new.schema_version or None,
            None,
            correlation_id,
            new.principal or None,
            self._namespace,
            trace.trace_id or None,
            trace.span_id or None,
        )
        return _Common(new, call.trace, correlation_id, call.now, template, headers)

    def from_envelope(
        self,
        blob: bytes,
        envelope: PrismEnvelope,
        *,
        idem_key: str | None = None,
        sticky_key: str | None = None,
    ) -> SendRequest:
        """Return the command that stores an external envelope unchanged (RFC-037).

        Arguments:
            envelope: the parsed bytes.

        Raises: InvalidRequest when it lacks a usable topic.
        """
        item = extract_mailbox_item(blob, received_at=self._wall() // 1_000, envelope=envelope)
        self._check_topic(item.topic)
        content = OpenedEnvelope(envelope)
        stream, other = self._streams(item.message_id, item.topic)
        headers = Headers(
            item.timestamp,
            external_id(stream, item.message_id),
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
        payload, ttl_seconds = content.payload, content.ttl_seconds
        extensions = content.extensions if item.custom_headers else {}  # which are among the headers
        digest = payload_hash(payload)
        command = Send(
            stream,
            item.topic,
            len(payload),
            digest,
            hash_chain(item.topic, content.published_at_us, idem_key, digest, extensions),
            headers,
            blob,
            idem_key,
            sticky_key,
            ttl_ms=ttl_seconds * SECOND_MS if ttl_seconds > 0 else None,
            has_external_id=True,
            priority=min(max(content.priority, 0), MAX_PRIORITY),
            other_stream=other,
        )
        return SendRequest(command, item.message_id)

    def _check_headers(self, new: NewMessage) -> NewMessage:
        """Check the topic and the headers, and return a message that has them but no content.

        Messages of one sender often have the very same objects, which are checked once. The returned message
        may have another correlation id, as calls have correlation ids of their own.
        """
        example = self._example
        if (
            (new.topic is example.topic or (type(new.topic) is str and new.topic == example.topic))
            and new.content_type is example.content_type
            and new.causality_parent is example.causality_parent
            and new.principal is example.principal
            and new.priority is example.priority
            and new.ttl_seconds is example.ttl_seconds
            and new.trace_id is example.trace_id
            and new.span_id is example.span_id
            and new.schema_url is example.schema_url
            and new.schema_version is example.schema_version
        ):
            if new.correlation_id is not example.correlation_id and new.correlation_id is not None:
                check_any_text("correlation_id", new.correlation_id)
            return example
        self._check_topic(new.topic)
        for name, default, check in HEADERS:
            value = getattr(new, name)
            if value is not default:
                check(name, value)
        example = self._example = msgspec.structs.replace(new, payload=b"", attrs={})
        return example

    def _check_topic(self, topic: str) -> None:
        # A cache of checked names; members of a str enum equal their text, so the type is checked, too.
        if type(topic) is not str or topic not in self._valid_topics:
            check_topic(topic)
            if len(self._valid_topics) < 10_000:
                self._valid_topics.add(topic)

    def _streams(self, message_id: str, topic: str) -> tuple[bytes, bytes]:
        """Return the stream of a message, and the stream of the same id from a sender of the other kind.

        Ids are unique in the mailbox, and ids of senders that are limited to topics are unique in their
        topic: a send of such a sender must not reveal or prevent a message of another topic (ADR 0106).
        """
        of_mailbox, of_topic = message_streams(self._mailbox, message_id, topic)
        if of_mailbox == self._reserved:
            raise InvalidRequest(
                f"The message id {message_id} is reserved for the mailbox itself; use another."
            )
        return (of_topic, of_mailbox) if is_limited() else (of_mailbox, of_topic)


_NO_ATTRS: dict[str, bytes] = {}


def _check_content(new: NewMessage) -> dict[str, bytes]:
    """Check every other field but the id, and return the attributes as bytes."""
    if len(check_type("payload", new.payload, bytes)) > MAX_FRAME_BYTES:
        raise FrameTooLarge(
            f"Message on topic {new.topic} has a payload of {len(new.payload)} bytes; a frame "
            f"holds at most {MAX_FRAME_BYTES}. Send a reference to the data instead."
        )
    if new.idem_key is not None:
        check_text("idem_key", new.idem_key, 1)
    if new.sticky_key is not None:
        check_text("sticky_key", new.sticky_key)
    if new.unique_key is not None:
        check_text("unique_key", new.unique_key, 1)
    if new.on_conflict is not EXAMPLE.on_conflict:
        check_choice("on_conflict", new.on_conflict, ON_CONFLICT)
        if new.unique_key is None and new.on_conflict != EXAMPLE.on_conflict:
            raise InvalidRequest("on_conflict needs a unique_key.")
    if new.deliver_after_ms is not EXAMPLE.deliver_after_ms:
        check_int("deliver_after_ms", new.deliver_after_ms, 0, MAX_DURATION_MS)
    if new.published_at_us is not None:
        check_int("published_at_us", new.published_at_us, FIRST_US, LAST_US)
    return _NO_ATTRS if type(new.attrs) is dict and not new.attrs else check_attrs(new.attrs)


def _trace_context(new: NewMessage) -> TraceContext | None:
    """Return the trace context that the sender names, if any, which counts as recorded."""
    if new.trace_id or new.span_id:
        return TraceContext(new.trace_id or "", new.span_id or "", SAMPLED if new.span_id else 0)
    return None
