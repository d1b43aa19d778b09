"""The outbox table, as relays and operators use it: one connection, one short transaction a claim."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from postroom.adapters.postgres.database import connect_async, describe, shown
from postroom.adapters.postgres.messaging.aggregate_events import micros, utc
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.postgres.messaging.transaction import for_psycopg
from postroom.application.aggregate_codec import CODEC
from postroom.application.ports.outbox_repository import Backlog, Decided, Stored
from postroom.domain.errors import Unavailable
from postroom.domain.outbox import OutboxEvent, OutboxEventRecorded, Status
from postroom.domain.subject import CorrelationContext

CLAIM_MS = 30_000
WAIT_MS = 60_000
BATCH_BYTES = 32 << 20

Connection = psycopg.AsyncConnection[tuple[Any, ...]]


class PostgresOutboxRepository:
    """Find and mark the outbox events of one database; a lost connection is made again by the next call.

    Arguments:
        url: the service's own database.
        claim_ms: end a claim when nothing was heard of it for so long; its holder must have stopped by then.
        keep_history: leave the histories of published events when their rows are deleted.
        batch_bytes: payloads that are read at once, about.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "postroom outbox",
        tables: Tables | None = None,
        claim_ms: int = CLAIM_MS,
        keep_history: bool = False,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._url = url
        self._name = name
        self._claim_ms = claim_ms
        self._keep_history = keep_history
        self._batch_bytes = batch_bytes
        self._connection: Connection | None = None
        statements = messaging_statements("outbox.sql", tables or Tables())
        self._sql = {name: for_psycopg(text) for name, text in statements.items()}

    @asynccontextmanager
    async def claim(self, partitions: Sequence[int], *, wait: bool = False) -> AsyncIterator["PostgresClaim"]:
        """Be the only one to change the events of partitions; see `OutboxRepository.claim`.

        The locks are of the transaction, so this works through PgBouncer, and they end with the session: the
        server ends one that is silent for longer than `claim_ms`.
        """
        async with self._transaction() as connection:
            limits = {"idle_ms": str(self._claim_ms), "wait_ms": str(WAIT_MS)}
            await connection.execute(self._sql["limit_claim"], limits)
            locks = {"partitions": list(partitions)}
            if wait:
                await connection.execute(self._sql["claim"], locks)
                claimed = list(partitions)
            else:
                cursor = await connection.execute(self._sql["claim_free"], locks)
                claimed = [partition for (partition,) in await cursor.fetchall()]
            yield PostgresClaim(connection, self._sql, claimed, self._batch_bytes)

    async def find_failed(self, limit: int, *, only_parked: bool) -> list[Stored]:
        """Return events that were refused, oldest first."""
        async with self._transaction() as connection:
            parameters = {"limit": limit, "only_parked": only_parked}
            cursor = await connection.execute(self._sql["find_failed"], parameters)
            ids = [id_ for (id_,) in await cursor.fetchall()]
            return await PostgresClaim(connection, self._sql, [], self._batch_bytes).find(ids)

    async def backlog(self) -> Backlog:
        """Count what is unpublished (SDS-047 QRY-050)."""
        async with self._transaction() as connection:
            cursor = await connection.execute(self._sql["backlog"])
            ((count, oldest_at),) = await cursor.fetchall()
            return Backlog(count, None if oldest_at is None else micros(oldest_at))

    async def delete_published(self, before: int, limit: int) -> int | None:
        """Remove up to `limit` events published before a time; None when another process is at it."""
        async with self._transaction() as connection:
            cursor = await connection.execute(self._sql["clean_alone"])
            if await cursor.fetchall() != [(True,)]:
                return None
            parameters = {"before": utc(before), "limit": limit, "keep_history": self._keep_history}
            cursor = await connection.execute(self._sql["delete_published"], parameters)
            ((count,),) = await cursor.fetchall()
            return int(count)

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Connection]:
        connection = self._connection
        if connection is None:
            connection = self._connection = await connect_async(self._url, self._name)
            connection.prepare_threshold = None  # a pooler may give the next transaction to another server
        try:
            async with connection.transaction():
                yield connection
        except psycopg.Error as error:
            if connection.closed:
                self._connection = None
            raise self._unavailable(error) from error

    def _unavailable(self, error: psycopg.Error) -> Unavailable:
        if isinstance(error, psycopg.errors.UndefinedTable):
            return Unavailable(
                f"The database {shown(self._url)} has no outbox: {error.diag.message_primary}. Run "
                "`postroom migrate --messaging URL` once, or say what its tables are called."
            )
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return Unavailable(
                f"A relay has held on to events of {shown(self._url)} for {WAIT_MS:,} ms; try again, or "
                "look for a relay that hangs."
            )
        return describe(error, self._url)


