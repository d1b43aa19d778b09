"""The outbox repository port over PostgreSQL: one connection, and one short transaction per claim."""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.database import AsyncConnection
from postroom.adapters.postgres.errors import shown
from postroom.adapters.postgres.messaging.aggregate_events import (
    MessagingDatabase,
    as_held,
    as_json,
    as_uuid,
    stored_rows,
    utc,
    utc_or_none,
)
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.messaging import CODEC
from postroom.application.ports.outbox import (
    Backlog,
    Decision,
    Kind,
    OutboxClaim,
    OutboxRepository,
    OutboxRow,
)
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.outbox import OutboxEvent, Status
from postroom.domain.outbox_events import OutboxEventRecorded, OutboxRowHeld
from postroom.domain.subject import CorrelationContext

CLAIM_MS = 30_000
WAIT_MS = 60_000
BATCH_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 64 << 20
"""Larger payloads are not read: NATS can't be configured to accept them."""
NO_LIMIT = 1 << 62
_ROW_ERRORS = ("22", "53200", "54", "XX")
"""SQLSTATEs of failures that one row can cause: data, memory, limits, internal errors."""


class PostgresOutboxRepository(MessagingDatabase, OutboxRepository):
    """Outbox events of one database; a lost connection is replaced at the next call.

    Arguments:
        url: the service's own database.
        name: application name of the connection.
        claim_ms: idle time after which the server ends a claim; publishing must stop before.
        keep_history: keep the histories of published events when their rows are deleted.
        batch_bytes: approximate total size of the payloads read at once.
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
        super().__init__(url, tables, "outbox.sql", name=name, contents="outbox")
        self._claim_ms = claim_ms
        self._keep_history = keep_history
        self._batch_bytes = batch_bytes

    @asynccontextmanager
    async def claim(self, partitions: Sequence[int], *, wait: bool = False) -> AsyncIterator["PostgresClaim"]:
        """Get exclusive access to partitions; see `OutboxRepository.claim`.

        The locks belong to the transaction, so this works through PgBouncer. The server ends a session that
        is idle in a transaction for longer than `claim_ms`.
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

    async def find_failed(self, limit: int, *, only_parked: bool) -> list[OutboxEvent]:
        async with self._transaction() as connection:
            parameters = {"limit": limit, "only_parked": only_parked}
            cursor = await connection.execute(self._sql["find_failed"], parameters)
            ids = [id_ for (id_,) in await cursor.fetchall()]
            claim = PostgresClaim(connection, self._sql, [], self._batch_bytes)
            return [row.event for row in await claim.load(ids, with_payload=False)]

    async def next_retry(self) -> int | None:
        async with self._transaction() as connection:
            ((due,),) = await (await connection.execute(self._sql["next_retry"])).fetchall()
            return None if due is None else int(due)

    async def backlog(self) -> Backlog:
        """Count unpublished events (SDS-047 QRY-050)."""
        async with self._transaction() as connection:
            cursor = await connection.execute(self._sql["backlog"])
            ((count, oldest_at),) = await cursor.fetchall()
            return Backlog(count, oldest_at)

    async def delete_published(self, before: int, limit: int) -> int | None:
        """Delete up to `limit` events published before a time; None while another process does so."""
        async with self._transaction() as connection:
            cursor = await connection.execute(self._sql["lock_cleanup"])
            if await cursor.fetchall() != [(True,)]:
                return None
            parameters = {"before": utc(before), "limit": limit, "keep_history": self._keep_history}
            cursor = await connection.execute(self._sql["delete_published"], parameters)
            ((count,),) = await cursor.fetchall()
            return int(count)

    def _unavailable(self, error: psycopg.Error) -> Unavailable:
        if isinstance(error, psycopg.errors.LockNotAvailable):
            return Unavailable(
                f"A relay has locked events of {shown(self._url)} for {WAIT_MS:,} ms; try again, or check "
                "for a relay that hangs."
            )
        return super()._unavailable(error)


