"""Shards: the queues of a topic, FIFO unless its policy has priorities."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any

from postroom.domain.message import Message

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
