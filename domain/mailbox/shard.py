"""A shard: one FIFO queue of a topic, as a fold of its messages' events."""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import merge
from operator import attrgetter

from postroom.domain.message import Message

_by_position = attrgetter("position")


class Shard:
    """Keep the messages of one shard that wait for delivery, in the order in which they were sent.

    New messages join `_fresh`, whose order is the log's. Messages that come back (nacked, timed out,
    redriven, or whose delay ended) join `_returned`, kept sorted, so that they go before everything sent
    later: FIFO per shard survives a redelivery (svc-mailbox I-14). Messages with a future `due` wait in the
        heap
    `_delayed`.
    """

    __slots__ = ("_delayed", "_fresh", "_returned", "_waiting", "in_flight")

    def __init__(self) -> None:
        self._fresh: deque[Message] = deque()
        self._returned: list[Message] = []
        self._delayed: list[tuple[int, int, Message]] = []
        # stream id -> the queue that holds the live reference; others are stale and get skipped
        self._waiting: dict[bytes, object] = {}
        self.in_flight = 0

    @property
    def waiting(self) -> int:
        """Count the messages that are ready or delayed."""
        return len(self._waiting)

    @property
    def size(self) -> int:
        """Count unsettled messages, in flight included: what `shard_capacity` bounds (svc-mailbox I-5)."""
        return len(self._waiting) + self.in_flight

    def enqueue(self, message: Message, now: int) -> None:
        """Let a ready message wait for its delivery; `now` in µs tells whether it is delayed."""
        if message.due > now:
            heapq.heappush(self._delayed, (message.due, message.position, message))
            self._waiting[message.stream] = self._delayed
        elif message.version == 1 and (not self._fresh or self._fresh[-1].position < message.position):
            self._fresh.append(message)
            self._waiting[message.stream] = self._fresh
        else:
            insort(self._returned, message, key=_by_position)
            self._waiting[message.stream] = self._returned

    def dequeue(self, message: Message) -> None:
        """Take a waiting message out; one from the middle of the line leaves a stale reference behind."""
        queue = self._waiting.pop(message.stream)
        if queue is self._fresh:
            if self._fresh[0] is message:
                self._fresh.popleft()
        elif queue is self._returned:
            del self._returned[bisect_left(self._returned, message.position, key=_by_position)]

    def ready(self, now: int) -> Iterator[Message]:
        """Yield the messages that may be delivered at `now` (µs), oldest first, without taking them out."""
        if self._delayed:
            self._promote(now)
        fresh = self._fresh
        while fresh and not self._is_live(fresh[0], fresh):
            fresh.popleft()
        return (
            merge(self._returned, self._live_fresh(), key=_by_position)
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

    def delayed(self, now: int) -> int:
        """Count the messages that are still delayed at `now` (µs)."""
        self._promote(now)
        return sum(1 for queue in self._waiting.values() if queue is self._delayed)

    def _promote(self, now: int) -> None:
        """Move delayed messages whose time has come: time passing is no event, so reading may do it."""
        delayed = self._delayed
        while delayed and delayed[0][0] <= now:
            entry = heapq.heappop(delayed)
            if self._is_due(entry):
                insort(self._returned, entry[2], key=_by_position)
                self._waiting[entry[2].stream] = self._returned

    def _is_live(self, message: Message, queue: object) -> bool:
        return self._waiting.get(message.stream) is queue

    def _is_due(self, entry: tuple[int, int, Message]) -> bool:
        due, _, message = entry
        return message.due == due and self._is_live(message, self._delayed)
