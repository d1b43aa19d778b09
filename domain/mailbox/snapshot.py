"""Snapshots: a mailbox's state as bytes, so that opening it needs only the tail of its log."""

from operator import attrgetter

import msgspec

from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.replay import Remembered, ReplayWindow
from postroom.domain.mailbox.state import Clock, Mailbox, Topic
from postroom.domain.message import DEAD, IN_FLIGHT, MS, READY, Message
from postroom.domain.policy import MailboxLimits, TopicPolicy

VERSION = 2
"""Raise this when the snapshot's or a message's fields change: snapshots of other versions are ignored."""


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """State of a mailbox after the event at `position`; queues and alarms are rebuilt from the messages."""

    version: int
    position: int
    mailbox_version: int
    epoch: int
    owner: str
    at: int
    clock: Clock | None
    mode: MailboxMode
    truncated_through: int
    archived: int
    policies: dict[str, TopicPolicy]
    messages: list[Message]
    windows: dict[str, dict[str, Remembered]]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Snapshot).decode


def take_snapshot(mailbox: Mailbox) -> bytes:
    """Return the mailbox's state as bytes."""
    windows = {
        name: topic.window.since(mailbox.at - topic.policy.replay_window_ms * MS)
        for name, topic in mailbox.topics.items()
    }
    return _encode(
        Snapshot(
            VERSION,
            mailbox.position,
            mailbox.version,
            mailbox.epoch,
            mailbox.owner,
            mailbox.at,
            mailbox.clock,
            mailbox.mode,
            mailbox.truncated_through,
            mailbox.archived,
            mailbox.policies,
            _in_order(mailbox),
            windows,
        )
    )


def _in_order(mailbox: Mailbox) -> list[Message]:
    """Return the messages as sent, then the dead letters as they died: the order in which they expire."""
    alive = [message for message in mailbox.messages.values() if message.status != DEAD]
    alive.sort(key=attrgetter("position"))
    return [*alive, *(message for topic in mailbox.topics.values() for message in topic.dead.values())]


def restore_snapshot(
    state: bytes, name: str, limits: MailboxLimits | None = None, default_policy: TopicPolicy | None = None
) -> Mailbox | None:
    """Return the mailbox that a snapshot holds, or None when this version can't read it."""
    try:
        saved = _decode(state)
    except msgspec.MsgspecError:
        return None
    if saved.version != VERSION:
        return None
    mailbox = Mailbox(name, limits, default_policy)
    mailbox.position = saved.position
    mailbox.version = saved.mailbox_version
    mailbox.epoch = saved.epoch
    mailbox.owner = saved.owner
    mailbox.at = saved.at
    mailbox.clock = saved.clock
    mailbox.mode = saved.mode
    mailbox.truncated_through = saved.truncated_through
    mailbox.archived = saved.archived
    mailbox.policies = saved.policies
    for topic_name, keys in saved.windows.items():
        mailbox.topics[topic_name] = Topic(topic_name, mailbox.policy(topic_name), ReplayWindow(keys))
    for message in saved.messages:
        _put_back(mailbox, message)
    return mailbox


def _put_back(mailbox: Mailbox, message: Message) -> None:
    mailbox.messages[message.stream] = message
    topic = mailbox.topic(message.topic)
    if message.status == READY:
        topic.shard(message.shard).enqueue(message, mailbox.at)
    elif message.status == IN_FLIGHT:
        topic.shard(message.shard).in_flight += 1
        mailbox.in_flight += 1
    elif message.status == DEAD:
        topic.dead[message.stream] = message
        if len(topic.dead) > topic.policy.dead_capacity:
            mailbox.crowded.add(topic.name)
    mailbox.set_alarm(message)
