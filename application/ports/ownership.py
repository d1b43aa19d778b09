"""Ports: ownership of mailboxes, and where their owners answer processes of other hosts."""

from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol


class OwnerAddress(NamedTuple):
    """The address of an owner.

    Arguments:
        address: `host:port`.
        certificate: in PEM, of this ownership alone; it is compared, not verified by an authority.
    """

    address: str
    certificate: str


class OwnerDirectory(Protocol):
    """Addresses of owners, beside their ownership, for all that can write to the store.

    A caller proves that it can by a ticket: random bytes that it sends over the encrypted connection, and
    whose hash it has written to the store. A ticket admits one connection, within a minute.

    All raise Unavailable when the store can't be used.
    """

    async def local_host(self, mailbox: str) -> str:
        """Return the address of the interface by which this process, the owner, uses the store."""

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
        log refuses what it appends, as soon as the next owner has taken the log over (ADR 0042).

        Raises: Unavailable when the store can't be used.
        """
