"""Counts of a mailbox's messages, by shard, by topic and by key."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice

import msgspec

from postroom.domain.mailbox.queues import Shard
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import DEAD, READY
from postroom.domain.policy import TopicPolicy


class TopicCount(msgspec.Struct, frozen=True, gc=False):
    """Number of messages of a shard by status (svc-mailbox I-10)."""

    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None


def count(mailbox: Mailbox, now: int, name: str | None = None) -> list[TopicCount]:
    """Return the message counts and the oldest send time of each shard at `now` (µs).

    Topics know the counts of their shards, so a million waiting messages or dead letters take no longer than
    a few. Messages in flight are looked at one by one. If a topic has priorities, ordered keys or fair keys,
    `count_each` counts all messages one by one.

    Arguments:
        name: only of this topic.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    one = None if name is None else mailbox.topics.get(name)
    if name is not None and one is None:
        return []
    for topic in mailbox.topics.values() if one is None else (one,):
        for number, shard in topic.shards.items():
            if not isinstance(shard, Shard):
                return count_each(mailbox, now, name)
            if shard.size:
                key = topic.name, number
                ready, delayed, first = shard.count_waiting(now)
                rows[key] = [ready, shard.in_flight, delayed, 0]
                if first is not None:
                    oldest[key] = first
        for number, dead in topic.dead_by_shard.items():
            rows.setdefault((topic.name, number), [0, 0, 0, 0])[DEAD] = dead
    for message in mailbox.in_flight_messages() if mailbox.in_flight else ():
        if name is not None and message.topic != name:
            continue
        key = message.topic, message.shard
        first = oldest.get(key)
        if first is None or message.sent_at < first:
            oldest[key] = message.sent_at
    return _counts(rows, oldest)


def count_each(mailbox: Mailbox, now: int, name: str | None = None) -> list[TopicCount]:
    """Return what `count` does, by counting the messages one by one."""
    rows: dict[tuple[str, int], list[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    for message in mailbox.messages.values():  # maybe a million
        if name is not None and message.topic != name:
            continue
        key = (message.topic, message.shard)
        row = rows.get(key)
        if row is None:
            row = rows[key] = [0, 0, 0, 0]
        status = message.status
        row[2 if status == READY and message.due > now else status] += 1
        if status != DEAD:
            first = oldest.get(key)
            if first is None or message.sent_at < first:
                oldest[key] = message.sent_at
    return _counts(rows, oldest)


def _counts(
    rows: Mapping[tuple[str, int], Sequence[int]], oldest: Mapping[tuple[str, int], int]
) -> list[TopicCount]:
    return [
        TopicCount(topic, shard, ready, in_flight, delayed, dead, oldest.get((topic, shard)))
        for (topic, shard), (ready, in_flight, delayed, dead) in sorted(rows.items())
    ]


class TopicSummary(msgspec.Struct, frozen=True, gc=False):
    """A topic of a mailbox with its policy and the number of its messages by status.

    Arguments:
        policy: its policy, if a section of the settings matches it; None when the default policy applies.
        oldest_at: send time (µs) of its oldest message that is no dead letter.
        dead_letterings: number of its dead-letterings by reason, since the mailbox holds the topic.
        shards_in_use: number of shards among which its messages are spread, if another number in its policy
            waits until the topic is empty; else None.
        held_keys: number of ordered keys whose messages wait for a dead letter to be redriven or removed.
        receivers: number of receives that wait for its messages now; 0 unless the owner answers.
    """

    topic: str
    paused: bool
    policy: TopicPolicy | None
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None
    dead_letterings: Mapping[str, int]
    shards_in_use: int | None = None
    held_keys: int = 0
    receivers: int = 0


def summarize_topics(mailbox: Mailbox, now: int) -> list[TopicSummary]:
    """Return the topics of a mailbox (see `Mailbox.topic_names`) at `now` (µs), sorted by name."""
    shards: dict[str, list[TopicCount]] = {name: [] for name in sorted(mailbox.topic_names())}
    for row in count(mailbox, now):
        shards[row.topic].append(row)
    return [_summarize(mailbox, name, rows) for name, rows in shards.items()]


def summarize_topic(mailbox: Mailbox, name: str, now: int) -> TopicSummary:
    """Return one topic, which need not exist; see `summarize_topics`."""
    return _summarize(mailbox, name, count(mailbox, now, name))


def _summarize(mailbox: Mailbox, name: str, rows: Sequence[TopicCount]) -> TopicSummary:
    topic = mailbox.topics.get(name)
    ready = in_flight = delayed = dead = 0
    oldest: int | None = None
    for row in rows:  # ten thousand topics are summarized for a page
        ready += row.ready
        in_flight += row.in_flight
        delayed += row.delayed
        dead += row.dead
        if row.oldest_at is not None and (oldest is None or row.oldest_at < oldest):
            oldest = row.oldest_at
    return TopicSummary(
        name,
        name in mailbox.paused_topics,
        mailbox.own_policy(name),
        ready,
        in_flight,
        delayed,
        dead,
        oldest,
        {} if topic is None else dict(topic.dead_letterings),
        None if topic is None or topic.shard_count == topic.policy.shards else topic.shard_count,
        topic.held_keys if topic is not None and topic.dead else 0,  # dead letters hold keys
    )


class KeyCount(msgspec.Struct, frozen=True):
    """A sticky key of a topic with ordered or fair keys.

    Arguments:
        waiting: number of its messages that are ready, or wait for earlier ones of the key.
        in_flight: number of its messages in flight.
        is_held: whether its messages wait for a dead letter to be redriven or removed.
        is_limited: whether its messages wait for a limit of the key.
    """

    key: str
    waiting: int
    in_flight: int
    is_held: bool
    is_limited: bool


MAX_KEYS = 100_000
"""Maximum number of keys in a report, held keys first."""


def count_keys(mailbox: Mailbox, name: str, limit: int) -> list[KeyCount]:
    """Return the keys of a topic that are held, and then those with the most messages.

    Arguments:
        limit: maximum number of keys.
    """
    topic = mailbox.topics.get(name)
    if topic is None or not (topic.policy.ordered_keys or topic.policy.fair_keys):
        return []
    held, limited = topic.keys_held, topic.keys_at_limit
    waiting = Counter(dict.fromkeys(islice(held, MAX_KEYS), 0))
    for key, number in islice(topic.count_keys(), MAX_KEYS):
        waiting[key] += number
    streams = {each.stream: each for each in mailbox.in_flight_messages() if each.topic == name}
    in_flight = Counter(each.sticky_key for each in streams.values() if each.sticky_key is not None)
    counts = (
        KeyCount(key, waiting[key], in_flight[key], key in held, key in limited)
        for key in waiting.keys() | in_flight.keys()
    )
    return sorted(counts, key=lambda each: (not each.is_held, -each.waiting - each.in_flight, each.key))[
        :limit
    ]
