"""Queues of messages in the order in which they are delivered, and timers in the order of their times."""

import heapq
from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from postroom.domain.message import Message

SHORT = 64
"""Number of messages up to which a list holds them, as a short deque takes ten times the bytes."""
MAX_STALE = 1_024
"""Number by which stale entries of a queue or heap may exceed the live ones before they are dropped."""


class Queue(Protocol):
    """A shard that knows no keys; times in µs."""

    @property
    def size(self) -> int:
        """Count its messages."""

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message."""

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay."""

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages to an empty queue."""

    def dequeue(self, message: Message) -> None:
        """Remove a waiting message."""

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered."""

    def next_due(self) -> int | None:
        """Return when the first delayed message becomes ready."""


by_position = attrgetter("position")


class Shard:
    """FIFO queue of ready and delayed messages, in send order.

    New messages are appended to `_fresh`, which is in log order. Requeued and redriven messages, and those
    whose delay ended, are inserted into `_returned`, sorted by position: they are delivered before messages
    that were sent later, so order within a shard survives redelivery (svc-mailbox I-14). Messages with a
    future `due` are in the heap `_delayed`.
    """

    __slots__ = ("_delayed", "_delays", "_fresh", "_gone", "_order", "_returned", "in_flight")

    def __init__(self, order: Callable[[Message], Any] = by_position) -> None:
        """Initialise with the sort key of the messages; undelayed messages must be sent in its order."""
        self._order = order
        self._fresh: deque[Message] = deque()
        # Positions of the entries of `_fresh` whose messages were removed; the first entry is none of them.
        self._gone: set[int] = set()
        self._returned: list[Message] = []
        self._delayed: list[tuple[int, int, Message]] = []
        # Delayed messages by position; entries of the heap with another `due` than theirs are stale.
        self._delays: dict[int, Message] = {}
        self.in_flight = 0

    @property
    def size(self) -> int:
        """Count the messages that `shard_capacity` bounds: ready, delayed and in flight (svc-mailbox I-5)."""
        waiting = len(self._fresh) - len(self._gone) + len(self._returned) + len(self._delays)
        return waiting + self.in_flight

    def enqueue(self, message: Message, now: int) -> None:
        """Add a message to the queue, delayed if its `due` is after `now` (µs)."""
        if message.due > now:
            heapq.heappush(self._delayed, (message.due, message.position, message))
            self._delays[message.position] = message
        elif (
            message.version == 1
            and message.due <= message.sent_at
            and (not self._fresh or self._fresh[-1].position < message.position)
        ):
            self._fresh.append(message)
        else:
            insort(self._returned, message, key=self._order)

    def enqueue_new(self, messages: Sequence[Message], now: int) -> None:
        """Add messages that were just sent without delay, in the order of their positions."""
        self._fresh.extend(messages)

    def restore(self, messages: Sequence[Message], now: int) -> None:
        """Add messages, in the order of their positions, to an empty queue as `enqueue` does one by one."""
        ready = [each for each in messages if each.due <= now]
        fresh = [each for each in ready if each.version == 1 and each.due <= each.sent_at]
        self._fresh.extend(fresh)
        if len(fresh) < len(ready):
            returned = [each for each in ready if each.version > 1 or each.due > each.sent_at]
            self._returned.extend(sorted(returned, key=self._order))
        if len(ready) < len(messages):
            self._delayed.extend((each.due, each.position, each) for each in messages if each.due > now)
            heapq.heapify(self._delayed)
            self._delays = {position: message for _, position, message in self._delayed}

    def dequeue(self, message: Message) -> None:
        """Remove a waiting message; in the middle of `_fresh` or `_delayed`, its entry becomes stale."""
        position, fresh, returned = message.position, self._fresh, self._returned
        if fresh and fresh[0] is message:  # the first entry is not stale
            fresh.popleft()
            self._drop_gone()
            return
        if self._delays.pop(position, None) is not None:
            if len(self._delayed) > 2 * len(self._delays) + MAX_STALE:
                # A message that was removed and added again with the same delay has two entries.
                due = {entry[1]: entry for entry in self._delayed if self._is_due(entry)}
                self._delayed[:] = sorted(due.values())
            return
        index = bisect_left(returned, self._order(message), key=self._order)
        if index < len(returned) and returned[index] is message:
            del returned[index]
            return
        self._gone.add(position)
        if 2 * len(self._gone) > len(fresh) + MAX_STALE:
            self._fresh = deque(self._live_fresh())
            self._gone.clear()

    def dequeue_all(self, messages: Sequence[Message]) -> None:
        """Remove waiting messages; see `dequeue`."""
        fresh, gone = self._fresh, self._gone
        for message in messages:
            if not gone and fresh and fresh[0] is message:
                fresh.popleft()
            else:
                self.dequeue(message)
                fresh = self._fresh

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), oldest first, without removing them."""
        if self._delayed:
            self._promote(now)
        return (
            merge(self._returned, self._live_fresh(), key=self._order)
            if self._returned
            else self._live_fresh()
        )

    def _live_fresh(self) -> Iterator[Message]:
        gone = self._gone
        return (each for each in self._fresh if each.position not in gone) if gone else iter(self._fresh)

    def count_waiting(self, now: int) -> tuple[int, int, int | None]:
        """Return the numbers of ready and of delayed messages at `now` (µs), and the oldest's send time."""
        self._promote(now)
        ready = len(self._fresh) - len(self._gone) + len(self._returned)
        oldest = [*islice(self._fresh, 1), *self._returned[:1]]
        if self._delays:
            oldest.append(self._delays[min(self._delays)])
        return ready, len(self._delays), min([each.sent_at for each in oldest], default=None)

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
                del self._delays[entry[1]]
                insort(self._returned, entry[2], key=self._order)

    def _drop_gone(self) -> None:
        """Drop the stale entries before the first message."""
        fresh, gone = self._fresh, self._gone
        while gone and fresh and fresh[0].position in gone:
            gone.remove(fresh.popleft().position)

    def _is_due(self, entry: tuple[int, int, Message]) -> bool:
        due, position, message = entry
        return position in self._delays and message.due == due


