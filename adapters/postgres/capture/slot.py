"""The slot, the publication and the table of a capture, on one connection that is opened on demand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.database import AsyncConnection, connect_async
from postroom.adapters.postgres.errors import describe, shown
from postroom.adapters.postgres.reconnecting import AsyncReconnecting
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.diagnosis import Finding, shown_bytes
from postroom.application.ports.outbox import SlotState
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable


class CapturedTable(NamedTuple):
    """OID of a table, and PostgreSQL's name of the encoding of its database."""

    oid: int
    encoding: str


class ReplicationSlot:
    """The replication slot of a capture.

    Arguments:
        url: the database of the table.
        name: application name of the connection.
    """

    def __init__(self, url: str, settings: CaptureSettings, name: str) -> None:
        self._url = url
        self._settings = settings
        self._database = AsyncReconnecting(lambda: connect_async(url, name, session_for="capture"))
        self._lock = asyncio.Lock()
        self._sql = {key: for_psycopg(text) for key, text in statements(__package__, "capture.sql").items()}

    async def create(self) -> bool:
        """Create the publication and the slot if they are missing; return whether the slot is new.

        Raises: InvalidRequest if the database can't be used as configured, Unavailable when it can't be used.
        """
        async with self._use() as connection:
            if await self._describe(connection) is None:
                table = sql.Identifier(*self._settings.schema_and_name)
                options = "publish = 'insert', publish_via_partition_root = true"
                await connection.execute(
                    sql.SQL("CREATE PUBLICATION {} FOR TABLE {} WITH ({})").format(
                        sql.Identifier(self._settings.publication), table, sql.SQL(options)
                    )
                )
            if await self._find(connection) is not None:
                return False
            await connection.execute(self._sql["create_slot"], {"slot": self._settings.slot})
            return True

    async def check(self) -> CapturedTable:
        """Return the facts about the table that a reader needs.

        Raises: InvalidRequest if slot, publication or table can't be used as configured, NotFound if there is
            no slot or publication, Unavailable when the database can't be used.
        """
        async with self._use() as connection:
            table = await self._describe(connection)
            if table is None:
                raise self._missing("publication")
            if await self._find(connection) is None:
                raise self._missing("replication slot")
            return table

    async def reader_pid(self) -> int | None:
        """Return the process id of the connection that reads the slot; None without one."""
        async with self._use() as connection:
            slot = await self._find(connection)
            return None if slot is None else slot[0]

    async def end(self) -> int:
        """Return the position of the latest commit."""
        async with self._use() as connection:
            cursor = await connection.execute(self._sql["end"])
            ((end,),) = await cursor.fetchall()
            return int(end)

    async def state(self) -> SlotState:
        """Return the state of the slot; raise NotFound if it does not exist."""
        async with self._use() as connection:
            slot = await self._find(connection)
        if slot is None:
            raise self._missing("replication slot")
        pid, lag, retained, safe = slot
        return SlotState(self._settings.slot, pid is not None, lag, retained, safe)

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
        await self._database.close()

    def _missing(self, what: str) -> NotFound:
        name = self._settings.publication if what == "publication" else self._settings.slot
        return NotFound(
            f"The database {shown(self._url)} has no {what} {name}; create it by `postroom outbox capture "
            "--create`. Rows that were committed before that are not published."
        )

    async def _describe(self, connection: AsyncConnection) -> CapturedTable | None:
        """Return the facts about the table that a reader needs; None if the publication is missing."""
        settings = self._settings
        schema, name = settings.schema_and_name
        where, table = shown(self._url), f"{schema}.{name}"
        parameters = {
            "table": sql.Identifier(schema, name).as_string(None),
            "schema": schema,
            "name": name,
            "publication": settings.publication,
        }
        cursor = await connection.execute(self._sql["describe"], parameters)
        ((wal_level, encoding, oid, columns, publishes_inserts, has_table),) = await cursor.fetchall()
        if wal_level != "logical":
            raise InvalidRequest(
                f"The server of {where} has wal_level = {wal_level}; set wal_level = logical in its "
                "configuration and restart it."
            )
        if columns is None:
            raise InvalidRequest(f"The database {where} has no table {table}; correct table under [capture].")
        for field, names in settings.columns.names().items():
            if not any(each in columns for each in names):
                raise InvalidRequest(
                    f"The table {table} has no column {' or '.join(names)} for {field}; set {field} under "
                    "[capture.columns], to a list of all its names if it was renamed."
                )
        if publishes_inserts is None:
            return None
        if not publishes_inserts or not has_table:
            raise InvalidRequest(
                f"The publication {settings.publication} of {where} does not publish inserts into {table}; "
                "alter it, or set publication under [capture] to another one."
            )
        return CapturedTable(oid, encoding)

    async def _find(self, connection: AsyncConnection) -> tuple[int | None, int, int, int | None] | None:
        """Return the reader's process id and the sizes of `SlotState`; None without a slot."""
        slot = self._settings.slot
        cursor = await connection.execute(self._sql["slot"], {"slot": slot})
        rows: list[Any] = await cursor.fetchall()
        if not rows:
            return None
        ((plugin, is_here, wal_status, pid, lag, retained, safe),) = rows
        where = shown(self._url)
        if plugin != "pgoutput" or not is_here:
            raise InvalidRequest(
                f"The replication slot {slot} of {where} is of another database or plugin; set slot under "
                "[capture] to another name."
            )
        if wal_status == "lost" or lag is None or retained is None:
            raise InvalidRequest(
                f"The server of {where} removed the write-ahead log that the replication slot {slot} needs "
                "(see max_slot_wal_keep_size): rows that were committed since its last position are not "
                f"published. Drop it by SELECT pg_drop_replication_slot('{slot}'), create it by "
                "`postroom outbox capture --create`, and insert the missing rows again."
            )
        return pid, int(lag), int(retained), None if safe is None else int(safe)

    @asynccontextmanager
    async def _use(self) -> AsyncIterator[AsyncConnection]:
        async with self._lock:
            connection = await self._database.connected()
            try:
                yield connection
            except psycopg.Error as error:
                raise _explain(error, self._url) from error


