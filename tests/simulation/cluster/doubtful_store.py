"""A lease store in memory whose writes collide, get lost, or take effect without or after an answer."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random
from typing import Any

from eventsourcing.persistence import IntegrityError, OperationalError, StoredEvent

from postroom.adapters.memory.lease_store import MemoryLeaseRecorder


class DoubtfulRecorder(MemoryLeaseRecorder):
    """Recorder that fails by chance.

    Attributes:
        doubt: probability that a writer does not learn whether its events were recorded.
        conflict: probability that somebody else writes between a read and the write that follows.
        rival: what somebody else does then.
    """

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.doubt = 0.0
        self.conflict = 0.0
        self.rival: Callable[[], None] = lambda: None
        self._random = random
        self._late: list[Sequence[StoredEvent]] = []
        self._is_rival = False

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Record events, or leave the caller in doubt."""
        if not self._is_rival and self._random.random() < self.conflict:
            self._is_rival = True
            try:
                self.rival()
            finally:
                self._is_rival = False
        self.record_late_events()
        if not stored_events or self._random.random() >= self.doubt:
            return self.record(stored_events, **kwargs)
        match self._random.choice(("lost", "done", "late")):
            case "done":
                self.record(stored_events, **kwargs)
            case "late":
                self._late.append(stored_events)
        raise OperationalError("The simulated store did not answer.")

    def select_events(self, *args: Any, **kwargs: Any) -> list[StoredEvent]:
        """Return events of an aggregate, of which a late one may be recorded just before or after."""
        if self._random.random() < 0.3:
            self.record_late_events()
        return super().select_events(*args, **kwargs)

    def record(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Record events without a failure."""
        return super().insert_events(stored_events, **kwargs)

    def record_late_events(self) -> None:
        """Record what was under way, unless its version was taken in the meantime."""
        late, self._late = self._late, []
        for events in late:
            with suppress(IntegrityError):
                self.record(events)
