"""What the lease stores of SQLite and PostgreSQL have in common."""

import time
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition
from typing import Any
from uuid import UUID

from eventsourcing.persistence import Notification, OperationalError, StoredEvent

from postroom.application.recorders import PollingRecorder, VersionRange, check_originator
from postroom.domain.errors import Unavailable


class SqlLeaseRecorder(PollingRecorder):
    """Recorder of events in a table.

    Arguments:
        poll_seconds: how often a wait looks for events of other processes.
    """

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._appended = Condition()

    @abstractmethod
    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        """Append events, all or none, and return their positions; see `LeaseStore.recorder`."""

    def max_notification_id(self) -> int | None:
        """Return the position of the last event; None for an empty log."""
        position: int | None = self._fetch("last_position", {})[0][0]
        return position

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there is an event after a position, of any process, or after the timeout."""
        deadline = time.monotonic() + timeout_ms / 1_000
        while (self.max_notification_id() or 0) <= after:
            seconds = min(self._poll_seconds, deadline - time.monotonic())
            if seconds <= 0:
                return
            with self._appended:
                self._appended.wait(seconds)

    @abstractmethod
    def remove_old_events(self) -> int:
        """Remove events that no fold needs; see `LeaseStore.remove_old_events`."""

    @abstractmethod
    def close(self) -> None:
        """Close both connections; closing twice is fine."""

    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        statement = "events_descending" if versions.desc else "events"
        bounds = {"gt": versions.gt, "lte": versions.lte, "limit": versions.limit}
        rows = self._fetch(statement, {"aggregate": check_originator(originator_id), **bounds})
        return [StoredEvent(_as_uuid(row[0]), *row[1:]) for row in rows]

    def _notifications(self, after: int, stop: int, topics: Sequence[str], limit: int) -> list[Notification]:
        values = {"after": after, "stop": stop, "topics": list(topics), "limit": limit}
        return [Notification(_as_uuid(row[0]), *row[1:]) for row in self._fetch("notifications", values)]

    @abstractmethod
    def _fetch(self, statement: str, values: dict[str, Any]) -> list[Any]:
        """Return the rows of a statement of `leases.sql`."""

    def _note_append(self) -> None:
        """Wake the waits of this process."""
        with self._appended:
            self._appended.notify_all()


def _as_uuid(column: UUID | bytes) -> UUID:
    return UUID(bytes=column) if isinstance(column, bytes) else column


class SqlLeaseStore:
    """`LeaseStore` of a recorder."""

    def __init__(self, recorder: SqlLeaseRecorder) -> None:
        self.recorder = recorder

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there is an event after a position; see `LeaseStore.wait`."""
        with _unavailable():
            self.recorder.wait(after, timeout_ms)

    def remove_old_events(self) -> int:
        """Remove events that no fold needs; see `LeaseStore.remove_old_events`."""
        with _unavailable():
            return self.recorder.remove_old_events()

    def close(self) -> None:
        """Close the connections; closing twice is fine."""
        self.recorder.close()


@contextmanager
def _unavailable() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        raise Unavailable(f"The log of leases can't be used: {error}") from error
