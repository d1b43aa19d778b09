"""The InboxMessage aggregate, and what follows from a handler's answer (SDS-047 2.1, 3.2, 3.3)."""

from typing import Literal
from uuid import UUID, uuid5

import msgspec

from postroom.domain.errors import DuplicateInboxMessage, InvalidTimestamp
from postroom.domain.event import Event
from postroom.domain.policy import backoff_ms

Outcome = Literal["processed", "already_processed", "poison", "unreadable", "failed"]
DeadLetterReason = Literal["poison", "unreadable", "max_deliver"]

SUCCESS = frozenset({200, 201, 204})
ALREADY_PROCESSED = 409
POISON = 422
MAX_REASON = 1_000
"""Characters kept of what a handler said."""


class InboxMessageReceived(Event, frozen=True, gc=False):
    """A delivery of the message was begun, the first, or one after a failure or a redrive."""

    message_id: str
    subject: str
    attempt: int


class InboxMessageProcessed(Event, frozen=True, gc=False):
    """The handler has dealt with the message, in this delivery or in an earlier one."""

    attempt: int


class InboxMessageFailed(Event, frozen=True, gc=False):
    """A delivery failed and will be repeated."""

    attempt: int
    reason: str


class InboxMessageDeadLettered(Event, frozen=True, gc=False):
    """The message went to the dead-letter subject with its reason (SDS-047 EVT-047-002)."""

    message_id: str
    original_subject: str
    reason: str
    attempts: int


InboxEvent = InboxMessageReceived | InboxMessageProcessed | InboxMessageFailed | InboxMessageDeadLettered


class InboxMessage(msgspec.Struct, frozen=True, gc=False):
    """State of a message in one inbox: the fold of its events (SDS-047 section 2.1); times in µs UTC.

    Arguments:
        stream: id of its history, 16 bytes; see `inbox_stream`.
        attempts: deliveries begun, over all workers and restarts.
        last_error: why its latest failed delivery failed.
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

    @property
    def is_settled(self) -> bool:
        """Tell whether nothing is left to do: it was processed, or is a dead letter."""
        return self.processed_at is not None or self.dead_lettered_at is not None


def inbox_stream(message_id: UUID, inbox: str) -> bytes:
    """Return the id of a message's history in one inbox.

    It differs from the message's id, under which the outbox that sent it may keep its own history in the same
    database, and it differs between the inboxes of several subscribers.
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
) -> list[InboxEvent]:
    """Begin a delivery.

    Arguments:
        message: what the inbox knows of it, None if nothing.
        inbox: name of the inbox, for the history's id.
        redrive: deliver it although it is a dead letter.

    Raises: DuplicateInboxMessage when it was dealt with before (SDS-047 POL-047-003).
    """
    if message is None:
        return [InboxMessageReceived(inbox_stream(message_id, inbox), 1, now, str(message_id), subject, 1)]
    if message.processed_at is not None:
        raise DuplicateInboxMessage(
            f"Message {message_id} of {subject} was processed before; acknowledge it, don't handle it again."
        )
    if message.dead_lettered_at is not None and not redrive:
        raise DuplicateInboxMessage(
            f"Message {message_id} of {subject} is a dead letter; see postroom inbox dlq redrive."
        )
    return [
        InboxMessageReceived(
            message.stream, message.version + 1, now, str(message_id), subject, message.attempts + 1
        )
    ]


def process(message: InboxMessage, now: int) -> list[InboxEvent]:
    """Note that the handler has dealt with the message; to do so twice changes nothing.

    Raises: InvalidTimestamp when that was before it was received (SDS-047 POL-047-004).
    """
    if message.processed_at is not None:
        return []
    if now < message.received_at:
        raise InvalidTimestamp(
            f"Message {message.message_id} can't have been processed at {now} µs, before it was received at "
            f"{message.received_at} µs; set the clocks of the workers right."
        )
    return [InboxMessageProcessed(message.stream, message.version + 1, now, message.attempts)]


def fail(message: InboxMessage, reason: str, now: int) -> list[InboxEvent]:
    """Note that a delivery failed; late news of a message that is settled changes nothing."""
    if message.is_settled:
        return []
    return [
        InboxMessageFailed(message.stream, message.version + 1, now, message.attempts, reason[:MAX_REASON])
    ]


def dead_letter(message: InboxMessage, reason: str, now: int) -> list[InboxEvent]:
    """Note that the message went to the dead-letter subject (SDS-047 CMD-052)."""
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


