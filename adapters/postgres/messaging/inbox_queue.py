"""The inbox queue port over PostgreSQL, hints by LISTEN, and backlogs."""

import asyncio
from collections.abc import Collection, Sequence
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg

from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.errors import unavailable
from postroom.adapters.postgres.messaging.aggregate_events import MessagingDatabase
from postroom.adapters.postgres.messaging.settings import Tables, messaging_statements
from postroom.application.inbox.request import PARTITIONS
from postroom.application.ports.inbox import InboxQueue, NewMessage, Ownership, QueuedMessage, Retry, Turn
from postroom.application.ports.read_models import ContextBacklog
from postroom.application.ports.source import Headers, SourceMessage, StreamState
from postroom.domain.errors import Unavailable


class _Content(msgspec.Struct, array_like=True, frozen=True):
    """A message as the queue stores it, msgpack."""

    subject: str
    headers: Sequence[tuple[str, str]]
    data: bytes


_decode = msgspec.msgpack.Decoder(_Content).decode


class PostgresInboxQueue(MessagingDatabase, InboxQueue):
    """The queue of one consumer in the service's database, as one worker uses it.

    Arguments:
        url: the database, in which `postroom migrate` created the tables.
        consumer: `STREAM/DURABLE`.
    """

    def __init__(self, url: str, consumer: str, tables: Tables | None = None) -> None:
        super().__init__(url, tables, "inbox_queue.sql", name="postroom inbox queue", contents="inbox queue")
        self._consumer = consumer
        self.worker: UUID = uuid4()
        """Identifies this worker."""
        self._incarnation = ""
        self._turn = asyncio.Lock()

    async def open(self, state: StreamState) -> None:
        await self._call("add_partitions", partitions=PARTITIONS)
        await self._call(
            "open_reader", incarnation=state.incarnation, floor=state.floor, delivered=state.delivered
        )
        self._incarnation = state.incarnation

    async def take_turn(self, ms: int, most: int) -> Turn | None:
        rows = await self._call("take_turn", incarnation=self._incarnation, ms=ms, most=most)
        return Turn(*rows[0]) if rows else None

    async def add(self, after: int, last: int, messages: Sequence[NewMessage]) -> bool:
        rows = await self._call(
            "add",
            incarnation=self._incarnation,
            after=after,
            last=last,
            partitions=[each.partition for each in messages],
            lanes=[each.lane for each in messages],
            sequences=[int(each.message.sequence) for each in messages],
            messages=[_encode(each.message) for each in messages],
        )
        return bool(rows)

    async def renew(self, ms: int) -> None:
        await self._call("renew", ms=ms)

    async def claim(self) -> Ownership:
        await self._call("claim", partitions=PARTITIONS)
        rows = await self._call("owned")
        return Ownership({partition: epoch for partition, epoch, _ in rows}, rows[0][2] if rows else 1)

    async def release(self, partitions: Collection[int]) -> None:
        await self._call("release", partitions=list(partitions))

    async def leave(self) -> None:
        await self._call("leave")

    async def next(
        self, limit: int, in_hand: Collection[int], draining: Collection[int]
    ) -> Sequence[QueuedMessage]:
        rows = await self._call("next", limit=limit, in_hand=list(in_hand), draining=list(draining))
        return [
            QueuedMessage(position, partition, epoch, lane, failures, _read(content, sequence, failures))
            for position, partition, epoch, lane, sequence, failures, content in rows
        ]

    async def settle(self, settled: Collection[int], retries: Collection[Retry]) -> None:
        await self._call(
            "settle",
            settled=list(settled),
            retried=[retry.position for retry in retries],
            partitions=[retry.partition for retry in retries],
            epochs=[retry.epoch for retry in retries],
            delays=[retry.delay_ms for retry in retries],
        )

    async def use(self) -> tuple[int, int]:
        """Return how many messages are in the queue, and how many workers share it; 0 without its tables."""
        try:
            ((messages, workers),) = await self._call("use")
        except Unavailable as error:
            if isinstance(error.__cause__, psycopg.errors.UndefinedTable):
                return 0, 0
            raise
        return messages, workers

    async def _call(self, name: str, **parameters: Any) -> list[tuple[Any, ...]]:
        """Run a statement, which is a transaction."""
        parameters |= {"consumer": self._consumer, "worker": str(self.worker)}
        async with self._turn, self._connected() as connection:
            return await self._run(connection, name, parameters)


def _encode(message: SourceMessage) -> bytes:
    return msgspec.msgpack.encode(_Content(message.subject, message.header_pairs, message.data))


def _read(content: bytes, sequence: int, failures: int) -> SourceMessage:
    stored = _decode(content)
    return SourceMessage(
        stored.subject, stored.data, Headers(stored.headers), failures + 1, str(sequence), None
    )


def count_backlog(database: str, context: str, tables: Tables) -> list[ContextBacklog]:
    """Return the backlog of a context's outbox and inbox in one snapshot (SDS-047 QRY-050, QRY-051).

    Arguments:
        database: URL of the service's own database.

    Raises: Unavailable when the database can't be read.
    """
    statement = messaging_statements("backlog.sql", tables)["backlog"]
    with connect(database, "postroom backlog") as connection, unavailable(database):
        return [ContextBacklog(context, *row) for row in connection.execute(statement.encode()).fetchall()]
