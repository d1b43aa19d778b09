"""The Message aggregate: its decisions, which return the events of a change, and its fold."""

from collections.abc import Callable
from typing import Any

from postroom.domain.errors import FrameTooLarge, InvalidRequest, StaleReceipt
from postroom.domain.message import (
    ACKED,
    ARCHIVED,
    DEAD,
    EXPIRED,
    IN_FLIGHT,
    MS,
    READY,
    DeadReason,
    Deliveries,
    ExpiryReason,
    Message,
    MessageAcked,
    MessageDeadLettered,
    MessageEvent,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
    NackAction,
    Receipt,
    RequeueReason,
    Status,
)
from postroom.domain.names import message_id
from postroom.domain.policy import TopicPolicy, backoff_ms
from postroom.domain.record import Event


def receive(
    message: Message,
    visibility_ms: int,
    consumer: str | None,
    now: int,
    *,
    principal: str | None,
    capability: str | None,
) -> MessageReceived:
    """Deliver a ready message and hide it for `visibility_ms` (svc-mailbox I-3)."""
    return MessageReceived(
        message.stream,
        message.version + 1,
        now,
        message.attempt + 1,
        now + visibility_ms * MS,
        consumer,
        principal,
        capability,
    )


def ack(
    message: Message,
    receipt: Receipt,
    now: int,
    *,
    result: bytes | None = None,
    result_type: str | None = None,
    most: int = 0,
) -> list[MessageEvent]:
    """Settle a message; repeating it with the same receipt changes nothing (svc-mailbox I-3).

    A delivery that timed out may be acked until the message is delivered again. The ack of a delivery whose
    message was erased changes nothing.

    Arguments:
        result, result_type: see `MessageAcked`.
        most: maximum size of the result, in bytes.

    Raises: StaleReceipt when the message has since been redelivered, dead-lettered or removed, FrameTooLarge
        when the result is too large.
    """
    if _is_latest(message, receipt) and (message.status == ACKED or _was_erased(message)):
        return []
    _require_current(message, receipt)
    if result is not None and len(result) > most:
        raise FrameTooLarge(
            f"The result of message {message_id(message.stream)} has {len(result):,} bytes, above the limit "
            f"result_bytes of {most:,}, so the message was not acked; store it elsewhere and return a "
            "reference."
        )
    return [MessageAcked(message.stream, message.version + 1, now, message.attempt, result, result_type)]


def nack(
    message: Message,
    receipt: Receipt,
    policy: TopicPolicy,
    now: int,
    *,
    reason: str | None,
    delay_ms: int | None,
    jitter: float,
    action: NackAction = "retry",
    traceback: bytes | None = None,
) -> list[MessageEvent]:
    """Fail a delivery: requeue with backoff, or dead-letter after the last attempt (svc-mailbox P-7).

    The nack of a delivery whose message was erased changes nothing.

    Arguments:
        action, traceback: see `Nack`.
        delay_ms: delay to use instead of the policy's backoff.
        jitter: a uniform random number in [0, 1).

    Raises: StaleReceipt when the delivery has ended.
    """
    if _is_latest(message, receipt) and _was_erased(message):
        return []
    _require_current(message, receipt)
    if action == "reject":
        return [dead_letter(message, "rejected", reason, policy, now, traceback)]
    if message.status == READY:  # it timed out and was requeued
        return []
    if action == "release":
        return [release(message, reason, now + (delay_ms or 0) * MS, now)]
    if message.attempt >= policy.max_attempts:
        return [dead_letter(message, "max_attempts", reason, policy, now, traceback)]
    hidden = backoff_ms(policy, message.attempt, jitter) if delay_ms is None else delay_ms
    return [_requeue(message, "nacked", reason, now + hidden * MS, now)]


