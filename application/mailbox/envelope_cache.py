"""Bounded cache of recently sent messages, which saves reading them from the log."""

from collections import OrderedDict
from collections.abc import Sequence

from postroom.domain.message import MessageSent

CACHE_BYTES = 64 << 20
READ_AHEAD_RATIO = 16
"""Share of the capacity, as a divisor, that is read ahead at a time."""


class EnvelopeCache:
    """Cache of `MessageSent` events by position, bounded by envelope bytes; the oldest are evicted first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._size = 0
        # Of a dict, the first key is found by a search over all that were removed before it.
        self._events: OrderedDict[int, MessageSent] = OrderedDict()

    @property
    def read_ahead_bytes(self) -> int:
        """Return how many bytes may be read ahead at a time, so that few others are evicted."""
        return self._capacity // READ_AHEAD_RATIO

    def __contains__(self, position: int) -> bool:
        """Return whether the cache has the event of a position."""
        return position in self._events

    def put(self, position: int, event: MessageSent) -> None:
        """Add an event; it is not evicted by its own size."""
        self._events[position] = event
        self._size += len(event.envelope)
        if self._size > self._capacity:
            self._shrink()

    def put_all(self, first: int, events: Sequence[MessageSent]) -> None:
        """Add events of consecutive positions."""
        self._events.update(enumerate(events, first))
        self._size += sum([len(event.envelope) for event in events])
        if self._size > self._capacity:
            self._shrink()

    def pop(self, position: int) -> MessageSent | None:
        """Remove an event and return it, or None; redeliveries read it from the log."""
        event = self._events.pop(position, None)
        if event is not None:
            self._size -= len(event.envelope)
        return event

    def drop(self, positions: Sequence[int]) -> None:
        """Remove the events of these positions."""
        for position in positions:
            if position in self._events:
                self.pop(position)

    def clear(self) -> None:
        """Remove all events."""
        self._events.clear()
        self._size = 0

    def _shrink(self) -> None:
        while self._size > self._capacity and len(self._events) > 1:
            _, event = self._events.popitem(last=False)
            self._size -= len(event.envelope)
