"""Snapshots: a mailbox in parts; each holds the changes since the previous part (ADR 0067)."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec

from postroom.domain.mailbox.events import Clock, MailboxMode, StoredSettings, settings_before
from postroom.domain.mailbox.key_ring import TokenBucket
from postroom.domain.mailbox.replay import ReplayEntry, ReplayWindow
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import DEAD, DEFAULT_PRIORITY, IN_FLIGHT, MS, READY, Deliveries, Message, Status
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import RedriveJob
from postroom.domain.schedule import Schedule
from postroom.domain.subscription import Subscription

VERSION = 10
"""Increment when fields of these structs or `Message` change."""
READABLE = (5, 6, 7, 8, 9, VERSION)
"""Versions that can be restored, as retention may have removed the events; others are ignored."""
ROW_BYTES = 1 << 20
"""Bytes of chunks in a row; encoding and storing one holds the interpreter for about a millisecond."""
_by_position, _by_last = attrgetter("position"), attrgetter("last")


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A part of the changes, applied in this order: settled messages, changed messages, keys by topic."""

    messages: list[Message] = []
    settled: list[bytes] = []
    keys: dict[str, dict[str, ReplayEntry]] = {}

    @property
    def items(self) -> int:
        """Return the number of messages and keys."""
        return len(self.messages) + len(self.settled) + sum(map(len, self.keys.values()))


class _FormerMessage(msgspec.Struct, array_like=True):
    """A message as versions before 10 stored it: with the fields of `Deliveries` among its own."""

    stream: bytes
    version: int
    status: Status
    topic: str
    shard: int
    position: int
    size: int
    sent_at: int
    expires_at: int
    due: int
    attempt: int = 0
    delivery: int = 0
    epoch: int = 0
    received_at: int = 0
    visibility: int = 0
    changed_at: int = 0
    reason: str | None = None
    last_error: str | None = None
    redriven: int = 0
    hidden: int = 0
    priority: int = DEFAULT_PRIORITY
    ready_at: int = 0
    last: int = 0
    sticky_key: str | None = None
    unique_key: str | None = None

    def as_message(self) -> Message:
        """Return the message as it is now."""
        values = {name: getattr(self, name) for name in Message.__struct_fields__ if name != "deliveries"}
        later = {name: getattr(self, name) for name in Deliveries.__struct_fields__}
        return Message(**values, deliveries=None if self.version == 1 else Deliveries(**later))


class _FormerChunk(msgspec.Struct, array_like=True):
    """A chunk of versions before 10; see `Chunk`."""

    messages: list[_FormerMessage] = []
    settled: list[bytes] = []
    keys: dict[str, dict[str, ReplayEntry]] = {}


class TopicHead(msgspec.Struct, frozen=True, array_like=True):
    """State of a topic besides its messages and keys; keys of `dropped_until` (µs) and before are void.

    `shards_in_use` is 0 in snapshots of versions before 6. The buckets are of the topic and its keys.
    """

    dropped_until: int
    dead_letterings: dict[str, int]
    shards_in_use: int = 0
    bucket: TokenBucket | None = None
    key_buckets: dict[str, TokenBucket] = {}


class Head(msgspec.Struct, frozen=True, array_like=True):
    """State of a mailbox besides its messages and keys, after the event at `position`.

    Snapshots of versions before 6 have the `policies` of topics, and no `stored_settings`.
    """

    position: int
    mailbox_version: int
    epoch: int
    owner: str
    at: int
    clock: Clock | None
    mode: MailboxMode
    truncated_through: int
    archived: int
    expiry_resumes_at: int
    policies: dict[str, TopicPolicy]
    paused_topics: list[str]
    topics: dict[str, TopicHead]
    redrives: list[RedriveJob] = []
    stored_settings: StoredSettings | None = None
    subscriptions: list[Subscription] = []
    schedules: list[Schedule] = []

    @classmethod
    def of(cls, mailbox: Mailbox) -> "Head":
        """Return the head of a mailbox as it is."""
        topics = {
            name: TopicHead(
                topic.window.dropped_until,
                topic.dead_letterings.copy(),
                topic.shards_in_use,
                None if topic.bucket is None else copy(topic.bucket),
                {} if topic.ring is None else {k: copy(each) for k, each in topic.ring.buckets.items()},
            )
            for name, topic in mailbox.topics.items()
        }
        return cls(
            mailbox.position,
            mailbox.version,
            mailbox.epoch,
            mailbox.owner,
            mailbox.at,
            mailbox.clock,
            mailbox.mode,
            mailbox.truncated_through,
            mailbox.archived,
            mailbox.expiry_resumes_at,
            {},
            sorted(mailbox.paused_topics),
            topics,
            list(mailbox.redrives.values()),
            mailbox.stored_settings,
            list(mailbox.subscriptions.values()),
            list(mailbox.schedules.values()),
        )

    @property
    def settings(self) -> StoredSettings:
        """Return the settings, which are assumed for snapshots from before they were stored."""
        if self.stored_settings is not None:
            return self.stored_settings
        topics = {topic: msgspec.structs.asdict(policy) for topic, policy in self.policies.items()}
        return StoredSettings(msgspec.structs.replace(settings_before(self.owner), topics=topics))