by_ready_time = attrgetter("ready_at", "position")
"""Order in which messages of one priority are delivered."""


class PriorityShard:
    """Queue of a topic with priorities: a FIFO queue for each priority in use, at most eleven.

    A message counts one priority higher for each `aging` that it has been ready. As all messages age alike,
    their order does not change while they wait: a message is ordered as if it had been ready `aging` earlier
    for each of its priorities, and nothing that becomes ready later than that passes it (ADR 0048).
    """

    __slots__ = ("_aging", "_new_queue", "_queues", "in_flight")

    def __init__(self, aging: int, new_queue: Callable[[], Queue]) -> None:
        """Initialise with the time (µs) that counts as one priority, and a factory of FIFO queues."""
        self._aging = aging
        self._new_queue = new_queue
        self._queues: dict[int, Queue] = {}
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
        return merge(*(queue.ready(now) for queue in self._queues.values()), key=self.rank)

    def next_due(self) -> int | None:
        """Return the µs at which the first delayed message becomes ready, or None."""
        times = (queue.next_due() for queue in self._queues.values())
        return min((time for time in times if time is not None), default=None)

    def _queue(self, priority: int) -> Queue:
        queue = self._queues.get(priority)
        if queue is None:
            queue = self._queues[priority] = self._new_queue()
        return queue

    def rank(self, message: Message) -> tuple[int, int]:
        """Return the sort key of a message that may be delivered."""
        return message.ready_at - message.priority * self._aging, message.position


class _InOrder(NamedTuple):
    """Timers in the order of their times (µs)."""

    times: deque[int]
    messages: deque[Message]


