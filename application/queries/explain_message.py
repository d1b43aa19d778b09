"""`ExplainMessage`: the history and current state of a message as sentences, from the log."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from heapq import merge

from postroom.application.mailbox.stored_snapshots import fold, refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.get_message import read_message
from postroom.application.queries.mailbox_past import first_settings, with_policies
from postroom.application.query_results import DeliveryExplanation, Explanation, HistoryStep
from postroom.application.text import span
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.topic import WaitReason
from postroom.domain.message import DEFAULT_PRIORITY, READY, DeadReason, ExpiryReason, MessageSent
from postroom.domain.message_history import (
    LogPosition,
    MessageHistory,
    PastDelivery,
    Removal,
    Rescheduling,
    Round,
    Takeover,
    trace,
)
from postroom.domain.names import mailbox_stream, message_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import resolve_policy, shared_limits_of


class ExplainMessage:
    """A query for the explanation of one message; needs no ownership and no read model."""

    def __init__(self, log: EventLogReader, now: Callable[[], int]) -> None:
        """Take the mailbox's log and its log time now in µs."""
        self._log = log
        self._now = now

    @refuse_altered_records
    def __call__(self, id_: str, covers: Callable[[str], bool] = lambda topic: True) -> Explanation:
        """Return the explanation of the message.

        Arguments:
            covers: returns whether a topic is considered; see `read_message`.

        Raises: NotFound if the log has no such message, or retention removed its `MessageSent`.
        """
        log = self._log
        sent, records = read_message(log, id_, covers)
        own = log.read_stream(mailbox_stream(log.mailbox))
        items = merge(
            ((r.position, r.epoch, r.event) for r in records),
            ((r.position, r.epoch, r.event) for r in own),
            key=lambda item: item[0],
        )
        settings = first_settings(log)
        history = trace(with_policies(sent.topic, items, settings))  # type: ignore[arg-type]  # `records` are one message's
        assert history is not None
        for record in own:
            settings = settings.after(record.event)
        policy = resolve_policy(settings.settings, sent.topic)
        section = shared_limits_of(settings.settings, sent.topic) if policy.shared_limits else None
        waits_for = partial(self._waits_for, sent, policy, section)
        return explain(log.mailbox, sent, history, self._now(), waits_for)

    def _waits_for(self, sent: MessageSent, policy: TopicPolicy, section: str | None) -> str:
        """Return what a ready message waits for; only keys and limits need the state of the mailbox."""
        if policy.ordered_keys or policy.fair_keys or policy.max_in_flight or policy.rate:
            mailbox = fold(self._log)
            message = mailbox.messages.get(sent.stream)
            if message is not None and message.status == READY:
                reason = mailbox.topics[sent.topic].waits_for(message, self._now())
                if reason == "topic_limit" and section is not None:
                    limits = "shared_limits, max_in_flight, rate"
                    return f"until a limit of section {section} allows it ({limits})"
                if reason is not None:
                    return _WAITS[reason]
        return "for a consumer to receive it"


def explain(
    mailbox: str, sent: MessageSent, history: MessageHistory, now: int, waits_for: Callable[[], str]
) -> Explanation:
    """Return the explanation of a message.

    Arguments:
        now: log time in µs.
        waits_for: returns what it waits for if it is ready.
    """
    return Explanation(
        mailbox,
        message_id(sent.stream, sent.headers.message_id),
        sent.topic,
        sent.shard,
        _current_state(history, now, waits_for),
        list(_deliveries(history)),
        sorted(_steps(sent, history), key=lambda step: step.position),
    )


# -- history ---


def _steps(sent: MessageSent, history: MessageHistory) -> Iterator[HistoryStep]:
    yield _step(history.sent, _sent(sent, history.policy))
    for number, each in enumerate(history.rounds):
        if number:
            yield _step(
                each.entry,
                "Redriven by an operator, with attempts counted from 1; it becomes a dead letter if it is "
                f"not delivered by {rfc3339(each.expires_at)}.",
            )
        steps = [_step(change.entry, _rescheduled(change)) for change in each.reschedulings]
        for delivery in each.deliveries:
            steps += _delivery(delivery)
        yield from sorted(steps, key=lambda step: step.position)
        if each.dead_lettering is not None:
            yield _step(each.dead_lettering.entry, _dead_lettering(each))
        if each.replacement is not None:
            yield _step(each.replacement.entry, _DEAD_LETTERED[each.replacement.reason])
    if history.removal is not None:
        yield _step(history.removal.entry, _removed(history.removal))


