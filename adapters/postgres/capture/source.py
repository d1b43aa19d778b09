"""The capture source port over PostgreSQL's streaming replication protocol (ADR 0093)."""

import asyncio
import struct
import time
from contextlib import suppress

import psycopg
from psycopg import sql

from postroom.adapters.postgres.capture.pgoutput import EPOCH_US, ChangeReader
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.capture.slot import ReplicationSlot
from postroom.adapters.postgres.database import AsyncConnection, connect_replication
from postroom.adapters.postgres.errors import describe, shown
from postroom.application.ports.outbox import CapturedBatch, SlotInUse, SlotState
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import Unavailable

BATCH_BYTES = 32 << 20
STATUS_SECONDS = 3.0
_STATUS = struct.Struct(">cqqqqb")
_NO_CONVERSION = ("UTF8", "SQL_ASCII")


class PostgresCaptureSource:
    """Rows of a table, read from its database's replication slot; see `CaptureSource`.

    Arguments:
        url: URL of the database at the server itself, not at a pooler.
        timeout_ms: time after which the server gives up a reader that does not answer.
    """

    def __init__(self, url: str, settings: CaptureSettings, timeout_ms: int) -> None:
        self._url = url
        self._settings = settings
        self._timeout_ms = timeout_ms
        self._slot = ReplicationSlot(url, settings, "postroom outbox capture")
        self._metrics_slot = ReplicationSlot(url, settings, "postroom outbox capture metrics")
        self._stream: _Stream | None = None

    async def read(self, limit: int, wait_ms: int) -> CapturedBatch:
        """Return rows as soon as there are any; see `CaptureSource.read`."""
        stream = self._stream
        if stream is None:
            stream = self._stream = await self._open()
        return await stream.read(limit, wait_ms / 1_000)

    async def confirm(self, position: int) -> None:
        """Record that rows up to a position need not be read again."""
        if self._stream is None:
            raise Unavailable(f"The replication stream of {shown(self._url)} was closed.")
        self._stream.confirm(position)

    async def check_reader(self) -> None:
        """Raise an error unless this process is the reader of the slot; see `CaptureSource.check_reader`."""
        await self._slot.check()
        pid = await self._slot.reader_pid()
        if self._stream is None or pid != self._stream.pid:
            raise Unavailable(f"The server of {shown(self._url)} ended the replication stream.")

    async def end(self) -> int:
        """Return the position of the latest commit."""
        return await self._slot.end()

    async def state(self) -> SlotState:
        """Return the state of the slot; raise NotFound if it does not exist."""
        return await self._metrics_slot.state()

    async def close(self) -> None:
        """Let other processes read; closing twice is fine."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
        await self._slot.close()
        await self._metrics_slot.close()

    async def _open(self) -> "_Stream":
        oid, encoding = await self._slot.check()
        settings = {"wal_sender_timeout": str(self._timeout_ms)}
        connection = await connect_replication(self._url, "postroom outbox capture", settings, encoding)
        try:
            codec = "utf-8" if encoding in _NO_CONVERSION else connection.info.encoding
            reader = ChangeReader(self._settings, oid, codec)
            return await _Stream.start(connection, self._url, self._settings, reader)
        except BaseException:
            await connection.close()
            raise


class _Stream:
    """One replication connection in COPY BOTH mode."""

    def __init__(self, connection: AsyncConnection, url: str, reader: ChangeReader) -> None:
        self._connection = connection
        self._pg = connection.pgconn
        self._url = url
        self._reader = reader
        self._confirmed = 0
        self._readable = asyncio.Event()
        self.pid = self._pg.backend_pid
        """Process id of the server's end."""
        self._socket = self._pg.socket  # a lost connection has none
        asyncio.get_running_loop().add_reader(self._socket, self._readable.set)
        self._reporting = asyncio.create_task(self._report())

    @classmethod
    async def start(
        cls, connection: AsyncConnection, url: str, settings: CaptureSettings, reader: ChangeReader
    ) -> "_Stream":
        """Start replication after the last confirmed position."""
        statement = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL 0/0 (proto_version '1', publication_names {})"
        ).format(sql.Identifier(settings.slot), sql.Literal(f'"{settings.publication}"'))
        try:
            await connection.execute(statement)
        except psycopg.errors.ObjectInUse as error:
            raise SlotInUse(
                f"Another process reads the replication slot {settings.slot} of {shown(url)}."
            ) from error
        except psycopg.Error as error:
            raise describe(error, url) from error
        return cls(connection, url, reader)

    async def read(self, limit: int, wait_seconds: float) -> CapturedBatch:
        """Return rows as soon as there are any; see `CaptureSource.read`."""
        reader = self._reader
        is_asked = False
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                while len(reader.rows) < limit and reader.size < BATCH_BYTES:
                    if (message := self._next() or self._next_from_socket()) is not None:
                        reader.add(message)
                        continue
                    if reader.rows:
                        break
                    if not is_asked:
                        is_asked = True
                        self._send_status(ask=True)  # so that an idle slot advances, too
                    await self._readable.wait()
        return reader.batch()

    def confirm(self, position: int) -> None:
        """Report a position as durable, so that the server can remove the write-ahead log before it."""
        self._confirmed = max(self._confirmed, position)
        self._send_status()

    async def close(self) -> None:
        """Close the connection, which frees the slot."""
        # Before anything else runs: the socket's number may be reused if the connection was lost.
        asyncio.get_running_loop().remove_reader(self._socket)
        await cancel_and_wait(self._reporting)
        await self._connection.close()

    def _next(self) -> bytes | None:
        """Return a message that has arrived, or None."""
        try:
            length, data = self._pg.get_copy_data(1)
            if length == -1:  # the server ended the stream
                result = self._pg.get_result()
                reason = "" if result is None else result.get_error_message()
                raise Unavailable(_lost(self._url, reason))
        except psycopg.Error as error:
            raise Unavailable(_lost(self._url, str(error))) from error
        return bytes(data) if length > 0 else None

    def _next_from_socket(self) -> bytes | None:
        self._readable.clear()
        try:
            self._pg.consume_input()
        except psycopg.Error as error:
            raise Unavailable(_lost(self._url, str(error))) from error
        return self._next()

    def _send_status(self, *, ask: bool = False) -> None:
        """Report the confirmed position; with `ask` the server answers with a keepalive."""
        now = time.time_ns() // 1_000 - EPOCH_US
        at = self._confirmed
        try:
            self._pg.put_copy_data(_STATUS.pack(b"r", at, at, at, now, ask))
            self._pg.flush()
        except psycopg.Error as error:
            raise Unavailable(_lost(self._url, str(error))) from error

    async def _report(self) -> None:
        """Report regularly while events are published, so that the server keeps the connection."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            with suppress(Unavailable):  # the next read raises it
                self._send_status()


def _lost(url: str, reason: str) -> str:
    detail = " ".join(reason.split()).removeprefix("ERROR: ").rstrip(".")
    return f"The replication stream of {shown(url)} was lost: {detail or 'the server closed it'}."