def _explain(error: psycopg.Error, url: str) -> Unavailable | InvalidRequest:
    if isinstance(error, psycopg.errors.ConfigurationLimitExceeded):
        return InvalidRequest(
            f"The server of {shown(url)} has no free replication slot: raise max_replication_slots."
        )
    return describe(error, url)


MAX_RETAINED_BYTES = 1_000_000_000
MIN_SAFE_BYTES = 500_000_000
_NAME = "capture"


def check_slot(url: str, settings: CaptureSettings, seconds: float) -> Finding:
    """Check whether the replication slot can be read and is read, and how much the server keeps for it.

    Arguments:
        url: database of the table.
        seconds: deadline of all statements.

    Raises: NotFound without slot or publication, InvalidRequest if they can't be used as configured or the
        slot lost rows, Unavailable when the database can't be used.
    """
    return describe_slot(asyncio.run(_find_state(url, settings, seconds)))


def describe_slot(state: SlotState) -> Finding:
    """Return the finding of a slot that can be read."""
    size = shown_bytes(state.retained_bytes)
    text = f"{state.slot}: {'active' if state.active else 'no process reads it'}, keeps {size}"
    if state.safe_bytes is not None and state.safe_bytes < MIN_SAFE_BYTES:
        left = shown_bytes(max(0, state.safe_bytes))
        advice = "Raise max_slot_wal_keep_size, and see that a capture publishes what waits."
        return Finding(_NAME, "failure", f"{text}; rows are lost when {left} more are written", advice)
    if not state.active:
        advice = f"Start postroom outbox capture, or run: SELECT pg_drop_replication_slot('{state.slot}')"
        return Finding(_NAME, "warning", text, advice)
    if state.retained_bytes > MAX_RETAINED_BYTES:
        advice = "See the log of the capture: the target may be slow or refuse; end long transactions."
        return Finding(_NAME, "warning", text, advice)
    if state.safe_bytes is None:
        return Finding(_NAME, "ok", text, "Set max_slot_wal_keep_size, so that the slot can't fill the disk.")
    return Finding(_NAME, "ok", text)


async def _find_state(url: str, settings: CaptureSettings, seconds: float) -> SlotState:
    slot = ReplicationSlot(url, settings, "postroom doctor")
    try:
        async with asyncio.timeout(seconds):
            await slot.check()
            return await slot.state()
    except TimeoutError:
        raise Unavailable(f"The database {shown(url)} did not answer within {seconds:g} s.") from None
    finally:
        await slot.close()
