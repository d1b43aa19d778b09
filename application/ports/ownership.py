"""Port: who may write to a mailbox."""

from contextlib import AbstractAsyncContextManager
from typing import Protocol


class Ownership(Protocol):
    """Let exactly one process own a mailbox at a time; it ends with the process at the latest."""

    def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AbstractAsyncContextManager[None]:
        """Own the mailbox for as long as the context lasts.

        Arguments:
            owner: who asks, in words an operator understands.
            wait_ms: how long to wait for the present owner to leave.

        Raises: MailboxOwned when somebody else still owns it after that.
        """
