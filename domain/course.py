"""The course of a message: its rounds in the queue and its deliveries, and how each of them ended.

A fold like that of `domain.message`, but of what happened rather than of how things stand: it keeps every
delivery. Both accounts of the past, why a message is where it is and what another policy would have made of
it, are told from it.
"""

from collections.abc import Iterable
from typing import Literal

import msgspec

from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import (
    DeadReason,
    ExpiryReason,
    MessageAcked,
    MessageDeadLettered,
    MessageEvent,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.policy import TopicPolicy

How = Literal["acked", "nacked", "timed_out"]


class Mark(msgspec.Struct, frozen=True, gc=False):
    """Where and when something stands in the log: position, log time in µs, and the owner's epoch."""

    position: int
    at: int
    epoch: int


class Extension(msgspec.Struct, frozen=True, gc=False):
    """The consumer got more time, until `due` (µs)."""

    mark: Mark
    due: int


class Takeover(msgspec.Struct, frozen=True, gc=False):
    """A process took the mailbox over; on a new clock, what was in flight was hidden as long again.

    Arguments:
        deadline: µs at which the delivery would reappear from then on.
    """

    mark: Mark
    owner: str
    clock_continues: bool
    deadline: int


class Ending(msgspec.Struct, frozen=True, gc=False):
    """How a delivery ended.

    Arguments:
        due: µs from which the message may be delivered again; None where this was the end of its round.
        error: what the consumer said.
        policy: what the topic promised then; None where the log does not say.
    """

    mark: Mark
    how: How
    due: int | None
    error: str | None
    policy: TopicPolicy | None


class Delivery(msgspec.Struct):
    """One delivery of a message.

    Arguments:
        available: µs from which it could have been made; consumers took it at `mark.at`.
        visibility: µs for which it was hidden at first.
        deadline: µs at which it reappears, or did, unless settled: extensions and takeovers included.
        takeovers: those that came while it was in flight.
        ending: None while it is in flight.
        late_ack: the ack that came after the visibility ended, and before anybody received it again.
    """

    mark: Mark
    attempt: int
    consumer: str | None
    available: int
    visibility: int
    deadline: int
    extensions: list[Extension] = []
    takeovers: list[Takeover] = []
    ending: Ending | None = None
    late_ack: Mark | None = None

    @property
    def hidden(self) -> int:
        """Return for how long, in µs, RECV or the latest EXTEND hid it."""
        latest = self.extensions[-1] if self.extensions else None
        return self.visibility if latest is None else latest.due - latest.mark.at


class Death(msgspec.Struct, frozen=True, gc=False):
    """The message became a dead letter, to be kept until `expires_at` (µs)."""

    mark: Mark
    reason: DeadReason
    error: str | None
    expires_at: int


class Round(msgspec.Struct):
    """One stay in the queue with attempts counted from 1: since it was sent, or redriven.

    Arguments:
        due: µs from which it may be delivered.
        expires_at: µs at which it dies undelivered.
    """

    mark: Mark
    due: int
    expires_at: int
    deliveries: list[Delivery] = []
    death: Death | None = None


class Removal(msgspec.Struct, frozen=True, gc=False):
    """The message left the mailbox unsettled."""

    mark: Mark
    reason: ExpiryReason


class Course(msgspec.Struct):
    """All that happened to one message; `rounds` is empty for one that is only archived."""

    stream: bytes
    topic: str
    shard: int
    sent: Mark
    rounds: list[Round] = []
    removal: Removal | None = None

    @property
    def deliveries(self) -> list[Delivery]:
        """Return all deliveries, in their order."""
        return [delivery for each in self.rounds for delivery in each.deliveries]

    @property
    def in_flight(self) -> Delivery | None:
        """Return the delivery that nothing has ended yet, or None."""
        latest = self.rounds[-1].deliveries[-1] if self.rounds and self.rounds[-1].deliveries else None
        return latest if latest is not None and latest.ending is None else None

    @property
    def is_settled(self) -> bool:
        """Tell whether nothing more can happen: it was acked, archived or removed."""
        if not self.rounds or self.removal is not None:
            return True
        latest = self.rounds[-1].deliveries[-1] if self.rounds[-1].deliveries else None
        return latest is not None and (
            latest.late_ack is not None or (latest.ending is not None and latest.ending.how == "acked")
        )


def begin(sent: MessageSent, position: int, epoch: int) -> Course:
    """Return the course of a message that was just sent."""
    mark = Mark(position, sent.at, epoch)
    course = Course(sent.stream, sent.topic, sent.shard, mark)
    if sent.due is not None:
        course.rounds.append(Round(mark, sent.due, sent.expires_at))
    return course


def follow(
    course: Course, event: MessageEvent, position: int, epoch: int, policy: TopicPolicy | None = None
) -> None:
    """Add what happened next.

    Arguments:
        position, epoch: of the event's record.
        policy: what the topic promised then; None where nobody knows.
    """
    mark = Mark(position, event.at, epoch)
    match event:
        case MessageReceived():
            current = course.rounds[-1]
            before = current.deliveries[-1].ending if current.deliveries else None
            available = before.due if before is not None and before.due is not None else current.due
            visibility = event.due - event.at
            current.deliveries.append(
                Delivery(mark, event.attempt, event.consumer, available, visibility, event.due)
            )
        case MessageVisibilityExtended():
            delivery = _latest(course)
            delivery.extensions.append(Extension(mark, event.due))
            delivery.deadline = event.due
        case MessageAcked():
            delivery = _latest(course)
            if delivery.ending is None:
                delivery.ending = Ending(mark, "acked", None, None, policy)
            else:
                delivery.late_ack = mark
        case MessageRequeued():
            how: How = "nacked" if event.reason == "nacked" else "timed_out"
            _latest(course).ending = Ending(mark, how, event.due, event.last_error, policy)
        case MessageDeadLettered():
            _die(course, event, mark, policy)
        case MessageRedriven():
            course.rounds.append(Round(mark, event.due, event.expires_at))
        case MessageExpired():
            course.removal = Removal(mark, event.reason)


def take_over(course: Course, taken: OwnershipTaken, position: int) -> None:
    """Note that the mailbox was taken over; only a delivery in flight cares (ADR 0007)."""
    delivery = course.in_flight
    if delivery is None:
        return
    mark = Mark(position, taken.at, taken.epoch)
    if not taken.clock_continues:
        delivery.deadline = taken.at + delivery.hidden
    delivery.takeovers.append(Takeover(mark, taken.owner, taken.clock_continues, delivery.deadline))


def trace(
    happenings: Iterable[tuple[int, int, MessageEvent | OwnershipTaken, TopicPolicy | None]],
) -> Course | None:
    """Return the course that a message took, or None where its beginning is gone.

    Arguments:
        happenings: position, epoch, event and topic policy in force, of the message's events and of those by
            which its mailbox was taken over, in the order of positions.
    """
    course: Course | None = None
    for position, epoch, event, policy in happenings:
        if isinstance(event, MessageSent):
            course = begin(event, position, epoch)
        elif course is not None:
            if isinstance(event, OwnershipTaken):
                take_over(course, event, position)
            else:
                follow(course, event, position, epoch, policy)
    return course


def _latest(course: Course) -> Delivery:
    return course.rounds[-1].deliveries[-1]


def _die(course: Course, event: MessageDeadLettered, mark: Mark, policy: TopicPolicy | None) -> None:
    delivery = course.in_flight
    if delivery is not None:
        # The log says that the last attempt failed, not how; only time ends a delivery that has none left.
        how: How = "timed_out" if event.at >= delivery.deadline else "nacked"
        delivery.ending = Ending(mark, how, None, event.last_error, policy)
    course.rounds[-1].death = Death(mark, event.reason, event.last_error, event.expires_at)