class SnapshotPart(msgspec.Struct, frozen=True, array_like=True):
    """Changes of a mailbox since the previous part; the rows from `since` on are a snapshot.

    A large part is stored in several rows at consecutive positions; the last is the part's own.

    Arguments:
        since: position of the first row that is needed; 0 if this one needs none before it.
        previous: digest of the row before; empty if none is needed.
        head: head of the mailbox at this part; the heads of earlier parts are not needed.
        chunks: encoded `Chunk`s, oldest first.
        rows_after: number of rows of the same part after this one.
    """

    version: int
    since: int
    previous: bytes
    head: Head
    chunks: list[bytes]
    rows_after: int = 0

    @property
    def position(self) -> int:
        """Return the position of the row."""
        return self.head.position - self.rows_after

    @property
    def items(self) -> int:
        """Return the number of messages and keys; raises MsgspecError for a damaged part."""
        return sum(chunk.items for chunk in self.decoded())

    def decoded(self) -> Iterator[Chunk]:
        """Yield the decoded chunks; raises MsgspecError for a damaged part."""
        if self.version >= 10:
            yield from map(_decode_chunk, self.chunks)
            return
        for chunk in map(_decode_former_chunk, self.chunks):
            yield Chunk([message.as_message() for message in chunk.messages], chunk.settled, chunk.keys)


encode_chunk = msgspec.msgpack.Encoder().encode
_decode_chunk = msgspec.msgpack.Decoder(Chunk).decode
_decode_former_chunk = msgspec.msgpack.Decoder(_FormerChunk).decode