def evolve(message: InboxMessage | None, event: InboxEvent) -> InboxMessage:
    """Return the message after one more event of its history."""
    if message is None:
        if not isinstance(event, InboxMessageReceived):
            raise ValueError(f"The history of an inbox message can't begin with {type(event).__name__}.")
        return InboxMessage(event.stream, event.version, UUID(event.message_id), event.subject, event.at)
    changed = msgspec.structs.replace(message, version=event.version)
    match event:
        case InboxMessageReceived():
            return msgspec.structs.replace(changed, attempts=event.attempt, dead_lettered_at=None)
        case InboxMessageProcessed():
            return msgspec.structs.replace(changed, processed_at=event.at, dead_lettered_at=None)
        case InboxMessageFailed():
            return msgspec.structs.replace(changed, last_error=event.reason)
        case InboxMessageDeadLettered():
            return msgspec.structs.replace(changed, last_error=event.reason, dead_lettered_at=event.at)


class HandlerResult(msgspec.Struct, frozen=True):
    """What became of handing a message to its handler.

    Arguments:
        outcome: poison is what the handler refuses, unreadable what can't even be handed to it.
        reason: why it is either, or why it failed.
        retry_after_ms: when the handler asks to try again.
    """

    outcome: Outcome
    reason: str | None = None
    retry_after_ms: int | None = None


PROCESSED = HandlerResult("processed")


def result_of(status: int, said: str = "", retry_after_ms: int | None = None) -> HandlerResult:
    """Return what the status of an HTTP response means (SDS-047 section 12).

    200, 201 and 204 say that the message was processed, 409 that it was before, 422 that it is poison. All
    else is a failure and repeated: a redirect, a 404 or a 401 tell of a wrong address or key, not of a bad
    message, 202 promises nothing, and 429 and 503 may say when to try again.

    Arguments:
        said: the beginning of the response's body.
    """
    reason = f"HTTP {status}: {said}"[:MAX_REASON] if said else f"HTTP {status}"
    if status in SUCCESS:
        return PROCESSED
    if status == ALREADY_PROCESSED:
        return HandlerResult("already_processed")
    if status == POISON:
        return HandlerResult("poison", reason)
    return HandlerResult("failed", reason, retry_after_ms)


class DeliveryPolicy(msgspec.Struct, frozen=True):
    """Say how often and how soon a message is delivered again; times in ms.

    Arguments:
        max_deliver: attempts until a message is dead-lettered.
        backoff_base_ms, backoff_max_ms: the exponential backoff between two attempts, with full jitter.
        server_limit: deliveries after which the server of a foreign consumer gives a message up by itself;
            None where it never does.
    """

    max_deliver: int = 20
    backoff_base_ms: int = 1_000
    backoff_max_ms: int = 120_000
    server_limit: int | None = None


class Acknowledge(msgspec.Struct, frozen=True):
    """The message is settled (SDS-047 POL-047-005)."""


class DeadLetter(msgspec.Struct, frozen=True):
    """The message goes to the dead-letter subject, and is acknowledged once it is there (POL-047-006)."""

    reason: DeadLetterReason
    last_error: str


class Redeliver(msgspec.Struct, frozen=True):
    """The message is not acknowledged and comes again after a while, in ms (POL-047-007)."""

    delay_ms: int
    last_error: str


Settlement = Acknowledge | DeadLetter | Redeliver


def settle(
    result: HandlerResult, attempt: int, delivered: int, policy: DeliveryPolicy, jitter: float
) -> Settlement:
    """Decide what follows from a handler's answer (SDS-047 POL-047-005 to 007).

    The last attempt is dead-lettered, never dropped.

    Arguments:
        attempt: attempts so far, as the inbox counts them.
        delivered: deliveries so far, as the source counts them; it matters only where its server has a limit.
        jitter: a uniform random number in [0, 1), drawn by the caller.
    """
    reason = result.reason or "the handler gave no reason"
    match result.outcome:
        case "processed" | "already_processed":
            return Acknowledge()
        case "poison" | "unreadable":
            return DeadLetter(result.outcome, reason)
    if attempt >= policy.max_deliver or (policy.server_limit and delivered >= policy.server_limit):
        return DeadLetter("max_deliver", reason)
    asked = min(result.retry_after_ms or 0, policy.backoff_max_ms)
    return Redeliver(asked or backoff_ms(policy, attempt, jitter), reason)


def spent(message: InboxMessage, policy: DeliveryPolicy) -> DeadLetter | None:
    """Return what to do with a message whose attempts are used up: a worker ended during the last one."""
    if message.attempts <= policy.max_deliver:
        return None
    return DeadLetter("max_deliver", message.last_error or "the worker ended during the last attempt")
