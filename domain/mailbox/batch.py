"""Batches: commands of one kind, or events of one type, that are decided or applied together.

A batch has the effect of its commands or events one by one, which costs several times as much (ADR 0074).
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from postroom.domain.mailbox.commands import Ack, Command, Receive, Send
from postroom.domain.mailbox.decide import sent
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.key_ring import FairShard
from postroom.domain.mailbox.keyed_shard import KeyedShard
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.snapshot import VERSION, Chunk, Head, SnapshotPart, encode_chunk
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
    evolve_all,
    new_message,
)
from postroom.domain.message_decisions import receive
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
) -> list[list[MessageReceived]] | None:
    """Return the events of each of several receives of a topic; None if they must be decided one by one.

    A topic with one shard and without limits gives each receive what the one before it left.

    Arguments:
        commands: all of the same topics.
        now: log time, µs.

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
    message, events = next(messages, None), []
    for command in commands:
        visibility_ms, size = policy.visibility_ms, 0
        received: list[MessageReceived] = []
        if command.visibility_ms is not None:
            visibility_ms = check_visibility(command.visibility_ms)
        consumer, principal, capability = command.consumer, command.principal, command.capability
        while message is not None and len(received) < command.max_messages:
            if message.expires_at > now:  # the next sweep dead-letters the others
                if size and size + message.size > command.max_bytes:
                    break
                size += message.size or 1
                received.append(
                    receive(message, visibility_ms, consumer, now, principal=principal, capability=capability)
                )
            message = next(messages, None)
        events.append(received)
    return events


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


def _send(commands: Sequence[Send], mailbox: Mailbox, now: int) -> Sequence[Event] | None:
    """Decide sends of new messages to one topic that has room for all of them."""
    topic = mailbox.topics.get(commands[0].topic)
    if topic is None or mailbox.mode == "archive" or topic.name in mailbox.subscriptions:
        return None
    is_encrypting = bool(mailbox.settings.subject_policies)
    if is_encrypting and any(is_in_the_clear(topic.name, each.headers, mailbox) for each in commands):
        return None
    name, policy, frame_bytes = topic.name, topic.policy, mailbox.limits.frame_bytes
    if policy.subscriptions_only:
        return None
    shards = topic.shard_count
    retention_ms, unkeyed = policy.ready_retention_ms, shard_of(name, shards)
    until = now + retention_ms * MS  # one number for all messages
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
        expires_at = until if ttl_ms is None or ttl_ms > retention_ms else now + ttl_ms * MS
        events.append(sent(command, shard, now, expires_at, now))
    streams = [event.stream for event in events]
    if len(set(streams)) < len(streams) or not mailbox.messages.keys().isdisjoint(streams):
        return None
    unique = [event.unique_key for event in events if event.unique_key is not None]
    if unique and (len(set(unique)) < len(unique) or not topic.unique.keys().isdisjoint(unique)):
        return None
    keys = [event.idem_key for event in events if event.idem_key is not None]
    if keys and not topic.window.has_room_for(keys, policy.replay_capacity):
        return None
    for number, count in Counter([event.shard for event in events]).items():
        queue = topic.shards.get(number)
        size = 0 if queue is None else queue.size
        if size + count > policy.shard_capacity:
            return None
    return [*events, *fan_out(events, mailbox, now)] if mailbox.subscriptions_of(name) else events


def _ack(commands: Sequence[Ack], mailbox: Mailbox, now: int) -> list[MessageAcked] | None:
    """Decide acks without results of messages that are in flight under their receipts."""
    messages, events = mailbox.messages, []
    acked: dict[tuple[str, str], int] = {}
    for command in commands:
        receipt = command.receipt
        message = messages.get(receipt.message)
        if (
            message is None
            or message.status != IN_FLIGHT
            or message.delivery != receipt.delivery
            or message.epoch != receipt.epoch
            or command.result is not None
        ):
            return None
        if message.sticky_key is not None and mailbox.topics[message.topic].policy.ordered_keys:
            key = message.topic, message.sticky_key
            in_flight, before = mailbox.topics[message.topic].in_flight_of(message), acked.get(key, 0)
            if before == len(in_flight) or in_flight[before] is not message:
                return None
            acked[key] = before + 1
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
    for message in messages:
        if message.unique_key is not None:
            topics[message.topic].unique[message.unique_key] = message
    by_shard: defaultdict[tuple[str, int], list[Message]] = defaultdict(list)
    for name in {message.topic for message in messages}:
        topics[name].shards_in_use = topics[name].shard_count
        mailbox.changed_topics.add(name)
    for (name, number), group in groupby(messages, _shard_of):
        if topics[name].ring is None:
            by_shard[name, number] += group
        else:  # keys join the ring in the order of their messages, whatever their shards
            topics[name].shard(number).enqueue_new(list(group), at)
    for (name, number), queued in by_shard.items():
        topics[name].shard(number).enqueue_new(queued, at)
    mailbox.set_timers(messages)
    return True


def _received(mailbox: Mailbox, events: Sequence[MessageReceived]) -> bool:
    """Apply deliveries."""
    messages = _messages_of(events, mailbox, READY)
    if messages is None:
        return False
    for (name, number), group in groupby(messages, _shard_of):
        topic, some = mailbox.topics[name], list(group)
        mailbox.changed_topics.add(name)
        shard = topic.shards[number]
        if isinstance(shard, (KeyedShard, FairShard)):
            shard.deliver_all(some)
        else:
            shard.dequeue_all(some)
            shard.in_flight += len(some)
        if topic.ring is not None or topic.policy.rate or topic.shared is not None:
            topic.end_turns(some, events[0].at)
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
    for (name, number), group in groupby(messages, _shard_of):
        topic, some = mailbox.topics[name], list(group)
        mailbox.changed_topics.add(name)
        shard = topic.shards[number]
        if topic.shared is not None:
            topic.shared.in_flight -= len(some)
            mailbox.changed_topics.add(ALL_TOPICS)
        if unique := topic.unique:
            for message in some:
                if message.unique_key is not None:
                    del unique[message.unique_key]
        if isinstance(shard, (KeyedShard, FairShard)):
            shard.end_deliveries(some, events[0].at)
        else:
            shard.in_flight -= len(some)
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


