"""The Message aggregate: its events, its state, and what may happen to it next."""

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal

import msgspec

from postroom.domain.errors import StaleReceipt
from postroom.domain.event import Event
from postroom.domain.policy import TopicPolicy, backoff_ms

MS = 1_000
"""Microseconds in a millisecond: events carry microseconds, policies milliseconds."""

RequeueReason = Literal["nacked", "visibility_expired"]
DeadReason = Literal["max_attempts", "rejected", "ttl_expired", "retention_expired", "integrity"]
ExpiryReason = Literal["retention", "capacity", "purged"]


class Headers(msgspec.Struct, frozen=True, gc=False):
    """Hold what search knows of a message besides its topic (RFC-037 header table); absent is None.

    Arguments:
        message_id: an id that came from outside, kept as given; None when the stream id is the id.
        timestamp: `metadata.published_at` in Unix ms.
        custom_headers: the envelope's extensions, as text.
    """

    timestamp: int
    message_id: str | None = None
    content_type: str | None = None
    schema_url: str | None = None
    schema_version: str | None = None
    encryption: str | None = None
    correlation_id: str | None = None
    principal: str | None = None
    namespace: str | None = None
    trace_id: str | None = None
    span_id: str | None = None
    custom_headers: dict[str, str] | None = None


class MessageSent(Event, frozen=True, gc=False):
    """A message was accepted; it stays `due` for ever until settled (svc-mailbox I-1).

    Arguments:
        shard: number of the FIFO queue it joined.
        due: log time in µs from which it may be delivered; None for a message that is only archived.
        expires_at: log time in µs at which it is dead-lettered if still undelivered.
        size: payload bytes.
        payload_hash, hash_chain: 32-byte BLAKE3 digests (svc-mailbox I-7, I-12).
        envelope: the `PrismEnvelope` bytes as received, stored unchanged.
    """

    topic: str
    shard: int
    due: int | None
    expires_at: int
    size: int
    idem_key: str | None
    payload_hash: bytes
    hash_chain: bytes
    headers: Headers
    envelope: bytes


class MessageReceived(Event, frozen=True, gc=False):
    """A consumer took the message; it stays hidden until `due` (svc-mailbox I-3)."""

    attempt: int
    due: int
    consumer: str | None


class MessageVisibilityExtended(Event, frozen=True, gc=False):
    """The consumer asked for more time; the message now stays hidden until `due`."""

    attempt: int
    due: int


class MessageAcked(Event, frozen=True, gc=False):
    """The consumer settled the message for good (svc-mailbox I-3)."""

    attempt: int


class MessageRequeued(Event, frozen=True, gc=False):
    """The delivery failed or timed out; the message may be delivered again from `due` on."""

    attempt: int
    due: int
    reason: RequeueReason
    last_error: str | None


class MessageDeadLettered(Event, frozen=True, gc=False):
    """The message was quarantined with its reason (svc-mailbox I-4)."""

    attempt: int
    reason: DeadReason
    last_error: str | None
    expires_at: int


class MessageRedriven(Event, frozen=True, gc=False):
    """An operator put a dead letter back into its queue with fresh attempts (svc-mailbox C-4)."""

    due: int
    expires_at: int


class MessageExpired(Event, frozen=True, gc=False):
    """The message left the mailbox without being settled: retention, capacity of the DLQ, or a purge."""

    reason: ExpiryReason


class Status(IntEnum):
    """Where a message stands; `ready` covers messages that are delayed until their `due`."""

    READY = 0
    IN_FLIGHT = 1
    ACKED = 2
    DEAD = 3
    EXPIRED = 4
    ARCHIVED = 5


# Module constants: attribute access on an enum class costs as much as the rest of a fold step.
READY, IN_FLIGHT, ACKED = Status.READY, Status.IN_FLIGHT, Status.ACKED
DEAD, EXPIRED, ARCHIVED = Status.DEAD, Status.EXPIRED, Status.ARCHIVED


class Receipt(msgspec.Struct, frozen=True, gc=False):
    """Prove one delivery of one message, so that a stale consumer is refused (fencing).

    Arguments:
        message: stream id, 16 bytes.
        delivery: version of the `MessageReceived` event; unlike the attempt it is never used again after a
            redrive.
        epoch: fencing number of the owner that delivered.
    """

    message: bytes
    delivery: int
    epoch: int