class PostgresClaim(OutboxClaim):
    """Some partitions of the outbox, in one open transaction."""

    def __init__(
        self, connection: AsyncConnection, sql: dict[str, str], partitions: Sequence[int], batch_bytes: int
    ) -> None:
        self._connection = connection
        self._sql = sql
        self._partitions = partitions
        self._batch_bytes = batch_bytes

    @property
    def partitions(self) -> Sequence[int]:
        """Return the claimed partitions."""
        return self._partitions

    async def find_unpublished(self, now: int, limit: int) -> list[OutboxRow]:
        return await self._find("find_unpublished", now, limit)

    async def find_besides(self, now: int, limit: int, kinds: Collection[Kind]) -> list[OutboxRow]:
        return await self._find(
            "find_besides",
            now,
            limit,
            aggregate_types=[kind.aggregate_type for kind in kinds],
            event_types=[kind.event_type for kind in kinds],
            event_versions=[kind.event_version for kind in kinds],
        )

    async def find(self, ids: Sequence[UUID]) -> list[OutboxRow]:
        """Return the events with these ids that are in the outbox."""
        return await self.load(ids)

    async def load(
        self, ids: Sequence[UUID], *, with_payload: bool = True, batch_bytes: int = NO_LIMIT
    ) -> list[OutboxRow]:
        """Return the rows of events in the order of recording, until their payloads exceed `batch_bytes`."""
        if not ids:
            return []
        try:
            return await self._load(ids, with_payload, batch_bytes)
        except psycopg.Error as error:
            if not _is_row_error(error):
                raise
        rows: list[OutboxRow] = []
        for id_ in ids:
            rows += await self._load_one(id_)
            if sum(len(row.payload or b"") for row in rows) >= batch_bytes:
                break
        return rows

    async def mark_published(self, decisions: Sequence[Decision]) -> None:
        """Record that the stream stored events (SDS-047 CMD-050)."""
        await self._write("mark_published", decisions)

    async def increment_attempts(self, decisions: Sequence[Decision]) -> None:
        """Record failed attempts, with the times of the next ones, and parked events."""
        await self._write("reschedule", decisions)

    async def retry(self, decisions: Sequence[Decision]) -> None:
        """Make events due at once."""
        await self._write("reschedule", decisions)

    async def replace(self, decisions: Sequence[tuple[Decision, bytes]]) -> None:
        """Make held rows due at once, as the events and JSON payloads that were read from them."""
        if decisions:
            parameters = {
                "held": as_json([as_held(decision, payload) for decision, payload in decisions]),
                "events": as_json(stored_rows(change for (_, changes), _ in decisions for change in changes)),
            }
            await self._connection.execute(self._sql["replace"], parameters)

    async def discard(self, decisions: Sequence[Decision]) -> None:
        """Remove events without publishing them; their histories remain."""
        await self._write("discard", decisions)

    async def _find(self, statement: str, now: int, limit: int, **parameters: Any) -> list[OutboxRow]:
        parameters |= {"now": utc(now), "limit": limit, "partitions": list(self._partitions)}
        cursor = await self._connection.execute(self._sql[statement], parameters)
        return await self.load([id_ for (id_,) in await cursor.fetchall()], batch_bytes=self._batch_bytes)

    async def _load(
        self, ids: Sequence[UUID], with_payload: bool, batch_bytes: int = NO_LIMIT
    ) -> list[OutboxRow]:
        parameters = {
            "ids": list(ids),
            "with_payload": with_payload,
            "batch_bytes": batch_bytes,
            "max_payload_bytes": MAX_PAYLOAD_BYTES,
        }
        # In a savepoint, so that the claim's locks survive a failed statement.
        async with self._connection.transaction(), self._connection.cursor(binary=True) as cursor:
            await cursor.execute(self._sql["load"], parameters)
            return [_outbox_row(_Row(*row), with_payload) for row in await cursor.fetchall()]

    async def _load_one(self, id_: UUID) -> list[OutboxRow]:
        """Return the row of one event, if it exists, without a payload that can't be read."""
        try:
            return await self._load([id_], with_payload=True)
        except psycopg.Error as error:
            if not _is_row_error(error):
                raise
            reason = f"its payload can't be read: {error.diag.message_primary or error}"
        return [row._replace(unreadable=reason) for row in await self._load([id_], with_payload=False)]

    async def _write(self, statement: str, decisions: Sequence[Decision]) -> None:
        if not decisions:
            return
        parameters = {
            "marks": as_json([_mark(event) for event, _ in decisions]),
            "events": as_json(stored_rows(change for _, changes in decisions for change in changes)),
        }
        await self._connection.execute(self._sql[statement], parameters)


