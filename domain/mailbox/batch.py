"""Batches: commands of one kind, or events of one type, that are decided or applied together.

A batch has the effect of its commands or events one by one, which costs several times as much (ADR 0072).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

from postroom.domain.event import Event
from postroom.domain.mailbox.commands import Ack, Command, Send
from postroom.domain.mailbox.decide import sent, shard_of
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.state import Mailbox, evolve, is_in_the_clear
from postroom.domain.message import (
    IN_FLIGHT,
    MS,
    READY,
    Message,
    MessageAcked,
    MessageReceived,
    MessageSent,
    Status,
    evolve_all,
    new_message,
)

_shard_of = attrgetter("topic", "shard")


def decide_batch(commands: Sequence[Command], mailbox: Mailbox, now: int) -> Sequence[Event] | None:
    """Return the events of commands if each causes exactly one; None if they must be decided one by one.

    Arguments:
        commands: all of one type.
        now: log time, µs.
    """
    decider = _DECIDE.get(type(commands[0]))
    return None if decider is None else decider(commands, mailbox, now)


def is_batch(events: Sequence[Event]) -> bool:
    """Return whether events are of one type that is applied together."""
    return type(events[0]) in _EVOLVE and len(set(map(type, events))) == 1


def evolve_batch(mailbox: Mailbox, events: Sequence[Event]) -> None:
    """Apply events of one type and of one time to the mailbox, in place; see `evolve` and `is_batch`."""
    if not _EVOLVE[type(events[0])](mailbox, events):
        for event in events:
            evolve(mailbox, event)
        return
    mailbox.position += len(events)
    mailbox.at = events[0].at


def _send(commands: Sequence[Send], mailbox: Mailbox, now: int) -> list[MessageSent] | None:
    """Decide sends of new messages to one topic that has room for all of them."""
    topic = mailbox.topics.get(commands[0].topic)
    if topic is None or mailbox.mode == "archive":
        return None
    is_encrypting = bool(mailbox.settings.subject_policies)
    if is_encrypting and any(is_in_the_clear(topic.name, each.headers, mailbox) for each in commands):
        return None
    name, policy, frame_bytes = topic.name, topic.policy, mailbox.limits.frame_bytes
    shards = topic.shard_count
    retention_ms, unkeyed = policy.ready_retention_ms, shard_of(name, shards)
    events = []
    for command in commands:
        if (
            command.topic != name
            or command.existing_hash is not None
            or command.deliver_after_ms
            or len(command.envelope) > frame_bytes
        ):
            return None
        key, ttl_ms = command.sticky_key, command.ttl_ms
        shard = shard_of(key, shards) if key else unkeyed
        kept_ms = retention_ms if ttl_ms is None or ttl_ms > retention_ms else ttl_ms
        events.append(sent(command, shard, now, now + kept_ms * MS, now))
    streams = [event.stream for event in events]
    if len(set(streams)) < len(streams) or not mailbox.messages.keys().isdisjoint(streams):
        return None
    keys = [event.idem_key for event in events if event.idem_key is not None]
    if keys and not topic.window.has_room_for(keys, policy.replay_capacity):
        return None
    for number, count in Counter([event.shard for event in events]).items():
        queue = topic.shards.get(number)
        size = 0 if queue is None else queue.size
        if size + count > policy.shard_capacity:
            return None
    return events


def _ack(commands: Sequence[Ack], mailbox: Mailbox, now: int) -> list[MessageAcked] | None:
    """Decide acks of messages that are in flight under their receipts."""
    messages, events = mailbox.messages, []
    for command in commands:
        receipt = command.receipt
        message = messages.get(receipt.message)
        if (
            message is None
            or message.status != IN_FLIGHT
            or message.delivery != receipt.delivery
            or message.epoch != receipt.epoch
        ):
            return None
        events.append(MessageAcked(message.stream, message.version + 1, now, message.attempt))
    return events if len({event.stream for event in events}) == len(events) else None


def _sent(mailbox: Mailbox, events: Sequence[MessageSent]) -> bool:
    """Apply sends to topics that exist, of messages that may be delivered at once."""
    at, topics = events[0].at, mailbox.topics
    if any(event.due is None or event.due > at or event.topic not in topics for event in events):
        return False
    entries: defaultdict[str, dict[str, ReplayEntry]] = defaultdict(dict)
    for event in events:
        if event.idem_key is not None:
            entries[event.topic][event.idem_key] = ReplayEntry(event.stream, event.payload_hash, at)
    unkeyed = [event.idem_key for event in events].count(None)
    if sum(map(len, entries.values())) + unkeyed < len(events):
        return False  # a key occurs twice
    for name, some in entries.items():
        topics[name].window.add_all(some, at, topics[name].policy.replay_window_ms * MS)
    messages = list(map(new_message, events, range(mailbox.position + 1, mailbox.position + len(events) + 1)))
    mailbox.messages.update(zip([message.stream for message in messages], messages, strict=True))
    by_shard: defaultdict[tuple[str, int], list[Message]] = defaultdict(list)
    for shard, group in groupby(messages, _shard_of):
        by_shard[shard] += group
    for name in {name for name, _ in by_shard}:
        topics[name].shards_in_use = topics[name].shard_count
    for (name, number), queued in by_shard.items():
        topics[name].shard(number).enqueue_new(queued, at)
    mailbox.set_timers(messages)
    return True


def _received(mailbox: Mailbox, events: Sequence[MessageReceived]) -> bool:
    """Apply deliveries."""
    messages = _messages_of(events, mailbox, READY)
    if messages is None:
        return False
    for (topic, number), group in groupby(messages, _shard_of):
        shard, some = mailbox.topics[topic].shards[number], list(group)
        shard.dequeue_all(some)
        shard.in_flight += len(some)
    mailbox.in_flight += len(events)
    evolve_all(messages, events, mailbox.position + 1, mailbox.epoch)
    mailbox.set_timers(messages)
    return True


def _acked(mailbox: Mailbox, events: Sequence[MessageAcked]) -> bool:
    """Apply acks of messages in flight."""
    messages, changes = _messages_of(events, mailbox, IN_FLIGHT), mailbox.changes
    if messages is None:
        return False
    evolve_all(messages, events, mailbox.position + 1, mailbox.epoch)
    for message in messages:
        del mailbox.messages[message.stream]
        if message.position <= changes.through:
            changes.settle(message.stream)
    for (topic, number), group in groupby(messages, _shard_of):
        mailbox.topics[topic].shards[number].in_flight -= len(list(group))
    mailbox.in_flight -= len(events)
    return True


def _messages_of(events: Sequence[Event], mailbox: Mailbox, status: Status) -> list[Message] | None:
    """Return the message of each event; None unless they are distinct and all have the status."""
    messages = [m for event in events if (m := mailbox.messages.get(event.stream)) is not None]
    statuses = [message.status for message in messages]
    is_usual = statuses.count(status) == len(events) == len({event.stream for event in events})
    return messages if is_usual else None


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event] | None]] = {Send: _send, Ack: _ack}
_EVOLVE: dict[type, Callable[[Mailbox, Any], bool]] = {
    MessageSent: _sent,
    MessageReceived: _received,
    MessageAcked: _acked,
}
"""They return False, having changed nothing, for events that must be applied one by one."""
