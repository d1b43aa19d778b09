"""`ExplainMessage`: what happened to a message and why, in plain words, from the log."""

from collections.abc import Callable, Iterator
from heapq import merge

import msgspec

from postroom.application.codec import to_event
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLog
from postroom.domain.course import Course, Delivery, Mark, Round, Takeover, trace
from postroom.domain.errors import NotFound
from postroom.domain.mailbox.events import OwnershipTaken, TopicPolicySet
from postroom.domain.message import DeadReason, ExpiryReason, MessageEvent, MessageSent
from postroom.domain.names import mailbox_stream, message_id, message_stream
from postroom.domain.policy import TopicPolicy

Happening = tuple[int, int, MessageEvent | OwnershipTaken, TopicPolicy | None]


class Happened(msgspec.Struct, frozen=True):
    """One thing that happened, where and when in the log, and what it meant."""

    position: int
    at: str
    text: str


class DeliveryAccount(msgspec.Struct, frozen=True):
    """One delivery: when, to whom, until when, and how it ended; `why` says why it was made."""

    number: int
    attempt: int
    position: int
    at: str
    consumer: str | None
    epoch: int
    visible_again: str
    ended: str | None
    ended_position: int | None
    ended_at: str | None
    error: str | None
    why: str


class Account(msgspec.Struct, frozen=True):
    """A message's story, its deliveries, and why it is where it is now."""

    mailbox: str
    message_id: str
    topic: str
    shard: int
    now: str
    deliveries: list[DeliveryAccount]
    story: list[Happened]


class ExplainMessage:
    """Tell what happened to one message and why; needs no ownership and no read model."""

    def __init__(self, log: EventLog, now: Callable[[], int]) -> None:
        """Take the mailbox's log and the time now in µs."""
        self._log = log
        self._now = now

    def __call__(self, id_: str) -> Account:
        """Return the account of the message.

        Raises: NotFound when the log has no such message, or retention removed its beginning.
        """
        log = self._log
        records = log.history(message_stream(log.mailbox, id_))
        sent = to_event(records[0]) if records else None
        if not isinstance(sent, MessageSent):
            raise NotFound(
                f"Mailbox {log.mailbox} has no message {id_}; check the id, and the mailbox it was sent to."
            )
        own = log.history(mailbox_stream(log.mailbox))
        happenings = merge(
            ((r.position, r.epoch, to_event(r)) for r in records),
            ((r.position, r.epoch, to_event(r)) for r in own),
            key=lambda happening: happening[0],
        )
        course = trace(_with_policies(sent.topic, happenings))  # type: ignore[arg-type]  # they are of a message
        assert course is not None
        return explain(log.mailbox, sent, course, self._now())


def _with_policies(
    topic: str, happenings: Iterator[tuple[int, int, MessageEvent | OwnershipTaken | TopicPolicySet]]
) -> Iterator[Happening]:
    policy: TopicPolicy | None = None
    for position, epoch, event in happenings:
        if isinstance(event, TopicPolicySet):
            policy = event.policy if event.topic == topic else policy
        else:
            yield position, epoch, event, policy


def explain(mailbox: str, sent: MessageSent, course: Course, now: int) -> Account:
    """Return the account of a message.

    Arguments:
        course: what happened to it.
        now: log time in µs.
    """
    return Account(
        mailbox,
        message_id(sent.stream, sent.headers.message_id),
        sent.topic,
        sent.shard,
        _standing(course, now),
        list(_deliveries(course)),
        sorted(_story(sent, course), key=lambda happened: happened.position),
    )


# -- the story ---


def _story(sent: MessageSent, course: Course) -> Iterator[Happened]:
    yield _happened(course.sent, _sent(sent))
    for number, each in enumerate(course.rounds):
        if number:
            yield _happened(
                each.mark,
                "An operator put it back into its queue with fresh attempts; it becomes a dead letter if "
                f"it is not delivered by {rfc3339(each.expires_at)}.",
            )
        for delivery in each.deliveries:
            yield from _delivery(delivery)
        if each.death is not None:
            yield _happened(each.death.mark, _death(each))
    if course.removal is not None:
        yield _happened(course.removal.mark, _REMOVED[course.removal.reason])


def _sent(sent: MessageSent) -> str:
    by = f" by {sent.headers.principal}" if sent.headers.principal else ""
    key = "without an idempotency key" if sent.idem_key is None else f"with idempotency key {sent.idem_key!r}"
    if sent.due is None:
        return f"Sent{by} to {sent.topic}, {key}; this mailbox only archives, so it is never delivered."
    when = f"to be delivered from {rfc3339(sent.due)} on" if sent.due > sent.at else "to be delivered at once"
    return (
        f"Sent{by} to {sent.topic}, shard {sent.shard}, {key}, {when}; it becomes a dead letter if it is not "
        f"delivered by {rfc3339(sent.expires_at)}."
    )


