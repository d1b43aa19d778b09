"""The projection of the log of leases to RFC-049's tables (RFC-049 Storage Schema)."""

from collections.abc import Callable

from postroom.application.leases.leases import PAGE, Leases, LoggedEvent
from postroom.application.ports.lease_tables import LeaseRow, LeaseTables
from postroom.domain.lease.lease import LeaseAcquired, LeaseEvent, LeaseExpired, LeaseReleased, LeaseRenewed
from postroom.domain.message import MS


class LeaseProjection:
    """Keeps `mailbox_leases` and `mailbox_routes` up to date; any number of admins may do so.

    Arguments:
        wall: the wall clock in µs since 1970 UTC, by which a lease is shown as expiring.
    """

    def __init__(self, leases: Leases, tables: LeaseTables, wall: Callable[[], int]) -> None:
        self._leases = leases
        self._tables = tables
        self._wall = wall

    def update(self) -> int:
        """Fold the events that the tables lack; return the position up to which they are folded then.

        Raises: Unavailable when the log or the tables can't be used, BrokenLog for an unreadable event.
        """
        position = self._tables.position()
        if position > (
            self._leases.recorder.max_notification_id() or 0
        ):  # the log was replaced by a shorter one
            self._tables.clear()
            position = 0
        while events := self._leases.read_events(position):
            through = events[-1].position
            is_applied = self._tables.apply(position, through, *fold(events))
            position = through if is_applied else self._tables.position()
            if len(events) < PAGE:
                break
        self._tables.mark_expiring(self._wall() // MS)
        return position


def fold(events: list[LoggedEvent]) -> tuple[list[LeaseRow], list[str]]:
    """Return the rows that events change, and the mailboxes whose leases they release."""
    last: dict[str, LeaseEvent] = {}
    for each in events:
        event = each.event
        if isinstance(event, LeaseAcquired | LeaseRenewed | LeaseReleased | LeaseExpired):
            last[event.mailbox] = event
    removals = [mailbox for mailbox, event in last.items() if isinstance(event, LeaseReleased)]
    rows = [_row(event) for event in last.values() if not isinstance(event, LeaseReleased)]
    return rows, removals


def _row(event: LeaseEvent) -> LeaseRow:
    return LeaseRow(
        event.mailbox,
        event.runner,
        event.proxy,
        event.address,
        event.partition,
        "expired" if isinstance(event, LeaseExpired) else "active",
        event.renewed_at // MS + event.ttl_ms,
        event.renewed_at // MS,
        event.created_at // MS,
        event.acquired_at // MS,
        event.at // MS,
    )
