"""The InboxMessage aggregate, and the settlement of its deliveries (SDS-047 2.1, 3.2, 3.3)."""

from typing import Literal
from uuid import UUID, uuid5

import msgspec

from postroom.domain.errors import DuplicateInboxMessage, InvalidTimestamp, Unavailable
from postroom.domain.policy import backoff_ms
from postroom.domain.record import Event

Outcome = Literal["processed", "already_processed", "poison", "unreadable", "unhandled", "failed"]
DeadLetterReason = Literal["poison", "unreadable", "unhandled", "max_deliver"]

MAX_REASON = 1_000
"""Longer reasons are truncated."""
BUSY_RETRY_MS = 1_000


class InboxMessageReceived(Event, frozen=True, gc=False):
    """A delivery of the message started: the first, or one after a failure or a redrive."""

    message_id: str
    subject: str
    attempt: int


class InboxMessageProcessed(Event, frozen=True, gc=False):
    """The handler processed the message, in this delivery or in an earlier one."""

    attempt: int


class InboxMessageFailed(Event, frozen=True, gc=False):
    """A delivery failed; the message will be delivered again."""

    attempt: int
    reason: str


class InboxMessageDeadLettered(Event, frozen=True, gc=False):
    """The message was published to the dead-letter subject (SDS-047 EVT-047-002)."""

    message_id: str
    original_subject: str
    reason: str
    attempts: int


class InboxMessageDiscarded(Event, frozen=True, gc=False):
    """An operator discarded the dead letter.

    Arguments:
        dead_letter: the dead letter as it was on the stream, JSON.
    """

    reason: str
    dead_letter: bytes


InboxEvent = (
    InboxMessageReceived
    | InboxMessageProcessed
    | InboxMessageFailed
    | InboxMessageDeadLettered
    | InboxMessageDiscarded
)


class InboxMessage(msgspec.Struct, frozen=True, gc=False):
    """State of a message in one inbox: the fold of its events (SDS-047 section 2.1); times in µs UTC.

    Arguments:
        stream: stream id of its history, 16 bytes; see `inbox_stream`.
        attempts: deliveries started, over all workers and restarts.
        last_error: why the latest failed delivery failed.
        in_flight_since: when the current delivery started; None if none is in progress.
    """

    stream: bytes
    version: int
    message_id: UUID
    subject: str
    received_at: int
    processed_at: int | None = None
    attempts: int = 1
    last_error: str | None = None
    dead_lettered_at: int | None = None
    in_flight_since: int | None = None

    @property
    def is_settled(self) -> bool:
        """Return whether the message was processed or dead-lettered."""
        return self.processed_at is not None or self.dead_lettered_at is not None


def inbox_stream(message_id: UUID, inbox: str) -> bytes:
    """Return the stream id of a message's history in one inbox.

    It differs from the message id, which is the stream id of the outbox event if the sender shares the
    database, and between the inboxes of several subscribers.
    """
    return uuid5(message_id, inbox).bytes


def receive(
    message: InboxMessage | None,
    message_id: UUID,
    inbox: str,
    subject: str,
    now: int,
    *,
    redrive: bool = False,
    busy_ms: int = 0,
) -> list[InboxEvent]:
    """Start a delivery.

    Arguments:
        message: its state in the inbox; None for a new message.
        inbox: name of the inbox, for the id of the history.
        redrive: deliver the message although it is a dead letter.
        busy_ms: how long a delivery in progress prevents another; after that, its worker is assumed dead.

    Raises:
        DuplicateInboxMessage: the message is settled (SDS-047 POL-047-003).
        Unavailable: another delivery of the message is in progress.
    """
    if message is None:
        return [InboxMessageReceived(inbox_stream(message_id, inbox), 1, now, str(message_id), subject, 1)]
    if message.processed_at is not None:
        raise DuplicateInboxMessage(
            f"Message {message_id} of {subject} was already processed; acknowledge it without handling it."
        )
    if message.dead_lettered_at is not None and not redrive:
        raise DuplicateInboxMessage(
            f"Message {message_id} of {subject} is a dead letter; see postroom inbox dlq redrive."
        )
    # The clocks of two workers differ, so the other delivery may seem to start in the future.
    if message.in_flight_since is not None and abs(now - message.in_flight_since) < busy_ms * 1_000:
        raise Unavailable(
            f"Message {message_id} of {subject} is being handled; deliver it again later.", BUSY_RETRY_MS
        )
    return [
        InboxMessageReceived(
            message.stream, message.version + 1, now, str(message_id), subject, message.attempts + 1
        )
    ]


def process(message: InboxMessage, now: int) -> list[InboxEvent]:
    """Record that the handler processed the message; the second time changes nothing.

    Raises: InvalidTimestamp if `now` is before the message was received (SDS-047 POL-047-004).
    """
    if message.processed_at is not None:
        return []
    if now < message.received_at:
        raise InvalidTimestamp(
            f"Message {message.message_id} can't have been processed at {now} µs, before it was received at "
            f"{message.received_at} µs; synchronise the clocks of the workers."
        )
    return [InboxMessageProcessed(message.stream, message.version + 1, now, message.attempts)]


