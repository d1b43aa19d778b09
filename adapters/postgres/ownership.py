"""The ownership port over PostgreSQL's advisory locks; the server frees them when their connection ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import psycopg

from postroom.adapters.postgres.database import AsyncConnection, connect_async, unavailable
from postroom.adapters.sql.statements import statements
from postroom.application.background import beside
from postroom.application.telemetry import logger
from postroom.domain.errors import MailboxOwned, Unavailable

POLL_MS = 20
KEEP_SECONDS = 5.0
"""How often an owner looks whether its lock is still there."""

_SQL = statements("postroom.adapters.postgres", "ownership.sql")


class PostgresOwnership:
    """Own a mailbox of a database by an advisory lock on a connection of its own, whose name is the owner's.

    The lock only keeps others from trying: should it be lost with its connection and somebody else take the
    mailbox over, the log refuses whatever the former owner appends.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        """Own the mailbox while the context lasts; see `Ownership.acquire`."""
        lock = _Lock(self._url, mailbox, owner)
        try:
            while not await lock.try_acquire():
                if wait_ms <= 0:
                    raise MailboxOwned(mailbox, await lock.holder())
                await asyncio.sleep(POLL_MS / 1_000)
                wait_ms -= POLL_MS
            async with beside(lock.keep()):
                yield
        finally:
            await lock.close()


class _Lock:
    """The lock of one mailbox, and the connection that it lives as long as."""

    def __init__(self, url: str, mailbox: str, owner: str) -> None:
        self._url = url
        self._mailbox = {"mailbox": mailbox}
        self._owner = owner
        self._connection: AsyncConnection | None = None

    async def try_acquire(self) -> bool:
        if self._connection is None:
            self._connection = await connect_async(self._url, self._owner)
            with unavailable(self._url):
                await self._connection.execute(_SQL["configure"])
        return bool(await self._ask("try_lock"))

    async def holder(self) -> str:
        return str(await self._ask("holder") or "")

    async def keep(self) -> None:
        """Take the lock again when its connection was lost, as by a restart of the server.

        Once somebody else has it the log is theirs: then it is left alone.
        """
        while True:
            await asyncio.sleep(KEEP_SECONDS)
            try:
                if self._connection is not None:
                    await self._ask("still_there")
                elif not await self.try_acquire():
                    logger().warning("mailbox.lock_taken_over", **self._mailbox, owner=await self.holder())
                    return
            except Unavailable as error:
                logger().warning("mailbox.lock_lost", **self._mailbox, error=str(error))
                await self.close()

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                with suppress(psycopg.Error):  # the server frees it too, once it sees that we are gone
                    await connection.execute(_SQL["unlock"])
            finally:
                await connection.close()

    async def _ask(self, statement: str) -> object:
        assert self._connection is not None  # only asked once it was made
        with unavailable(self._url):
            found = await (await self._connection.execute(_SQL[statement], self._mailbox)).fetchone()
        return found[0] if found else None
