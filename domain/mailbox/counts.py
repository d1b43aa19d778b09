"""Counts of a mailbox's messages, by shard and by topic."""

from collections.abc import Mapping, Sequence

import msgspec

from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Shard
from postroom.domain.message import DEAD, READY
from postroom.domain.policy import TopicPolicy


class TopicCount(msgspec.Struct, frozen=True):
    """Number of messages of a shard by status (svc-mailbox I-10)."""

    topic: str
    shard: int
    ready: int
    in_flight: int
    delayed: int
    dead: int
    oldest_at: int | None


def count(mailbox: Mailbox, now: int) -> list[TopicCount]:
    """Return the message counts and the oldest send time of each shard at `now` (µs).

    Queues know their counts, so a million messages that wait take no longer than a few. Beside topics with
    priorities, ordered or fair keys, messages are counted one by one.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    for topic in mailbox.topics.values():
        for number, shard in topic.shards.items():
            if not isinstance(shard, Shard):
                return count_each(mailbox, now)
            if shard.size:
                key = topic.name, number
                ready, delayed, first = shard.count_waiting(now)
                rows[key] = [ready, shard.in_flight, delayed, 0]
                if first is not None:
                    oldest[key] = first
        for message in topic.dead.values():
            rows.setdefault((topic.name, message.shard), [0, 0, 0, 0])[DEAD] += 1
    for message in mailbox.in_flight_messages() if mailbox.in_flight else ():
        key = message.topic, message.shard
        oldest[key] = min(message.sent_at, oldest.get(key, message.sent_at))
    return _counts(rows, oldest)


def count_each(mailbox: Mailbox, now: int) -> list[TopicCount]:
    """Return what `count` does, by a look at each message."""
    rows: dict[tuple[str, int], list[int]] = {}
    oldest: dict[tuple[str, int], int] = {}
    for message in mailbox.messages.values():  # maybe a million
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


class TopicSummary(msgspec.Struct, frozen=True):
    """A topic of a mailbox with its policy and the number of its messages by status.

    Arguments:
        policy: its policy, if a section of the settings matches it; None when the default policy applies.
        oldest_at: send time (µs) of its oldest message that is no dead letter.
        dead_letterings: number of its dead-letterings by reason, since the mailbox holds the topic.
        shards_in_use: number of shards that its messages are spread among, if its policy's number waits until
            there are none; None if it does not wait.
        held_keys: number of ordered keys whose messages wait for a dead letter to be redriven or removed.
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


def summarize_topics(mailbox: Mailbox, now: int) -> list[TopicSummary]:
    """Return the topics of a mailbox (see `Mailbox.topic_names`) at `now` (µs), sorted by name."""
    shards: dict[str, list[TopicCount]] = {name: [] for name in sorted(mailbox.topic_names())}
    for row in count(mailbox, now):
        shards[row.topic].append(row)
    summaries = []
    for name, rows in shards.items():
        topic = mailbox.topics.get(name)
        summaries.append(
            TopicSummary(
                name,
                name in mailbox.paused_topics,
                mailbox.own_policy(name),
                sum(row.ready for row in rows),
                sum(row.in_flight for row in rows),
                sum(row.delayed for row in rows),
                sum(row.dead for row in rows),
                min((row.oldest_at for row in rows if row.oldest_at is not None), default=None),
                {} if topic is None else dict(topic.dead_letterings),
                None if topic is None or topic.shard_count == topic.policy.shards else topic.shard_count,
                0 if topic is None else topic.held_keys,
            )
        )
    return summaries
