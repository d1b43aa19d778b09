"""The message outbox port over PostgreSQL, and hints by LISTEN and NOTIFY."""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import closing, suppress

import psycopg
from psycopg import sql

from postroom.adapters.postgres.database import (
    AsyncConnection,
    Connection,
    connect,
    connect_async,
)
from postroom.adapters.postgres.errors import unavailable
from postroom.adapters.postgres.reconnecting import Reconnecting
from postroom.adapters.postgres.url import schema_of
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.outbox.events import rank_mailboxes
from postroom.application.ports.outbox import MAX_COUNTED, MessageCount, MessageOutbox, RecordedMessage
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait, poll_pause, wait_at_most
from postroom.domain.errors import PostroomError, Unavailable

RECONNECT_SECONDS = 5.0


class PostgresHints:
    """Notifications of outboxes with `notify=True`, received when an event or message is committed.

    The payload of a hint is the schema of the outbox, if that was named. LISTEN needs a session, which a
    transaction pooler doesn't have; see `check`.
    """

    def __init__(
        self, url: str, name: str = "postroom outbox hints", channel: str = "postroom_outbox"
    ) -> None:
        self._url = url
        self._listen_to = sql.SQL("LISTEN {}").format(sql.Identifier(channel))
        self._name = name
        self._schema = schema_of(url)
        self._hinted = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @staticmethod
    async def check(url: str) -> None:
        """Check that a URL can be used, unless the database can't be reached now.

        Raises: InvalidRequest for a pooler.
        """
        with suppress(Unavailable):
            await (await _connect(url, "postroom outbox hints")).close()

    async def wait(self) -> None:
        """Return at the next hint, or at once if there was one since the last call."""
        await self._hinted.wait()
        self._hinted.clear()

    async def close(self) -> None:
        """Stop listening; closing twice is fine."""
        await cancel_and_wait(self._listening)

    async def _listen(self) -> None:
        while True:
            try:
                async with await _connect(self._url, self._name) as connection:
                    await connection.execute(self._listen_to)
                    self._hinted.set()  # events committed before LISTEN
                    await self._receive(connection)
            except (psycopg.Error, PostroomError) as error:
                logger().retry("outbox.hints_lost", error=str(error))
            await asyncio.sleep(RECONNECT_SECONDS)

    async def _receive(self, connection: AsyncConnection) -> None:
        """Note hints until the connection ends; the driver's own wait looks at it ten times a second."""
        loop, has_arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor := connection.fileno(), has_arrived.set)
        try:
            while True:
                connection.pgconn.consume_input()
                while (hint := connection.pgconn.notifies()) is not None:
                    if hint.extra.decode() in ("", self._schema):
                        self._hinted.set()
                await has_arrived.wait()
                has_arrived.clear()
        finally:
            loop.remove_reader(descriptor)


async def _connect(url: str, name: str) -> AsyncConnection:
    return await connect_async(url, name, session_for="a relay with `hints = true`")


POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 0.5
MISSING_TABLE_SECONDS = 60.0
"""Interval at which a table that is missing is looked for."""
BATCH_BYTES = 8 << 20
COUNT_TIMEOUT = "2s"
"""Deadline of each statement of a count."""
_NAME = "postroom message outbox"
_SQL = {
    name: for_psycopg(text).encode()
    for name, text in statements("postroom.adapters.postgres.messaging", "message_outbox.sql").items()
}


class PostgresMessageOutbox(MessageOutbox):
    """Messages for one mailbox in a database, which may be migrated later."""

    def __init__(self, url: str, mailbox: str) -> None:
        self._url = url
        self._mailbox = mailbox
        self._connection = Reconnecting(self._open)
        self._hints: PostgresHints | None = None
        self._is_migrated = False
        self._found_at = time.monotonic()

    async def find(self, limit: int, except_topics: Collection[str] = ()) -> list[RecordedMessage]:
        if not self._is_migrated:
            self._is_migrated = await asyncio.to_thread(has_message_outbox, self._url)
            if not self._is_migrated:
                return []
            self._hints = PostgresHints(self._url, f"{_NAME} hints", "postroom_outbox_messages")
        if rows := await asyncio.to_thread(self._find, limit, list(except_topics)):
            self._found_at = time.monotonic()
        return rows

    async def settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        await asyncio.to_thread(self._settle, sent, refused)

    async def wait(self) -> None:
        """Return at the next hint, or after the poll interval."""
        if self._hints is None:
            await asyncio.sleep(MISSING_TABLE_SECONDS)
            return
        pause = poll_pause(time.monotonic() - self._found_at, POLL_SECONDS, MAX_POLL_SECONDS)
        await wait_at_most(pause, self._hints.wait())

    async def close(self) -> None:
        """Close the connections; closing twice is fine."""
        if self._hints is not None:
            await self._hints.close()
        await asyncio.to_thread(self._connection.close)

    def _open(self) -> Connection:
        return connect(self._url, _NAME)

    def _find(self, limit: int, except_topics: list[str]) -> list[RecordedMessage]:
        parameters = {"mailbox": self._mailbox, "limit": limit, "except_topics": except_topics}
        rows: list[RecordedMessage] = []
        size = 0
        with unavailable(self._url), self._connection.use() as connection:
            for row in connection.execute(_SQL["find"], parameters):
                rows.append(RecordedMessage(*row))
                size += len(rows[-1].message)
                if size >= BATCH_BYTES:
                    break
        return rows

    def _settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        parameters = {
            "sent": [row.position for row in sent],
            "sent_ids": [row.id for row in sent],
            "refused": [row.position for row, _ in refused],
            "refused_ids": [row.id for row, _ in refused],
            "errors": [error.replace("\x00", "") for _, error in refused],
        }
        with unavailable(self._url), self._connection.use() as connection:
            connection.execute(_SQL["settle"], parameters)


def count_messages(url: str) -> list[MessageCount]:
    """Count the messages in a database by mailbox; see `Store.count_messages`."""
    settings = {"statement_timeout": COUNT_TIMEOUT}
    with unavailable(url), closing(connect(url, _NAME, settings)) as connection:
        if connection.execute(_SQL["exists"]).fetchall() != [(True,)]:
            return []
        groups = connection.execute(_SQL["count"], {"limit": MAX_COUNTED}).fetchall()
        return rank_mailboxes(
            groups, lambda position: connection.execute(_SQL["row"], {"position": position}).fetchone()
        )


def has_message_outbox(url: str) -> bool:
    """Return whether a database has the table of the outbox.

    Raises: Unavailable when the database can't be reached.
    """
    with unavailable(url), connect(url, _NAME) as connection:
        return connection.execute(_SQL["exists"]).fetchall() == [(True,)]