def _delivery(delivery: Delivery) -> Iterator[Happened]:
    yield _happened(
        delivery.mark,
        f"Delivered {_to(delivery)}as attempt {delivery.attempt}, hidden for {_span(delivery.visibility)}, "
        f"until {rfc3339(delivery.mark.at + delivery.visibility)}.",
    )
    for extension in delivery.extensions:
        text = f"The consumer asked for more time: hidden until {rfc3339(extension.due)}."
        yield _happened(extension.mark, text)
    for takeover in delivery.takeovers:
        if not takeover.clock_continues:  # others change nothing for the message
            yield _happened(takeover.mark, _restarted(takeover))
    if delivery.ending is not None and delivery.ending.due is not None:
        yield _happened(
            delivery.ending.mark, f"{_ended(delivery)}. {_back(delivery.ending.mark, delivery.ending.due)}"
        )
    elif delivery.ending is not None and delivery.ending.how == "acked":
        held = delivery.ending.mark.at - delivery.mark.at
        yield _happened(delivery.ending.mark, f"Acked by its consumer after {_span(held)}: settled for good.")
    if delivery.late_ack is not None:
        late = delivery.late_ack.at - delivery.deadline
        yield _happened(
            delivery.late_ack,
            f"Acked by its consumer {_span(late)} after its visibility had ended; nobody had received it "
            "again, so it is settled for good.",
        )


def _to(delivery: Delivery) -> str:
    return f"to {delivery.consumer} " if delivery.consumer else ""


def _restarted(takeover: Takeover) -> str:
    return (
        f"{takeover.owner} took the mailbox over (epoch {takeover.mark.epoch}) on a new clock, as after a "
        "reboot: nobody knows how much of its time had passed, so it was hidden for its full time again, "
        f"until {rfc3339(takeover.deadline)}."
    )


def _ended(delivery: Delivery) -> str:
    """Say how a delivery failed, without a full stop."""
    ending = delivery.ending
    assert ending is not None
    held = _span(ending.mark.at - delivery.mark.at)
    if ending.how == "nacked":
        said = f": {ending.error}" if ending.error else ", without a reason"
        return f"Its consumer gave it back (nack) after {held}{said}"
    ended = f"Its visibility ended at {rfc3339(delivery.deadline)} without ack, nack or extend"
    after = [each for each in delivery.takeovers if each.mark.at > delivery.deadline]
    if after:
        ended += (
            f"; no process owned the mailbox then, so that was noticed when {after[0].owner} had taken it "
            f"over (epoch {after[0].mark.epoch}, position {after[0].mark.position})"
        )
    return ended


def _back(mark: Mark, due: int) -> str:
    if due > mark.at:
        return f"It waits {_span(due - mark.at)}, until {rfc3339(due)}, before it may be delivered again."
    return "It was ready again at once."


def _death(each: Round) -> str:
    death = each.death
    assert death is not None
    kept = f"It is a dead letter now, kept until {rfc3339(death.expires_at)}."
    latest = each.deliveries[-1] if each.deliveries else None
    if latest is not None and latest.ending is not None and latest.ending.mark == death.mark:
        if death.reason == "max_attempts":
            allowed = latest.ending.policy.max_attempts if latest.ending.policy is not None else None
            last = (
                f"attempt {latest.attempt} of {allowed}"
                if allowed is not None
                else f"attempt {latest.attempt}"
            )
            return f"{_ended(latest)}. That was {last}, the last one: max_attempts of the topic. {kept}"
        return f"{_ended(latest)}. {_DIED[death.reason]} {kept}"
    return f"{_DIED[death.reason]} {kept}"


_DIED: dict[DeadReason, str] = {
    "max_attempts": "It has no attempts left.",
    "rejected": "Its consumer rejected it for good.",
    "ttl_expired": "The time to live that its sender gave it ended before it was delivered.",
    "retention_expired": "It waited undelivered for as long as its topic keeps such messages.",
    "integrity": "Its stored bytes no longer match their hash, so it was not delivered.",
}
_REMOVED: dict[ExpiryReason, str] = {
    "retention": "Removed: dead letters are kept for only so long (dead_retention of the topic).",
    "capacity": "Removed: it was the oldest dead letter when its topic had more than dead_capacity.",
    "purged": "Removed by an operator, who purged the topic.",
}


