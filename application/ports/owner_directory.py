"""Port: where the owner of a mailbox answers processes of other hosts."""

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
