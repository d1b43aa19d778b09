"""Hints by LISTEN and NOTIFY, on a dedicated connection; lost hints are covered by polling."""

import asyncio
from contextlib import suppress

import psycopg
from psycopg import sql

from postroom.adapters.postgres.database import AsyncConnection, connect_async
from postroom.adapters.postgres.url import schema_of
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
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
                    async for hint in connection.notifies():
                        if hint.payload in ("", self._schema):
                            self._hinted.set()
            except (psycopg.Error, PostroomError) as error:
                logger().warning("outbox.hints_lost", error=str(error))
            await asyncio.sleep(RECONNECT_SECONDS)


async def _connect(url: str, name: str) -> AsyncConnection:
    return await connect_async(url, name, session_for="a relay with `hints = true`")
