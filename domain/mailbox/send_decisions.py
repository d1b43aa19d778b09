"""Decisions of sends."""

from postroom.domain.errors import FrameTooLarge, IdempotencyConflict, InvalidRequest, Saturated
from postroom.domain.mailbox.commands import Send
from postroom.domain.mailbox.state import Mailbox, shard_of
from postroom.domain.mailbox.subscription_decisions import fan_out, refuse_send
from postroom.domain.mailbox.topic import Topic
from postroom.domain.mailbox.topic_decisions import is_in_the_clear
from postroom.domain.message import MS, READY, Message, MessageSent
from postroom.domain.message_decider import expire, reschedule
from postroom.domain.names import message_id
from postroom.domain.policy import ARCHIVE_ROOM_BYTES, SATURATED_RETRY_MS
from postroom.domain.record import Event


def send(command: Send, mailbox: Mailbox, now: int) -> list[Event]:
    """Accept a message, once for each id, idempotency key and unique key; see `Send`."""
    most = mailbox.limits.frame_bytes + (ARCHIVE_ROOM_BYTES if mailbox.mode == "archive" else 0)
    if len(command.envelope) > most:
        raise FrameTooLarge(
            f"Message on topic {command.topic} is {len(command.envelope)} bytes with its envelope; "
            f"a frame holds at most {most}. Send a reference to the data instead."
        )
    if mailbox.settings.subject_policies and is_in_the_clear(command.topic, command.headers, mailbox):
        raise InvalidRequest(
            f"Mailbox {mailbox.name} encrypts the messages of topic {command.topic}, and its owner does not "
            "know the key store; open it with the settings of erasure."
        )
    if mailbox.subscriptions:
        refuse_send(command.topic, mailbox)
    if command.existing_hash is not None or command.message in mailbox.messages:
        return _check_duplicate(command)
    topic = mailbox.topics.get(command.topic)
    if topic is not None and command.idem_key is not None:
        is_new = topic.window.admit(
            command.topic,
            command.idem_key,
            command.payload_hash,
            capacity=topic.policy.replay_capacity,
            window=topic.policy.replay_window_ms * MS,
            now=now,
        )
        if not is_new:
            return []
    is_archived = mailbox.mode == "archive"
    if topic is None and not (is_archived and command.idem_key is None) and not mailbox.has_room(now):
        raise Saturated(
            f"Mailbox {mailbox.name} holds its limit of {mailbox.limits.topics} topics; use one of them.",
            SATURATED_RETRY_MS,
        )
    if is_archived:
        return [sent(command, 0, None, 0, now)]
    holder = None if topic is None or command.unique_key is None else topic.unique.get(command.unique_key)
    if holder is None:
        events: list[Event] = [_enqueue(command, topic, mailbox, now)]
    else:
        events = _resolve_conflict(command, holder, mailbox, now)
    if mailbox.subscriptions and events and type(events[0]) is MessageSent:
        events += fan_out([events[0]], mailbox, now)
    return events


def _resolve_conflict(command: Send, holder: Message, mailbox: Mailbox, now: int) -> list[Event]:
    """Decide a send whose unique key an unsettled message has; see `Send`."""
    if command.on_conflict == "replace":
        event = _enqueue(command, mailbox.topics[command.topic], mailbox, now, holder)
        shown = message_id(command.message, command.headers.message_id)
        return [event, expire(holder, "superseded", now, note=shown)]
    if command.on_conflict == "keep" or holder.status != READY:
        return []
    due = now + command.deliver_after_ms * MS
    return [reschedule(holder, due, mailbox.policy(command.topic), now, None)]


def _check_duplicate(command: Send) -> list[Event]:
    """Accept a message whose id exists, if its payload is the same."""
    if not command.existing_hash or command.existing_hash == command.payload_hash:
        return []
    # The error omits the hash of the existing payload, from which a short payload could be guessed.
    raise IdempotencyConflict(
        f"Message id {message_id(command.message, command.headers.message_id)} exists with another payload "
        f"than the one sent now to topic {command.topic}; send this payload under another id."
    )


def _enqueue(
    command: Send, topic: Topic | None, mailbox: Mailbox, now: int, replaced: Message | None = None
) -> MessageSent:
    """Return the event of a send to a queue; a message that it replaces does not count as unsettled."""
    policy = mailbox.policy(command.topic) if topic is None else topic.policy
    if policy.subscriptions_only:
        return _archive(command, now)
    shards = policy.shards if topic is None else topic.shard_count
    # The retention of a delayed message begins when it is due; its time to live, when it is sent.
    kept_ms = command.deliver_after_ms + policy.ready_retention_ms
    if command.ttl_ms is not None:
        kept_ms = min(kept_ms, command.ttl_ms)
    if command.deliver_after_ms and command.deliver_after_ms >= kept_ms:
        raise InvalidRequest(
            f"deliver_after_ms must be below the {kept_ms} ms of ttl_seconds, after which an undelivered "
            f"message is dead-lettered; it was {command.deliver_after_ms} for topic {command.topic}."
        )
    shard = shard_of(command.sticky_key or command.topic, shards)
    queue = topic.shards.get(shard) if topic is not None else None
    freed = 1 if replaced is not None and replaced.shard == shard else 0
    if queue is not None and queue.size - freed >= policy.shard_capacity:
        raise Saturated(
            f"Shard {shard} of topic {command.topic} is full with {policy.shard_capacity} messages; "
            "retry later, receive faster, or raise shard_capacity in its policy.",
            SATURATED_RETRY_MS,
        )
    return sent(command, shard, now + command.deliver_after_ms * MS, now + kept_ms * MS, now)


def _archive(command: Send, now: int) -> MessageSent:
    """Return the event of a send to a topic whose messages go to subscriptions only."""
    if command.deliver_after_ms:
        raise InvalidRequest(
            f"deliver_after_ms must be 0 for topic {command.topic}, whose messages go to subscriptions only; "
            f"it was {command.deliver_after_ms}."
        )
    return sent(command, 0, None, 0, now)


def sent(command: Send, shard: int, due: int | None, expires_at: int, now: int) -> MessageSent:
    """Return the event of a send that is accepted; see `MessageSent`."""
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
        command.priority,
        command.sticky_key,
        command.unique_key,
    )
