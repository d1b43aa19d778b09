"""Alarms: which message next runs out of time."""

import heapq
from collections import deque
from collections.abc import Callable, Iterable

from postroom.domain.message import Message


class Alarms:
    """Keep the times at which time alone changes messages.

    `alarm_of` says when a message's present alarm is, None for no more; an entry that disagrees is stale and
    gets skipped. Deadlines that all come from the same policy arrive in order and cost no more than a deque;
    only those that don't go to a heap. Both are rebuilt before stale entries outnumber the live ones.
    """

    __slots__ = ("_alarm_of", "_heap", "_line")

    def __init__(self, alarm_of: Callable[[Message], int | None]) -> None:
        self._alarm_of = alarm_of
        self._line: deque[tuple[int, int, Message]] = deque()
        self._heap: list[tuple[int, int, Message]] = []

    def __len__(self) -> int:
        return len(self._line) + len(self._heap)

    def set(self, at: int, message: Message) -> None:
        """Note that the message's alarm is at `at` (µs)."""
        line = self._line
        if not line or line[-1][0] <= at:
            line.append((at, message.position, message))
        else:
            heapq.heappush(self._heap, (at, message.position, message))

    def next(self) -> int | None:
        """Return when the first alarm goes off, or None."""
        alarm_of, line, heap = self._alarm_of, self._line, self._heap
        while line and alarm_of(line[0][2]) != line[0][0]:
            line.popleft()
        while heap and alarm_of(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        if line and heap:
            return min(line[0][0], heap[0][0])
        return line[0][0] if line else heap[0][0] if heap else None

    def due(self, now: int, limit: int) -> list[Message]:
        """Return up to `limit` messages whose alarm has gone off at `now` (µs), without taking them out."""
        found: dict[bytes, Message] = {}
        for at, _, message in self._line:
            if at > now or len(found) >= limit:
                break
            if self._alarm_of(message) == at:
                found[message.stream] = message
        heap = self._heap
        reached = [0] if heap else []
        while reached and len(found) < limit:  # walk down the heap as far as it is due
            index = reached.pop()
            at, _, message = heap[index]
            if at > now:
                continue
            if self._alarm_of(message) == at:
                found[message.stream] = message
            reached += [child for child in (2 * index + 1, 2 * index + 2) if child < len(heap)]
        return list(found.values())

    def rebuild(self, messages: Iterable[Message]) -> None:
        """Forget what is stale."""
        live = [(at, m.position, m) for m in messages if (at := self._alarm_of(m)) is not None]
        self._line = deque(sorted(live, key=lambda entry: entry[:2]))
        self._heap = []
