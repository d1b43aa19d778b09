"""Port: the mailboxes of a namespace, as a client of a cluster finds them."""

from collections.abc import Sequence
from typing import Protocol

from postroom.application.operations.mailbox import Mailbox


class NamespaceDirectory(Protocol):
    """Finds the mailboxes of one namespace."""

    @property
    def namespace(self) -> str:
        """Return the name of the namespace."""

    async def list_members(self) -> Sequence[str]:
        """Return the names of the mailboxes that have an owner now.

        Raises: Unavailable when nobody can be asked.
        """

    def mailbox(self, name: str) -> Mailbox:
        """Return a mailbox; its calls are repeated for the whole time of a call while it has no owner."""

    def poller(self, name: str) -> Mailbox:
        """Return a mailbox whose calls fail after seconds, so that others need not wait for it."""
