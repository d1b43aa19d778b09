"""The lease store port in memory, for one process: its leases end with it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from operator import attrgetter
from threading import Condition
from typing import Any
from uuid import UUID

from eventsourcing.persistence import (
    ApplicationRecorder,
    IntegrityError,
    Notification,
    StoredEvent,
)

from postroom.application.ports.lease_store import RENEWAL
from postroom.application.recorders import PollingSubscription, check_originator


class MemoryLeaseRecorder(ApplicationRecorder):
    """Recorder of events in a list, ordered by position."""

    def __init__(self) -> None:
        self._notifications: list[Notification] = []
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
                    raise IntegrityError(
                        f"Aggregate {id_} already has an event of version {newest}; load it again and repeat "
                        "the command."
                    )
                last[id_] = event.originator_version
            start = self._position
            for event in stored_events:
                self._position += 1
                notification = Notification(
                    event.originator_id, event.originator_version, event.topic, event.state, self._position
                )
                self._notifications.append(notification)
                self._aggregates[event.originator_id].append(notification)
            self._changed.notify_all()
            return list(range(start + 1, self._position + 1))

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> list[StoredEvent]:
        """Return events of one aggregate in the order of their versions."""
        with self._changed:
            events = [
                StoredEvent(each.originator_id, each.originator_version, each.topic, each.state)
                for each in self._aggregates.get(originator_id, ())
                if (gt is None or each.originator_version > gt)
                and (lte is None or each.originator_version <= lte)
            ]
        return (events[::-1] if desc else events)[:limit]

    def select_notifications(
        self,
        start: int | None,
        limit: int,
        stop: int | None = None,
        topics: Sequence[str] = (),
        *,
        inclusive_of_start: bool = True,
    ) -> list[Notification]:
        """Return up to `limit` events from position `start` to `stop`, of every type or those in `topics`."""
        after = 0 if start is None else start - 1 if inclusive_of_start else start
        with self._changed:
            first = bisect_right(self._notifications, after, key=attrgetter("id"))
            last = None if stop is None else bisect_right(self._notifications, stop, key=attrgetter("id"))
            if not topics and last is None:
                last = first + limit
            events = self._notifications[first:last]
        return [each for each in events if not topics or each.topic in topics][:limit]

    def max_notification_id(self) -> int | None:
        """Return the position of the last event, or None without events."""
        return self._position or None

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> PollingSubscription:
        """Return an iterator over the events after position `gt`, including those appended later."""
        return PollingSubscription(self, gt, topics)

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
            before = len(self._notifications)
            remaining = [each for events in self._aggregates.values() for each in events]
            self._notifications = sorted(remaining, key=attrgetter("id"))
            return before - len(self._notifications)


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