class Timers:
    """Timers of messages, one per message.

    `time_of` returns when a message's current timer fires, or None; entries with another time are stale and
    skipped. Timers that are set in order, as the timers of one policy are, are appended to `_recent`, others
    to a heap. A sweep moves the entries of both to `_swept`, in their order and without the stale ones, in
    steps: a pass over a million timers would stop the event loop for a second. `_recent` is after `_swept`;
    a heap that a sweep has begun to move is `_sweeping`.
    """

    __slots__ = ("_heap", "_recent", "_sweeping", "_swept", "_time_of")

    def __init__(self, time_of: Callable[[Message], int | None]) -> None:
        self._time_of = time_of
        self._swept = _InOrder(deque(), deque())
        self._recent = _InOrder(deque(), deque())
        self._heap: list[tuple[int, int, Message]] = []
        self._sweeping: list[tuple[int, int, Message]] = []

    def __len__(self) -> int:
        in_order = len(self._swept.times) + len(self._recent.times)
        return in_order + len(self._heap) + len(self._sweeping)

    def set(self, at: int, message: Message) -> None:
        """Set the message's timer to fire at `at` (µs)."""
        times = self._recent.times or self._swept.times
        if not times or times[-1] <= at:
            self._recent.times.append(at)
            self._recent.messages.append(message)
        else:
            heapq.heappush(self._heap, (at, message.position, message))

    def set_all(self, times: list[int], messages: Sequence[Message]) -> None:
        """Set the timers of messages, each to fire at its time (µs)."""
        last = self._recent.times or self._swept.times
        if (not last or last[-1] <= times[0]) and times == sorted(times):
            self._recent.times.extend(times)
            self._recent.messages.extend(messages)
            return
        for at, message in zip(times, messages, strict=True):
            self.set(at, message)

    def next(self) -> int | None:
        """Return when the next timer fires (µs), or None."""
        time_of, first = self._time_of, None
        for entries in (self._swept, self._recent):
            while entries.times and time_of(entries.messages[0]) != entries.times[0]:
                entries.times.popleft()
                entries.messages.popleft()
            if entries.times:
                first = entries.times[0]
                break
        for heap in (self._heap, self._sweeping):
            while heap and time_of(heap[0][2]) != heap[0][0]:
                heapq.heappop(heap)
            if heap and (first is None or heap[0][0] < first):
                first = heap[0][0]
        return first

    def due(self, now: int, limit: int) -> list[Message]:
        """Return up to `limit` messages whose timers are due at `now` (µs), without removing the timers."""
        fired: dict[bytes, Message] = {}
        for entries in (self._swept, self._recent):
            for at, message in zip(entries.times, entries.messages, strict=True):
                if at > now or len(fired) >= limit:
                    break
                if self._time_of(message) == at:
                    fired[message.stream] = message
        for heap in (self._heap, self._sweeping):
            pending = [0] if heap else []
            while pending and len(fired) < limit:  # descend the heap as far as timers are due
                index = pending.pop()
                at, _, message = heap[index]
                if at > now:
                    continue
                if self._time_of(message) == at:
                    fired[message.stream] = message
                pending += [child for child in (2 * index + 1, 2 * index + 2) if child < len(heap)]
        return list(fired.values())

    def __iter__(self) -> Iterator[Message]:
        """Iterate over the messages that have a timer, some more than once."""
        for entries in (self._swept, self._recent):
            for at, message in zip(entries.times, entries.messages, strict=True):
                if self._time_of(message) == at:
                    yield message
        for at, _, message in chain(self._heap, self._sweeping):
            if self._time_of(message) == at:
                yield message

    def sweep(self, count: int) -> None:
        """Look at the next `count` entries, and drop the stale ones and those that occur twice."""
        time_of, recent = self._time_of, self._recent
        seen_at, seen = (
            -1,
            set[int](),
        )  # positions of one time; not remembered, as `next` removes entries, too
        for _ in range(count):
            heap = self._sweeping
            if not recent.times and not heap:
                self._swept, self._recent = recent, self._swept
                self._sweeping, self._heap = self._heap, heap
                return
            if heap and (not recent.times or heap[0][0] < recent.times[0]):
                at, _, message = heapq.heappop(heap)
            else:
                at, message = recent.times.popleft(), recent.messages.popleft()
            if time_of(message) != at:
                continue
            if at != seen_at:
                seen_at = at
                seen.clear()
            if message.position not in seen:
                seen.add(message.position)
                self._swept.times.append(at)
                self._swept.messages.append(message)

    def rebuild(self, messages: Iterable[Message]) -> None:
        """Set the timers of these messages only."""
        live = [(at, m.position, m) for m in messages if (at := self._time_of(m)) is not None]
        live.sort()  # never compares messages, whose positions differ
        self._swept = _InOrder(deque(), deque())
        self._recent = _InOrder(deque(each[0] for each in live), deque(each[2] for each in live))
        self._heap, self._sweeping = [], []
