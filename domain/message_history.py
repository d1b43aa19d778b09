"""The history of a message: its rounds in the queue, its deliveries, and their outcomes.

Like the state in `domain.message`, it is a fold of the message's events, but it retains every delivery.
Explanations of messages and policy simulations are derived from it.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import (
    REPLACED,
    DeadReason,
    ExpiryReason,
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
    RequeueReason,
)
from postroom.domain.policy import TopicPolicy

OutcomeKind = Literal["acked", "nacked", "released", "timed_out"]
_REQUEUED: dict[RequeueReason, OutcomeKind] = {
    "nacked": "nacked",
    "released": "released",
    "visibility_expired": "timed_out",
}


class LogPosition(msgspec.Struct, frozen=True, gc=False):
    """Position of an event in the log, with its log time in µs and the owner's epoch."""

    position: int
    at: int
    epoch: int


class Extension(msgspec.Struct, frozen=True, gc=False):
    """Extension of a delivery's visibility to `due` (µs)."""

    entry: LogPosition
    due: int


class Takeover(msgspec.Struct, frozen=True, gc=False):
    """Ownership change during a delivery; a new clock restarts the delivery's visibility timeout.

    Arguments:
        deadline: µs at which the delivery times out after the takeover.
    """

    entry: LogPosition
    owner: str
    clock_continues: bool
    deadline: int


class DeliveryOutcome(msgspec.Struct, frozen=True, gc=False):
    """Outcome of a delivery.

    Arguments:
        due: µs from which the message may be delivered again; None where the outcome ended its round.
        error: reason that the consumer reported.
        policy: the topic's policy at that time; None where the log does not contain it.
    """

    entry: LogPosition
    kind: OutcomeKind
    due: int | None
    error: str | None
    policy: TopicPolicy | None


class PastDelivery(msgspec.Struct):
    """Delivery in the history of a message.

    Arguments:
        available: µs from which the message was available; it was received at `entry.at`.
        visibility: initial visibility, µs.
        deadline: µs at which it times out, with extensions and takeovers.
        takeovers: changes of ownership while it was in flight.
        outcome: None while it is in flight.
        late_ack: the ack after the deadline and before the next delivery, if any.
        principal, capability: of the consumer; see `MessageReceived`.
    """

    entry: LogPosition
    attempt: int
    consumer: str | None
    available: int
    visibility: int
    deadline: int
    extensions: list[Extension] = []
    takeovers: list[Takeover] = []
    outcome: DeliveryOutcome | None = None
    late_ack: LogPosition | None = None
    principal: str | None = None
    capability: str | None = None

    @property
    def hidden(self) -> int:
        """Return the visibility timeout (µs) set by RECV or by the latest EXTEND."""
        latest = self.extensions[-1] if self.extensions else None
        return self.visibility if latest is None else latest.due - latest.entry.at


class DeadLettering(msgspec.Struct, frozen=True, gc=False):
    """Dead-lettering of a message, which is retained until `expires_at` (µs)."""

    entry: LogPosition
    reason: DeadReason
    error: str | None
    expires_at: int


class Rescheduling(msgspec.Struct, frozen=True, gc=False):
    """Change of the time from which a waiting message may be delivered; see `MessageRescheduled`."""

    entry: LogPosition
    due: int
    expires_at: int
    principal: str | None


class Round(msgspec.Struct):
    """Period in the queue that starts when the message is sent or redriven; attempts count from 1.

    Arguments:
        due: µs from which it may be delivered.
        expires_at: µs at which it is dead-lettered if undelivered.
        replacement: since when the dead letter has a copy in its place, which a redrive job sent.
    """

    entry: LogPosition
    due: int
    expires_at: int
    deliveries: list[PastDelivery] = []
    reschedulings: list[Rescheduling] = []
    dead_lettering: DeadLettering | None = None
    replacement: DeadLettering | None = None

    @property
    def rescheduling(self) -> Rescheduling | None:
        """Return the latest rescheduling since the latest delivery, if any."""
        latest = self.reschedulings[-1] if self.reschedulings else None
        since = self.deliveries[-1].entry if self.deliveries else self.entry
        return latest if latest is not None and latest.entry.position > since.position else None

    @property
    def available(self) -> int:
        """Return the µs from which it may be delivered next."""
        if self.rescheduling is not None:
            return self.rescheduling.due
        outcome = self.deliveries[-1].outcome if self.deliveries else None
        return self.due if outcome is None or outcome.due is None else outcome.due

    @property
    def expiry(self) -> int:
        """Return the µs at which it is dead-lettered if undelivered."""
        return self.reschedulings[-1].expires_at if self.reschedulings else self.expires_at


class Removal(msgspec.Struct, frozen=True, gc=False):
    """Removal of an unsettled message; see `MessageExpired`."""

    entry: LogPosition
    reason: ExpiryReason
    note: str | None = None
    principal: str | None = None


