"""Queue of a topic with fair keys: keys are served in turn, each within its limits (ADR 0117)."""

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple, Self

import msgspec

from postroom.domain.mailbox.queues import MAX_STALE, SHORT, Queue, by_position
from postroom.domain.message import MS, Message

Key = str | None
"""A sticky key; None for all messages without one, which share a turn and are not limited."""
Waiting = list[Message] | Queue
"""Ready messages of a key: a sorted list while they are few, as a queue takes some hundred bytes."""
NO_LIMIT = 1 << 62
LEAST_BUCKETS = 1_024
"""Number of token buckets below which full ones are not dropped."""


class Rate(NamedTuple):
    """Number of deliveries in a period (µs), and the number that may come at once after a pause."""

    deliveries: int
    period: int
    burst: int

    @classmethod
    def of(cls, count: int, period_ms: int, burst: int) -> Self | None:
        """Return the rate that a policy sets; None without a limit."""
        return cls(count, period_ms * MS, burst or count) if count else None


class TokenBucket(msgspec.Struct, array_like=True, gc=False):
    """Token bucket on log time: each delivery takes a token.

    To avoid rounding, a token is divided into as many units as the rate's period has µs; each µs adds as many
    units as the rate allows deliveries in a period.

    Arguments:
        level: units at `at` (µs), besides whole tokens.
        whole: whole tokens at `at`; units alone could exceed 64 bits for a large rate.
    """

    level: int
    at: int
    whole: int = 0

    @classmethod
    def full(cls, rate: Rate, now: int) -> Self:
        """Return a bucket with as many tokens as the rate's burst."""
        return cls(0, now, rate.burst)

    def tokens(self, rate: Rate, now: int) -> int:
        """Return how many deliveries the rate allows at `now` (µs)."""
        return max(0, self.level_at(rate, now) // rate.period)

    def take(self, rate: Rate, count: int, now: int) -> None:
        """Take the tokens of deliveries at `now` (µs)."""
        self.whole, self.level = divmod(self.level_at(rate, now) - count * rate.period, rate.period)
        self.at = now

    def next_at(self, rate: Rate) -> int:
        """Return when there is a token (µs)."""
        missing = rate.period - self.whole * rate.period - self.level
        return self.at + max(0, -(-missing // rate.deliveries))

    def level_at(self, rate: Rate, now: int) -> int:
        """Return the units at `now` (µs)."""
        level = self.whole * rate.period + self.level
        return min(rate.burst * rate.period, level + max(0, now - self.at) * rate.deliveries)

    def is_full(self, rate: Rate, now: int) -> bool:
        """Return whether the bucket has as many tokens at `now` (µs) as it can have."""
        return self.tokens(rate, now) >= rate.burst

    def at_rate(self, before: Rate | None, after: Rate | None, now: int) -> "TokenBucket | None":
        """Return a bucket with as many tokens after a change of the rate at `now` (µs); None: full."""
        if before is None or after is None:
            return None
        level = self.level_at(before, now) * after.period // before.period
        whole, level = divmod(min(level, after.burst * after.period), after.period)
        return TokenBucket(level, now, whole)


class SharedLimits:
    """Counts of the topics that share the limits of a section (ADR 0117).

    Arguments:
        topics: their number.
        in_flight: their messages in flight.
        bucket: the tokens of their rate; None: full.
    """

    __slots__ = ("bucket", "in_flight", "topics")

    def __init__(self) -> None:
        self.topics = 0
        self.in_flight = 0
        self.bucket: TokenBucket | None = None

    def add(self, in_flight: int, bucket: TokenBucket | None, rate: Rate | None, now: int) -> None:
        """Add a topic at `now` (µs); of several buckets, the one with the fewest tokens applies."""
        self.topics += 1
        self.in_flight += in_flight
        if rate is not None:
            buckets = [each for each in (self.bucket, bucket) if each is not None]
            self.bucket = min(buckets, key=lambda each: each.level_at(rate, now), default=None)


def _unexpired(waiting: Waiting, now: int) -> Iterator[Message]:
    ready = waiting if isinstance(waiting, list) else waiting.ready(now)
    return (message for message in ready if message.expires_at > now)


class KeyRing:
    """Messages that wait in a topic: ready ones by key, in the order of turns, and delayed ones.

    `_ready` has the keys with a ready message that may be served, in the order of their turns. A key joins at
    the end, and returns there after its turn: one message, or as many as its weight. So the first message of
    a key waits for at most one turn of each other key. A key that leaves the ring during its turn continues
    it at the front when it comes back. `_blocked` has the keys at their limits. After a restart, turns begin
    anew.

    Arguments:
        order: sort key of the messages of a key.
        new_queue: creates the queue of a key with many messages, in the same order.
        max_in_flight: of a key; 0 without a limit.
        rate: of a key.
        buckets: of the keys that were served recently; full for all others.
        weights: of keys; 1 for all others.
    """

    __slots__ = (
        "_blocked",
        "_delayed",
        "_due",
        "_in_flight",
        "_max_in_flight",
        "_most_buckets",
        "_new_queue",
        "_order",
        "_ready",
        "_served",
        "_wakes",
        "_waking",
        "_weights",
        "buckets",
        "rate",
    )

    def __init__(
        self,
        order: Callable[[Message], Any],
        new_queue: Callable[[], Queue],
        max_in_flight: int,
        rate: Rate | None,
        buckets: dict[str, TokenBucket],
        weights: Mapping[str, int],
    ) -> None:
        self._order = order
        self._new_queue = new_queue
        self._max_in_flight = max_in_flight
        self.rate = rate
        self.buckets = buckets
        self._weights: dict[Key, int] = dict(weights.items())
        self._served: dict[Key, int] = {}  # messages in their turns, of keys with weights
        self._ready: OrderedDict[Key, Waiting] = OrderedDict()
        self._blocked: dict[Key, Waiting] = {}
        self._delayed: dict[bytes, int] = {}
        self._due: list[tuple[int, int, Message]] = []
        self._in_flight: Counter[str] = Counter()
        self._wakes: list[tuple[int, str]] = []
        self._waking: set[str] = set()
        self._most_buckets = LEAST_BUCKETS

    def add(self, message: Message, now: int) -> None:
        """Add a message, delayed if its `due` is after `now` (µs)."""
        if message.due > now:
            self._delayed[message.stream] = message.due
            heapq.heappush(self._due, (message.due, message.position, message))
            return
        key = message.sticky_key
        keys = self._blocked if key in self._blocked else self._ready
        waiting = keys.get(key)
        if waiting is None:
            self._join(key, [message], now)
        elif not isinstance(waiting, list):
            waiting.enqueue(message, now)
        elif len(waiting) < SHORT:
            insort(waiting, message, key=self._order)
        else:
            queue = keys[key] = self._new_queue()
            for each in sorted((*waiting, message), key=by_position):
                queue.enqueue(each, now)

    def remove(self, message: Message) -> None:
        """Remove a message."""
        if self._delayed.pop(message.stream, None) is not None:
            if len(self._due) > 2 * len(self._delayed) + MAX_STALE:
                due = {each[2].stream: each for each in self._due}.values()
                self._due = [each for each in due if self._delayed.get(each[2].stream) == each[0]]
                heapq.heapify(self._due)
            return
        key = message.sticky_key
        keys = self._ready if key in self._ready else self._blocked
        waiting = keys[key]
        if isinstance(waiting, list):
            del waiting[bisect_left(waiting, self._order(message), key=self._order)]
            is_empty = not waiting
        else:
            waiting.dequeue(message)
            is_empty = not waiting.size
        if is_empty:
            del keys[key]

    def end_turn(self, key: Key, now: int) -> None:
        """Count a delivery of a key at `now` (µs), and move the key behind the others if its turn ends."""
        if key is not None:
            if self._max_in_flight:
                self._in_flight[key] += 1
            if self.rate is not None:
                bucket = self.buckets.get(key)
                if bucket is None:
                    self._drop_full_buckets(self.rate, now)
                    bucket = self.buckets[key] = TokenBucket.full(self.rate, now)
                bucket.take(self.rate, 1, now)
            if key in self._weights:
                self._served[key] = self._served.get(key, 0) + 1
        if key in self._ready:
            self._join(key, self._ready.pop(key), now)

    def restore_in_flight(self, key: Key) -> None:
        """Count a message in flight."""
        if key is not None and self._max_in_flight:
            self._in_flight[key] += 1

    def end_delivery(self, key: Key, now: int) -> None:
        """Count a delivery of a key no longer, at `now` (µs)."""
        if key is None or not self._max_in_flight:
            return
        self._in_flight[key] -= 1
        if not self._in_flight[key]:
            del self._in_flight[key]
        self._unblock(key, now)

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), in turns; remove none.

        Expired messages, which wait for a sweep, take no turn.
        """
        self._promote(now)
        for key, waiting in self._ready.items():
            if isinstance(waiting, list) and waiting[0].expires_at > now and key not in self._weights:
                yield waiting[0]
            else:
                yield from islice(_unexpired(waiting, now), self._rest_of_turn(key, now))
        turns = []
        for key, waiting in self._ready.items():
            count = self._rest_of_turn(key, now)
            more = islice(_unexpired(waiting, now), count, None)
            turns.append((more, self.allowed(key, now) - count, self._weights.get(key, 1)))
        while turns := [turn for turn in turns if turn[1] > 0]:
            for number, (messages, allowed, weight) in enumerate(turns):
                count = 0
                for message in islice(messages, min(allowed, weight)):
                    yield message
                    count += 1
                turns[number] = (messages, allowed - count if count else 0, weight)

    def _rest_of_turn(self, key: Key, now: int) -> int:
        """Return how many messages of a key may be delivered before the next key's at `now` (µs)."""
        return min(self.allowed(key, now), self._weights.get(key, 1) - self._served.get(key, 0))

    @property
    def keys_at_limit(self) -> Collection[Key]:
        """Return the keys whose ready messages wait for a limit of the key."""
        return self._blocked.keys()

    def count_keys(self) -> Iterator[tuple[str, int]]:
        """Yield the keys with the number of their messages that are ready."""
        for key, waiting in chain(self._ready.items(), self._blocked.items()):
            if key is not None:
                yield key, len(waiting) if isinstance(waiting, list) else waiting.size

    def is_at_limit(self, key: Key, now: int) -> bool:
        """Return whether a limit allows no delivery of a key at `now` (µs)."""
        return self.allowed(key, now) <= 0

    def next_due(self) -> int | None:
        """Return when a delay ends, or a limit allows another delivery (µs); None for never."""
        while self._due and self._delayed.get(self._due[0][2].stream) != self._due[0][0]:
            heapq.heappop(self._due)
        times = [queue[0][0] for queue in (self._due, self._wakes) if queue]
        return min(times, default=None)

    def _join(self, key: Key, waiting: Waiting, now: int) -> None:
        """Add a key that is not in the ring, unless at its limit: first if its turn goes on, else last."""
        served = self._served.get(key, 0)
        if served >= self._weights.get(key, 1):  # more than its weight by a batch
            del self._served[key]
        if self.allowed(key, now) > 0:
            self._ready[key] = waiting
            if key in self._served:
                self._ready.move_to_end(key, last=False)
            return
        self._blocked[key] = waiting
        if key is not None and self.rate is not None and key in self.buckets:
            at = self.buckets[key].next_at(self.rate)
            if at > now and key not in self._waking:  # an earlier wake looks at the key again
                heapq.heappush(self._wakes, (at, key))
                self._waking.add(key)

    def _unblock(self, key: Key, now: int) -> None:
        if key in self._blocked:
            self._join(key, self._blocked.pop(key), now)

    def allowed(self, key: Key, now: int) -> int:
        """Return how many more messages of a key may be delivered at `now` (µs)."""
        if key is None:
            return NO_LIMIT
        allowed = self._max_in_flight - self._in_flight[key] if self._max_in_flight else NO_LIMIT
        if self.rate is not None:
            bucket = self.buckets.get(key)
            allowed = min(allowed, self.rate.burst if bucket is None else bucket.tokens(self.rate, now))
        return allowed

    def _drop_full_buckets(self, rate: Rate, now: int) -> None:
        """Drop full buckets once there are twice as many as were left the last time."""
        if len(self.buckets) < self._most_buckets:
            return
        for key in [key for key, bucket in self.buckets.items() if bucket.is_full(rate, now)]:
            del self.buckets[key]
        self._most_buckets = max(LEAST_BUCKETS, 2 * len(self.buckets))

    def _promote(self, now: int) -> None:
        """Let keys join whose delays or limits have ended; time is not an event, so reads may do this."""
        while self._due and self._due[0][0] <= now:
            due, _, message = heapq.heappop(self._due)
            if self._delayed.get(message.stream) == due:
                del self._delayed[message.stream]
                self.add(message, now)
        while self._wakes and self._wakes[0][0] <= now:
            _, key = heapq.heappop(self._wakes)
            self._waking.remove(key)
            self._unblock(key, now)
