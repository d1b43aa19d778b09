"""Port: where the events of leases and proxies are stored, in one total order."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # eventsourcing is slow to import
    from eventsourcing.persistence import ApplicationRecorder

RENEWAL = "Renewed."
"""Part of the topics of events that only renew: of those, an aggregate needs no more than its last event."""


class LeaseStore(Protocol):
    """The log of leases; every adapter passes `tests/conformance/lease_store.py`.

    Calls block and may come from any thread.
    """

    @property
    def recorder(self) -> "ApplicationRecorder":
        """Return the recorder of the events.

        Notification ids are positions: they grow in the order in which events become visible, so a reader
        that continues after the last one misses none. `insert_events` stores all or none, and raises
        IntegrityError when an aggregate has an event of the same or a later version, and OperationalError
        when the store failed, so that the outcome may be unknown.
        """

    def wait(self, after: int, timeout_ms: int) -> None:
        """Return when there may be an event after position `after`, or after the timeout; best effort.

        Raises: Unavailable when the store can't be used.
        """

    def remove_old_events(self) -> int:
        """Remove events that no fold needs, and return how many.

        Of every aggregate its last event remains, and its last one whose topic does not contain `RENEWAL`. A
        store that removes events by itself may keep the last one alone: admins that start later then see the
        position of a renewal in a route, which no proxy takes for another route.

        Raises: Unavailable when the store can't be used.
        """

    def close(self) -> None:
        """Close connections and files; closing twice is fine."""