class Message(msgspec.Struct, gc=False, array_like=True, eq=False):
    """State of one message: the fold of its events. `evolve` changes it in place.

    Arguments:
        position: where its `MessageSent` stands in the mailbox log; also its rank in the shard.
        due: in µs; when a ready message may be delivered, or an in-flight one reappears.
        delivery, epoch: of the receipt that settles it; 0 when no receipt can.
        visibility: in µs; what its latest RECV asked for.
        hidden: in µs; for how long its latest RECV or EXTEND hid it, so that a new clock can hide it as long
            again.
    """

    stream: bytes
    version: int
    status: Status
    topic: str
    shard: int
    position: int
    size: int
    sent_at: int
    expires_at: int
    due: int
    attempt: int = 0
    delivery: int = 0
    epoch: int = 0
    received_at: int = 0
    visibility: int = 0
    changed_at: int = 0
    reason: str | None = None
    last_error: str | None = None
    redriven: int = 0
    hidden: int = 0

    @property
    def receipt(self) -> Receipt:
        """Return the receipt of its latest delivery."""
        return Receipt(self.stream, self.delivery, self.epoch)


MessageEvent = (
    MessageSent
    | MessageReceived
    | MessageVisibilityExtended
    | MessageAcked
    | MessageRequeued
    | MessageDeadLettered
    | MessageRedriven
    | MessageExpired
)


def receive(message: Message, visibility_ms: int, consumer: str | None, now: int) -> MessageReceived:
    """Deliver a ready message and hide it for `visibility_ms` (svc-mailbox I-3)."""
    return MessageReceived(
        message.stream, message.version + 1, now, message.attempt + 1, now + visibility_ms * MS, consumer
    )


def ack(message: Message, receipt: Receipt, now: int) -> list[MessageEvent]:
    """Settle a message; settling it again with the same receipt changes nothing (svc-mailbox I-3: final).

    A delivery that timed out may still be acked as long as nobody received the message again.

    Raises: StaleReceipt when the message was redelivered, dead-lettered or expired since.
    """
    if message.status == ACKED and message.receipt == receipt:
        return []
    _require_current(message, receipt)
    return [MessageAcked(message.stream, message.version + 1, now, message.attempt)]


def nack(
    message: Message,
    receipt: Receipt,
    policy: TopicPolicy,
    now: int,
    *,
    reason: str | None,
    delay_ms: int | None,
    jitter: float,
) -> list[MessageEvent]:
    """Give a delivery back: requeue with backoff, or dead-letter after the last attempt (svc-mailbox P-7).

    Arguments:
        delay_ms: hide for exactly this long instead of the policy's backoff.
        jitter: a uniform random number in [0, 1).

    Raises: StaleReceipt when the delivery is over.
    """
    _require_current(message, receipt)
    if message.status == READY:  # it timed out and is back in its queue already
        return []
    if message.attempt >= policy.max_attempts:
        return [dead_letter(message, "max_attempts", reason, policy, now)]
    hidden = backoff_ms(policy, message.attempt, jitter) if delay_ms is None else delay_ms
    return [_requeue(message, "nacked", reason, now + hidden * MS, now)]


def extend(
    message: Message, receipt: Receipt, visibility_ms: int, policy: TopicPolicy, now: int
) -> list[MessageEvent]:
    """Hide a received message for `visibility_ms` from now, within the in-flight retention (svc-mailbox P-9).

    Raises: StaleReceipt when the delivery is over or may be held no longer.
    """
    _require_current(message, receipt)
    held_until = message.received_at + message.visibility * policy.in_flight_retention_visibilities
    due = min(now + visibility_ms * MS, held_until)
    if message.status == READY or due <= now:
        raise StaleReceipt(
            f"The delivery of message {message.stream.hex()} on topic {message.topic} is over; receive it "
            "again."
        )
    return [MessageVisibilityExtended(message.stream, message.version + 1, now, message.attempt, due)]


def time_out(message: Message, policy: TopicPolicy, now: int) -> MessageRequeued | MessageDeadLettered:
    """End a delivery whose visibility ran out: ready again, or dead after the last one (svc-mailbox C-3)."""
    if message.attempt >= policy.max_attempts:
        error = message.last_error or "visibility expired"
        return dead_letter(message, "max_attempts", error, policy, now)
    return _requeue(message, "visibility_expired", None, now, now)


