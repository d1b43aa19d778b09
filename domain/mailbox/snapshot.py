"""Snapshots: serialised states of a mailbox, which shorten the part of the log to replay."""

from operator import attrgetter

import msgspec

from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.replay import ReplayEntry, ReplayWindow
from postroom.domain.mailbox.state import Clock, Mailbox, Topic
from postroom.domain.message import DEAD, IN_FLIGHT, MS, READY, Message
from postroom.domain.policy import MailboxLimits, TopicPolicy

VERSION = 3
"""Increment when fields of `Snapshot` or `Message` change; snapshots of unreadable versions are ignored.

Fields with defaults may be appended: snapshots without them stay readable.
"""
_WITHOUT_PRIORITIES = 2
_READABLE = (_WITHOUT_PRIORITIES, VERSION)


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """State of a mailbox after the event at `position`; queues and timers are rebuilt from the messages."""

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
    windows: dict[str, dict[str, ReplayEntry]]
    expiry_resumes_at: int = 0
    paused_topics: list[str] = []
    dead_letterings: dict[str, dict[str, int]] = {}


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
            _ordered_messages(mailbox),
            windows,
            mailbox.expiry_resumes_at,
            sorted(mailbox.paused_topics),
            {name: each.dead_letterings for name, each in mailbox.topics.items() if each.dead_letterings},
        )
    )


def _ordered_messages(mailbox: Mailbox) -> list[Message]:
    """Return the live messages in send order, then the dead letters in the order in which they expire."""
    live = [message for message in mailbox.messages.values() if message.status != DEAD]
    live.sort(key=attrgetter("position"))
    return [*live, *(message for topic in mailbox.topics.values() for message in topic.dead.values())]


def restore_snapshot(
    state: bytes, name: str, limits: MailboxLimits | None = None, default_policy: TopicPolicy | None = None
) -> Mailbox | None:
    """Return the mailbox of a snapshot, or None if its version is not supported."""
    try:
        saved = _decode(state)
    except msgspec.MsgspecError:
        return None
    if saved.version not in _READABLE:
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
    mailbox.expiry_resumes_at = saved.expiry_resumes_at
    mailbox.policies = saved.policies
    mailbox.paused_topics = set(saved.paused_topics)
    for topic_name, keys in saved.windows.items():
        mailbox.topics[topic_name] = Topic(topic_name, mailbox.policy(topic_name), ReplayWindow(keys))
    for topic_name, counts in saved.dead_letterings.items():
        mailbox.topic(topic_name).dead_letterings = counts
    for message in saved.messages:
        if saved.version == _WITHOUT_PRIORITIES:
            message.ready_at = message.due if message.version == 1 else message.sent_at
        _restore_message(mailbox, message)
    return mailbox


def _restore_message(mailbox: Mailbox, message: Message) -> None:
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
            mailbox.over_capacity.add(topic.name)
    mailbox.set_timer(message)