T = TypeVar("T")
_by_position = attrgetter("position")

CHUNK_ITEMS = 500
"""Messages or keys that are collected without a break; a few tenths of a millisecond's work."""

BLOCK_ITEMS = 100 * CHUNK_ITEMS
"""Messages that are listed at a time until they reach a position; a million take 10 to 20 ms."""


class Moment(NamedTuple):
    """A position of a log, and the log time (µs) of its record."""

    position: int
    at: int


NEVER = Moment(0, -1)
EVER = Moment(1 << 63, 1 << 63)


class Collector:
    """Collects the part of a snapshot that a mailbox has changed since the part before.

    The mailbox may change between the steps, and what changes after it was collected is collected again. The
    last step finds nothing that changed, so the part then holds the mailbox as it is at that moment.

    Arguments:
        rewritten: what last changed at or before this moment is collected, too, so that the parts before are
            not needed any more. `EVER` collects all.
    """

    def __init__(self, mailbox: Mailbox, rewritten: Moment = NEVER) -> None:
        self._mailbox = mailbox
        self.is_whole = rewritten == EVER
        if self.is_whole:
            mailbox.changes.take(mailbox.position)
            for topic in mailbox.topics.values():
                topic.window.forget_uncollected()
        self._chunks = self._collect(rewritten)
        self._encoded: list[bytes] = []
        self.items = 0
        self.unsettled: set[bytes] = set()
        """Streams of the messages that it has, if it collects all."""

    def step(self, chunks: int) -> bool:
        """Collect up to `chunks` chunks; return whether nothing is left that changed."""
        for _ in range(chunks):
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            if chunk.items:
                self.items += chunk.items
                if self.is_whole:
                    self.unsettled.difference_update(chunk.settled)
                    self.unsettled.update([message.stream for message in chunk.messages])
                self._encoded.append(encode_chunk(chunk))
        return False

    def finish(self, since: int, previous: bytes) -> SnapshotPart:
        """Return the part; to be called when `step` has just returned True, before the mailbox changes.

        Arguments:
            since: position of the first row that this one needs; 0 if it needs none.
            previous: digest of the row before.
        """
        return SnapshotPart(VERSION, since, previous, Head.of(self._mailbox), self._encoded)

    def _collect(self, rewritten: Moment) -> Iterator[Chunk]:
        mailbox, messages = self._mailbox, self._mailbox.messages
        yield from chunks_through(mailbox, rewritten)
        while True:
            sent = _sent_after(mailbox, mailbox.changes.through)
            changed, settled = mailbox.changes.take(mailbox.position)
            topics = [topic for topic in mailbox.topics.values() if topic.window.has_uncollected]
            keys = [(topic, topic.window.take_uncollected()) for topic in topics]
            if not (sent or changed or settled or keys):
                return
            for batch in _batches(settled):
                yield Chunk(settled=list(batch))
            for batch in _batches(changed + sent):
                yield Chunk([messages[stream] for stream in batch if stream in messages])
            for topic, names in keys:
                for some in _batches(names):
                    yield Chunk(keys={topic.name: _entries(mailbox, topic, some)})


def chunks_through(mailbox: Mailbox, moment: Moment) -> Iterator[Chunk]:
    """Yield the messages and keys of a mailbox that last changed at or before a moment, in order."""
    messages, position = mailbox.messages, moment.position
    sent = _sent_through(mailbox, position)
    while sent:  # the last entries are removed, as to free all of them at the end would take long
        batch = sent[: -CHUNK_ITEMS - 1 : -1]
        del sent[-CHUNK_ITEMS:]
        yield Chunk([m for m in batch if m.last <= position and messages.get(m.stream) is m])
    for topic in list(mailbox.topics.values()):
        for keys in chain.from_iterable(map(_batches, topic.window.blocks_through(moment.at))):
            yield Chunk(keys={topic.name: _entries(mailbox, topic, keys)})


def _entries(mailbox: Mailbox, topic: Topic, keys: Sequence[str]) -> dict[str, ReplayEntry]:
    return topic.window.entries(keys, mailbox.at - topic.policy.replay_window_ms * MS)


def _sent_through(mailbox: Mailbox, position: int) -> list[Message]:
    """Return the messages sent up to a position, newest first; the mailbox has them in order."""
    messages, sent, before = iter(mailbox.messages.values()), list[Message](), -1
    while len(sent) > before and (not sent or sent[-1].position <= position):
        before = len(sent)
        sent.extend(islice(messages, BLOCK_ITEMS))
    del sent[bisect_right(sent, position, key=_by_position) :]
    sent.reverse()
    return sent


def _sent_after(mailbox: Mailbox, position: int) -> list[bytes]:
    """Return the streams of the messages sent after a position; the mailbox has them in that order."""
    sent: list[Message] = []
    for message in reversed(mailbox.messages.values()):
        if message.position <= position:
            break
        sent.append(message)
    return [message.stream for message in reversed(sent)]


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + CHUNK_ITEMS] for start in range(0, len(items), CHUNK_ITEMS))
