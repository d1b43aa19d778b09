"""Bodies and answers of the HTTP calls that send, receive and settle, which server and client share.

OpenAPI is made from them. The client leaves out fields with their defaults, and skips fields that it does not
know.
"""

from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.application.message_stream import MAX_HEARTBEAT_MS, MAX_WAIT_MS, MIN_HEARTBEAT_MS
from postroom.application.messages import MessageDelivery, MessageResult, NewMessage, Sent, read_receipt
from postroom.application.operations.mailbox import Position, Text
from postroom.application.remote_errors import ProblemBrief
from postroom.domain.errors import Rejected
from postroom.domain.message import NackAction, OnConflict
from postroom.domain.names import external_id
from postroom.domain.policy import (
    DEFAULT_MAX_BYTES,
    DEFAULT_MAX_MESSAGES,
    MAX_DURATION_MS,
    MAX_VISIBILITY_MS,
    MIN_VISIBILITY_MS,
)

MAX_BATCH = 1_000
MAX_RECEIVE_BYTES = 4 << 20

Name = Annotated[str, Meta(min_length=1, max_length=255)]
Topics = Annotated[list[Name], Meta(min_length=1, max_length=1_000)]
Receipts = Annotated[list[Name], Meta(min_length=1, max_length=MAX_BATCH)]
MaxMessages = Annotated[int, Meta(ge=1, le=256)]
MaxBytes = Annotated[int, Meta(ge=1, le=MAX_RECEIVE_BYTES)]
Visibility = Annotated[int, Meta(ge=MIN_VISIBILITY_MS, le=MAX_VISIBILITY_MS)]
Duration = Annotated[int, Meta(ge=0, le=MAX_DURATION_MS)]
Base64 = Annotated[str, Meta(extra_json_schema={"contentEncoding": "base64"})]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HASH_PREFIX = "b3:"
_HASH_CHARS = len(_HASH_PREFIX) + 64