def fail(message: InboxMessage, reason: str, now: int) -> list[InboxEvent]:
    """Record that a delivery failed; changes nothing for a settled message."""
    if message.is_settled:
        return []
    return [
        InboxMessageFailed(message.stream, message.version + 1, now, message.attempts, reason[:MAX_REASON])
    ]


def dead_letter(message: InboxMessage, reason: str, now: int) -> list[InboxEvent]:
    """Record that the message was published to the dead-letter subject (SDS-047 CMD-052)."""
    if message.is_settled:
        return []
    return [
        InboxMessageDeadLettered(
            message.stream,
            message.version + 1,
            now,
            str(message.message_id),
            message.subject,
            reason[:MAX_REASON],
            message.attempts,
        )
    ]


def discard(message: InboxMessage, reason: str, dead_letter: bytes, now: int) -> list[InboxEvent]:
    """Record that an operator discarded the dead letter, and store it in the history."""
    if message.dead_lettered_at is None:
        return []
    return [InboxMessageDiscarded(message.stream, message.version + 1, now, reason[:MAX_REASON], dead_letter)]


def evolve(message: InboxMessage | None, event: InboxEvent) -> InboxMessage:
    """Return the message after one more event of its history."""
    if message is None:
        if not isinstance(event, InboxMessageReceived):
            raise ValueError(f"The history of an inbox message can't start with {type(event).__name__}.")
        message_id = UUID(event.message_id)
        return InboxMessage(
            event.stream, event.version, message_id, event.subject, event.at, in_flight_since=event.at
        )
    changed = msgspec.structs.replace(message, version=event.version, in_flight_since=None)
    match event:
        case InboxMessageReceived():
            return msgspec.structs.replace(
                changed, attempts=event.attempt, dead_lettered_at=None, in_flight_since=event.at
            )
        case InboxMessageProcessed():
            return msgspec.structs.replace(changed, processed_at=event.at, dead_lettered_at=None)
        case InboxMessageFailed():
            return msgspec.structs.replace(changed, last_error=event.reason)
        case InboxMessageDeadLettered():
            return msgspec.structs.replace(changed, last_error=event.reason, dead_lettered_at=event.at)
        case InboxMessageDiscarded():
            return changed


class HandlerResult(msgspec.Struct, frozen=True):
    """Response of a handler to a message.

    Arguments:
        outcome: `poison` if the handler rejects the message permanently, `unreadable` if it isn't a request,
            `unhandled` if its event type has no handler.
        reason: why the message was not processed.
        retry_after_ms: delay that the handler asks for before the next delivery.
    """

    outcome: Outcome
    reason: str | None = None
    retry_after_ms: int | None = None


PROCESSED = HandlerResult("processed")


class DeliveryPolicy(msgspec.Struct, frozen=True):
    """Number and spacing of attempts to deliver a message; times in ms.

    Arguments:
        max_deliver: attempts after which the message is dead-lettered.
        backoff_base_ms, backoff_max_ms: bounds of the exponential backoff, which has full jitter.
        server_limit: deliveries after which the server stops delivering a message; None if it never does.
    """

    max_deliver: int = 20
    backoff_base_ms: int = 1_000
    backoff_max_ms: int = 120_000
    server_limit: int | None = None


class Acknowledge(msgspec.Struct, frozen=True):
    """Settlement: acknowledge the message (SDS-047 POL-047-005)."""


class RouteToDeadLetter(msgspec.Struct, frozen=True):
    """Settlement: publish the message to the dead-letter subject, then acknowledge it (POL-047-006)."""

    reason: DeadLetterReason
    last_error: str


class Redeliver(msgspec.Struct, frozen=True):
    """Settlement: don't acknowledge the message, and request redelivery after `delay_ms` (POL-047-007)."""

    delay_ms: int
    last_error: str


Settlement = Acknowledge | RouteToDeadLetter | Redeliver


def settle(
    result: HandlerResult, attempt: int, delivered: int, policy: DeliveryPolicy, jitter: float
) -> Settlement:
    """Return how to settle a delivery (SDS-047 POL-047-005 to 007); the last attempt is dead-lettered.

    Arguments:
        attempt: attempts so far, as the inbox counts them.
        delivered: deliveries so far, as the source counts them; used only if its server has a limit.
        jitter: a uniform random number in [0, 1).
    """
    reason = result.reason or "the handler gave no reason"
    match result.outcome:
        case "processed" | "already_processed":
            return Acknowledge()
        case "poison" | "unreadable" | "unhandled":
            return RouteToDeadLetter(result.outcome, reason)
    if attempt >= policy.max_deliver or (policy.server_limit and delivered >= policy.server_limit):
        return RouteToDeadLetter("max_deliver", reason)
    retry_after_ms = min(result.retry_after_ms or 0, policy.backoff_max_ms)
    return Redeliver(retry_after_ms or backoff_ms(policy, attempt, jitter), reason)


def give_up(message: InboxMessage, policy: DeliveryPolicy) -> RouteToDeadLetter | None:
    """Return the settlement of a message whose worker was killed during the last attempt; None otherwise."""
    if message.attempts <= policy.max_deliver:
        return None
    return RouteToDeadLetter("max_deliver", message.last_error or "the worker ended during the last attempt")
