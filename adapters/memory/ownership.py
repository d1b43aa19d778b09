"""The ownership port for one process: whoever asks first owns the mailbox."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom.domain.errors import MailboxOwned

POLL_MS = 20


class MemoryOwnership:
    """Let one engine of this process own each mailbox."""

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        """Own the mailbox while the context lasts; see `Ownership.acquire`."""
        while mailbox in self._owners:
            if wait_ms <= 0:
                raise MailboxOwned(mailbox, self._owners[mailbox])
            await asyncio.sleep(POLL_MS / 1_000)
            wait_ms -= POLL_MS
        self._owners[mailbox] = owner
        try:
            yield
        finally:
            del self._owners[mailbox]
