"""Port: ownership of mailboxes."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol

from postroom.application.ports.owner_directory import OwnerDirectory


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
