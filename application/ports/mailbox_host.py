"""Port: where a runner opens the mailboxes that it has leases of."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol

from postroom.application.ports.control_plane import Health


class MailboxReport(NamedTuple):
    """What a runner reports of a mailbox with its heartbeat (RFC-049 MailboxHeartbeat)."""

    events_stored: int = 0
    queries_served: int = 0
    storage_size_bytes: int = 0
    status: Health = "healthy"


class HostedMailbox(Protocol):
    """A mailbox that is open and served."""

    async def wait_until_lost(self) -> None:
        """Return when another owner has taken over the mailbox."""

    async def report(self) -> MailboxReport:
        """Return counts since the mailbox was opened, and its health; raise Unavailable without them."""


class MailboxHost(Protocol):
    """The store of a runner, and the server at which its mailboxes are called."""

    async def log_epoch(self, mailbox: str) -> int:
        """Return the epoch of the last record of a mailbox's log; 0 for a mailbox that does not exist.

        Raises: Unavailable when the store can't be read.
        """

    def open(
        self, mailbox: str, epoch: int, may_append: Callable[[], bool]
    ) -> AbstractAsyncContextManager[HostedMailbox]:
        """Open a mailbox and serve it for as long as the context lasts; create it if it does not exist.

        At the end it is served no longer, its pending requests finish, and its log is closed.

        Arguments:
            epoch: of the lease.
            may_append: whether the lease lasts; from any thread.

        Raises: Fenced when the log has this epoch or a later one, Unavailable when the store can't be used or
            the lease has ended, and what else prevents that a mailbox is opened.
        """