def dead_letter(
    message: Message, reason: DeadReason, error: str | None, policy: TopicPolicy, now: int
) -> MessageDeadLettered:
    """Quarantine a message with `{reason, attempt, last_error}` (svc-mailbox I-4)."""
    return MessageDeadLettered(
        message.stream,
        message.version + 1,
        now,
        message.attempt,
        reason,
        error if error is not None else message.last_error,
        now + policy.dead_retention_ms * MS,
    )


def redrive(message: Message, policy: TopicPolicy, now: int) -> MessageRedriven:
    """Put a dead letter back into its queue, by explicit operator action only (svc-mailbox I-4)."""
    return MessageRedriven(
        message.stream, message.version + 1, now, now, now + policy.ready_retention_ms * MS
    )


def expire(message: Message, reason: ExpiryReason, now: int) -> MessageExpired:
    """Let a message leave the mailbox, with a trace in the log (svc-mailbox I-14)."""
    return MessageExpired(message.stream, message.version + 1, now, reason)


def evolve(message: Message | None, event: MessageEvent, position: int = 0, epoch: int = 0) -> Message:
    """Return the message after `event`; a message that exists is changed in place.

    Arguments:
        position, epoch: of the record that carries the event.
    """
    kind = type(event)
    if kind is MessageSent:
        return _sent(event, position)  # type: ignore[arg-type]  # narrowed by `kind`, which mypy can't follow
    assert message is not None, f"{kind.__name__} came before MessageSent"
    message.version = event.version
    message.changed_at = event.at
    _EVOLVE[kind](message, event, epoch)
    return message


def _require_current(message: Message, receipt: Receipt) -> None:
    if (
        message.delivery == receipt.delivery > 0  # 0 is of a message that no receipt settles
        and message.epoch == receipt.epoch
        and message.status <= IN_FLIGHT
    ):
        return
    standing = Status(message.status).name.lower().replace("_", " ")
    raise StaleReceipt(
        f"The receipt for message {message.stream.hex()} on topic {message.topic} is of an earlier delivery; "
        f"the message is now {standing} with attempt {message.attempt}. Receive it again."
    )


def _requeue(
    message: Message, reason: RequeueReason, error: str | None, due: int, now: int
) -> MessageRequeued:
    return MessageRequeued(message.stream, message.version + 1, now, message.attempt, due, reason, error)


def _sent(event: MessageSent, position: int) -> Message:
    archived = event.due is None
    return Message(
        event.stream,
        event.version,
        ARCHIVED if archived else READY,
        event.topic,
        event.shard,
        position,
        event.size,
        event.at,
        event.expires_at,
        event.due or 0,
        changed_at=event.at,
    )


def _received(message: Message, event: MessageReceived, epoch: int) -> None:
    message.status = IN_FLIGHT
    message.attempt = event.attempt
    message.due = event.due
    message.delivery = event.version
    message.epoch = epoch
    message.received_at = event.at
    message.visibility = message.hidden = event.due - event.at


def _extended(message: Message, event: MessageVisibilityExtended, epoch: int) -> None:
    message.due = event.due
    message.hidden = event.due - event.at


def _acked(message: Message, event: MessageAcked, epoch: int) -> None:
    message.status = ACKED


def _requeued(message: Message, event: MessageRequeued, epoch: int) -> None:
    message.status = READY
    message.due = event.due
    message.reason = event.reason
    if event.reason == "nacked":  # the consumer gave its receipt back; after a time-out it may still ack
        message.delivery = 0
        message.last_error = event.last_error


def _dead_lettered(message: Message, event: MessageDeadLettered, epoch: int) -> None:
    message.status = DEAD
    message.reason = event.reason
    message.last_error = event.last_error
    message.expires_at = event.expires_at


def _redriven(message: Message, event: MessageRedriven, epoch: int) -> None:
    message.status = READY
    message.attempt = 0
    message.delivery = 0
    message.due = event.due
    message.expires_at = event.expires_at
    message.redriven += 1


def _expired(message: Message, event: MessageExpired, epoch: int) -> None:
    message.status = EXPIRED
    message.reason = event.reason


_EVOLVE: dict[type[Event], Callable[[Message, Any, int], None]] = {
    MessageReceived: _received,
    MessageVisibilityExtended: _extended,
    MessageAcked: _acked,
    MessageRequeued: _requeued,
    MessageDeadLettered: _dead_lettered,
    MessageRedriven: _redriven,
    MessageExpired: _expired,
}