def split_chunks(chunks: Sequence[bytes], limit: int) -> list[list[bytes]]:
    """Return the chunks of a part by rows of about `ROW_BYTES`.

    Arguments:
        limit: number of rows for which there are positions.

    Returns: at least one row, but no more than `limit` if that is positive.
    """
    row_bytes = max(ROW_BYTES, 2 * sum(map(len, chunks)) // max(1, limit - 1) + 1)
    rows: list[list[bytes]] = [[]]
    size = 0
    for chunk in chunks:
        if rows[-1] and size + len(chunk) > row_bytes:
            rows.append([])
            size = 0
        rows[-1].append(chunk)
        size += len(chunk)
    return rows


def restore_snapshot(parts: Sequence[SnapshotPart], name: str) -> Mailbox | None:
    """Return the mailbox of a snapshot, or None if a part of it is damaged.

    Arguments:
        parts: all rows of the snapshot, oldest first.
    """
    messages: dict[bytes, Message] = {}
    windows: defaultdict[str, dict[str, ReplayEntry]] = defaultdict(dict)
    try:
        for part in parts:
            for chunk in part.decoded():
                _share_values(chunk.messages)
                for stream in chunk.settled:
                    messages.pop(stream, None)
                messages.update((message.stream, message) for message in chunk.messages)
                for topic, keys in chunk.keys.items():
                    _add_keys(windows[topic], keys)
    except msgspec.MsgspecError:
        return None
    mailbox = Mailbox(name)
    _restore_head(mailbox, parts[-1].head, windows)
    _restore_messages(mailbox, messages)
    mailbox.changes.through = mailbox.position
    return mailbox


def _share_values(messages: Sequence[Message]) -> None:
    """Let messages share equal values, as messages sent together do; a copy would take 32 bytes each."""
    values: dict[int, int] = {}
    topics: dict[str, str] = {}
    share, share_topic = values.setdefault, topics.setdefault
    for message in messages:
        message.topic = share_topic(message.topic, message.topic)
        message.sent_at = share(message.sent_at, message.sent_at)
        message.due = share(message.due, message.due)
        message.ready_at = share(message.ready_at, message.ready_at)
        message.expires_at = share(message.expires_at, message.expires_at)
        message.size = share(message.size, message.size)
        message.last = message.position if message.last == message.position else message.last


def _add_keys(window: dict[str, ReplayEntry], keys: dict[str, ReplayEntry]) -> None:
    if not window.keys().isdisjoint(keys.keys()):
        for key in keys:
            window.pop(key, None)  # so that it moves to the end
    window.update(keys)


def _restore_head(mailbox: Mailbox, head: Head, windows: dict[str, dict[str, ReplayEntry]]) -> None:
    mailbox.position = head.position
    mailbox.version = head.mailbox_version
    mailbox.epoch = head.epoch
    mailbox.owner = head.owner
    mailbox.at = head.at
    mailbox.clock = head.clock
    mailbox.mode = head.mode
    mailbox.truncated_through = head.truncated_through
    mailbox.archived = head.archived
    mailbox.expiry_resumes_at = head.expiry_resumes_at
    mailbox.configure(head.settings, head.at)
    mailbox.paused_topics = set(head.paused_topics)
    mailbox.set_subscriptions({each.name: each for each in head.subscriptions})
    mailbox.schedules = {each.name: each for each in head.schedules}
    mailbox.redrives = {job.job: job for job in head.redrives}
    for name, saved in head.topics.items():
        policy = mailbox.policy(name)
        since = max(saved.dropped_until, mailbox.at - policy.replay_window_ms * MS)
        topic = Topic(name, policy, _window(windows.get(name, {}), since, saved.dropped_until))
        topic.dead_letterings = saved.dead_letterings
        topic.shards_in_use = saved.shards_in_use or policy.shards
        topic.bucket = copy(saved.bucket)
        if topic.ring is not None:
            topic.ring.buckets |= {key: copy(each) for key, each in saved.key_buckets.items()}
        mailbox.topics[name] = topic


def _window(keys: dict[str, ReplayEntry], since: int, dropped_until: int) -> ReplayWindow:
    """Return the window of the keys added after `since`; keys that were collected again came out of order."""
    times = [entry.at for entry in keys.values()]
    if times != sorted(times):
        keys = dict(sorted(keys.items(), key=lambda item: item[1].at))
        times.sort()
    if times and times[0] <= since:
        keys = dict(islice(keys.items(), bisect_right(times, since), None))
    return ReplayWindow(keys, dropped_until)


def _restore_messages(mailbox: Mailbox, by_stream: dict[bytes, Message]) -> None:
    """Add the messages, in the order of their positions, to their queues."""
    messages = list(by_stream.values())
    positions = [message.position for message in messages]
    if positions != sorted(positions):
        messages.sort(key=_by_position)
        by_stream = {message.stream: message for message in messages}
    mailbox.messages = by_stream
    ready: defaultdict[str, list[Message]] = defaultdict(list)
    dead: list[Message] = []
    for message in messages:
        if message.unique_key is not None and message.status != DEAD:
            mailbox.topic(message.topic).unique[message.unique_key] = message
        if message.status == READY:
            ready[message.topic].append(message)
        elif message.status == IN_FLIGHT:
            mailbox.topic(message.topic).restore(message)
            mailbox.in_flight += 1
        elif message.status == DEAD:
            mailbox.topic(message.topic).restore(message)
            dead.append(message)
    for name, some in ready.items():
        mailbox.topic(name).restore_waiting(some, mailbox.at)
    for message in sorted(dead, key=_by_last):  # the order in which they expire
        topic = mailbox.topic(message.topic)
        topic.add_dead(message)
        if len(topic.dead) > topic.policy.dead_capacity:
            mailbox.over_capacity.add(topic.name)
    mailbox.share_limits(mailbox.at)
    mailbox.restore_timers()


class Moment(NamedTuple):
    """A position of a log, and the log time (µs) of its record."""

    position: int
    at: int


NEVER = Moment(0, -1)
EVER = Moment(1 << 63, 1 << 63)
