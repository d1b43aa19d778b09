"""Ports: the store of lease events, tables of leases, and the ownership of a mailbox on one host."""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:  # eventsourcing is slow to import
    from eventsourcing.persistence import ApplicationRecorder


RENEWAL = "Renewed."
"""Part of the topics of events that only renew; of these events, an aggregate needs only the last."""


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
        """Remove events that are not needed by a fold, and return their number.

        Every aggregate keeps its last event, and its last event whose topic does not contain `RENEWAL`. A
        store that removes events by itself may keep only the last event. Then routes of admins that start
        later have the position of a renewal, but proxies do not take them for other routes.

        Raises: Unavailable when the store can't be used.
        """

    def close(self) -> None:
        """Close connections and files; closing twice is fine."""


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
        """Mark active leases whose TTL has ended as expiring; return how many.

        Arguments:
            now: ms since 1970 UTC.
        """

    def close(self) -> None:
        """Close connections and files; closing twice is fine."""


class OwnerAddress(NamedTuple):
    """The address of an owner.

    Arguments:
        address: `host:port`.
        certificate: in PEM, of this ownership alone; it is compared, not verified by an authority.
    """

    address: str
    certificate: str


class OwnerDirectory(Protocol):
    """Addresses of owners, stored beside their ownership, for all processes that can write to the store.

    A caller proves by a ticket that it can write to the store: it writes the hash of random bytes to the
    store, and sends the bytes over the encrypted connection. A ticket admits one connection, within a minute.

    All raise Unavailable when the store can't be used.
    """

    async def local_host(self, mailbox: str) -> str:
        """Return the address of the interface through which this process, the owner, uses the store."""

    async def announce(self, mailbox: str, address: OwnerAddress) -> None:
        """Set the address of this process, the owner; idempotent, and repeated after a new session."""

    async def find(self, mailbox: str) -> OwnerAddress | None:
        """Return the address of the owner; None without an owner, or if it has announced none."""

    async def issue_ticket(self, mailbox: str) -> bytes:
        """Return a new ticket for one connection to the owner."""

    async def redeem_ticket(self, mailbox: str, ticket: bytes) -> bool:
        """Use up a ticket, in the process that owns the mailbox; return whether it was valid."""


class Ownership(Protocol):
    """Exclusive ownership of a mailbox by one process; it ends when the process does, at the latest."""

    @property
    def directory(self) -> OwnerDirectory | None:
        """Return the directory of owners' addresses, or None if all processes are on one host."""

    def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AbstractAsyncContextManager[None]:
        """Own the mailbox while the context lasts.

        Arguments:
            owner: name of the process, shown to operators.
            wait_ms: how long to wait for the current owner to release it.

        Raises: MailboxOwned when another process owns it for longer than that.
        """

    async def owner(self, mailbox: str) -> str | None:
        """Return the name of the process that owns the mailbox now; None if nobody does.

        Raises: Unavailable when the store can't be used.
        """

    async def incumbent(self, mailbox: str) -> str | None:
        """Return a token that is unique to the current ownership, or None if the mailbox has no owner.

        Raises: Unavailable when the store can't be used.
        """

    async def evict(self, mailbox: str, incumbent: str) -> None:
        """End the ownership of a process that hangs, so that another may acquire it.

        Does nothing when the mailbox has a later owner by now. The process that is evicted is not told: the
        log refuses its appends as soon as the next owner has taken the log over (ADR 0042).

        Raises: Unavailable when the store can't be used.
        """
