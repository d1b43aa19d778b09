"""Connections to a PostgreSQL database that are replaced when they were lost or ended."""

import asyncio
import select
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

import psycopg
from psycopg.pq import TransactionStatus

from postroom.adapters.postgres.database import AsyncConnection, Connection
from postroom.domain.errors import Unavailable

T = TypeVar("T")


def has_ended(connection: Connection | AsyncConnection) -> bool:
    """Return whether a connection was lost, or is idle and was ended by the server or on the way to it.

    Between two statements, a server sends nothing but the reason why it ends the session; if it sends
    anything else, a new connection serves as well. So a statement that was not sent yet is not repeated, but
    sent once over a new connection.
    """
    if connection.closed:
        return True
    if connection.pgconn.transaction_status != TransactionStatus.IDLE:
        return False
    arrivals = select.poll()
    arrivals.register(connection.fileno(), select.POLLIN)
    return bool(arrivals.poll(0))


class Reconnecting:
    """A connection that one thread at a time uses; the next use replaces one that was lost or ended.

    Arguments:
        open_: opens and configures a connection.
    """

    def __init__(self, open_: Callable[[], Connection]) -> None:
        self._open = open_
        self._lock = Lock()
        self._connection: Connection | None = None
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[Connection]:
        """Use the connection exclusively while the context lasts.

        Raises: Unavailable after `close`.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("The connection to the database was closed; open the store again.")
            if self._connection is not None and has_ended(self._connection):
                self._disconnect()
            if self._connection is None:
                self._connection = self._open()
            try:
                yield self._connection
            finally:
                if self._connection.broken:
                    self._disconnect()

    def run(self, function: Callable[[Connection], T]) -> T:
        """Return a function's result; call it once more if the connection was lost in its first call.

        Arguments:
            function: idempotent, as the server may have executed the statements of the first call, or still
                will.
        """
        with self.use() as connection:
            try:
                return function(connection)
            except psycopg.OperationalError:
                if not connection.broken:
                    raise
        with self.use() as connection:
            return function(connection)

    def close(self) -> None:
        """Close the connection permanently; idempotent."""
        with self._lock:
            self._closed = True
            self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class AsyncReconnecting:
    """A connection for asyncio; the next use replaces one that was lost, or ended outside a transaction.

    Arguments:
        open_: opens and configures a connection.
    """

    def __init__(self, open_: Callable[[], Awaitable[AsyncConnection]]) -> None:
        self._open = open_
        self._opening = asyncio.Lock()
        self._connection: AsyncConnection | None = None

    async def connected(self) -> AsyncConnection:
        """Return the connection, which may have been opened for this call."""
        async with self._opening:
            if self._connection is not None and has_ended(self._connection):
                await self.close()
            if self._connection is None:
                self._connection = await self._open()
            return self._connection

    async def close(self) -> None:
        """Close the connection until its next use; idempotent."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
