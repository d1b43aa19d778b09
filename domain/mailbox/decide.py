"""The mailbox's decider: `decide(command, state, now) -> events`, or a `Rejected`."""

from collections.abc import Callable, Collection, Sequence
from itertools import chain, islice
from typing import Any

from postroom.domain.errors import InvalidRequest, NotFound, Saturated, StaleReceipt
from postroom.domain.mailbox.commands import (
    Ack,
    Cancel,
    Command,
    DeleteSearch,
    Erase,
    Extend,
    Nack,
    Pause,
    Purge,
    Receive,
    Redrive,
    Reschedule,
    Resume,
    RunSchedule,
    SaveSearch,
    ScheduleCommand,
    Send,
    SetPolicy,
    SetSettings,
    Sweep,
    TakeOwnership,
    Truncate,
)
from postroom.domain.mailbox.key_ring import SharedLimits
from postroom.domain.mailbox.ownership import take_ownership, truncate
from postroom.domain.mailbox.redrive_decisions import decide_redrive
from postroom.domain.mailbox.schedule_decisions import decide_schedule
from postroom.domain.mailbox.send_decisions import send
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.subscription_decisions import decide_subscription
from postroom.domain.mailbox.topic_decisions import (
    delete_search,
    find_topic,
    pause,
    resume,
    save_search,
    set_policy,
    set_settings,
)
from postroom.domain.message import (
    DEAD,
    IN_FLIGHT,
    MS,
    READY,
    REPLACED,
    DeadReason,
    Message,
    MessageDeadLettered,
    MessageEvent,
    Receipt,
)
from postroom.domain.message_decider import (
    ack,
    dead_letter,
    expire,
    extend,
    nack,
    receive,
    redrive,
    release,
    reschedule,
    time_out,
)
from postroom.domain.names import message_id
from postroom.domain.policy import SATURATED_RETRY_MS, TopicPolicy, check_visibility
from postroom.domain.record import Event
from postroom.domain.redrive.job import RedriveCommand
from postroom.domain.subscription import SubscriptionCommand