class Send(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Message to be sent; see `NewMessage` for its fields."""

    topic: Name
    payload_b64: Annotated[bytes, Meta(description="The payload in base64.")]
    idem_key: Name | None = None
    attrs: dict[Name, str] = {}
    attrs_b64: Annotated[dict[Name, bytes], Meta(description="Attributes that are not text, in base64.")] = {}
    sticky_key: Text | None = None
    message_id: Name | None = None
    deliver_after_ms: Duration = 0
    ttl_seconds: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    published_at_us: Position | None = None
    content_type: Text | None = None
    correlation_id: Text | None = None
    causality_parent: Text | None = None
    principal: Text | None = None
    priority: Annotated[int, Meta(ge=0, le=10)] = 5
    trace_id: Text | None = None
    span_id: Text | None = None
    schema_url: Text | None = None
    schema_version: Text | None = None
    unique_key: Name | None = None
    on_conflict: OnConflict = "keep"

    @classmethod
    def of(cls, message: NewMessage) -> "Send":
        """Return the body that sends a message."""
        values = ((name, getattr(message, name)) for name in _SAME_FIELDS)
        fields = {name: value for name, value in values if value is not None}
        return cls(
            topic=message.topic,
            payload_b64=message.payload,
            attrs={name: value for name, value in message.attrs.items() if isinstance(value, str)},
            attrs_b64={name: value for name, value in message.attrs.items() if isinstance(value, bytes)},
            correlation_id=message.correlation_id,
            **fields,
        )

    def to_message(self, corr_id: str) -> NewMessage:
        """Return the message.

        Arguments:
            corr_id: of the request; the message's correlation id unless it has its own (svc-mailbox P-8).
        """
        attrs: dict[str, str | bytes] = {**self.attrs, **self.attrs_b64}
        fields = _read_same(self)
        return NewMessage(
            self.topic,
            self.payload_b64,
            attrs=attrs,
            correlation_id=self.correlation_id or corr_id,
            **dict(zip(_SAME_FIELDS, fields, strict=True)),
        )


_SAME_FIELDS = sorted(
    {*Send.__struct_fields__} & {*NewMessage.__struct_fields__} - {"topic", "attrs", "correlation_id"}
)
_read_same = attrgetter(*_SAME_FIELDS)

SendBody = Send | Annotated[list[Send], Meta(min_length=1, max_length=MAX_BATCH)]


class SendAnswer(msgspec.Struct, frozen=True):
    """Id of a message, and whether it was sent before; `msg_id` is its name in svc-mailbox C-9."""

    message_id: str
    duplicate: bool
    msg_id: str


class SendResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result for one message of a list: its id, as in `SendAnswer`, or why it was refused."""

    message_id: str | None = None
    duplicate: bool | None = None
    msg_id: str | None = None
    error: ProblemBrief | None = None

    @classmethod
    def of(cls, result: Sent | Rejected) -> "SendResult":
        """Return the result that `Mailbox.send_batch` has for a message."""
        if isinstance(result, Rejected):
            return cls(error=ProblemBrief.of(result))
        return cls(result.message_id, result.duplicate, result.message_id)

    def to_sent(self) -> Sent:
        """Return the result of the only message of a call."""
        return Sent(self.msg_id or "", bool(self.duplicate))

    def to_result(self) -> Sent | Rejected:
        """Return it as `Mailbox.send_batch` does."""
        return self.to_sent() if self.error is None else self.error.to_refusal()


class SendAnswers(msgspec.Struct, frozen=True):
    """Results for a list of messages, in its order."""

    results: list[SendResult]

    def to_results(self) -> list[Sent | Rejected]:
        """Return them as `Mailbox.send_batch` does."""
        return [each.to_result() for each in self.results]


class Recv(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What to receive, and how.

    Arguments:
        visibility_ms: how long messages are hidden unless settled; by default as the topic's policy says.
        max_messages: maximum number of messages; of a stream, of those not settled yet.
        max_bytes: maximum size of payloads; the first message is always delivered.
        wait_ms: maximum wait for a message; a stream ends after it.
        consumer: name recorded in the log.
        with_envelope: return the whole envelope instead of the payload.
    """

    topic: Name | Topics
    visibility_ms: Visibility | None = None
    max_messages: MaxMessages = DEFAULT_MAX_MESSAGES
    max_bytes: MaxBytes = DEFAULT_MAX_BYTES
    wait_ms: Annotated[int, Meta(ge=0, le=MAX_WAIT_MS)] | None = None
    consumer: Text | None = None
    with_envelope: bool = False


class RecvStream(Recv, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to stream, and how; see `Recv`.

    Arguments:
        heartbeat_ms: longest silence; by default as the server is set.
    """

    heartbeat_ms: Annotated[int, Meta(ge=MIN_HEARTBEAT_MS, le=MAX_HEARTBEAT_MS)] | None = None


class Delivery(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Fields of a delivery that a client needs, with its envelope."""

    msg_id: str
    topic: str
    shard: int
    attempt: int
    receipt: str
    visible_at: Annotated[str, Meta(description="When the message reappears unless settled.")]
    idem_key: str | None
    payload_hash: str
    hash_chain: str
    ordered_key: Annotated[str | None, Meta(description="Its key, whose messages are handled in order.")] = (
        None
    )
    envelope_b64: bytes | None = None

    def to_delivery(self) -> MessageDelivery:
        """Return it as the owner handed it over.

        Raises: ValueError for an invalid time, hash or envelope; InvalidRequest for an invalid receipt.
        """
        receipt, visible_at = read_receipt(self.receipt), datetime.fromisoformat(self.visible_at)
        if self.envelope_b64 is None or visible_at.tzinfo is None:
            raise ValueError("the envelope, or the time zone, is missing")
        return MessageDelivery(
            receipt,
            self.topic,
            self.shard,
            self.attempt,
            (visible_at - _EPOCH) // timedelta(microseconds=1),
            external_id(receipt.message, self.msg_id),
            self.idem_key,
            _read_hash(self.payload_hash),
            _read_hash(self.hash_chain),
            self.envelope_b64,
            self.ordered_key,
        )


class Envelope(Delivery, frozen=True, omit_defaults=True, kw_only=True):
    """A delivery of a message (svc-mailbox C-9).

    Arguments:
        msg_id, corr_id: `message_id` and `correlation_id` by their names in C-9.
        published_topic: what the sender named; of a copy that a subscription got, the topic of the original.
        ts, timestamp: when it was published: RFC 3339, and ms since 1970 UTC as in a search.
    """

    message_id: str
    published_topic: str
    timestamp: int | None
    ts: str | None
    attrs: dict[str, str]
    correlation_id: str
    corr_id: str
    payload_b64: Base64 | None = None


class Messages(msgspec.Struct, frozen=True):
    """Messages received; empty if none is ready."""

    messages: list[Envelope]


class Deliveries(msgspec.Struct, frozen=True):
    """Fields of received messages that a client needs."""

    messages: list[Delivery]

    def to_deliveries(self) -> list[MessageDelivery]:
        """Return them as the owner handed them over; raises as `Delivery.to_delivery`."""
        return [each.to_delivery() for each in self.messages]


class Heartbeat(msgspec.Struct, frozen=True):
    """A line of a stream without a message, with the time."""

    heartbeat: str


class StreamError(msgspec.Struct, frozen=True):
    """The last line of a stream that the server ends."""

    error: ProblemBrief


StreamLine = Envelope | Heartbeat | StreamError


class Result(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Result of a message; see `MessageResult`."""

    payload: Annotated[bytes, Meta(description="The result in base64.")]
    content_type: Text | None = None

    def to_result(self) -> MessageResult:
        """Return it as `Mailbox.ack_messages` takes it."""
        return MessageResult(self.payload, self.content_type)


class Ack(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The delivery to settle; without a receipt, the latest one.

    Arguments:
        result: for the sender of the message.
    """

    receipt: Name | None = None
    result: Result | None = None


class Nack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The delivery that failed; without a receipt, the latest one.

    Arguments:
        reason: the error; its first 1,000 characters are stored.
        delay_ms: delay before the next attempt, instead of the policy's backoff; after a release, instead of
            no delay.
        action: `retry`; `reject` dead-letters it at once; `release` requeues it and counts no attempt.
        traceback: of the error; a message that becomes a dead letter keeps it.
    """

    receipt: Name | None = None
    reason: str | None = None
    delay_ms: Duration | None = None
    action: NackAction = "retry"
    traceback: str | None = None


class Extend(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The delivery to extend; without a receipt, the latest one."""

    receipt: Name | None = None
    visibility_ms: Visibility


class AckMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Deliveries to settle.

    Arguments:
        results: for the senders of the messages: one for each receipt, or null.
    """

    receipts: Receipts
    results: Annotated[list[Result | None], Meta(max_length=MAX_BATCH)] | None = None


class NackMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Deliveries that failed; see `Nack`."""

    receipts: Receipts
    reason: str | None = None
    delay_ms: Duration | None = None
    action: NackAction = "retry"
    traceback: str | None = None


class ExtendMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Deliveries to extend."""

    receipts: Receipts
    visibility_ms: Visibility


class Ok(msgspec.Struct, frozen=True):
    """The request has taken effect."""

    ok: bool = True


class SettleResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """Result for one receipt: `ok`, or why it was refused."""

    ok: bool
    error: ProblemBrief | None = None

    @classmethod
    def of(cls, refusal: Rejected | None) -> "SettleResult":
        """Return the result that `Mailbox.ack_messages` has for a receipt."""
        return cls(refusal is None, None if refusal is None else ProblemBrief.of(refusal))

    def to_result(self) -> Rejected | None:
        """Return it as `Mailbox.ack_messages` does."""
        return None if self.error is None else self.error.to_refusal()


class SettleResults(msgspec.Struct, frozen=True):
    """Results for receipts, in their order."""

    results: list[SettleResult]

    def to_results(self) -> list[Rejected | None]:
        """Return them as `Mailbox.ack_messages` does."""
        return [each.to_result() for each in self.results]


def _read_hash(text: str) -> bytes:
    """Return the bytes of a hash; raise ValueError if the text is no hash."""
    if not text.startswith(_HASH_PREFIX) or len(text) != _HASH_CHARS:
        raise ValueError(f"{text[:80]!r} is not a hash")
    return bytes.fromhex(text.removeprefix(_HASH_PREFIX))
