"""Notifications of the rows that are committed to a table, by LISTEN and NOTIFY (ADR 0138).

PostgreSQL serialises the commits of transactions that notify. Appends to the log and the trigger
`notify_listeners` of the outboxes therefore notify only while a session holds an advisory lock. A process
takes the lock when it has found nothing for a while.
"""

import asyncio
import os
import select
import time
from collections.abc import Callable
from contextlib import suppress

import psycopg
from psycopg import sql

from postroom.adapters.postgres.database import AsyncConnection, Connection, connect_async
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, schema_of
from postroom.adapters.sql.statements import statements
from postroom.application.ports.event_log import Hints
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

RECONNECT_SECONDS = 5.0
QUIET_SECONDS = 2.0
"""Time without a notification after which `PostgresHints` asks the trigger for the next one."""
_SQL = {name: text.encode() for name, text in statements("postroom.adapters.postgres", "hints.sql").items()}


class PostgresHints(Hints):
    """Notifications of an outbox, received when an event or message is committed.

    They come from recorders with `notify=True`, and from the trigger of the table while it is watched. Their
    payload is the schema of the outbox, empty if the recorder does not name it. LISTEN needs a session, which
    a transaction pooler doesn't have; see `check`.

    Arguments:
        name: application name of the connection.
        table: name of the outbox's table.
    """

    def __init__(
        self,
        url: str,
        name: str = "postroom outbox hints",
        channel: str = "postroom_outbox",
        table: str = "outbox_events",
    ) -> None:
        self._url = url
        self._listen_to = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._name = name
        self._table: dict[str, str | None] = {
            "table": table,
            "trigger": "notify_listeners",
            "channel": channel,
            "schema": schema_of(url) or "",
        }
        self._hinted = asyncio.Event()
        self._is_asked = asyncio.Event()
        """Set when the connection has something to read, or `watch` was called."""
        self._wants_watch = False
        self._is_watching: bool | None = False
        self._noted_at = time.monotonic() - QUIET_SECONDS
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def check(url: str) -> None:
        """Check that a URL can be used, unless the database can't be reached now.

        Raises: InvalidRequest for a pooler.
        """
        with suppress(Unavailable):
            await (await _connect(url, "postroom outbox hints")).close()

    async def wait(self) -> None:
        await self._hinted.wait()
        self._hinted.clear()

    def watch(self) -> bool:
        if self._is_watching is False and time.monotonic() >= self._noted_at + QUIET_SECONDS:
            self._wants_watch = True
            self._is_asked.set()
        return bool(self._is_watching)

    async def close(self) -> None:
        await cancel_and_wait(self._listening)

    async def _listen(self) -> None:
        while True:
            try:
                async with await _connect(self._url, self._name) as connection:
                    _handle_hints(connection, self._note)
                    await connection.execute(self._listen_to)
                    self._hinted.set()  # rows committed before LISTEN
                    await self._receive(connection)
            except InvalidRequest as error:  # behind a pooler, the outbox is only polled
                logger().warning("outbox.hints_refused", error=str(error))
                return
            except (psycopg.Error, PostroomError) as error:
                logger().retry("outbox.hints_lost", error=str(error))
            finally:
                self._is_watching = False
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _receive(self, connection: AsyncConnection) -> None:
        """Note hints until the connection ends, without the driver's wait, which polls ten times a second."""
        loop = asyncio.get_running_loop()
        duplicate = os.dup(connection.fileno())  # so that the driver does not replace its reader
        loop.add_reader(duplicate, self._is_asked.set)
        try:
            while True:
                self._is_asked.clear()
                _read_hints(connection)
                if self._wants_watch and self._is_watching is False:
                    await self._begin_watch(connection)
                elif self._is_watching and not self._wants_watch:
                    self._is_watching = False
                    await connection.execute(_SQL["unwatch"], self._table)
                await self._is_asked.wait()
        finally:
            loop.remove_reader(duplicate)
            os.close(duplicate)
            if self._is_watching and not connection.closed:
                with suppress(psycopg.Error):
                    await connection.execute(_SQL["unwatch"], self._table)

    async def _begin_watch(self, connection: AsyncConnection) -> None:
        self._wants_watch = False
        rows = await (await connection.execute(_SQL["watch"], self._table)).fetchall()
        self._table["schema"], is_watching = rows[0] if rows else ("", None)
        if is_watching:
            self._wants_watch = True
            self._hinted.set()  # rows committed before
        self._is_watching = is_watching

    def _note(self, schema: str) -> None:
        if schema in ("", self._table["schema"]):
            self._noted_at, self._wants_watch = time.monotonic(), False
            self._hinted.set()


async def _connect(url: str, name: str) -> AsyncConnection:
    return await connect_async(url, name, session_for="a relay with `hints = true`")


def _handle_hints(connection: Connection | AsyncConnection, note: Callable[[str], None]) -> None:
    """Call a function with the payload of each notification that other sessions send."""
    own = connection.info.backend_pid

    def handle(hint: psycopg.Notify) -> None:
        if hint.pid != own:
            note(hint.payload)

    connection.add_notify_handler(handle)


def _read_hints(connection: Connection | AsyncConnection) -> None:
    """Handle the notifications that have arrived."""
    server = connection.pgconn
    server.consume_input()
    while (hint := server.notifies()) is not None and server.notify_handler is not None:
        server.notify_handler(hint)


class TableHints:
    """Notifications of rows of a store's table, for one thread, in a session that waits for nothing else.

    Arguments:
        connection: connection of the session, in autocommit mode.
        url: URL of the store.
        table: its name without the schema.
    """

    def __init__(self, connection: Connection, url: str, table: str) -> None:
        self._connection = connection
        self._schema = schema_of(url) or DEFAULT_SCHEMA
        channel = f"postroom_{table}"
        self._table: dict[str, str | None] = {
            "table": f'"{self._schema}".{table}',
            "trigger": None,
            "channel": channel,
            "schema": self._schema,
        }
        self._listen_to = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._is_listening = self._is_watching = self._is_noted = False
        _handle_hints(connection, self._note)

    def wait(self, seconds: float) -> bool | None:
        """Wait for a row that is committed after the last call that returned True.

        Returns: whether there may be such a row; None, at once, if the session would not notice one.
        """
        try:
            if not self._is_watching:
                return self._begin_watch()
            arrivals = select.poll()
            arrivals.register(self._connection.fileno(), select.POLLIN)
            if not self._is_noted and arrivals.poll(seconds * 1_000):
                _read_hints(self._connection)
            if not self._is_noted:
                return False
            self._is_noted = False
            self.close()
        except psycopg.Error:  # the next use of the session raises the error
            self._is_watching = False
            return None
        return True

    def close(self) -> None:
        """Stop waiting, and notify the sessions that rely on this one.

        Raises: psycopg.Error when the session has ended.
        """
        if self._is_watching:
            self._is_watching = False
            self._connection.execute(_SQL["unwatch"], self._table)

    def _begin_watch(self) -> bool | None:
        if not self._is_listening:
            self._connection.execute(self._listen_to)
            self._is_listening = True
        rows = self._connection.execute(_SQL["watch"], self._table).fetchall()
        self._is_watching = bool(rows and rows[0][1])
        return self._is_watching or None

    def _note(self, schema: str) -> None:
        self._is_noted |= schema == self._schema
