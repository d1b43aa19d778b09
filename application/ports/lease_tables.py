"""Port: RFC-049's tables `mailbox_leases` and `mailbox_routes`, read models of the log of leases."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

LeaseStatus = Literal["active", "expiring", "expired"]


class LeaseRow(msgspec.Struct, frozen=True):
    """A lease in the tables; it has a route unless it has expired (RFC-049 Storage Schema).

    Arguments, all times in ms since 1970 UTC:
        expires: end of its TTL, by the clock of the admin that recorded the last renewal.
        heartbeat: when it was last renewed.
        created: when the mailbox was leased for the first time.
        acquired: when this lease was acquired.
        updated: when its last event was recorded.
    """

    mailbox: str
    runner: str
    proxy: str
    address: str
    partition: int
    status: LeaseStatus
    expires: int
    heartbeat: int
    created: int
    acquired: int
    updated: int


class LeaseTables(Protocol):
    """The tables and the position of the log up to which they are folded; calls block.

    Each raises Unavailable when the store can't be used.
    """

    def position(self) -> int:
        """Return the position up to which the tables are folded; 0 at first."""

    def apply(self, after: int, through: int, rows: Sequence[LeaseRow], removals: Sequence[str]) -> bool:
        """Apply the changes of the events after one position through another, all or none.

        Arguments:
            rows: leases that changed.
            removals: mailboxes whose leases were released.

        Returns: False, without a change, when the tables are not at position `after`: another process has
            moved them.
        """

    def clear(self) -> None:
        """Remove all rows and return to position 0."""

    def mark_expiring(self, now: int) -> int:
        """Mark active leases as expiring whose TTL has ended; return how many.

        Arguments:
            now: ms since 1970 UTC.
        """

    def close(self) -> None:
        """Close connections and files; closing twice is fine."""
