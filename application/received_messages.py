"""Received messages: their content, and the ends of their deliveries."""

from base64 import b64encode
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol, Self

import msgspec

from postroom.application.messages import MessageDelivery, MessageResult, write_receipt
from postroom.application.tracing import TraceContext, make_context
from postroom.domain.envelope.build import OpenedEnvelope, without_auth_token
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.message import NackAction, Receipt
from postroom.domain.names import b3, message_id


class DeliverySettler(Protocol):
    """The commands that end or extend deliveries, of the mailbox that delivered a message."""

    async def ack_messages(
        self, receipts: Sequence[Receipt], /, *, results: Sequence[MessageResult | None] | None = None
    ) -> list[Rejected | None]:
        """Settle deliveries; see `Mailbox.ack_messages`."""

    async def nack_messages(
        self,
        receipts: Sequence[Receipt],
        /,
        *,
        reason: str | None = None,
        delay_ms: int | None = None,
        action: NackAction = "retry",
        traceback: str | None = None,
    ) -> list[Rejected | None]:
        """Fail deliveries; see `Mailbox.nack_messages`."""

    async def extend_visibility(
        self, receipts: Sequence[Receipt], visibility_ms: int, /
    ) -> list[Rejected | None]:
        """Extend deliveries; see `Mailbox.extend_visibility`."""


class DeliveredMessage(msgspec.Struct, gc=False, eq=False):
    """Message of a delivery: its payload and headers (svc-mailbox C-9).

    Arguments:
        delivery: data from the owner.
        mailbox: the mailbox that settles it, if any; it is not pickled with the message.
    """

    _delivery: MessageDelivery
    _mailbox: Any = None
    _parsed: PrismEnvelope | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message_id!r}, topic={self.topic!r}, attempt={self.attempt})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._delivery,)

    def __deepcopy__(self, memo: object) -> Self:
        return copy(self)  # content never changes, and the mailbox is shared

    @property
    def _settler(self) -> Any:
        """Return the mailbox that settles this delivery: a `DeliverySettler`, or a `SyncMailbox`.

        Raises: InvalidRequest when the message was pickled.
        """
        if self._mailbox is None:
            raise InvalidRequest(
                f"Message {self.message_id} was pickled, without its mailbox; pass its receipt to "
                "ack_messages, nack_messages or extend_visibility of an open mailbox."
            )
        return self._mailbox

    @property
    def delivery(self) -> MessageDelivery:
        """Return the message as the owner returned it, for a surface that forwards it."""
        return self._delivery

    def json(self) -> Any:
        """Return the payload, parsed as JSON.

        Raises: InvalidRequest when it is not JSON.
        """
        try:
            return msgspec.json.decode(self.payload)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"The payload of message {self.message_id} on topic {self.topic} is not JSON: {error}."
            ) from error

    @property
    def message_id(self) -> str:
        """Return the message's id."""
        return message_id(self._delivery.receipt.message, self._delivery.external_id)

    @property
    def topic(self) -> str:
        """Return the topic it was received from; for a copy, the name of the subscription."""
        return self._delivery.topic

    @property
    def published_topic(self) -> str:
        """Return the topic that the sender named; for a subscription's copy, the topic of the original."""
        return self._open().topic

    @property
    def shard(self) -> int:
        """Return its shard of the topic."""
        return self._delivery.shard

    @property
    def attempt(self) -> int:
        """Return the attempt, counted from 1."""
        return self._delivery.attempt

    @property
    def receipt(self) -> Receipt:
        """Return the receipt with which to ack, nack or extend this delivery."""
        return self._delivery.receipt

    @property
    def visible_at_us(self) -> int:
        """Return the log time (µs) at which the message reappears unless settled."""
        return self._delivery.due

    @property
    def idem_key(self) -> str | None:
        """Return its idempotency key."""
        return self._delivery.idem_key

    @property
    def ordered_key(self) -> str | None:
        """Return its sticky key if its topic has ordered keys.

        The received messages of one key are to be handled in their order. When one fails, the owner delivers
        it again before the later ones, whose receipts then are stale.
        """
        return self._delivery.ordered_key

    @property
    def payload(self) -> bytes:
        """Return the payload."""
        return self._parse().payload.value

    @property
    def attrs(self) -> dict[str, str]:
        """Return the sender's attributes as text; values that are not text in base64."""
        return self._open().attrs

    @property
    def binary_attrs(self) -> dict[str, bytes]:
        """Return the sender's attributes as the bytes that were sent."""
        return self._open().extensions

    @property
    def namespace(self) -> str | None:
        """Return the tenant."""
        return self._open().namespace

    @property
    def published_at_us(self) -> int | None:
        """Return when the sender published it, µs since 1970 UTC."""
        return self._open().published_at_us

    @property
    def content_type(self) -> str | None:
        """Return the payload's media type."""
        return self._open().content_type

    @property
    def content_encoding(self) -> str | None:
        """Return the payload's compression."""
        return self._open().content_encoding

    @property
    def encryption(self) -> str | None:
        """Return the algorithm that the payload is encrypted with."""
        return self._open().encryption

    @property
    def correlation_id(self) -> str:
        """Return the correlation id, or the message's own id if it has none."""
        return self._open().correlation_id or self.message_id

    @property
    def causality_parent(self) -> str | None:
        """Return the id of the message that caused this one."""
        return self._open().causality_parent

    @property
    def principal(self) -> str | None:
        """Return the publisher."""
        return self._open().principal

    @property
    def priority(self) -> int:
        """Return the publisher's priority, 0 to 10."""
        return self._open().priority

    @property
    def ttl_seconds(self) -> int:
        """Return the time to live that the sender asked for, or 0."""
        return self._open().ttl_seconds

    @property
    def trace_id(self) -> str | None:
        """Return the trace id, for distributed tracing."""
        return self._open().trace_id

    @property
    def span_id(self) -> str | None:
        """Return the span id, for distributed tracing."""
        return self._open().span_id

    @property
    def trace_context(self) -> TraceContext | None:
        """Return the sender's trace context; None without valid ids."""
        opened = self._open()
        return make_context(
            opened.trace_id, opened.span_id, opened.trace_flags, opened.trace_state, opened.baggage
        )

    @property
    def schema_url(self) -> str | None:
        """Return the schema of the payload."""
        return self._open().schema_url

    @property
    def schema_version(self) -> str | None:
        """Return the version of that schema."""
        return self._open().schema_version

    @property
    def envelope(self) -> bytes:
        """Return the `PrismEnvelope` bytes, without the publisher's auth token."""
        return without_auth_token(self._delivery.envelope)

    def to_json(self) -> dict[str, Any]:
        """Return the delivery as a JSON object, with payload and receipt.

        It has the same keys as searches, and the topic that the sender named; HTTP adds the names of
        svc-mailbox C-9. `timestamp` is when it was published, in ms since 1970 UTC.
        """
        # Each part is read once: reading the properties one by one would take several times as long.
        delivery, opened, id_ = self._delivery, self._open(), self.message_id
        published_at = opened.published_at_us
        return {
            "message_id": id_,
            "topic": delivery.topic,
            "published_topic": opened.topic,
            "timestamp": None if published_at is None else published_at // 1_000,
            "idem_key": delivery.idem_key,
            **({} if delivery.ordered_key is None else {"ordered_key": delivery.ordered_key}),
            "payload_hash": b3(delivery.payload_hash),
            "attrs": opened.attrs,
            "correlation_id": opened.correlation_id or id_,
            "shard": delivery.shard,
            "attempt": delivery.attempt,
            "hash_chain": b3(delivery.hash_chain),
            "receipt": write_receipt(delivery.receipt),
            "payload_b64": b64encode(opened.payload).decode(),
        }

    def _open(self) -> OpenedEnvelope:
        return OpenedEnvelope(self._parse())

    def _parse(self) -> PrismEnvelope:
        parsed = self._parsed
        if parsed is None:
            parsed = self._parsed = parse_envelope(self._delivery.envelope)
        return parsed