class _Mark(msgspec.Struct, frozen=True, gc=False):
    """The changed columns of an event, as a JSON parameter."""

    id: UUID
    published_at: datetime | None
    attempts: int
    error: str | None
    retry_at: datetime | None


def _mark(event: OutboxEvent) -> _Mark:
    return _Mark(
        event.id,
        utc_or_none(event.published_at),
        event.publish_attempts,
        event.publish_error,
        utc_or_none(event.retry_at),
    )


class _Row(NamedTuple):
    """A row of the statement `load`."""

    id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    occurred_at: int | None
    correlation_id: UUID | None
    causation_id: UUID | None
    is_published: bool
    published_at: int | None
    publish_attempts: int
    publish_error: str | None
    has_failed: bool
    retry_at: int | None
    payload_bytes: int | None
    payload: bytes | None
    version: int | None
    recorded_type: str | None
    recorded_state: bytes | None


def _outbox_row(row: _Row, with_payload: bool) -> OutboxRow:
    status: Status = "waiting"
    if row.is_published:
        status = "published"
    elif row.has_failed and row.retry_at is None:
        status = "parked"
    recorded, unreadable = _recorded(row)
    payload = row.payload
    if recorded is not None and recorded.is_binary and payload is not None:
        payload, unreadable = _decode_binary(payload)
    if row.occurred_at is None:
        unreadable = "its occurred_at is outside the years 1 to 9999"
    elif with_payload and row.payload is None:
        unreadable = f"its payload has {row.payload_bytes:,} bytes, more than {MAX_PAYLOAD_BYTES:,}"
    event = OutboxEvent(
        row.id,
        row.version or 1,
        row.aggregate_type,
        row.aggregate_id,
        row.event_type,
        row.event_version,
        row.occurred_at,
        CorrelationContext(
            _id_text(row.correlation_id, recorded.correlation_id if recorded else None),
            _id_text(row.causation_id, recorded.causation_id if recorded else None),
        ),
        recorded.traceparent if recorded else None,
        row.published_at,
        row.publish_attempts,
        row.publish_error,
        row.retry_at,
        status,
        recorded.attributes if recorded else {},
        recorded.is_binary if recorded else False,
        recorded.tracestate if recorded else None,
        recorded.baggage if recorded else None,
        is_row=isinstance(recorded, OutboxRowHeld),
    )
    if event.is_row:
        unreadable = "it is a row of a captured table that could not be read"
    return OutboxRow(event, payload, row.version is not None, unreadable)


def _id_text(column: UUID | None, recorded: str | None) -> str | None:
    """Return the id of a row; an id that is not a UUID is only in the history."""
    if recorded is not None and as_uuid(recorded) == column:
        return recorded
    return None if column is None else str(column)


def _decode_binary(payload: bytes) -> tuple[bytes | None, str | None]:
    """Return the bytes that a payload encodes, or the reason why it can't be decoded."""
    try:
        return msgspec.json.decode(payload, type=bytes), None
    except msgspec.MsgspecError as error:
        return None, f"its payload can't be read as base64: {error}"


def _recorded(row: _Row) -> tuple[OutboxEventRecorded | None, str | None]:
    """Return the first event of the history, or the reason why it can't be read."""
    if row.recorded_type is None or row.recorded_state is None:
        return None, None
    try:
        recorded = CODEC.to_event(row.id.bytes, 1, row.recorded_type, 0, row.recorded_state)
    except (PostroomError, msgspec.MsgspecError) as error:
        return None, f"its history can't be read: {error}"
    return (recorded if isinstance(recorded, OutboxEventRecorded) else None), None


def _is_row_error(error: psycopg.Error) -> bool:
    """Return whether a statement failed because of the data of a row."""
    return isinstance(error, psycopg.DataError) or (error.sqlstate or "").startswith(_ROW_ERRORS)