class PostgresClaim:
    """Some partitions of the outbox, in one open transaction."""

    def __init__(
        self, connection: Connection, sql: dict[str, str], partitions: Sequence[int], batch_bytes: int
    ) -> None:
        self._connection = connection
        self._sql = sql
        self._partitions = partitions
        self._batch_bytes = batch_bytes

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partitions that nobody else may change meanwhile."""
        return self._partitions

    async def find_unpublished(self, now: int, limit: int) -> list[Stored]:
        """Return events to publish, oldest first, without those that wait or are held back."""
        parameters = {
            "now": utc(now),
            "limit": limit,
            "partitions": list(self._partitions),
            "batch_bytes": self._batch_bytes,
        }
        return await self._stored("find_unpublished", parameters)

    async def find(self, ids: Sequence[UUID]) -> list[Stored]:
        """Return those of these events that are in the outbox."""
        return await self._stored("find", {"ids": list(ids)})

    async def mark_published(self, decided: Sequence[Decided]) -> None:
        """Note that events are on the stream (SDS-047 CMD-050)."""
        await self._write(
            "mark_published",
            decided,
            published_at=[utc(event.published_at or 0) for event, _ in decided],
            attempts=[event.publish_attempts for event, _ in decided],
        )

    async def increment_attempts(self, decided: Sequence[Decided]) -> None:
        """Note that publishing events failed, when they are tried again, and which are parked."""
        await self._reschedule(decided)

    async def retry(self, decided: Sequence[Decided]) -> None:
        """Have events tried again at once."""
        await self._reschedule(decided)

    async def discard(self, decided: Sequence[Decided]) -> None:
        """Remove events unpublished; their histories stay."""
        await self._write("discard", decided)

    async def _reschedule(self, decided: Sequence[Decided]) -> None:
        await self._write(
            "reschedule",
            decided,
            attempts=[event.publish_attempts for event, _ in decided],
            errors=[event.publish_error for event, _ in decided],
            retry_at=[None if event.retry_at is None else utc(event.retry_at) for event, _ in decided],
        )

    async def _write(self, statement: str, decided: Sequence[Decided], **columns: list[Any]) -> None:
        if not decided:
            return
        changes = [change for _, changes in decided for change in changes]
        rows = [CODEC.to_row(change) for change in changes]
        history = {
            "streams": [UUID(bytes=change.stream) for change in changes],
            "versions": [change.version for change in changes],
            "types": [type_ for type_, _ in rows],
            "ats": [utc(change.at) for change in changes],
            "states": [state for _, state in rows],
        }
        ids = {"ids": [event.id for event, _ in decided]}
        await self._connection.execute(self._sql[statement], ids | columns | history)

    async def _stored(self, statement: str, parameters: dict[str, Any]) -> list[Stored]:
        async with self._connection.cursor(binary=True) as cursor:
            await cursor.execute(self._sql[statement], parameters)
            return [_stored(*row) for row in await cursor.fetchall()]


def _stored(
    id_: UUID,
    aggregate_type: str,
    aggregate_id: str,
    event_type: str,
    event_version: int,
    occurred_at: datetime,
    correlation_id: UUID | None,
    causation_id: UUID | None,
    attempts: int,
    error: str | None,
    published_at: datetime | None,
    payload: bytes,
    failed: bool,
    retry_at: datetime | None,
    version: int | None,
    type_: str | None,
    state: bytes | None,
) -> Stored:
    at = micros(occurred_at)
    began: tuple[OutboxEventRecorded, ...] = ()
    traceparent = None
    if type_ is not None and state is not None:
        recorded = CODEC.to_event(id_.bytes, 1, type_, at, state)
        traceparent = getattr(recorded, "traceparent", None)
    elif version is None:
        about = (aggregate_type, aggregate_id, event_type, event_version, at)
        began = (OutboxEventRecorded(id_.bytes, 1, at, *about, correlation_id, causation_id, None),)
    status: Status = "waiting"
    if published_at is not None:
        status = "published"
    elif failed and retry_at is None:
        status = "parked"
    event = OutboxEvent(
        id_,
        version or 1,
        aggregate_type,
        aggregate_id,
        event_type,
        event_version,
        at,
        CorrelationContext(correlation_id, causation_id),
        traceparent,
        None if published_at is None else micros(published_at),
        attempts,
        error,
        None if retry_at is None else micros(retry_at),
        status,
    )
    return Stored(event, payload, began)