class MessageHistory(msgspec.Struct):
    """History of a message; `rounds` is empty for an archived message.

    `policy` is its topic's when it was sent; None if unknown.
    """

    stream: bytes
    topic: str
    shard: int
    sent: LogPosition
    policy: TopicPolicy | None = None
    rounds: list[Round] = []
    removal: Removal | None = None

    @property
    def deliveries(self) -> list[PastDelivery]:
        """Return all deliveries in order."""
        return [delivery for each in self.rounds for delivery in each.deliveries]

    @property
    def in_flight(self) -> PastDelivery | None:
        """Return the current delivery if it has no outcome yet, or None."""
        if self.removal is not None:
            return None
        latest = self.rounds[-1].deliveries[-1] if self.rounds and self.rounds[-1].deliveries else None
        return latest if latest is not None and latest.outcome is None else None

    @property
    def is_settled(self) -> bool:
        """Return whether the message was acked, archived or removed."""
        if not self.rounds or self.removal is not None:
            return True
        latest = self.rounds[-1].deliveries[-1] if self.rounds[-1].deliveries else None
        return latest is not None and (
            latest.late_ack is not None or (latest.outcome is not None and latest.outcome.kind == "acked")
        )


def begin(sent: MessageSent, position: int, epoch: int, policy: TopicPolicy | None = None) -> MessageHistory:
    """Return the history that begins with this event; for the arguments, see `follow`."""
    entry = LogPosition(position, sent.at, epoch)
    history = MessageHistory(sent.stream, sent.topic, sent.shard, entry, policy)
    if sent.due is not None:
        history.rounds.append(Round(entry, sent.due, sent.expires_at))
    return history


def follow(
    history: MessageHistory, event: MessageEvent, position: int, epoch: int, policy: TopicPolicy | None = None
) -> None:
    """Apply the next event to a history, in place.

    Arguments:
        position, epoch: of the event's record.
        policy: the topic's policy at that time; None if unknown.
    """
    entry = LogPosition(position, event.at, epoch)
    match event:
        case MessageReceived():
            current = history.rounds[-1]
            visibility = event.due - event.at
            current.deliveries.append(
                PastDelivery(
                    entry,
                    event.attempt,
                    event.consumer,
                    current.available,
                    visibility,
                    event.due,
                    principal=event.principal,
                    capability=event.capability,
                )
            )
        case MessageVisibilityExtended():
            delivery = _latest(history)
            delivery.extensions.append(Extension(entry, event.due))
            delivery.deadline = event.due
        case MessageAcked():
            delivery = _latest(history)
            if delivery.outcome is None:
                delivery.outcome = DeliveryOutcome(entry, "acked", None, None, policy)
            else:
                delivery.late_ack = entry
        case MessageRequeued():
            outcome = DeliveryOutcome(entry, _REQUEUED[event.reason], event.due, event.last_error, policy)
            _latest(history).outcome = outcome
        case MessageDeadLettered():
            _dead_letter(history, event, entry, policy)
        case MessageRedriven():
            history.rounds.append(Round(entry, event.due, event.expires_at))
        case MessageRescheduled():
            rescheduling = Rescheduling(entry, event.due, event.expires_at, event.principal)
            history.rounds[-1].reschedulings.append(rescheduling)
        case MessageExpired():
            history.removal = Removal(entry, event.reason, event.note, event.principal)


def take_over(history: MessageHistory, event: OwnershipTaken, position: int) -> None:
    """Add a change of the mailbox's ownership, which affects only a delivery in flight (ADR 0007)."""
    delivery = history.in_flight
    if delivery is None:
        return
    entry = LogPosition(position, event.at, event.epoch)
    if not event.clock_continues:
        delivery.deadline = event.at + delivery.hidden
    delivery.takeovers.append(Takeover(entry, event.owner, event.clock_continues, delivery.deadline))


def trace(
    events: Iterable[tuple[int, int, MessageEvent | OwnershipTaken, TopicPolicy | None]],
) -> MessageHistory | None:
    """Return the history of a message, or None where retention removed its first event.

    Arguments:
        events: position, epoch, event and topic policy of the message's events and the mailbox's changes of
            ownership, ordered by position.
    """
    history: MessageHistory | None = None
    for position, epoch, event, policy in events:
        if isinstance(event, MessageSent):
            history = begin(event, position, epoch, policy)
        elif history is not None:
            if isinstance(event, OwnershipTaken):
                take_over(history, event, position)
            else:
                follow(history, event, position, epoch, policy)
    return history


def _latest(history: MessageHistory) -> PastDelivery:
    return history.rounds[-1].deliveries[-1]


def _dead_letter(
    history: MessageHistory, event: MessageDeadLettered, entry: LogPosition, policy: TopicPolicy | None
) -> None:
    delivery = history.in_flight
    if delivery is not None:
        # The log does not record how the last attempt ended: at or after its deadline, it timed out.
        is_late = event.at >= delivery.deadline and event.reason != "rejected"
        kind: OutcomeKind = "timed_out" if is_late else "nacked"
        delivery.outcome = DeliveryOutcome(entry, kind, None, event.last_error, policy)
    current, latest = (
        history.rounds[-1],
        DeadLettering(entry, event.reason, event.last_error, event.expires_at),
    )
    if current.dead_lettering is None:
        current.dead_lettering = latest
    elif event.reason == REPLACED:
        current.replacement = latest
    else:  # the job that replaced it was undone
        current.replacement = None
        current.dead_lettering = msgspec.structs.replace(current.dead_lettering, expires_at=event.expires_at)
