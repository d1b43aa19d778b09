"""Timers of visibility timeouts and expiry."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from postroom.domain.message import Message


class Timers:
    """Timers of messages, one per message.

    `time_of` returns when a message's current timer fires, or None; entries with another time are stale and
    skipped. Timers that are set in order, as those of one policy are, go to a deque, others to a heap. Both
    are rebuilt before stale entries outnumber the live ones.
    """

    __slots__ = ("_heap", "_ordered", "_time_of")

    def __init__(self, time_of: Callable[[Message], int | None]) -> None:
        self._time_of = time_of
        self._ordered: deque[tuple[int, int, Message]] = deque()
        self._heap: list[tuple[int, int, Message]] = []

    def __len__(self) -> int:
        return len(self._ordered) + len(self._heap)

    def set(self, at: int, message: Message) -> None:
        """Set the message's timer to fire at `at` (µs)."""
        ordered = self._ordered
        if not ordered or ordered[-1][0] <= at:
            ordered.append((at, message.position, message))
        else:
            heapq.heappush(self._heap, (at, message.position, message))

    def set_all(self, timers: list[tuple[int, int, Message]]) -> None:
        """Set timers: each the time (µs) at which it fires, the message's position, and the message."""
        ordered = self._ordered
        if (not ordered or ordered[-1][0] <= timers[0][0]) and timers == sorted(timers):
            ordered.extend(timers)
            return
        for at, _, message in timers:
            self.set(at, message)

    def next(self) -> int | None:
        """Return when the next timer fires (µs), or None."""
        time_of, ordered, heap = self._time_of, self._ordered, self._heap
        while ordered and time_of(ordered[0][2]) != ordered[0][0]:
            ordered.popleft()
        while heap and time_of(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        if ordered and heap:
            return min(ordered[0][0], heap[0][0])
        return ordered[0][0] if ordered else heap[0][0] if heap else None

    def due(self, now: int, limit: int) -> list[Message]:
        """Return up to `limit` messages whose timers are due at `now` (µs), without removing the timers."""
        fired: dict[bytes, Message] = {}
        for at, _, message in self._ordered:
            if at > now or len(fired) >= limit:
                break
            if self._time_of(message) == at:
                fired[message.stream] = message
        heap = self._heap
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

    def rebuild(self, messages: Iterable[Message]) -> None:
        """Drop the stale entries."""
        live = [(at, m.position, m) for m in messages if (at := self._time_of(m)) is not None]
        live.sort()  # never compares messages, whose positions differ
        self._ordered = deque(live)
        self._heap = []
