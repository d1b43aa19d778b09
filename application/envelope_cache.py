"""A bounded memory of messages that were just sent, so that delivering them needs no read."""

from postroom.domain.message import MessageSent


class EnvelopeCache:
    """Keep `MessageSent` events by log position, up to a number of envelope bytes; the oldest leave first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._size = 0
        self._events: dict[int, MessageSent] = {}

    def put(self, position: int, event: MessageSent) -> None:
        """Keep an event; the one just put always stays, however large."""
        self._events[position] = event
        self._size += len(event.envelope)
        if self._size > self._capacity:
            self._shrink()

    def pop(self, position: int) -> MessageSent | None:
        """Return an event and forget it, or None: a redelivery is rare enough to read it from the log."""
        event = self._events.pop(position, None)
        if event is not None:
            self._size -= len(event.envelope)
        return event

    def clear(self) -> None:
        """Forget everything."""
        self._events.clear()
        self._size = 0

    def _shrink(self) -> None:
        # Down to half at once, so that dropping the oldest costs little per message.
        while self._size > self._capacity // 2 and len(self._events) > 1:
            self.pop(next(iter(self._events)))
