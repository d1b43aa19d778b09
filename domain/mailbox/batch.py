"""Batches: commands of one kind, or events of one type, that are decided or applied together.

A batch has the effect of its commands or events one by one, which costs several times as much (ADR 0072).
"""

from collections.abc import Callable, Sequence
from typing import Any

from postroom.domain.event import Event
from postroom.domain.mailbox.commands import Ack, Command, Send
from postroom.domain.mailbox.decide import sent, shard_of
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.state import Mailbox, evolve
from postroom.domain.message import (
    IN_FLIGHT,
    MS,
    Message,
    MessageAcked,
    MessageReceived,
    MessageSent,
    new_message,
)
from postroom.domain.message import evolve as evolve_message


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
    name, policy, frame_bytes = topic.name, topic.policy, mailbox.limits.frame_bytes
    retention_ms, unkeyed = policy.ready_retention_ms, shard_of(name, policy.shards)
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
        shard = shard_of(key, policy.shards) if key else unkeyed
        kept_ms = retention_ms if ttl_ms is None or ttl_ms > retention_ms else ttl_ms
        events.append(sent(command, shard, now, now + kept_ms * MS, now))
    streams = [event.stream for event in events]
    if len(set(streams)) < len(streams) or not mailbox.messages.keys().isdisjoint(streams):
        return None
    keys = [event.idem_key for event in events if event.idem_key is not None]
    if keys and not topic.window.has_room_for(keys, policy.replay_capacity):
        return None
    shards = [event.shard for event in events]
    for number in set(shards):
        queue = topic.shards.get(number)
        size = 0 if queue is None else queue.size
        if size + shards.count(number) > policy.shard_capacity:
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
    """Apply sends to one topic, of messages that may be delivered at once."""
    at, name = events[0].at, events[0].topic
    topic = mailbox.topics.get(name)
    if topic is None:
        return False
    by_shard: dict[int, list[Message]] = {}
    entries: dict[str, ReplayEntry] = {}
    messages = list(map(new_message, events, range(mailbox.position + 1, mailbox.position + len(events) + 1)))
    for event, message in zip(events, messages, strict=True):
        if event.topic != name or event.due is None or event.due > at:
            return False
        if event.idem_key is not None:
            entries[event.idem_key] = ReplayEntry(event.stream, event.payload_hash, at)
        same_shard = by_shard.get(event.shard)
        if same_shard is None:
            by_shard[event.shard] = [message]
        else:
            same_shard.append(message)
    if len(entries) < sum(event.idem_key is not None for event in events):
        return False  # a key occurs twice
    if entries:
        topic.window.add_all(entries, at, topic.policy.replay_window_ms * MS)
    mailbox.messages.update(zip([message.stream for message in messages], messages, strict=True))
    for number, some in by_shard.items():
        topic.shard(number).enqueue_new(some, at)
    mailbox.set_timers(messages)
    return True


def _received(mailbox: Mailbox, events: Sequence[MessageReceived]) -> bool:
    """Apply deliveries."""
    topics, messages, epoch = mailbox.topics, mailbox.messages, mailbox.epoch
    received = []
    for position, event in enumerate(events, mailbox.position + 1):
        message = messages[event.stream]
        shard = topics[message.topic].shards[message.shard]
        shard.dequeue(message)
        shard.in_flight += 1
        received.append(evolve_message(message, event, position, epoch))
    mailbox.in_flight += len(events)
    mailbox.set_timers(received)
    return True


def _acked(mailbox: Mailbox, events: Sequence[MessageAcked]) -> bool:
    """Apply acks of messages in flight."""
    topics, messages, changes = mailbox.topics, mailbox.messages, mailbox.changes
    if any(messages[event.stream].status != IN_FLIGHT for event in events):
        return False
    for position, event in enumerate(events, mailbox.position + 1):
        message = evolve_message(messages.pop(event.stream), event, position)
        topics[message.topic].shards[message.shard].in_flight -= 1
        if message.position <= changes.through:
            changes.settle(event.stream)
    mailbox.in_flight -= len(events)
    return True


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event] | None]] = {Send: _send, Ack: _ack}
_EVOLVE: dict[type, Callable[[Mailbox, Any], bool]] = {
    MessageSent: _sent,
    MessageReceived: _received,
    MessageAcked: _acked,
}
"""They return False, having changed nothing, for events that must be applied one by one."""