def _sent(sent: MessageSent, policy: TopicPolicy | None) -> str:
    by = f" by {sent.headers.principal}" if sent.headers.principal else ""
    key = "without an idempotency key" if sent.idem_key is None else f"with idempotency key {sent.idem_key!r}"
    if sent.due is None:
        is_archive = policy is None or not policy.subscriptions_only
        why = "the mailbox is an archive" if is_archive else "its topic has subscriptions_only"
        return f"Sent{by} to {sent.topic}, {key}; {why}, so it is never delivered."
    when = f"to be delivered from {rfc3339(sent.due)} on" if sent.due > sent.at else "to be delivered at once"
    priority = "" if sent.priority == DEFAULT_PRIORITY else f", with priority {sent.priority}"
    ends = f"{when}; it becomes a dead letter if it is not delivered by {rfc3339(sent.expires_at)}."
    if sent.copy_of is not None:
        return (
            f"Copied to subscription {sent.topic}, shard {sent.shard}{priority}, from message {sent.copy_of}"
            f"{_original_topic(sent)}, {ends}"
        )
    return f"Sent{by} to {sent.topic}, shard {sent.shard}{priority}, {key}, {ends}"


def _original_topic(sent: MessageSent) -> str:
    """Return to which topic the original of a copy was sent, to continue a sentence."""
    try:
        return f", which was sent to {open_envelope(sent.envelope).topic}"
    except InvalidRequest:  # altered on disk
        return ""


def _delivery(delivery: PastDelivery) -> Iterator[HistoryStep]:
    yield _step(
        delivery.entry,
        f"Delivered {_to(delivery)}as attempt {delivery.attempt}, hidden for {span(delivery.visibility)}, "
        f"until {rfc3339(delivery.entry.at + delivery.visibility)}.",
    )
    for extension in delivery.extensions:
        text = f"Its consumer extended the visibility timeout: hidden until {rfc3339(extension.due)}."
        yield _step(extension.entry, text)
    for takeover in delivery.takeovers:
        if not takeover.clock_continues:  # others leave the deadline unchanged
            yield _step(takeover.entry, _restarted(takeover))
    if delivery.outcome is not None and delivery.outcome.due is not None:
        yield _step(
            delivery.outcome.entry,
            f"{_ended(delivery)}. {_requeued(delivery.outcome.entry, delivery.outcome.due)}",
        )
    elif delivery.outcome is not None and delivery.outcome.kind == "acked":
        duration = span(delivery.outcome.entry.at - delivery.entry.at)
        yield _step(delivery.outcome.entry, f"Acked by its consumer after {duration}; it is settled.")
    if delivery.late_ack is not None:
        late = delivery.late_ack.at - delivery.deadline
        yield _step(
            delivery.late_ack,
            f"Acked by its consumer {span(late)} after the visibility timeout; it had not been received "
            "again, so the ack is valid and it is settled.",
        )


def _rescheduled(change: Rescheduling) -> str:
    return (
        f"Rescheduled by {_operator(change)}: it may be delivered from {rfc3339(change.due)} on, and becomes "
        f"a dead letter if it is not delivered by {rfc3339(change.expires_at)}."
    )


def _removed(removal: Removal) -> str:
    if removal.reason == "superseded":
        return f"Removed: message {removal.note}, which has its unique key and is newer, replaced it."
    if removal.reason != "cancelled":
        return _REMOVED[removal.reason]
    note = f": {removal.note}" if removal.note else ""
    return f"Cancelled by {_operator(removal)}{note}."


def _operator(change: Rescheduling | Removal) -> str:
    return "an operator" if change.principal is None else change.principal


def _to(delivery: PastDelivery) -> str:
    name = f"to {delivery.consumer} " if delivery.consumer else ""
    if delivery.principal is None:
        return name
    return f"{name}with capability {delivery.capability} of {delivery.principal} "


def _restarted(takeover: Takeover) -> str:
    return (
        f"{takeover.owner} took over the mailbox (epoch {takeover.entry.epoch}) with a new clock, as after a "
        "reboot. The elapsed time is unknown, so the visibility timeout started again: hidden until "
        f"{rfc3339(takeover.deadline)}."
    )