def extend(
    message: Message, receipt: Receipt, visibility_ms: int, policy: TopicPolicy, now: int
) -> list[MessageEvent]:
    """Hide a received message for `visibility_ms` from now, within the in-flight retention (svc-mailbox P-9).

    Raises: StaleReceipt when the delivery has ended or reached the in-flight retention.
    """
    _require_current(message, receipt)
    max_due = message.received_at + message.visibility * policy.in_flight_retention_visibilities
    due = min(now + visibility_ms * MS, max_due)
    if message.status == READY or due <= now:
        raise StaleReceipt(
            f"The delivery of message {message_id(message.stream)} on topic {message.topic} is over; receive "
            "it again."
        )
    return [MessageVisibilityExtended(message.stream, message.version + 1, now, message.attempt, due)]


def time_out(message: Message, policy: TopicPolicy, now: int) -> MessageRequeued | MessageDeadLettered:
    """Time out a delivery: requeue, or dead-letter after the last attempt (svc-mailbox C-3)."""
    if message.attempt >= policy.max_attempts:
        error = message.last_error or "visibility expired"
        return dead_letter(message, "max_attempts", error, policy, now)
    return _requeue(message, "visibility_expired", None, now, now)


def release(message: Message, reason: str | None, due: int, now: int) -> MessageRequeued:
    """Return a message in flight to its queue, counting no attempt, to be delivered from `due` (µs) on."""
    return _requeue(message, "released", reason, due, now, attempt=message.attempt - 1)


def dead_letter(
    message: Message,
    reason: DeadReason,
    error: str | None,
    policy: TopicPolicy,
    now: int,
    traceback: bytes | None = None,
) -> MessageDeadLettered:
    """Dead-letter a message with `{reason, attempt, last_error}` (svc-mailbox I-4)."""
    return MessageDeadLettered(
        message.stream,
        message.version + 1,
        now,
        message.attempt,
        reason,
        error if error is not None else message.last_error,
        now + policy.dead_retention_ms * MS,
        traceback,
    )


def redrive(message: Message, policy: TopicPolicy, now: int) -> MessageRedriven:
    """Redrive a dead letter; only an operator may (svc-mailbox I-4)."""
    return MessageRedriven(
        message.stream, message.version + 1, now, now, now + policy.ready_retention_ms * MS
    )


def reschedule(
    message: Message, due: int, policy: TopicPolicy, now: int, principal: str | None
) -> MessageRescheduled:
    """Deliver a waiting message not before `due` (µs), and retain it from then on.

    Raises: InvalidRequest when its time to live ends before.
    """
    retention = policy.ready_retention_ms * MS
    expires_at = due + retention
    if message.expires_at < message.sent_at + retention:  # its sender set a time to live
        expires_at = message.expires_at
        if due >= expires_at:
            left_ms, delay_ms = max(0, expires_at - now) // MS, (due - now) // MS
            raise InvalidRequest(
                f"deliver_after_ms must be below the {left_ms} ms after which message "
                f"{message_id(message.stream)} of topic {message.topic} is dead-lettered; it was {delay_ms}."
            )
    return MessageRescheduled(message.stream, message.version + 1, now, due, expires_at, principal)


def expire(
    message: Message | MessageSent,
    reason: ExpiryReason,
    now: int,
    *,
    note: str | None = None,
    principal: str | None = None,
) -> MessageExpired:
    """Remove a message, stored or sent in the same commit; its event stays in the log (svc-mailbox I-14)."""
    return MessageExpired(message.stream, message.version + 1, now, reason, note, principal)


def _was_erased(message: Message) -> bool:
    """Return whether a delivered message was removed as the key of its subject was destroyed."""
    return message.status == EXPIRED and message.reason == "erased" and message.delivery > 0


def _is_latest(message: Message, receipt: Receipt) -> bool:
    """Return whether a receipt is of the message's latest delivery."""
    return message.delivery == receipt.delivery and message.epoch == receipt.epoch


def _require_current(message: Message, receipt: Receipt) -> None:
    if (
        message.delivery == receipt.delivery > 0  # 0: no receipt settles the message
        and message.epoch == receipt.epoch
        and message.status <= IN_FLIGHT
    ):
        return
    status = Status(message.status).name.lower().replace("_", " ")
    rest = (
        f"({message.reason}) and is not delivered again."
        if message.status == EXPIRED
        else f"with attempt {message.attempt}. Receive it again."
    )
    raise StaleReceipt(
        f"The receipt for message {message_id(message.stream)} on topic {message.topic} is of an earlier "
        f"delivery; the message is now {status} {rest}"
    )


