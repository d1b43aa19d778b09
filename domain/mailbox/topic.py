"""Topics of a mailbox: shards, priorities, and timers of visibility timeouts and expiry."""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any

from postroom.domain.mailbox.keyed_shard import KeyedShard
from postroom.domain.mailbox.replay import ReplayWindow
from postroom.domain.message import DEAD, IN_FLIGHT, MS, READY, REPLACED, Message
from postroom.domain.policy import TopicPolicy

_by_position, _by_stream = attrgetter("position"), attrgetter("stream")


class Shard:
    """FIFO queue of ready and delayed messages, in send order.

    New messages are appended to `_fresh`, which is in log order. Requeued and redriven messages, and those
    whose delay ended, are inserted into `_returned`, sorted by position: they are delivered before messages
    that were sent later, so order within a shard survives redelivery (svc-mailbox I-14). Messages with a
    future `due` are in the heap `_delayed`.
    """

    __slots__ = ("_delayed", "_fresh", "_order", "_returned", "_waiting", "in_flight")

    def __init__(self, order: Callable[[Message], Any] = _by_position) -> None:
        """Initialise with the sort key of the messages; undelayed messages must be sent in its order."""
        self._order = order
        self._fresh: deque[Message] = deque()
        self._returned: list[Message] = []
        self._delayed: list[tuple[int, int, Message]] = []
        # The queue with a message's live entry, by stream id; entries in other queues are stale and skipped.
        self._waiting: dict[bytes, object] = {}
        self.in_flight = 0

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        return len(self._waiting) + self.in_flight

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message to the queue, delayed if its `due` is after `now` (µs)."""
        if message.due > now:
            heapq.heappush(self._delayed, (message.due, message.position, message))
            self._waiting[message.stream] = self._delayed
        elif (
            message.version == 1
            and message.due <= message.sent_at
            and (not self._fresh or self._fresh[-1].position < message.position)
        ):
            self._fresh.append(message)
            self._waiting[message.stream] = self._fresh
        else:
            insort(self._returned, message, key=self._order)
            self._waiting[message.stream] = self._returned

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        self._fresh.extend(messages)
        self._waiting.update(dict.fromkeys(map(_by_stream, messages), self._fresh))

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty queue as `enqueue` does one by one."""
        ready = [each for each in messages if each.due <= now]
        fresh = [each for each in ready if each.version == 1 and each.due <= each.sent_at]
        delayed = [each for each in messages if each.due > now]
        self._fresh.extend(fresh)
        self._waiting = dict.fromkeys(map(_by_stream, fresh), self._fresh)
        if len(fresh) < len(ready):
            returned = [each for each in ready if each.version > 1 or each.due > each.sent_at]
            self._returned.extend(sorted(returned, key=self._order))
            self._waiting |= dict.fromkeys(map(_by_stream, returned), self._returned)
        self._delayed.extend((each.due, each.position, each) for each in delayed)
        heapq.heapify(self._delayed)
        self._waiting |= dict.fromkeys(map(_by_stream, delayed), self._delayed)

    def dequeue(self, message: Message) -> None:
        """Remove a waiting message; in the middle of `_fresh` or `_delayed`, its entry becomes stale."""
        queue = self._waiting.pop(message.stream)
        if queue is self._fresh:
            if self._fresh[0] is message:
                self._fresh.popleft()
        elif queue is self._returned:
            order = self._order
            del self._returned[bisect_left(self._returned, order(message), key=order)]

    def dequeue_all(self, messages: Sequence[Message]) -> None:
        """Remove waiting messages; see `dequeue`."""
        fresh = self._fresh
        for message in messages:
            if fresh and fresh[0] is message and self._waiting[message.stream] is fresh:
                del self._waiting[message.stream]
                fresh.popleft()
            else:
                self.dequeue(message)

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), oldest first, without removing them."""
        if self._delayed:
            self._promote(now)
        fresh = self._fresh
        while fresh and not self._is_live(fresh[0], fresh):
            fresh.popleft()
        return (
            merge(self._returned, self._live_fresh(), key=self._order)
            if self._returned
            else self._live_fresh()
        )

    def _live_fresh(self) -> Iterator[Message]:
        fresh, waiting = self._fresh, self._waiting
        for message in fresh:
            if waiting.get(message.stream) is fresh:
                yield message

    def next_due(self) -> int | None:
        """Return the µs at which the first delayed message becomes ready, or None."""
        delayed = self._delayed
        while delayed and not self._is_due(delayed[0]):
            heapq.heappop(delayed)
        return delayed[0][0] if delayed else None

    def _promote(self, now: int) -> None:
        """Move messages whose delay has ended to `_returned`; time is not an event, so reads may do this."""
        delayed = self._delayed
        while delayed and delayed[0][0] <= now:
            entry = heapq.heappop(delayed)
            if self._is_due(entry):
                insort(self._returned, entry[2], key=self._order)
                self._waiting[entry[2].stream] = self._returned

    def _is_live(self, message: Message, queue: object) -> bool:
        return self._waiting.get(message.stream) is queue

    def _is_due(self, entry: tuple[int, int, Message]) -> bool:
        due, _, message = entry
        return message.due == due and self._is_live(message, self._delayed)


_by_ready_time = attrgetter("ready_at", "position")


class PriorityShard:
    """Queue of a topic with priorities: a FIFO queue for each priority in use, at most eleven.

    A message counts one priority higher for each `aging` that it has been ready. As all messages age alike,
    their order does not change while they wait: a message is ordered as if it had been ready `aging` earlier
    for each of its priorities, and nothing that becomes ready later than that passes it (ADR 0048).
    """

    __slots__ = ("_aging", "_queues", "in_flight")

    def __init__(self, aging: int) -> None:
        """Initialise with the time (µs) that counts as one priority."""
        self._aging = aging
        self._queues: dict[int, Shard] = {}
        self.in_flight = 0

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        return self.in_flight + sum(queue.size for queue in self._queues.values())

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message to the queue, delayed if its `due` is after `now` (µs)."""
        self._queue(message.priority).enqueue(message, now)

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        for message in messages:
            self.enqueue(message, now)

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty queue as `enqueue` does one by one."""
        by_priority: defaultdict[int, list[Message]] = defaultdict(list)
        for message in messages:
            by_priority[message.priority].append(message)
        for priority, some in by_priority.items():
            self._queue(priority).restore(some, now)

    def dequeue(self, message: Message) -> None:
        """Remove a waiting message."""
        self._queues[message.priority].dequeue(message)

    def dequeue_all(self, messages: Sequence[Message]) -> None:
        """Remove waiting messages."""
        for message in messages:
            self.dequeue(message)

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), most urgent first; remove none."""
        return merge(*(queue.ready(now) for queue in self._queues.values()), key=self._rank)

    def next_due(self) -> int | None:
        """Return the µs at which the first delayed message becomes ready, or None."""
        times = (queue.next_due() for queue in self._queues.values())
        return min((time for time in times if time is not None), default=None)

    def _queue(self, priority: int) -> Shard:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = Shard(_by_ready_time)
        return queue

    def _rank(self, message: Message) -> tuple[int, int]:
        return message.ready_at - message.priority * self._aging, message.position