# -- the deliveries ---


def _deliveries(course: Course) -> Iterator[DeliveryAccount]:
    before: Delivery | None = None
    number = 0
    for each in course.rounds:
        for delivery in each.deliveries:
            number += 1
            how, mark = _end(delivery)
            yield DeliveryAccount(
                number,
                delivery.attempt,
                delivery.mark.position,
                rfc3339(delivery.mark.at) or "",
                delivery.consumer,
                delivery.mark.epoch,
                rfc3339(delivery.deadline) or "",
                how,
                mark.position if mark is not None else None,
                rfc3339(mark.at) if mark is not None else None,
                delivery.ending.error if delivery.ending is not None else None,
                _why(number, delivery, each, before),
            )
            before = delivery


def _end(delivery: Delivery) -> tuple[str | None, Mark | None]:
    if delivery.late_ack is not None:
        return "acked_late", delivery.late_ack
    return (delivery.ending.how, delivery.ending.mark) if delivery.ending is not None else (None, None)


def _why(number: int, delivery: Delivery, each: Round, before: Delivery | None) -> str:
    waited = _span(delivery.mark.at - delivery.available)
    if before is None:
        return f"It was sent at position {each.mark.position}, and was ready for {waited}."
    last = f"{number - 1} (position {before.mark.position}, {rfc3339(before.mark.at)})"
    if delivery is each.deliveries[0]:
        return (
            f"After delivery {last} it became a dead letter, and an operator put it back at position "
            f"{each.mark.position}, {rfc3339(each.mark.at)}."
        )
    ending = before.ending
    assert ending is not None
    ended = _ended(before)
    return (
        f"Delivery {last} ended at position {ending.mark.position}, {rfc3339(ending.mark.at)}: "
        f"{ended[0].lower()}{ended[1:]}. Then it was ready for {waited}."
    )


# -- where it is now ---


def _standing(course: Course, now: int) -> str:
    if not course.rounds:
        return "It is archived: it can be searched and read, and is never delivered."
    if course.removal is not None:
        return f"It is gone since {rfc3339(course.removal.mark.at)}. {_REMOVED[course.removal.reason]}"
    current = course.rounds[-1]
    if current.death is not None:
        why = _DIED[current.death.reason]
        return (
            f"It is a dead letter since {rfc3339(current.death.mark.at)}, kept until "
            f"{rfc3339(current.death.expires_at)}. {why} postroom dlq reprocess puts it back."
        )
    latest = current.deliveries[-1] if current.deliveries else None
    if latest is not None and course.is_settled:
        _, mark = _end(latest)
        assert mark is not None
        return f"It is settled: its consumer acked it at {rfc3339(mark.at)}, and it never comes again."
    if latest is not None and latest.ending is None:
        return _in_flight(latest, now)
    due = current.due if latest is None or latest.ending is None else latest.ending.due or current.due
    return _waiting(due, current, latest, now)


def _in_flight(latest: Delivery, now: int) -> str:
    where = (
        f"It is in flight: delivered {_to(latest)}as attempt {latest.attempt} at {rfc3339(latest.mark.at)}"
    )
    if latest.deadline <= now:
        return (
            f"{where}. Its time ended at {rfc3339(latest.deadline)}, so it comes back as soon as a process "
            "owns the mailbox; until somebody receives it again, its consumer may still ack it."
        )
    return f"{where}, hidden until {rfc3339(latest.deadline)} unless it is acked, nacked or extended."


def _waiting(due: int, current: Round, latest: Delivery | None, now: int) -> str:
    after = f" after attempt {latest.attempt} failed" if latest is not None else ""
    if current.expires_at <= now:
        return (
            f"It waits{after}, but its time ended at {rfc3339(current.expires_at)}: it becomes a dead letter "
            "as soon as a process owns the mailbox."
        )
    if due > now:
        why = after or " as its sender asked"
        return f"It is delayed{why}: it may be delivered from {rfc3339(due)} on."
    return f"It is ready{after} since {rfc3339(due)}, and waits for a consumer to receive it."


def _happened(mark: Mark, text: str) -> Happened:
    return Happened(mark.position, rfc3339(mark.at) or "", text)


def _span(us: int) -> str:
    """Return a length of time in the largest unit that keeps it readable."""
    for unit, size in (("d", 86_400_000_000), ("h", 3_600_000_000), ("min", 60_000_000), ("s", 1_000_000)):
        if us >= size:
            return f"{us / size:.3g} {unit}"
    return f"{us / 1_000:.3g} ms"