class ReceivedMessage(DeliveredMessage):
    """Delivery of a message: its payload and headers, and how to settle it (svc-mailbox C-9).

    Arguments:
        delivery: data from the owner.
        mailbox: the mailbox that delivered it, which settles it.
    """

    async def ack(self, *, result: bytes | None = None, content_type: str | None = None) -> None:
        """Settle this delivery: the message was processed (svc-mailbox I-3).

        Arguments:
            result: for the sender, which waits for it with `Mailbox.wait_for_result`.
            content_type: media type of the result.

        Raises: StaleReceipt when the message was delivered again or is dead, FrameTooLarge when the result is
            above the limit `result_bytes`, Unavailable when the outcome is unknown.
        """
        options = ack_options(result, content_type)
        raise_refusal(await self._settler.ack_messages([self.receipt], **options))

    async def nack(self, *, reason: str | None = None, delay_ms: int | None = None) -> None:
        """Fail this delivery: the message is retried, or dead-lettered after its last attempt.

        Arguments:
            reason: the error; see `Mailbox.nack_messages`.
            delay_ms: delay to use instead of the policy's backoff.

        Raises: InvalidRequest, StaleReceipt when the delivery has ended, Unavailable.
        """
        raise_refusal(await self._settler.nack_messages([self.receipt], reason=reason, delay_ms=delay_ms))

    async def reject(self, reason: str | None = None) -> None:
        """Dead-letter the message at once, as no attempt can succeed (svc-mailbox I-4).

        Arguments, Raises: as `nack`.
        """
        raise_refusal(await self._settler.nack_messages([self.receipt], reason=reason, action="reject"))

    async def release(self, delay_ms: int = 0) -> None:
        """Return the message to the queue; this delivery counts as no attempt.

        Arguments:
            delay_ms: delay before the next delivery.

        Raises: as `nack`.
        """
        raise_refusal(await self._settler.nack_messages([self.receipt], delay_ms=delay_ms, action="release"))

    async def extend(self, visibility_ms: int) -> None:
        """Hide the message for `visibility_ms` from now on, within the in-flight retention.

        Raises: InvalidRequest, StaleReceipt when the delivery has ended, Unavailable.
        """
        raise_refusal(await self._settler.extend_visibility([self.receipt], visibility_ms))


def ack_options(result: bytes | None, content_type: str | None) -> dict[str, Any]:
    """Return the options of `Mailbox.ack_messages` for one delivery with this result, if there is one."""
    if result is None:
        if content_type is not None:
            raise InvalidRequest("content_type must be absent without a result.")
        return {}
    return {"results": [MessageResult(result, content_type)]}


def raise_refusal(answers: list[Rejected | None]) -> None:
    """Raise the refusal of the one delivery that was to be settled, if there is one."""
    (refusal,) = answers
    if refusal is not None:
        raise refusal