def _requeue(
    message: Message,
    reason: RequeueReason,
    error: str | None,
    due: int,
    now: int,
    *,
    attempt: int | None = None,
) -> MessageRequeued:
    counted = message.attempt if attempt is None else attempt
    return MessageRequeued(message.stream, message.version + 1, now, counted, due, reason, error)


def evolve(message: Message | None, event: MessageEvent, position: int = 0, epoch: int = 0) -> Message:
    """Return the message after `event`; an existing message is changed in place.

    Arguments:
        position, epoch: of the record that carries the event.
    """
    kind = type(event)
    if kind is MessageSent:
        return new_message(event, position)  # type: ignore[arg-type]  # narrowed by `kind`, which mypy can't follow
    assert message is not None, f"{kind.__name__} came before MessageSent"
    if message.deliveries is None:
        message.deliveries = Deliveries()
    message.version = event.version
    message.last = position
    message.deliveries.changed_at = event.at
    _EVOLVE[kind](message, message.deliveries, event, epoch)
    return message


def new_message(event: MessageSent, position: int) -> Message:
    """Return the message that was sent at `position`."""
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
        priority=event.priority,
        ready_at=event.due or 0,
        last=position,
        sticky_key=event.sticky_key,
        unique_key=event.unique_key,
    )


def _received(message: Message, deliveries: Deliveries, event: MessageReceived, epoch: int) -> None:
    message.status = IN_FLIGHT
    message.due = event.due
    message.attempt = event.attempt
    message.delivery = event.version
    message.epoch = epoch
    deliveries.received_at = event.at
    deliveries.visibility = deliveries.hidden = event.due - event.at


def _extended(message: Message, deliveries: Deliveries, event: MessageVisibilityExtended, epoch: int) -> None:
    message.due = event.due
    deliveries.hidden = event.due - event.at


def _acked(message: Message, deliveries: Deliveries, event: MessageAcked, epoch: int) -> None:
    message.status = ACKED


def _requeued(message: Message, deliveries: Deliveries, event: MessageRequeued, epoch: int) -> None:
    message.status = READY
    message.due = event.due
    message.attempt = event.attempt
    deliveries.reason = event.reason
    if event.reason != "visibility_expired":  # its receipt is void; after a time-out it is still valid
        message.delivery = 0
    if event.reason == "nacked":
        deliveries.last_error = event.last_error


def _dead_lettered(message: Message, deliveries: Deliveries, event: MessageDeadLettered, epoch: int) -> None:
    message.status = DEAD
    message.expires_at = event.expires_at
    deliveries.reason = event.reason
    deliveries.last_error = event.last_error


def _redriven(message: Message, deliveries: Deliveries, event: MessageRedriven, epoch: int) -> None:
    message.status = READY
    message.due = message.ready_at = event.due
    message.expires_at = event.expires_at
    message.attempt = 0
    message.delivery = 0
    deliveries.redriven += 1


def _rescheduled(message: Message, deliveries: Deliveries, event: MessageRescheduled, epoch: int) -> None:
    message.due = event.due
    message.expires_at = event.expires_at
    if not message.attempt:
        message.ready_at = event.due


def _expired(message: Message, deliveries: Deliveries, event: MessageExpired, epoch: int) -> None:
    message.status = EXPIRED
    deliveries.reason = event.reason


_Change = Callable[[Message, Deliveries, Any, int], None]
_EVOLVE: dict[type[Event], _Change] = {
    MessageReceived: _received,
    MessageVisibilityExtended: _extended,
    MessageAcked: _acked,
    MessageRequeued: _requeued,
    MessageDeadLettered: _dead_lettered,
    MessageRedriven: _redriven,
    MessageRescheduled: _rescheduled,
    MessageExpired: _expired,
}
