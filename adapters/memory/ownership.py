"""The ownership port within one process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom.domain.errors import MailboxOwned

POLL_SECONDS = 0.02


class MemoryOwnership:
    """Ownership of mailboxes by the engines of this process."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[str, object]] = {}

    @property
    def directory(self) -> None:
        """Return None: the memory of a process is of one host; see `Ownership.directory`."""

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        """Own the mailbox while the context lasts; see `Ownership.acquire`."""
        now = asyncio.get_running_loop().time
        deadline = now() + wait_ms / 1_000
        while mailbox in self._owners:
            if now() >= deadline:
                raise MailboxOwned(mailbox, self._owners[mailbox][0])
            await asyncio.sleep(POLL_SECONDS)
        ownership = self._owners[mailbox] = owner, object()
        try:
            yield
        finally:
            if self._owners.get(mailbox) is ownership:
                del self._owners[mailbox]

    async def owner(self, mailbox: str) -> str | None:
        """Return the owner's name; see `Ownership.owner`."""
        return self._owners[mailbox][0] if mailbox in self._owners else None

    async def incumbent(self, mailbox: str) -> str | None:
        """Return a token of the current ownership; see `Ownership.incumbent`."""
        return repr(self._owners[mailbox]) if mailbox in self._owners else None

    async def evict(self, mailbox: str, incumbent: str) -> None:
        """End an ownership; see `Ownership.evict`."""
        if await self.incumbent(mailbox) == incumbent:
            del self._owners[mailbox]
