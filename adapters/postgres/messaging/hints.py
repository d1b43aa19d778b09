"""Hints by LISTEN and NOTIFY, on a connection of their own; a hint that is lost is made up for by polling."""

import asyncio

import psycopg

from postroom.adapters.postgres.database import connect_async
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.application.background import end
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

RECONNECT_SECONDS = 5.0
_LISTEN = messaging_statements("outbox.sql", Tables())["listen"]


class PostgresHints:
    """Hear of new events as soon as they are committed by an outbox that notifies.

    LISTEN belongs to a session: give it the URL of the server itself, not that of a pooler of transactions.
    """

    def __init__(self, url: str, name: str = "postroom outbox hints") -> None:
        self._url = url
        self._name = name
        self._hinted = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    async def wait(self) -> None:
        """Return at the next hint, or at once where one came since the last call."""
        await self._hinted.wait()
        self._hinted.clear()

    async def close(self) -> None:
        """Stop listening; closing twice is fine."""
        await end(self._listening)

    async def _listen(self) -> None:
        while True:
            try:
                async with await connect_async(self._url, self._name) as connection:
                    await connection.execute(_LISTEN)
                    self._hinted.set()  # whatever came before
                    async for _ in connection.notifies():
                        self._hinted.set()
            except (psycopg.Error, Unavailable) as error:
                logger().warning("outbox.hints_lost", error=str(error))
            await asyncio.sleep(RECONNECT_SECONDS)
