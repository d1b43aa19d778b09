"""The ownership port over PostgreSQL's advisory locks, released when their connection ends."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from hashlib import sha256

import psycopg
from psycopg.errors import ConnectionTimeout

from postroom.adapters.postgres.database import AsyncConnection, connect_async
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.reconnecting import has_ended
from postroom.adapters.sql.statements import statements
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory, Ownership
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, set_close_on_fork, wait_at_most
from postroom.domain.errors import MailboxOwned, Unavailable

POLL_SECONDS = 0.02
CHECK_SECONDS = 2.0
"""Pause before an owner reopens the connection of its lock, so that a process that ended it to own the
mailbox comes first.
"""
PING_SECONDS = 30.0
"""Interval at which an owner checks a connection that the server has not ended."""
END_SESSION_WAIT_MS = 5_000
TICKET_BYTES = 32
TICKET_SECONDS = 60
LOOPBACK = "127.0.0.1"

_SETTINGS = {
    # The server detects a lost owner within 30 seconds instead of two hours.
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "30s",
    "idle_session_timeout": "0",
}
_SQL = statements("postroom.adapters.postgres", "ownership.sql")
_DIRECTORY = statements("postroom.adapters.postgres", "owner_directory.sql")


class PostgresOwnership(Ownership, OwnerDirectory):
    """Ownership of a mailbox by an advisory lock, whose connection has the owner as its application name.

    The lock only prevents conflicts. If its connection is lost and another process takes the mailbox over,
    the log refuses the appends of the former owner.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._locks: dict[str, _Lock] = {}

    @property
    def directory(self) -> "PostgresOwnership":
        return self

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        lock = _Lock(self._url, mailbox, owner)
        now = asyncio.get_running_loop().time
        deadline = now() + wait_ms / 1_000
        try:
            while not await lock.try_acquire():
                if now() >= deadline:
                    raise MailboxOwned(mailbox, await lock.holder())
                await asyncio.sleep(POLL_SECONDS)
            self._locks[mailbox] = lock
            async with background_task(lock.keep()):
                yield
        finally:
            if self._locks.get(mailbox) is lock:
                del self._locks[mailbox]
            await lock.release()

    async def owner(self, mailbox: str) -> str | None:
        name = await self._fetch("holder", mailbox=mailbox)
        return None if name is None else str(name)

    async def incumbent(self, mailbox: str) -> str | None:
        session = await self._fetch("incumbent", mailbox=mailbox)
        return None if session is None else str(session)

    async def evict(self, mailbox: str, incumbent: str) -> None:
        await self._fetch("evict", incumbent=incumbent, wait_ms=END_SESSION_WAIT_MS)

    # -- the addresses of owners ---

    async def local_host(self, mailbox: str) -> str:
        return await self._lock(mailbox).local_host()

    async def announce(self, mailbox: str, address: OwnerAddress) -> None:
        await self._lock(mailbox).announce(address)

    async def find(self, mailbox: str) -> OwnerAddress | None:
        row = await self._execute(_DIRECTORY["find"], {"mailbox": mailbox})
        return None if row is None else OwnerAddress(str(row[0]), str(row[1]))

    async def issue_ticket(self, mailbox: str) -> bytes:
        ticket = secrets.token_bytes(TICKET_BYTES)
        await self._execute(_DIRECTORY["issue_ticket"], _ticket_row(mailbox, ticket))
        return ticket

    async def redeem_ticket(self, mailbox: str, ticket: bytes) -> bool:
        row = await self._lock(mailbox).execute(_DIRECTORY["redeem_ticket"], _ticket_row(mailbox, ticket))
        return row is not None

    def _lock(self, mailbox: str) -> "_Lock":
        if mailbox not in self._locks:
            raise _not_owned(mailbox)
        return self._locks[mailbox]

    async def _fetch(self, statement: str, **values: object) -> object:
        row = await self._execute(_SQL[statement], values)
        return row[0] if row else None

    async def _execute(self, statement: str, values: dict[str, object]) -> tuple[object, ...] | None:
        connection = await connect_async(self._url, "postroom ownership")
        try:
            with unavailable(self._url):
                cursor = await connection.execute(statement.encode(), values)
                return None if cursor.description is None else await cursor.fetchone()
        finally:
            await connection.close()