AnyShard = Shard | PriorityShard | KeyedShard


def queue_of(policy: TopicPolicy) -> tuple[int | None, bool, bool]:
    """Return what the policy says about the order of the shards.

    Returns: the time (µs) that counts as one priority, or None without priorities; whether keys are ordered,
        and whether dead letters hold them.
    """
    aging = policy.priority_aging_ms * MS if policy.priorities else None
    return aging, policy.ordered_keys, policy.ordered_keys and policy.dead_letters_hold_keys


def create_shard(policy: TopicPolicy) -> AnyShard:
    """Return an empty shard in the order that the policy asks for."""
    aging, is_ordered, _ = queue_of(policy)
    queue = Shard() if aging is None else PriorityShard(aging)
    return KeyedShard(queue) if is_ordered else queue


class Topic:
    """Destination of messages: its shards, dead letters and replay window.

    `dead_letterings` is their number by reason, for metrics (svc-mailbox C-4). `shards_in_use` is the number
    of shards among which its messages are spread: another one of the policy waits until there are none.
    `unique` has the unsettled message of each unique key.
    """

    __slots__ = ("dead", "dead_letterings", "name", "policy", "shards", "shards_in_use", "unique", "window")

    def __init__(self, name: str, policy: TopicPolicy, window: ReplayWindow | None = None) -> None:
        self.name = name
        self.policy = policy
        self.shards: dict[int, AnyShard] = {}
        self.shards_in_use = policy.shards
        self.dead: dict[bytes, Message] = {}
        self.dead_letterings: dict[str, int] = {}
        self.unique: dict[str, Message] = {}
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
        self.shards = {}
        waiting: defaultdict[int, list[Message]] = defaultdict(list)
        for message in messages:
            if message.topic != self.name:
                continue
            if message.status == READY:
                waiting[message.shard].append(message)
            else:
                self.restore(message)
        for number, some in waiting.items():
            self.shard(number).restore(some, now)

    def restore(self, message: Message) -> None:
        """Count a message in flight or a dead letter, before the waiting messages are restored."""
        if message.status == IN_FLIGHT:
            shard = self.shard(message.shard)
            if isinstance(shard, KeyedShard):
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
        """Return the shard whose keys a dead letter holds; None for one that holds none."""
        if not self.policy.dead_letters_hold_keys or message.reason == REPLACED:
            return None
        shard = self.shard(message.shard)
        return shard if isinstance(shard, KeyedShard) else None

    @property
    def held_keys(self) -> int:
        """Return how many keys are held by dead letters."""
        return sum(len(shard.held_keys) for shard in self.shards.values() if isinstance(shard, KeyedShard))

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
