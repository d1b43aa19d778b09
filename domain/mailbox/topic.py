"""Topics of a mailbox: their shards, dead letters, keys and limits."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import Literal

from postroom.domain.mailbox.key_ring import KeyRing, Rate, SharedLimits, TokenBucket
from postroom.domain.mailbox.keyed_shard import FairShard, KeyedShard
from postroom.domain.mailbox.queues import PriorityShard, Shard, by_position, by_ready_time
from postroom.domain.mailbox.replay import ReplayWindow
from postroom.domain.message import DEAD, IN_FLIGHT, MS, READY, REPLACED, Message
from postroom.domain.policy import MAX_COUNT, TopicPolicy

_by_shard = attrgetter("shard")

WaitReason = Literal["dead_letter", "key", "key_limit", "topic_limit"]
"""Reason why a ready message waits: a dead letter holds its ordered key, earlier messages of the key are not
settled, or the key or the topic is at a limit."""
AnyShard = Shard | PriorityShard | KeyedShard | FairShard


def queue_of(policy: TopicPolicy) -> tuple[object, ...]:
    """Return the fields of a policy that order messages; when one changes, the queues are built again."""
    return (
        policy.priority_aging_ms if policy.priorities else None,
        policy.ordered_keys,
        policy.ordered_keys and policy.dead_letters_hold_keys,
        policy.fair_keys,
        policy.key_weights,
        policy.max_in_flight_per_key,
        *((policy.rate_per_key, policy.rate_period_ms, policy.rate_burst) if policy.rate_per_key else ()),
    )


def create_queue(policy: TopicPolicy) -> Shard | PriorityShard:
    """Return an empty queue for messages of any key, in the order that the policy asks for."""
    if not policy.priorities:
        return Shard()
    return PriorityShard(policy.priority_aging_ms * MS, partial(Shard, by_ready_time))


class Topic:
    """Destination of messages: its shards, dead letters and replay window.

    `dead_by_shard` counts dead letters by shard, and `dead_letterings` counts dead-letterings by reason, for
    metrics (svc-mailbox C-4). `shards_in_use` is the number of shards among which its messages are spread:
    another number in the policy waits until the topic is empty. `unique` has the unsettled message of each
    unique key. With fair keys, `ring` has the messages that wait. `bucket` has the tokens of its rate.
    `shared` has the counts of the topics that share its limits.
    """

    __slots__ = (
        "_bucket",
        "dead",
        "dead_by_shard",
        "dead_letterings",
        "name",
        "policy",
        "ring",
        "shards",
        "shards_in_use",
        "shared",
        "unique",
        "window",
    )

    def __init__(self, name: str, policy: TopicPolicy, window: ReplayWindow | None = None) -> None:
        self.name = name
        self.policy = policy
        self.shards: dict[int, AnyShard] = {}
        self.shards_in_use = policy.shards
        self.dead: dict[bytes, Message] = {}
        self.dead_by_shard: dict[int, int] = {}
        self.dead_letterings: dict[str, int] = {}
        self.unique: dict[str, Message] = {}
        self.window = ReplayWindow() if window is None else window
        self._bucket: TokenBucket | None = None
        self.shared: SharedLimits | None = None
        self.ring = self._create_ring({})

    def shard(self, number: int) -> AnyShard:
        """Return a shard of this topic, creating it on first use."""
        shard = self.shards.get(number)
        if shard is None:
            queue = create_queue(self.policy) if self.ring is None else FairShard(self.ring)
            shard = self.shards[number] = KeyedShard(queue) if self.policy.ordered_keys else queue
        return shard

    @property
    def bucket(self) -> TokenBucket | None:
        """Return the tokens of the rate that limits its deliveries; None: full."""
        return self._bucket if self.shared is None else self.shared.bucket

    @bucket.setter
    def bucket(self, bucket: TokenBucket | None) -> None:
        if self.shared is None:
            self._bucket = bucket
        else:
            self.shared.bucket = bucket

    @property
    def limited_in_flight(self) -> int:
        """Return how many messages count against `max_in_flight`."""
        return self.in_flight if self.shared is None else self.shared.in_flight

    def share(self, shared: SharedLimits | None, now: int) -> None:
        """Share limits with other topics from `now` (µs) on; None ends this."""
        if self.shared is not None:
            self.shared.topics -= 1
            self._bucket, self.shared = copy(self.shared.bucket), None
        if shared is not None:
            shared.add(self.in_flight, self._bucket, self.rate, now)
            self.shared = shared

    @property
    def rate(self) -> Rate | None:
        """Return the rate that limits its deliveries; None without a limit."""
        return Rate.of(self.policy.rate, self.policy.rate_period_ms, self.policy.rate_burst)

    def _create_ring(self, buckets: dict[str, TokenBucket]) -> KeyRing | None:
        policy = self.policy
        if not policy.fair_keys:
            return None
        # An ordered key has one batch in flight, whose length `_with_followers` limits.
        most = 0 if policy.ordered_keys else policy.max_in_flight_per_key
        rate = Rate.of(policy.rate_per_key, policy.rate_period_ms, policy.rate_burst)
        queue = create_queue(policy)
        order = queue.rank if isinstance(queue, PriorityShard) else by_position
        return KeyRing(order, partial(create_queue, policy), most, rate, buckets, policy.key_weights)

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
        return max([*used, *self.dead_by_shard], default=-1)

    def add_dead(self, message: Message) -> None:
        """Add a dead letter."""
        self.dead[message.stream] = message
        self.dead_by_shard[message.shard] = self.dead_by_shard.get(message.shard, 0) + 1

    def remove_dead(self, message: Message) -> None:
        """Remove a dead letter."""
        del self.dead[message.stream]
        self.dead_by_shard[message.shard] -= 1
        if not self.dead_by_shard[message.shard]:
            del self.dead_by_shard[message.shard]

    def change_policy(
        self, policy: TopicPolicy, messages: Callable[[], Mapping[str, list[Message]]], now: int
    ) -> None:
        """Apply a policy at `now` (µs); `messages` returns messages by topic, if they must be reordered."""
        queue, rate = queue_of(self.policy), self.rate
        self.policy = policy
        if self.bucket is not None:
            self.bucket = self.bucket.at_rate(rate, self.rate, now)
        if queue != queue_of(policy):
            self._reorder(messages().get(self.name, []), now)

    def _reorder(self, messages: Sequence[Message], now: int) -> None:
        """Build the shards again."""
        before = self.ring
        self.ring = self._create_ring({})
        if self.ring is not None and before is not None:
            for key, bucket in before.buckets.items():
                if (same := bucket.at_rate(before.rate, self.ring.rate, now)) is not None:
                    self.ring.buckets[key] = same
        self.shards = {}
        for message in messages:
            self.restore(message)
        self.restore_waiting([each for each in messages if each.status == READY], now)

    def restore_waiting(self, messages: Iterable[Message], now: int) -> None:
        """Add messages that wait, in the order of their positions, to empty shards at `now` (µs)."""
        if self.ring is None:  # keys join a ring in the order of their oldest messages, whatever their shards
            messages = sorted(messages, key=_by_shard)
        for number, some in groupby(messages, _by_shard):
            self.shard(number).restore(list(some), now)

    def restore(self, message: Message) -> None:
        """Count a message in flight or a dead letter, before the waiting messages are restored."""
        if message.status == IN_FLIGHT:
            shard = self.shard(message.shard)
            if isinstance(shard, (KeyedShard, FairShard)):
                shard.restore_in_flight(message)
            else:
                shard.in_flight += 1
        elif message.status == DEAD:
            self.hold(message)

    def hold(self, message: Message) -> None:
        """Have a dead letter hold the messages of its key, if the policy says so."""
        if (shard := self._held_by(message)) is not None:
            shard.hold(message)

    def unhold(self, message: Message, now: int) -> None:
        """Undo `hold` for a message that is no dead letter any more, at `now` (µs)."""
        if (shard := self._held_by(message)) is not None:
            shard.unhold(message, now)

    def _held_by(self, message: Message) -> KeyedShard | None:
        """Return the shard in which a dead letter holds its key; None if it holds no key."""
        if not self.policy.dead_letters_hold_keys or message.reason == REPLACED:
            return None
        shard = self.shard(message.shard)
        return shard if isinstance(shard, KeyedShard) else None

    def held_key(self, message: Message) -> tuple[str, int] | None:
        """Return the key that a dead letter holds, and how many messages wait for it; or None."""
        key, shard = message.sticky_key, self._held_by(message)
        return None if key is None or shard is None else (key, shard.count_behind(key))

    @property
    def held_keys(self) -> int:
        """Return how many keys are held by dead letters."""
        return sum(map(len, self._held_by_shard()))

    @property
    def keys_held(self) -> set[str]:
        """Return the keys that are held by dead letters."""
        return set().union(*self._held_by_shard())

    @property
    def keys_at_limit(self) -> Collection[str | None]:
        """Return the fair keys whose ready messages wait for a limit of the key."""
        return () if self.ring is None else self.ring.keys_at_limit

    def count_keys(self) -> Iterator[tuple[str, int]]:
        """Yield ordered or fair keys with their numbers of waiting messages; numbers of one key add up."""
        if not self.policy.ordered_keys:
            return iter(()) if self.ring is None else self.ring.count_keys()
        shards = (each for each in self.shards.values() if isinstance(each, KeyedShard))
        return chain.from_iterable(each.count_keys() for each in shards)

    def _held_by_shard(self) -> Iterator[Collection[str]]:
        return (each.held_keys for each in self.shards.values() if isinstance(each, KeyedShard))

    def ready(self, now: int, offset: int = 0) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs); remove none.

        Arguments:
            offset: callers vary it to begin with another shard, so that no shard starves.
        """
        messages: Iterator[Message]
        if self.ring is not None:
            messages = self.ring.ready(now)
        elif len(self.shards) == 1:
            messages = next(iter(self.shards.values())).ready(now)
        else:
            numbers = sorted(self.shards)
            start = offset % len(numbers) if numbers else 0
            messages = chain.from_iterable(
                self.shards[number].ready(now) for number in numbers[start:] + numbers[:start]
            )
        if self.policy.key_batch > 1:
            messages = self._with_followers(messages, now)
        if self.policy.max_in_flight or self.policy.rate:
            # Expired messages, which wait for a sweep, do not count.
            return islice((message for message in messages if message.expires_at > now), self.allowed(now))
        return messages

    def _with_followers(self, messages: Iterable[Message], now: int) -> Iterator[Message]:
        """Yield messages, each followed by later ones of its ordered key that may be delivered with it."""
        policy = self.policy
        most = min(policy.key_batch, policy.max_in_flight_per_key or MAX_COUNT)
        for message in messages:
            yield message
            key, shard = message.sticky_key, self.shards[message.shard]
            if key is not None and message.expires_at > now and isinstance(shard, KeyedShard):
                allowed = most if self.ring is None else min(most, self.ring.allowed(key, now))
                yield from shard.followers(key, max(0, allowed - 1), now)

    def may_settle(self, message: Message) -> bool:
        """Return whether no earlier message of its ordered key must be settled first."""
        shard = self.shards[message.shard]
        return not isinstance(shard, KeyedShard) or shard.may_settle(message)

    def in_flight_of(self, message: Message) -> Sequence[Message]:
        """Return the messages of its ordered key that are in flight, in their order."""
        shard = self.shards[message.shard]
        return shard.in_flight_of(message) if isinstance(shard, KeyedShard) else ()

    def allowed(self, now: int) -> int:
        """Return how many messages its limits allow to deliver at `now` (µs)."""
        allowed, rate = MAX_COUNT, self.rate
        if self.policy.max_in_flight:
            allowed = max(0, self.policy.max_in_flight - self.limited_in_flight)
        if rate is not None:
            bucket = self.bucket
            allowed = min(allowed, rate.burst if bucket is None else bucket.tokens(rate, now))
        return allowed

    def waits_for(self, message: Message, now: int) -> WaitReason | None:
        """Return why a ready message waits at `now` (µs); None if it waits for a consumer."""
        key, shard = message.sticky_key, self.shard(message.shard)
        if isinstance(shard, KeyedShard) and not shard.is_head(message):
            return "dead_letter" if key in shard.held_keys else "key"
        if not self.allowed(now):
            return "topic_limit"
        return "key_limit" if self.ring is not None and self.ring.is_at_limit(key, now) else None

    def end_turns(self, messages: Sequence[Message], now: int) -> None:
        """Count deliveries at `now` (µs) against the rates, and move their keys behind the others."""
        if self.shared is not None:
            self.shared.in_flight += len(messages)
        if (rate := self.rate) is not None:
            bucket = self.bucket
            if bucket is None:
                bucket = self.bucket = TokenBucket.full(rate, now)
            bucket.take(rate, len(messages), now)
        if self.ring is not None:
            for message in messages:
                self.ring.end_turn(message.sticky_key, now)

    def next_due(self, now: int) -> int | None:
        """Return when the first delay ends, or a limit allows a delivery (µs); None for never.

        Arguments:
            now: log time (µs).
        """
        limited = self.policy.max_in_flight or self.policy.rate
        if limited and not self.allowed(now):
            bucket, rate = self.bucket, self.rate
            at = bucket.next_at(rate) if bucket is not None and rate is not None else now
            return at if at > now else None  # the end of a delivery allows the next one
        if self.ring is not None:
            return self.ring.next_due()
        times = [shard.next_due() for shard in self.shards.values()]
        return min((time for time in times if time is not None), default=None)

    def count_deliverable(self, now: int, limit: int) -> int:
        """Return how many messages could be delivered at `now` (µs), counted up to `limit`."""
        return sum(1 for _ in islice((m for m in self.ready(now) if m.expires_at > now), limit))

    @property
    def in_flight(self) -> int:
        """Return the number of messages in flight."""
        return sum(shard.in_flight for shard in self.shards.values())

    @property
    def unsettled(self) -> int:
        """Return the number of messages that are ready, delayed or in flight."""
        return sum(shard.size for shard in self.shards.values())

    @property
    def size(self) -> int:
        """Return the number of messages, dead letters included."""
        return self.unsettled + len(self.dead)

    @property
    def is_empty(self) -> bool:
        """Return whether the topic has no messages and no dead letters."""
        return not self.size

    def is_idle(self, now: int) -> bool:
        """Return whether the topic has no messages, idempotency keys and recent deliveries at `now` (µs)."""
        if not self.is_empty or not self.window.is_expired(now - self.policy.replay_window_ms * MS):
            return False
        others = self.shared is not None and self.shared.topics > 1  # which keep the bucket
        limits = [(self.rate, [] if others or self.bucket is None else [self.bucket])]
        if self.ring is not None:
            limits.append((self.ring.rate, list(self.ring.buckets.values())))
        return all(each.is_full(rate, now) for rate, buckets in limits if rate for each in buckets)
