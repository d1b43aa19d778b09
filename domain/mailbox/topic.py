"""State of a topic of a mailbox."""

from collections.abc import Iterable
from itertools import islice

from postroom.domain.mailbox.priority_shard import AnyShard, create_shard
from postroom.domain.mailbox.replay import ReplayWindow
from postroom.domain.message import MS, READY, Message
from postroom.domain.policy import TopicPolicy


class Topic:
    """Destination of messages: its shards, dead letters and replay window.

    `dead_letterings` is their number by reason, for metrics (svc-mailbox C-4). `shards_in_use` is the number
    of shards among which its messages are spread: another one of the policy waits until there are none.
    """

    __slots__ = ("dead", "dead_letterings", "name", "policy", "shards", "shards_in_use", "window")

    def __init__(self, name: str, policy: TopicPolicy, window: ReplayWindow | None = None) -> None:
        self.name = name
        self.policy = policy
        self.shards: dict[int, AnyShard] = {}
        self.shards_in_use = policy.shards
        self.dead: dict[bytes, Message] = {}
        self.dead_letterings: dict[str, int] = {}
        self.window = window or ReplayWindow()

    def shard(self, number: int) -> AnyShard:
        """Return a shard of this topic, creating it on first use."""
        shard = self.shards.get(number)
        if shard is None:
            shard = self.shards[number] = create_shard(self.policy)
        return shard

    @property
    def shard_count(self) -> int:
        """Return the number of shards among which the next message is placed (ADR 0098)."""
        if self.shards_in_use != self.policy.shards and self.is_empty:
            return self.policy.shards
        return self.shards_in_use

    @property
    def highest_shard(self) -> int:
        """Return the highest number of a shard with messages or dead letters; -1 without any."""
        used = [number for number, shard in self.shards.items() if shard.size]
        return max([*used, *(message.shard for message in self.dead.values())], default=-1)

    def reorder(self, messages: Iterable[Message], now: int) -> None:
        """Build the shards again, as the policy orders the messages of the mailbox at `now` (µs)."""
        shards, self.shards = self.shards, {}
        for number, shard in shards.items():
            self.shard(number).in_flight = shard.in_flight
        for message in messages:
            if message.topic == self.name and message.status == READY:
                self.shard(message.shard).enqueue(message, now)

    def count_deliverable(self, now: int, limit: int) -> int:
        """Return how many messages could be delivered at `now` (µs), counted up to `limit`."""
        ready = (message for shard in self.shards.values() for message in shard.ready(now))
        return sum(1 for _ in islice((m for m in ready if m.expires_at > now), limit))

    @property
    def is_empty(self) -> bool:
        """Return whether the topic has no messages and no dead letters."""
        return not self.dead and all(shard.size == 0 for shard in self.shards.values())

    def is_idle(self, now: int) -> bool:
        """Return whether the topic has no messages and no idempotency keys at `now` (µs)."""
        return self.is_empty and self.window.is_expired(now - self.policy.replay_window_ms * MS)