def decide(command: Command, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Return the events that `command` causes; empty if it changes nothing.

    Arguments:
        mailbox: the state; it is not changed.
        now: log time, µs; at or after the mailbox's last event.

    Raises: a `Rejected` when the command is refused.
    """
    decider = _DECIDE[type(command)]
    return decider(command, mailbox, now)


def deliverable(
    command: Receive, mailbox: Mailbox, now: int, skip: Collection[str] | None = None
) -> list[Message]:
    """Return the messages that `command` would deliver, quarantine or remove, in the order of their shards.

    Arguments:
        skip: topics to leave out; None leaves out those that are stopped.
    """
    if skip is None:
        skip = mailbox.stopped_topics
    topics = [mailbox.topics[name] for name in command.topics if name in mailbox.topics and name not in skip]
    remaining = min(command.max_messages, mailbox.limits.in_flight_ceiling - mailbox.in_flight)
    messages: list[Message] = []
    size = 0
    unreadable = command.corrupt | command.erased
    stopped_keys: set[tuple[str, str | None]] = set()
    counts: dict[SharedLimits, int] = {}
    for message in chain.from_iterable(topic.ready(now, mailbox.position) for topic in topics):
        if stopped_keys and (message.topic, message.sticky_key) in stopped_keys:
            continue
        if message.stream in unreadable:
            messages.append(message)
            if mailbox.topics[message.topic].policy.ordered_keys and message.sticky_key is not None:
                stopped_keys.add((message.topic, message.sticky_key))  # as a dead letter may hold its key
            continue
        if message.expires_at <= now:  # the next sweep dead-letters it
            continue
        if remaining <= 0 or (size and size + message.size > command.max_bytes):
            break
        if len(topics) > 1 and (shared := mailbox.topics[message.topic].shared) is not None:
            count = counts.get(shared, 0)
            if count >= mailbox.topics[message.topic].allowed(now):
                continue
            counts[shared] = count + 1
        remaining -= 1
        size += message.size or 1
        messages.append(message)
    return messages


def _receive(command: Receive, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    if not 1 <= command.max_messages <= mailbox.limits.max_messages:
        raise InvalidRequest(
            f"max_messages must be between 1 and {mailbox.limits.max_messages}; it was "
            f"{command.max_messages}."
        )
    if command.visibility_ms is not None:
        check_visibility(command.visibility_ms)
    messages = deliverable(command, mailbox, now)
    if not messages and mailbox.in_flight >= mailbox.limits.in_flight_ceiling:
        timer = mailbox.next_timer()
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {mailbox.limits.in_flight_ceiling} messages in flight; "
            "ack or nack some, or retry when a delivery times out.",
            max(1, (timer - now) // MS) if timer is not None else SATURATED_RETRY_MS,
        )
    policies = {name: mailbox.policy(name) for name in {message.topic for message in messages}}
    visibilities = {name: command.visibility_ms or each.visibility_ms for name, each in policies.items()}
    corrupt, erased = command.corrupt, command.erased

    def deliver(message: Message) -> MessageEvent:
        return receive(
            message,
            visibilities[message.topic],
            command.consumer,
            now,
            principal=command.principal,
            capability=command.capability,
        )

    if not corrupt and not erased:
        return list(map(deliver, messages))
    return [
        dead_letter(
            message, "integrity", "stored bytes do not match their hash", policies[message.topic], now
        )
        if message.stream in corrupt
        else expire(message, "erased", now)
        if message.stream in erased
        else deliver(message)
        for message in messages
    ]


def _ack(command: Ack, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = _find_message(command.receipt, command.stored_message, mailbox)
    result, most = command.result, mailbox.limits.result_bytes
    events = ack(message, command.receipt, now, result=result, result_type=command.result_type, most=most)
    if events and message.sticky_key is not None and not mailbox.topics[message.topic].may_settle(message):
        name = f"Message {message_id(message.stream)} of topic {message.topic}"
        if message.status == READY:
            raise StaleReceipt(
                f"{name} timed out and waits for an earlier message of its sticky key; receive it again."
            )
        raise InvalidRequest(
            f"{name} can't be acked before the earlier messages of its sticky key that are in flight; ack "
            "them first, as the topic has ordered keys."
        )
    return events


def _nack(command: Nack, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = _find_message(command.receipt, command.stored_message, mailbox)
    events = nack(
        message,
        command.receipt,
        mailbox.policy(message.topic),
        now,
        reason=command.reason,
        delay_ms=command.delay_ms,
        jitter=command.jitter,
        action=command.action,
        traceback=command.traceback,
    )
    if events and message.sticky_key is not None:
        events += _take_back(message, events[0], mailbox, now)
    return events


def _take_back(message: Message, event: MessageEvent, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    """Return to the queue the later messages of the ordered key of a message whose delivery `event` ends."""
    topic = mailbox.topics[message.topic]
    if isinstance(event, MessageDeadLettered) and not topic.policy.dead_letters_hold_keys:
        return []
    later = (each for each in topic.in_flight_of(message) if each.position > message.position)
    return [release(each, None, now, now) for each in later]


def _extend(command: Extend, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = _find_message(command.receipt, command.stored_message, mailbox)
    visibility_ms = check_visibility(command.visibility_ms)
    return extend(message, command.receipt, visibility_ms, mailbox.policy(message.topic), now)


def _find_message(receipt: Receipt, stored_message: Message | None, mailbox: Mailbox) -> Message:
    message = mailbox.messages.get(receipt.message) or stored_message
    if message is None:
        raise NotFound(
            f"Mailbox {mailbox.name} has no message {message_id(receipt.message)}; check the receipt "
            "and the mailbox."
        )
    return message


def _redrive(command: Redrive, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    topic = find_topic(command.topic, mailbox)
    events: list[MessageEvent] = []
    free = {n: topic.policy.shard_capacity - shard.size for n, shard in topic.shards.items()}
    taken: set[str] = set()
    for stream, message in topic.dead.items():
        if len(events) >= command.limit:
            break
        if command.reason is not None and message.reason != command.reason:
            continue
        if command.messages is not None and stream not in command.messages:
            continue
        if message.reason == REPLACED != command.reason:  # its copy was sent instead
            continue
        if message.unique_key is not None:
            if message.unique_key in topic.unique or message.unique_key in taken:
                continue
            taken.add(message.unique_key)
        if free.setdefault(message.shard, topic.policy.shard_capacity) <= 0:
            if events:
                break
            raise Saturated(
                f"Shard {message.shard} of topic {topic.name} is full with {topic.policy.shard_capacity} "
                "messages; receive some before redriving its dead letters.",
                SATURATED_RETRY_MS,
            )
        free[message.shard] -= 1
        events.append(redrive(message, topic.policy, now))
    return events


def _purge(command: Purge, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    topic = find_topic(command.topic, mailbox)
    messages: list[Message] = list(topic.dead.values()) if command.dead else []
    if command.ready:
        messages += [m for m in mailbox.messages.values() if m.topic == command.topic and m.status == READY]
    return [expire(message, "purged", now) for message in messages[: command.limit]]


def _erase(command: Erase, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    messages = [mailbox.messages[stream] for stream in command.messages if stream in mailbox.messages]
    return [expire(message, "erased", now) for message in messages]


def _cancel(command: Cancel, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = mailbox.messages.get(command.message)
    if message is None or message.status == DEAD:
        return []
    return [expire(message, "cancelled", now, note=command.note, principal=command.principal)]


def _reschedule(command: Reschedule, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = mailbox.messages.get(command.message)
    if message is None or message.status != READY:
        return []
    due = now + command.deliver_after_ms * MS if command.at is None else max(now, command.at)
    return [reschedule(message, due, mailbox.policy(message.topic), now, command.principal)]


def _sweep(command: Sweep, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    events: list[MessageEvent] = []
    returned: set[bytes] = set()
    for message in mailbox.overdue(now, command.limit):
        if message.stream in returned:
            continue
        policy = mailbox.policy(message.topic)
        if message.status == IN_FLIGHT:
            events.append(time_out(message, policy, now))
            if message.sticky_key is not None:
                later = _take_back(message, events[-1], mailbox, now)
                returned.update(event.stream for event in later)
                events += later
        elif message.status == DEAD:
            events.append(expire(message, "retention", now))
        else:
            events.append(dead_letter(message, _expiry_reason(message, policy), None, policy, now))
    if events:
        return events
    for name in sorted(mailbox.over_capacity):
        topic = mailbox.topics[name]
        excess = len(topic.dead) - topic.policy.dead_capacity
        events += [expire(message, "capacity", now) for message in islice(topic.dead.values(), excess)]
    return events


def _run_schedule(command: RunSchedule, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Send the message of a schedule, and mark its tick as done."""
    events = decide_schedule(command, mailbox, now)
    return events if not events or command.send is None else [*send(command.send, mailbox, now), *events]


def _expiry_reason(message: Message, policy: TopicPolicy) -> DeadReason:
    by_retention = message.expires_at - message.sent_at >= policy.ready_retention_ms * MS
    return "retention_expired" if by_retention else "ttl_expired"


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    Send: send,
    Receive: _receive,
    Ack: _ack,
    Nack: _nack,
    Extend: _extend,
    Redrive: _redrive,
    Purge: _purge,
    Erase: _erase,
    Cancel: _cancel,
    Reschedule: _reschedule,
    SetPolicy: set_policy,
    SetSettings: set_settings,
    SaveSearch: save_search,
    DeleteSearch: delete_search,
    Pause: pause,
    Resume: resume,
    Sweep: _sweep,
    TakeOwnership: take_ownership,
    Truncate: truncate,
    **dict.fromkeys(RedriveCommand.__args__, decide_redrive),
    **dict.fromkeys(SubscriptionCommand.__args__, decide_subscription),
    **dict.fromkeys(ScheduleCommand.__args__, decide_schedule),
    RunSchedule: _run_schedule,
}
