"""What a mailbox answers to a command: `decide(command, state, now) -> events`, or a typed rejection."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, islice
from typing import Any

from blake3 import blake3

from postroom.domain.errors import FrameTooLarge, InvalidRequest, NotFound, Saturated
from postroom.domain.event import Event
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Purge,
    Receive,
    Reprocess,
    Send,
    SetPolicy,
    Sweep,
    TakeOwnership,
    Truncate,
)
from postroom.domain.mailbox.events import LogTruncated, MailboxCreated, OwnershipTaken, TopicPolicySet
from postroom.domain.mailbox.state import Mailbox, Topic
from postroom.domain.message import (
    DEAD,
    IN_FLIGHT,
    MS,
    READY,
    DeadReason,
    Message,
    MessageEvent,
    MessageSent,
    Receipt,
    ack,
    dead_letter,
    expire,
    extend,
    nack,
    receive,
    redrive,
    time_out,
)
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import MIN_VISIBILITY_MS, SATURATED_RETRY_MS, TopicPolicy


def decide(command: Command, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Return the events that `command` causes, none where it changes nothing.

    Arguments:
        mailbox: the state, which is only read.
        now: log time, µs; not before the mailbox's last event.

    Raises: a `Rejected`; then nothing happened.
    """
    decider = _DECIDE[type(command)]
    return decider(command, mailbox, now)


@lru_cache(65_536)
def shard_of(key: str, shards: int) -> int:
    """Return the shard of a sticky key: a hash, the same in every process and version (svc-mailbox P-6)."""
    return int.from_bytes(blake3(key.encode()).digest(8), "big") % shards


def deliverable(command: Receive, mailbox: Mailbox, now: int) -> list[Message]:
    """Return the messages that `command` would deliver or quarantine, in order, oldest first per shard."""
    topic = mailbox.topics.get(command.topic)
    if topic is None:
        return []
    room = min(command.max_messages, mailbox.limits.in_flight_ceiling - mailbox.in_flight)
    chosen: list[Message] = []
    size = 0
    corrupt = command.corrupt
    for message in _in_turn(topic, mailbox.position, now):
        if message.stream in corrupt:
            chosen.append(message)
            continue
        if message.expires_at <= now:  # the next sweep ends it
            continue
        if room <= 0 or (size and size + message.size > command.max_bytes):
            break
        room -= 1
        size += message.size or 1
        chosen.append(message)
    return chosen


def _in_turn(topic: Topic, turn: int, now: int) -> Iterator[Message]:
    """Yield a topic's ready messages by shard, starting at another one each time, so that none starves."""
    numbers = sorted(topic.shards)
    if len(numbers) == 1:
        return topic.shards[numbers[0]].ready(now)
    start = turn % len(numbers) if numbers else 0
    return chain.from_iterable(topic.shards[n].ready(now) for n in numbers[start:] + numbers[:start])


def _send(command: Send, mailbox: Mailbox, now: int) -> list[Event]:
    if len(command.envelope) > mailbox.limits.frame_bytes:
        raise FrameTooLarge(
            f"Message on topic {command.topic} is {len(command.envelope)} bytes with its envelope; "
            f"a frame holds at most {mailbox.limits.frame_bytes}. Send a reference to the data instead."
        )
    if command.known or command.message in mailbox.messages:
        return []
    if mailbox.mode == "archive":
        return [_sent(command, 0, None, 0, now)]
    topic = mailbox.topics.get(command.topic)
    policy = topic.policy if topic is not None else mailbox.policy(command.topic)
    shard = shard_of(command.sticky_key or command.topic, policy.shards)
    if topic is not None:
        if command.idem_key is not None and not topic.window.admit(
            command.topic,
            command.idem_key,
            command.payload_hash,
            capacity=policy.replay_capacity,
            window=policy.replay_window_ms * MS,
            now=now,
        ):
            return []
        queue = topic.shards.get(shard)
        if queue is not None and queue.size >= policy.shard_capacity:
            raise Saturated(
                f"Shard {shard} of topic {command.topic} is full with {policy.shard_capacity} messages; "
                "retry later, receive faster, or raise shard_capacity in its policy.",
                SATURATED_RETRY_MS,
            )
    elif len(mailbox.topics) >= mailbox.limits.topics:
        raise Saturated(
            f"Mailbox {mailbox.name} holds its limit of {mailbox.limits.topics} topics; use one of them.",
            SATURATED_RETRY_MS,
        )
    due = now + command.deliver_after_ms * MS
    ttl_ms = policy.ready_retention_ms if command.ttl_ms is None else command.ttl_ms
    expires_at = now + min(ttl_ms, policy.ready_retention_ms) * MS
    return [_sent(command, shard, due, expires_at, now)]