class _Lock:
    """The lock of one mailbox and its connection."""

    def __init__(self, url: str, mailbox: str, owner: str) -> None:
        self._url = url
        self._mailbox: dict[str, object] = {"mailbox": mailbox}
        self._owner = owner
        self._connection: AsyncConnection | None = None
        self._descriptor: int | None = None
        self._pid: int | None = None
        self._announced: tuple[int, OwnerAddress] | None = None
        self._is_over = False
        self._turn = asyncio.Lock()

    async def local_host(self) -> str:
        with socket.socket(fileno=os.dup((await self._held()).fileno())) as connected:
            if connected.family == socket.AF_UNIX:
                return LOOPBACK
            return str(connected.getsockname()[0])

    async def announce(self, address: OwnerAddress) -> None:
        """Write the address, unless this session has done so already."""
        announced = (await self._held()).info.backend_pid, address
        if self._announced == announced:
            return
        await self.execute(_DIRECTORY["announce"], self._mailbox | address._asdict())
        self._announced = announced

    async def try_acquire(self) -> bool:
        try:
            return await self._try_acquire()
        except Unavailable as error:
            is_lost = (
                self._was_ended_while_opened(error)
                if self._connection is None
                else has_ended(self._connection)
            )
            if not is_lost:
                raise
            return await self._try_acquire()  # the connection was ended during the statement

    @staticmethod
    def _was_ended_while_opened(error: Unavailable) -> bool:
        cause = error.__cause__
        return isinstance(cause, psycopg.OperationalError) and not isinstance(cause, ConnectionTimeout)

    async def _try_acquire(self) -> bool:
        if self._connection is not None and has_ended(self._connection):
            logger().warning("mailbox.lock_lost", **self._mailbox)
            await self._close()
        if self._connection is None:
            owner = f"the owner of {self._mailbox['mailbox']}"
            self._connection = await connect_async(self._url, self._owner, _SETTINGS, session_for=owner)
            self._descriptor = self._connection.fileno()
            set_close_on_fork(self._descriptor, True)
            await self._end_lost_session()
            self._pid = self._connection.info.backend_pid
        if self._announced is None:
            return bool(await self._fetch("try_lock"))
        # In one statement, so that a process that is paused after it can be found and evicted.
        address = self._announced[1]
        row = await self._execute(
            self._connection, _DIRECTORY["lock_and_announce"], self._mailbox | address._asdict()
        )
        if row is not None:
            self._announced = self._connection.info.backend_pid, address
        return row is not None

    async def holder(self) -> str:
        return str(await self._fetch("holder") or "")

    async def keep(self) -> None:
        """Reacquire the lock after its connection is lost, for example by a restart of the server.

        Stop when another process has acquired it: that process owns the log.
        """
        while not self._is_over:
            await self._wait_for_end()
            with suppress(Unavailable):  # it is logged, and tried again
                try:
                    await self.execute(_SQL["ping"], {})
                except Unavailable:
                    await self._held()

    async def _wait_for_end(self) -> None:
        """Return when the server has sent something, such as the session's end, or when a check is due."""
        if self._connection is not None and not has_ended(self._connection):
            loop, has_arrived = asyncio.get_running_loop(), asyncio.Event()
            duplicate = os.dup(self._connection.fileno())  # so that the driver does not replace its reader
            loop.add_reader(duplicate, has_arrived.set)
            try:
                await wait_at_most(PING_SECONDS, has_arrived.wait())
            finally:
                loop.remove_reader(duplicate)
                os.close(duplicate)
            if not has_arrived.is_set():
                return
        await asyncio.sleep(CHECK_SECONDS)

    async def release(self) -> None:
        """Release the lock for good; idempotent."""
        async with self._turn:
            self._is_over = True
            await self._close()

    async def _held(self) -> AsyncConnection:
        """Return the connection that has the lock; if it was ended, a new one that has reacquired the lock.

        Raises: Unavailable when another process has acquired it, or the server can't be reached.
        """
        async with self._turn:
            try:
                is_held = self._connection is not None and not has_ended(self._connection)
                if not is_held and not self._is_over and not await self.try_acquire():
                    self._is_over = True
                    logger().warning("mailbox.lock_taken_over", **self._mailbox, owner=await self.holder())
            except Unavailable as error:
                logger().retry("mailbox.lock_unavailable", **self._mailbox, error=str(error))
                await self._close()
                raise
            if self._is_over or self._connection is None:
                raise _not_owned(str(self._mailbox["mailbox"]))
            return self._connection

    async def _close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            if self._descriptor is not None:
                set_close_on_fork(self._descriptor, False)
            try:
                with suppress(psycopg.Error):  # the server releases it with the connection
                    await connection.execute(_SQL["unlock"])
            finally:
                await connection.close()

    async def _end_lost_session(self) -> None:
        """End the session of a lost connection, which has the lock until the server notices the loss."""
        lost = {"pid": self._pid, "wait_ms": END_SESSION_WAIT_MS}
        if self._pid is not None and await self._fetch("end_session", **lost) is False:
            raise Unavailable(
                f"The database {shown(self._url)} still has the session of a lost connection; retry shortly."
            )

    async def execute(self, statement: str, values: dict[str, object]) -> tuple[object, ...] | None:
        """Return the first row of a statement in the session that has the lock."""
        return await self._execute(await self._held(), statement, values)

    async def _fetch(self, statement: str, **values: object) -> object:
        assert self._connection is not None
        row = await self._execute(self._connection, _SQL[statement], self._mailbox | values)
        return row[0] if row else None

    async def _execute(
        self, connection: AsyncConnection, statement: str, values: dict[str, object]
    ) -> tuple[object, ...] | None:
        with unavailable(self._url):
            cursor = await connection.execute(statement.encode(), values)
            return None if cursor.description is None else await cursor.fetchone()


def _not_owned(mailbox: str) -> Unavailable:
    return Unavailable(f"This process does not own mailbox {mailbox} any more; retry shortly.")


def _ticket_row(mailbox: str, ticket: bytes) -> dict[str, object]:
    return {"mailbox": mailbox, "hash": sha256(ticket).digest(), "seconds": TICKET_SECONDS}
