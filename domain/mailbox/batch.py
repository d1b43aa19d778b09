"""Batches: commands of one kind, or events of one type, that are decided or applied together.

A batch has the effect of its commands or events one by one, which costs several times as much (ADR 0074).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, cast

from msgspec.structs import astuple

from postroom.domain.commit import EventColumns
from postroom.domain.mailbox.commands import Ack, Command, Receive, Send
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.keyed_shard import FairShard, KeyedShard
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.state import ALL_TOPICS, Mailbox, shard_of
from postroom.domain.mailbox.subscription_decisions import fan_out
from postroom.domain.mailbox.topic import Topic
from postroom.domain.mailbox.topic_decisions import is_in_the_clear
from postroom.domain.message import (
    IN_FLIGHT,
    MS,
    READY,
    Message,
    MessageAcked,
    MessageReceived,
    MessageSent,
    Status,
    ack_all,
    new_messages,
    receive_all,
)
from postroom.domain.policy import check_visibility
from postroom.domain.record import Event

_shard_of = attrgetter("topic", "shard")


def decide_batch(commands: Sequence[Command], mailbox: Mailbox, now: int) -> Sequence[Event] | None:
    """Return the events of commands if each is accepted; None if they must be decided one by one.

    Each causes one event; copies for subscriptions follow them.

    Arguments:
        commands: all of one type.
        now: log time, µs.
    """
    decider = _DECIDE.get(type(commands[0]))
    return None if decider is None else decider(commands, mailbox, now)


def decide_receives(
    commands: Sequence[Receive], mailbox: Mailbox, now: int
) -> tuple[EventColumns, list[int]] | None:
    """Return the events of several receives of a topic; None if they must be decided one by one.

    In a topic with one shard and without limits, each receive gets messages that the one before it left.

    Arguments:
        commands: all of the same topics.
        now: log time, µs.

    Returns: `MessageReceived` events, and how many of them each receive gets.
    Raises: InvalidRequest for a visibility timeout out of range.
    """
    limits, policy = mailbox.limits, mailbox.policy(commands[0].topics[0])
    topic = mailbox.topics.get(commands[0].topics[0])
    if (
        topic is None
        or len(commands[0].topics) > 1
        or len(topic.shards) != 1
        or topic.name in mailbox.stopped_topics
        or topic.ring is not None
        or topic.shared is not None
        or policy.ordered_keys
        or policy.max_in_flight
        or policy.rate
        or mailbox.in_flight + sum([each.max_messages for each in commands]) > limits.in_flight_ceiling
        or any(
            each.corrupt or each.erased or not 1 <= each.max_messages <= limits.max_messages
            for each in commands
        )
    ):
        return None
    messages = topic.ready(now)
    message = next(messages, None)
    received: list[Message] = []
    counts: list[int] = []
    dues: list[int] = []
    consumers: list[tuple[str | None, str | None, str | None]] = []
    for command in commands:
        visibility_ms, size, before = policy.visibility_ms, 0, len(received)
        if command.visibility_ms is not None:
            visibility_ms = check_visibility(command.visibility_ms)
        end, max_bytes = before + command.max_messages, command.max_bytes
        while message is not None and len(received) < end:
            if message.expires_at > now:  # the next sweep dead-letters the others
                if size and size + message.size > max_bytes:
                    break
                size += message.size or 1
                received.append(message)
            message = next(messages, None)
        count = len(received) - before
        counts.append(count)
        dues += [now + visibility_ms * MS] * count
        consumers += [(command.consumer, command.principal, command.capability)] * count
    columns: tuple[Sequence[Any], ...] = (
        [each.stream for each in received],
        [each.version + 1 for each in received],
        [now] * len(received),
        [each.attempt + 1 for each in received],
        dues,
        *(zip(*consumers, strict=True) if received else ([], [], [])),
    )
    return EventColumns(MessageReceived, columns), counts


def is_batch(events: Sequence[Event]) -> bool:
    """Return whether events are of one type that is applied together."""
    if isinstance(events, EventColumns):
        return events.type in _EVOLVE
    return type(events[0]) in _EVOLVE and len(set(map(type, events))) == 1


def evolve_batch(mailbox: Mailbox, events: Sequence[Event]) -> None:
    """Apply events of one type and of one time to the mailbox, in place; see `evolve` and `is_batch`."""
    if not isinstance(events, EventColumns):
        events = EventColumns.of(events)
    if not _EVOLVE[events.type](mailbox, events):
        for event in events:
            evolve(mailbox, event)
        return
    mailbox.position += len(events)
    mailbox.at = events.columns[2][0]


def _send(commands: Sequence[Send], mailbox: Mailbox, now: int) -> Sequence[Event] | None:
    """Decide sends of new messages to one topic that has room for all of them; see `sent`."""
    topic, count = mailbox.topics.get(commands[0].topic), len(commands)
    if topic is None or mailbox.mode == "archive" or topic.name in mailbox.subscriptions:
        return None
    is_encrypting = bool(mailbox.settings.subject_policies)
    if is_encrypting and any(is_in_the_clear(topic.name, each.headers, mailbox) for each in commands):
        return None
    policy = topic.policy
    if policy.subscriptions_only:
        return None
    columns = zip(*map(astuple, commands), strict=True)
    streams, topics, sizes, payload_hashes, hash_chains, headers, envelopes, idem_keys, *rest = columns
    sticky_keys, delays, ttls, _, existing, priorities, _, unique_keys, _ = rest
    if (
        topics.count(topic.name) < count
        or existing.count(None) < count
        or any(delays)
        or max(map(len, envelopes)) > mailbox.limits.frame_bytes
        or len(set(streams)) < count
        or not mailbox.messages.keys().isdisjoint(streams)
    ):
        return None
    if unique_keys.count(None) < count:
        unique = [each for each in unique_keys if each is not None]
        if len(set(unique)) < len(unique) or not topic.unique.keys().isdisjoint(unique):
            return None
    if idem_keys.count(None) < count:
        keys = [each for each in idem_keys if each is not None]
        if not topic.window.has_room_for(keys, policy.replay_capacity):
            return None
    shard_count, retention_ms = topic.shard_count, policy.ready_retention_ms
    shards = [shard_of(topic.name, shard_count)] * count
    if sticky_keys.count(None) < count:
        shards = [shard_of(key, shard_count) if key else shards[0] for key in sticky_keys]
    for number, added in Counter(shards).items():
        queue = topic.shards.get(number)
        if added + (0 if queue is None else queue.size) > policy.shard_capacity:
            return None
    expires_at = [now + retention_ms * MS] * count
    if ttls.count(None) < count:
        expires_at = [expires_at[0] if ttl is None else now + min(ttl, retention_ms) * MS for ttl in ttls]
    times = [now] * count
    events = EventColumns(
        MessageSent,
        (
            streams,
            [1] * count,
            times,
            topics,
            shards,
            times,
            expires_at,
            sizes,
            idem_keys,
            payload_hashes,
            hash_chains,
            headers,
            envelopes,
            priorities,
            sticky_keys,
            unique_keys,
            [None] * count,
        ),
    )
    if not mailbox.subscriptions_of(topic.name):
        return events
    sent = cast("list[MessageSent]", list(events))
    return [*sent, *fan_out(sent, mailbox, now)]


def _ack(commands: Sequence[Ack], mailbox: Mailbox, now: int) -> EventColumns | None:
    """Decide acks without results of messages that are in flight under their receipts."""
    find, count = mailbox.messages.get, len(commands)
    messages = [
        message
        for command in commands
        if (message := find((receipt := command.receipt).message)) is not None
        and message.status == IN_FLIGHT
        and message.delivery == receipt.delivery
        and message.epoch == receipt.epoch
        and command.result is None
    ]
    streams = [each.stream for each in messages]
    if len(set(streams)) < count:
        return None
    acked: dict[tuple[str, str], int] = {}
    for message in messages:
        if message.sticky_key is not None and mailbox.topics[message.topic].policy.ordered_keys:
            key = message.topic, message.sticky_key
            in_flight, before = mailbox.topics[message.topic].in_flight_of(message), acked.get(key, 0)
            if before == len(in_flight) or in_flight[before] is not message:
                return None
            acked[key] = before + 1
    versions = [each.version + 1 for each in messages]
    attempts, none = [each.attempt for each in messages], [None] * count
    return EventColumns(MessageAcked, (streams, versions, [now] * count, attempts, none, none))


def _sent(mailbox: Mailbox, events: EventColumns) -> bool:
    """Apply sends to topics that exist, of messages that may be delivered at once."""
    streams, _, times, names, shards, dues, _, _, keys, payload_hashes, *_ = events.columns
    at, topics, count = times[0], mailbox.topics, len(events)
    if None in dues or max(dues) > at or not topics.keys() >= (changed := set(names)):
        return False
    unkeyed = keys.count(None)
    if unkeyed < count:
        entries: defaultdict[str, dict[str, ReplayEntry]] = defaultdict(dict)
        for name, key, stream, payload_hash in zip(names, keys, streams, payload_hashes, strict=True):
            if key is not None:
                entries[name][key] = ReplayEntry(stream, payload_hash, at)
        if sum(map(len, entries.values())) + unkeyed < count:
            return False  # a key occurs twice
        for name, some in entries.items():
            topics[name].window.add_all(some, at, topics[name].policy.replay_window_ms * MS)
    messages = new_messages(events, mailbox.position + 1)
    mailbox.messages.update(zip(streams, messages, strict=True))
    unique_keys = events.column("unique_key")
    if unique_keys.count(None) < count:
        for message in messages:
            if message.unique_key is not None:
                topics[message.topic].unique[message.unique_key] = message
    for name in changed:
        topics[name].shards_in_use = topics[name].shard_count
    mailbox.changed_topics |= changed
    if len(changed) == 1 and shards.count(shards[0]) == count:
        topics[names[0]].shard(shards[0]).enqueue_new(messages, at)
    else:
        by_shard: defaultdict[tuple[str, int], list[Message]] = defaultdict(list)
        for (name, number), group in groupby(messages, _shard_of):
            if topics[name].ring is None:
                by_shard[name, number] += group
            else:  # keys join the ring in the order of their messages, whatever their shards
                topics[name].shard(number).enqueue_new(list(group), at)
        for (name, number), queued in by_shard.items():
            topics[name].shard(number).enqueue_new(queued, at)
    mailbox.set_timers(messages)
    return True


def _received(mailbox: Mailbox, events: EventColumns) -> bool:
    """Apply deliveries."""
    messages = _messages_of(events, mailbox, READY)
    if messages is None:
        return False
    for topic, number, some in _by_shard(messages, mailbox):
        shard, at = topic.shards[number], events.columns[2][0]
        if isinstance(shard, (KeyedShard, FairShard)):
            for message in some:
                shard.deliver(message)
                if topic.ring is not None:  # a turn depends on what its key has left after each delivery
                    topic.end_turns((message,), at)
        else:
            shard.dequeue_all(some)
            shard.in_flight += len(some)
        if topic.ring is None and (topic.policy.rate or topic.shared is not None):
            topic.end_turns(some, at)
    mailbox.in_flight += len(events)
    receive_all(messages, events, mailbox.position + 1, mailbox.epoch)
    mailbox.set_timers(messages)
    return True


def _acked(mailbox: Mailbox, events: EventColumns) -> bool:
    """Apply acks of messages in flight."""
    messages, changes = _messages_of(events, mailbox, IN_FLIGHT), mailbox.changes
    if messages is None:
        return False
    ack_all(messages, events, mailbox.position + 1)
    for message in messages:
        del mailbox.messages[message.stream]
        if message.position <= changes.through:
            changes.settle(message.stream)
    for topic, number, some in _by_shard(messages, mailbox):
        shard = topic.shards[number]
        if topic.shared is not None:
            topic.shared.in_flight -= len(some)
            mailbox.changed_topics.add(ALL_TOPICS)
        if unique := topic.unique:
            for message in some:
                if message.unique_key is not None:
                    del unique[message.unique_key]
        if isinstance(shard, (KeyedShard, FairShard)):
            shard.end_deliveries(some, events.columns[2][0])
        else:
            shard.in_flight -= len(some)
    mailbox.in_flight -= len(events)
    return True


def _messages_of(events: EventColumns, mailbox: Mailbox, status: Status) -> list[Message] | None:
    """Return the message of each event; None unless they are distinct and all have the status."""
    streams = events.columns[0]
    messages = [m for m in map(mailbox.messages.get, streams) if m is not None and m.status == status]
    return messages if len(messages) == len(streams) == len(set(streams)) else None


def _by_shard(
    messages: Sequence[Message], mailbox: Mailbox
) -> Iterator[tuple[Topic, int, Sequence[Message]]]:
    """Yield consecutive messages of the same shard with their topic, and mark the topic as changed."""
    names = {message.topic for message in messages}
    mailbox.changed_topics |= names
    topic = mailbox.topics[messages[0].topic]
    if len(names) == len(topic.shards) == 1:
        yield topic, messages[0].shard, messages
        return
    for (name, number), group in groupby(messages, _shard_of):
        yield mailbox.topics[name], number, list(group)


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event] | None]] = {Send: _send, Ack: _ack}
_EVOLVE: dict[type, Callable[[Mailbox, Any], bool]] = {
    MessageSent: _sent,
    MessageReceived: _received,
    MessageAcked: _acked,
}
"""For events that must be applied one by one, these functions change nothing and return False."""