def _sent(command: Send, shard: int, due: int | None, expires_at: int, now: int) -> MessageSent:
    return MessageSent(
        command.message,
        1,
        now,
        command.topic,
        shard,
        due,
        expires_at,
        command.size,
        command.idem_key,
        command.payload_hash,
        command.hash_chain,
        command.headers,
        command.envelope,
    )


def _receive(command: Receive, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    if not 1 <= command.max_messages <= mailbox.limits.max_messages:
        raise InvalidRequest(
            f"max_messages must be between 1 and {mailbox.limits.max_messages}; it was "
            f"{command.max_messages}."
        )
    policy = mailbox.policy(command.topic)
    visibility_ms = _visibility(
        policy.visibility_ms if command.visibility_ms is None else command.visibility_ms
    )
    chosen = deliverable(command, mailbox, now)
    if not chosen and mailbox.in_flight >= mailbox.limits.in_flight_ceiling:
        alarm = mailbox.next_alarm()
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {mailbox.limits.in_flight_ceiling} messages in flight; "
            "ack or nack some, or retry when a delivery times out.",
            max(1, (alarm - now) // MS) if alarm is not None else SATURATED_RETRY_MS,
        )
    corrupt, consumer = command.corrupt, command.consumer
    if not corrupt:
        return [receive(message, visibility_ms, consumer, now) for message in chosen]
    return [
        dead_letter(message, "integrity", "stored bytes do not match their hash", policy, now)
        if message.stream in corrupt
        else receive(message, visibility_ms, consumer, now)
        for message in chosen
    ]


def _ack(command: Ack, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    return ack(_held(command.receipt, command.settled, mailbox), command.receipt, now)


def _nack(command: Nack, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = _held(command.receipt, command.settled, mailbox)
    return nack(
        message,
        command.receipt,
        mailbox.policy(message.topic),
        now,
        reason=command.reason,
        delay_ms=command.delay_ms,
        jitter=command.jitter,
    )


def _extend(command: Extend, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    message = _held(command.receipt, command.settled, mailbox)
    visibility_ms = _visibility(command.visibility_ms)
    return extend(message, command.receipt, visibility_ms, mailbox.policy(message.topic), now)


def _held(receipt: Receipt, settled: Message | None, mailbox: Mailbox) -> Message:
    message = mailbox.messages.get(receipt.message) or settled
    if message is None:
        raise NotFound(
            f"Mailbox {mailbox.name} knows no message {receipt.message.hex()}; check the receipt and the "
            "mailbox."
        )
    return message


def _visibility(visibility_ms: int) -> int:
    if visibility_ms < MIN_VISIBILITY_MS:
        raise InvalidRequest(f"visibility_ms must be at least {MIN_VISIBILITY_MS}; it was {visibility_ms}.")
    return visibility_ms


def _reprocess(command: Reprocess, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    topic = _known_topic(command.topic, mailbox)
    events: list[MessageEvent] = []
    room = {n: topic.policy.shard_capacity - shard.size for n, shard in topic.shards.items()}
    for stream, message in topic.dead.items():
        if len(events) >= command.limit:
            break
        if command.reason is not None and message.reason != command.reason:
            continue
        if command.messages is not None and stream not in command.messages:
            continue
        left = room.setdefault(message.shard, topic.policy.shard_capacity)
        if left <= 0:
            if events:
                break
            raise Saturated(
                f"Shard {message.shard} of topic {topic.name} is full with {topic.policy.shard_capacity} "
                "messages; receive some before reprocessing its dead letters.",
                SATURATED_RETRY_MS,
            )
        room[message.shard] = left - 1
        events.append(redrive(message, topic.policy, now))
    return events


def _purge(command: Purge, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    topic = _known_topic(command.topic, mailbox)
    doomed: list[Message] = list(topic.dead.values()) if command.dead else []
    if command.ready:
        doomed += [m for m in mailbox.messages.values() if m.topic == command.topic and m.status == READY]
    return [expire(message, "purged", now) for message in doomed[: command.limit]]


def _known_topic(name: str, mailbox: Mailbox) -> Topic:
    topic = mailbox.topics.get(name)
    if topic is None:
        raise NotFound(
            f"Mailbox {mailbox.name} has no topic {name}; its topics are listed by `postroom backlog`."
        )
    return topic


def _set_policy(command: SetPolicy, mailbox: Mailbox, now: int) -> list[Event]:
    policy = command.policy.validate()
    topic = mailbox.topics.get(command.topic)
    if topic is not None and policy.shards != topic.policy.shards and not topic.is_empty:
        raise InvalidRequest(
            f"Topic {command.topic} has {topic.policy.shards} shards and holds messages; "
            "its shard count can change only while it is empty."
        )
    if policy == mailbox.policies.get(command.topic):
        return []
    stream, version = mailbox_stream(mailbox.name), mailbox.version + 1
    return [TopicPolicySet(stream, version, now, command.topic, policy)]


def _sweep(command: Sweep, mailbox: Mailbox, now: int) -> list[MessageEvent]:
    events: list[MessageEvent] = []
    for message in mailbox.overdue(now, command.limit):
        policy = mailbox.policy(message.topic)
        if message.status == IN_FLIGHT:
            events.append(time_out(message, policy, now))
        elif message.status == DEAD:
            events.append(expire(message, "retention", now))
        else:
            events.append(dead_letter(message, _lateness(message, policy), None, policy, now))
    if events:
        return events
    for name in sorted(mailbox.crowded):
        topic = mailbox.topics[name]
        excess = len(topic.dead) - topic.policy.dead_capacity
        events += [expire(message, "capacity", now) for message in islice(topic.dead.values(), excess)]
    return events


def _lateness(message: Message, policy: TopicPolicy) -> DeadReason:
    by_retention = message.expires_at - message.sent_at >= policy.ready_retention_ms * MS
    return "retention_expired" if by_retention else "ttl_expired"


def _take_ownership(command: TakeOwnership, mailbox: Mailbox, now: int) -> list[Event]:
    stream = mailbox_stream(mailbox.name)
    version = mailbox.version + 1
    events: list[Event] = []
    if version == 1:
        events.append(MailboxCreated(stream, version, now, command.name, command.mode))
        version += 1
    taken = OwnershipTaken(
        stream,
        version,
        now,
        mailbox.epoch + 1,
        command.owner,
        command.boot,
        command.uptime,
        command.clock_continues,
    )
    return [*events, taken]


def _truncate(command: Truncate, mailbox: Mailbox, now: int) -> list[Event]:
    if command.through <= mailbox.truncated_through:
        return []
    stream = mailbox_stream(mailbox.name)
    return [LogTruncated(stream, mailbox.version + 1, now, command.through, command.link)]


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    Send: _send,
    Receive: _receive,
    Ack: _ack,
    Nack: _nack,
    Extend: _extend,
    Reprocess: _reprocess,
    Purge: _purge,
    SetPolicy: _set_policy,
    Sweep: _sweep,
    TakeOwnership: _take_ownership,
    Truncate: _truncate,
}