def _ended(delivery: PastDelivery) -> str:
    """Return how a delivery failed, as a sentence without the full stop."""
    outcome = delivery.outcome
    assert outcome is not None
    duration = span(outcome.entry.at - delivery.entry.at)
    if outcome.kind == "nacked":
        reason = f": {outcome.error}" if outcome.error else ", without a reason"
        return f"Nacked by its consumer after {duration}{reason}"
    if outcome.kind == "released":
        reason = f": {outcome.error}" if outcome.error else ""
        return f"Released by its consumer after {duration}, which counts no attempt{reason}"
    ended = f"Its visibility timeout ended at {rfc3339(delivery.deadline)} without ack, nack or extend"
    if after := [each for each in delivery.takeovers if each.entry.at > delivery.deadline]:
        ended += (
            f"; no process owned the mailbox then, and {after[0].owner} detected it when it took over "
            f"(epoch {after[0].entry.epoch}, position {after[0].entry.position})"
        )
    return ended


def _requeued(entry: LogPosition, due: int) -> str:
    if due > entry.at:
        return f"It is delayed by {span(due - entry.at)}; it may be delivered again from {rfc3339(due)} on."
    return "It was ready again immediately."


def _dead_lettering(each: Round) -> str:
    end = each.dead_lettering
    assert end is not None
    retained = f"It became a dead letter, retained until {rfc3339(end.expires_at)}."
    latest = each.deliveries[-1] if each.deliveries else None
    if latest is not None and latest.outcome is not None and latest.outcome.entry == end.entry:
        if end.reason == "max_attempts":
            allowed = latest.outcome.policy.max_attempts if latest.outcome.policy is not None else None
            last = f"attempt {latest.attempt}, the last one (max_attempts of the topic)"
            if allowed is not None and latest.attempt > allowed:  # lowered after the attempt before
                last = f"attempt {latest.attempt}, and max_attempts of the topic was lowered to {allowed}"
            elif allowed is not None:
                last = f"attempt {latest.attempt} of {allowed}, the last one (max_attempts of the topic)"
            return f"{_ended(latest)}. That was {last}. {retained}"
        return f"{_ended(latest)}. {_DEAD_LETTERED[end.reason]} {retained}"
    return f"{_DEAD_LETTERED[end.reason]} {retained}"


_DEAD_LETTERED: dict[DeadReason, str] = {
    "max_attempts": "It has no attempts left.",
    "rejected": "Its consumer rejected it.",
    "ttl_expired": "Its time to live ended before it was delivered.",
    "retention_expired": "It was not delivered within the retention of its topic (ready_retention).",
    "integrity": "Its stored bytes no longer match their hash, so it was not delivered.",
    "replaced": "A redrive job sent a copy of it instead.",
}
_REMOVED: Mapping[ExpiryReason, str] = {
    "retention": "Removed: the retention of dead letters ended (dead_retention of the topic).",
    "capacity": "Removed: its topic had more dead letters than dead_capacity, and it was the oldest.",
    "purged": "Removed by an operator, who purged the topic.",
    "archived": "Removed from the dead letters by an operator, who archived it.",
    "erased": "Removed: the key of its subject was destroyed, so its content can't be read any more.",
    "rewound": "Removed by an operator, who rewound the subscription; what it copies again has other ids.",
    "undone": "Removed: it was the copy of a redrive job that an operator undid.",
}


_WAITS: Mapping[WaitReason, str] = {
    "dead_letter": "until the dead letter that holds its sticky key is redriven or removed",
    "key": "until the earlier messages of its sticky key are settled",
    "key_limit": "until a limit of its sticky key allows it (max_in_flight_per_key, rate_per_key)",
    "topic_limit": "until a limit of its topic allows it (max_in_flight, rate)",
}


# -- deliveries ---


def _deliveries(history: MessageHistory) -> Iterator[DeliveryExplanation]:
    before: PastDelivery | None = None
    pairs = ((each, delivery) for each in history.rounds for delivery in each.deliveries)
    for number, (each, delivery) in enumerate(pairs, 1):
        kind, entry = _end(delivery)
        yield DeliveryExplanation(
            number,
            delivery.attempt,
            delivery.entry.position,
            rfc3339(delivery.entry.at) or "",
            delivery.consumer,
            delivery.entry.epoch,
            rfc3339(delivery.deadline) or "",
            kind,
            entry.position if entry is not None else None,
            rfc3339(entry.at) if entry is not None else None,
            delivery.outcome.error if delivery.outcome is not None else None,
            _why(number, delivery, each, before),
            delivery.principal,
            delivery.capability,
        )
        before = delivery


