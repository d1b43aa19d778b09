"""The message outbox port over PostgreSQL."""

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import closing

from postroom.adapters.postgres.database import Connection, connect
from postroom.adapters.postgres.errors import unavailable
from postroom.adapters.postgres.hints import QUIET_SECONDS, PostgresHints
from postroom.adapters.postgres.reconnecting import Reconnecting
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.outbox.events import rank_mailboxes
from postroom.application.ports.outbox import (
    MAX_COUNTED,
    MessageCount,
    MessageOutbox,
    RecordedMessage,
    RefusedMessage,
)
from postroom.application.threads import poll_pause, wait_at_most

POLL_SECONDS, MAX_POLL_SECONDS = 0.1, 0.5
LOST_SECONDS = 10.0
"""Time after which an owner looks for messages without a notification, which may have been lost."""
MISSING_TABLE_SECONDS = 60.0
"""Interval at which a table that is missing is looked for."""
BATCH_BYTES = 8 << 20
COUNT_TIMEOUT = "2s"
"""Deadline of each statement of a count."""
TABLE = "outbox_messages"
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
            self._hints = PostgresHints(self._url, f"{_NAME} hints", f"postroom_{TABLE}", TABLE)
        if rows := await asyncio.to_thread(self._find, limit, list(except_topics)):
            self._found_at = time.monotonic()
        return rows

    async def settle(
        self, sent: Sequence[RecordedMessage], refused: Sequence[tuple[RecordedMessage, str]]
    ) -> None:
        await asyncio.to_thread(self._settle, sent, refused)

    async def find_refused(self, limit: int) -> list[RefusedMessage]:
        return await asyncio.to_thread(self._find_refused, limit)

    async def retry(self, ids: Collection[str] | None) -> int:
        return await asyncio.to_thread(self._retry, None if ids is None else list(ids))

    async def wait(self) -> None:
        """Return at the next hint, or after the poll interval, which is long while hints are certain."""
        if self._hints is None:
            await asyncio.sleep(MISSING_TABLE_SECONDS)
            return
        quiet = time.monotonic() - self._found_at
        is_watched = quiet >= QUIET_SECONDS and self._hints.watch()
        pause = LOST_SECONDS if is_watched else poll_pause(quiet, POLL_SECONDS, MAX_POLL_SECONDS)
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

    def _find_refused(self, limit: int) -> list[RefusedMessage]:
        parameters = {"mailbox": self._mailbox, "limit": limit, "counted": MAX_COUNTED}
        with unavailable(self._url), self._connection.use() as connection:
            if connection.execute(_SQL["exists"]).fetchall() != [(True,)]:
                return []
            return [RefusedMessage(*row) for row in connection.execute(_SQL["find_refused"], parameters)]

    def _retry(self, ids: list[str] | None) -> int:
        only = None if ids is None else [each.replace("\x00", "") for each in ids]
        parameters = {"mailbox": self._mailbox, "ids": only, "counted": MAX_COUNTED}
        with unavailable(self._url), self._connection.use() as connection:
            return connection.execute(_SQL["retry"], parameters).rowcount

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
