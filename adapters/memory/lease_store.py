"""The lease store port in memory, for one process: its leases end with it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from threading import Condition
from typing import Any
from uuid import UUID

from eventsourcing.persistence import Notification, StoredEvent

from postroom.application.ports.lease_store import RENEWAL
from postroom.application.recorders import PollingRecorder, VersionRange, check_originator, conflict


class MemoryLeaseRecorder(PollingRecorder):
    """Recorder of events in a list, ordered by position."""

    def __init__(self) -> None:
        self._log: list[Notification] = []
        self._aggregates: defaultdict[UUID | str, list[Notification]] = defaultdict(list)
        self._position = 0
        self._changed = Condition()

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Append events, all or none, and return their positions; see `LeaseStore.recorder`."""
        with self._changed:
            last: dict[UUID | str, int] = {}
            for event in stored_events:
                id_ = check_originator(event.originator_id)
                events = self._aggregates.get(id_)
                newest = last.get(id_, events[-1].originator_version if events else -1)
                if event.originator_version <= newest:
                    raise conflict(id_, f"already has an event of version {newest}")
                last[id_] = event.originator_version
            start = self._position
            for event in stored_events:
                self._position += 1
                notification = Notification(
                    event.originator_id, event.originator_version, event.topic, event.state, self._position
                )
                self._log.append(notification)
                self._aggregates[event.originator_id].append(notification)
            self._changed.notify_all()
            return list(range(start + 1, self._position + 1))

    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        with self._changed:
            selected = versions.select(
                self._aggregates.get(originator_id, ()), attrgetter("originator_version")
            )
            return [
                StoredEvent(each.originator_id, each.originator_version, each.topic, each.state)
                for each in selected
            ]

    def _notifications(self, after: int, stop: int, topics: Sequence[str], limit: int) -> list[Notification]:
        with self._changed:
            first = bisect_right(self._log, after, key=attrgetter("id"))
            last = bisect_right(self._log, stop, key=attrgetter("id"))
            events = self._log[first : last if topics else min(last, first + limit)]
        return [each for each in events if not topics or each.topic in topics][:limit]

    def max_notification_id(self) -> int | None:
        """Return the position of the last event, or None without events."""
        return self._position or None

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there is an event after a position, or after the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._position > after, timeout_ms / 1_000)

    def remove_old_events(self) -> int:
        """Remove events that no fold needs; see `LeaseStore.remove_old_events`."""
        with self._changed:
            for id_, events in self._aggregates.items():
                lasting = [each for each in events if RENEWAL not in each.topic][-1:]
                if lasting != events[-1:]:
                    lasting.append(events[-1])
                self._aggregates[id_] = lasting
            before = len(self._log)
            remaining = [each for events in self._aggregates.values() for each in events]
            self._log = sorted(remaining, key=attrgetter("id"))
            return before - len(self._log)


class MemoryLeaseStore:
    """The events of leases in memory."""

    def __init__(self) -> None:
        self.recorder = MemoryLeaseRecorder()

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there is an event after a position; see `LeaseStore.wait`."""
        self.recorder.wait(after, timeout_ms)

    def remove_old_events(self) -> int:
        """Remove events that no fold needs; see `LeaseStore.remove_old_events`."""
        return self.recorder.remove_old_events()

    def close(self) -> None:
        """Do nothing: the events are freed with the last reference to the store."""