def _end(delivery: PastDelivery) -> tuple[str | None, LogPosition | None]:
    if delivery.late_ack is not None:
        return "acked_late", delivery.late_ack
    return (delivery.outcome.kind, delivery.outcome.entry) if delivery.outcome is not None else (None, None)


def _why(number: int, delivery: PastDelivery, each: Round, before: PastDelivery | None) -> str:
    waited = span(delivery.entry.at - delivery.available)
    if before is None:
        return f"It was sent at position {each.entry.position} and was ready for {waited}."
    last = f"{number - 1} (position {before.entry.position}, {rfc3339(before.entry.at)})"
    if delivery is each.deliveries[0]:
        return (
            f"It became a dead letter after delivery {last}, and an operator redrove it at position "
            f"{each.entry.position}, {rfc3339(each.entry.at)}."
        )
    outcome = before.outcome
    assert outcome is not None
    ended = _ended(before)
    return (
        f"Delivery {last} ended at position {outcome.entry.position}, {rfc3339(outcome.entry.at)}: "
        f"{ended[0].lower()}{ended[1:]}. It was then ready for {waited}."
    )


# -- current state ---


def _current_state(history: MessageHistory, now: int, waits_for: Callable[[], str]) -> str:
    if not history.rounds:
        return "It is archived: it is searchable and never delivered."
    if history.removal is not None:
        return f"It was removed at {rfc3339(history.removal.entry.at)}. {_removed(history.removal)}"
    current = history.rounds[-1]
    end = current.dead_lettering
    if end is not None:
        if current.replacement is not None:
            return (
                f"It is a dead letter, retained until {rfc3339(end.expires_at)}, with a copy in its place "
                f"since {rfc3339(current.replacement.entry.at)}. {_DEAD_LETTERED[end.reason]}"
            )
        return (
            f"It has been a dead letter since {rfc3339(end.entry.at)} and is retained until "
            f"{rfc3339(end.expires_at)}. {_DEAD_LETTERED[end.reason]} It can be redriven."
        )
    latest = current.deliveries[-1] if current.deliveries else None
    if latest is not None and history.is_settled:
        _, entry = _end(latest)
        assert entry is not None
        return f"It is settled: its consumer acked it at {rfc3339(entry.at)}."
    if latest is not None and latest.outcome is None:
        return _in_flight(latest, now)
    return _waiting(current, latest, now, waits_for)


def _in_flight(latest: PastDelivery, now: int) -> str:
    at = rfc3339(latest.entry.at)
    where = f"It is in flight: delivered {_to(latest)}as attempt {latest.attempt} at {at}"
    if latest.deadline <= now:
        return (
            f"{where}. Its visibility timeout ended at {rfc3339(latest.deadline)}, so it is requeued as soon "
            "as a process owns the mailbox; until it is received again, its consumer may still ack it."
        )
    return f"{where}, hidden until {rfc3339(latest.deadline)} unless it is acked, nacked or extended."


def _waiting(current: Round, latest: PastDelivery | None, now: int, waits_for: Callable[[], str]) -> str:
    due = current.available
    after = "" if latest is None else f" after attempt {latest.attempt} failed"
    if latest is not None and latest.outcome is not None and latest.outcome.kind == "released":
        after = " since its consumer released it"
    if current.expiry <= now:
        return (
            f"It is waiting{after}, but its retention ended at {rfc3339(current.expiry)}: it becomes a "
            "dead letter as soon as a process owns the mailbox."
        )
    if due > now:
        change = current.rescheduling
        why = f" by {_operator(change)}" if change is not None else after or " by its sender"
        return f"It is delayed{why}: it may be delivered from {rfc3339(due)} on."
    return f"It has been ready since {rfc3339(due)}{after}, and waits {waits_for()}."


def _step(entry: LogPosition, text: str) -> HistoryStep:
    return HistoryStep(entry.position, rfc3339(entry.at) or "", text)
