"""What two mailboxes must agree on to behave alike from now on."""

from typing import Any

from msgspec.structs import astuple

from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS


def view(mailbox: Mailbox, now: int) -> dict[str, Any]:
    """Return everything about a mailbox that later commands can notice, as plain values.

    Arguments:
        now: log time, µs: keys whose window is over and stale timers make no difference.
    """
    return {
        "position": mailbox.position,
        "version": mailbox.version,
        "epoch": mailbox.epoch,
        "owner": mailbox.owner,
        "at": mailbox.at,
        "clock": mailbox.clock,
        "in_flight": mailbox.in_flight,
        "next_timer": mailbox.next_timer(),
        "over_capacity": mailbox.over_capacity,
        "paused_topics": mailbox.paused_topics,
        "settings": mailbox.stored_settings,
        "messages": {stream: astuple(message) for stream, message in mailbox.messages.items()},
        "topics": {name: _topic_view(topic, now) for name, topic in mailbox.topics.items()},
    }


def _topic_view(topic: Any, now: int) -> dict[str, Any]:
    return {
        "policy": topic.policy,
        "shards in use": topic.shards_in_use,
        "dead, oldest first": list(topic.dead),
        "dead_letterings": topic.dead_letterings,
        "unique": {key: message.stream for key, message in topic.unique.items()},
        "keys": topic.window.entries(topic.window.keys(), now - topic.policy.replay_window_ms * MS),
        "shards": {
            number: (shard.size, shard.in_flight, [message.stream for message in shard.ready(now)])
            if topic.ring is None
            else (shard.size, shard.in_flight)
            for number, shard in topic.shards.items()
            if shard.size
        },
        # The turns of keys begin anew when a mailbox is loaded.
        "ready": None if topic.ring is None else {message.stream for message in topic.ring.ready(now)},
        "tokens": None if topic.rate is None else _tokens(topic.bucket, topic.rate, now),
        "tokens of keys": {}
        if topic.ring is None or topic.ring.rate is None
        else {
            key: _tokens(bucket, topic.ring.rate, now)
            for key, bucket in topic.ring.buckets.items()
            if not bucket.is_full(topic.ring.rate, now)
        },
    }


def _tokens(bucket: Any, rate: Any, now: int) -> int:
    return int(rate.burst if bucket is None else bucket.tokens(rate, now))
