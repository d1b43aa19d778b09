"""The ownership port over file locks beside a SQLite store; the kernel frees them when a process dies."""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote

from postroom.domain.errors import MailboxOwned

POLL_MS = 20


class FileOwnership:
    """Own a mailbox of a store by locking the file `<store>-owner-<mailbox>`, which names the owner."""

    def __init__(self, store: str | Path) -> None:
        self._store = Path(store)

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        """Own the mailbox while the context lasts; see `Ownership.acquire`."""
        path = self._store.with_name(f"{self._store.name}-owner-{quote(mailbox, safe='@$')}")
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            while not _lock(descriptor):
                if wait_ms <= 0:
                    raise MailboxOwned(mailbox, os.pread(descriptor, 1_000, 0).decode("utf-8", "replace"))
                await asyncio.sleep(POLL_MS / 1_000)
                wait_ms -= POLL_MS
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
