"""The inbox repository port over PostgreSQL (SDS-047 `PostgresInboxAdapter`)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.database import connect_async, describe, shown, unavailable
from postroom.adapters.postgres.messaging.aggregate_events import as_json, micros, stored_rows, utc
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.sql.transaction import for_psycopg
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import NotFound, PostroomError, Unavailable
from postroom.domain.inbox import (
    BUSY_RETRY_MS,
    InboxEvent,
    InboxMessage,
    dead_letter,
    discard,
    evolve,
    fail,
    inbox_stream,
    process,
    receive,
)

MAX_BATCH = 500


class _New(msgspec.Struct, frozen=True):
    message_id: UUID
    subject: str
    received_at: datetime


class _Row(msgspec.Struct, frozen=True):
    message_id: UUID
    processed_at: datetime | None
    attempts: int
    last_error: str | None
    version: int
    dead_lettered_at: datetime | None


class _Operation(NamedTuple):
    """A change of one message.

    Arguments:
        new: the row to insert if it is missing; None requires it to exist.
        decide: returns the new events of the history.
    """

    message_id: UUID
    new: _New | None
    decide: Callable[[InboxMessage | None], list[InboxEvent]]
    result: "asyncio.Future[InboxMessage]"


class PostgresInbox:
    """The inbox in the service's database, on one connection that is opened on demand.

    Concurrent changes are batched: a busy worker commits once for dozens of messages. A message that is
    locked by a handler's transaction is refused as busy instead of waiting.

    Arguments:
        url: the database, in which `postroom migrate` created the tables.
        keep_history: keep the histories of messages that are cleaned up.
    """

    def __init__(self, url: str, tables: Tables | None = None, *, keep_history: bool = False) -> None:
        self._url = url
        self._keep_history = keep_history
        self._tables = tables or Tables()
        statements = messaging_statements("inbox.sql", self._tables)
        self._sql: dict[str, Any] = {name: for_psycopg(text) for name, text in statements.items()}
        self._connection: psycopg.AsyncConnection[tuple[Any, ...]] | None = None
        self._turn = asyncio.Lock()
        self._waiting: list[_Operation] = []
        self._writer: asyncio.Task[None] | None = None

    async def insert(
        self, message_id: UUID, subject: str, at: int, *, redrive: bool = False, busy_ms: int = 0
    ) -> InboxMessage:
        """Record that a delivery of a message starts; see `InboxRepository.insert`."""
        subject = subject.replace("\x00", "")
        inbox = self._tables.inbox_messages
        return await self._change(
            message_id,
            lambda message: receive(
                message, message_id, inbox, subject, at, redrive=redrive, busy_ms=busy_ms
            ),
            _New(message_id, subject, utc(at)),
        )

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
        """Record that the handler processed the message; see `InboxRepository.mark_processed`."""
        return await self._change(message_id, partial(_on_existing, process, now=at))

    async def record_error(self, message_id: UUID, error: str, at: int) -> InboxMessage:
        """Record that a delivery failed and the message will be delivered again."""
        reason = error.replace("\x00", "")
        return await self._change(message_id, partial(_on_existing, fail, reason=reason, now=at))

    async def mark_dead_lettered(self, message_id: UUID, reason: str, at: int) -> InboxMessage:
        """Record that the message was published to the dead-letter subject."""
        reason = reason.replace("\x00", "")
        return await self._change(message_id, partial(_on_existing, dead_letter, reason=reason, now=at))

    async def mark_discarded(self, message_id: UUID, reason: str, letter: bytes, at: int) -> InboxMessage:
        """Record that an operator discarded a dead letter; see `InboxRepository.mark_discarded`."""
        change = partial(_on_existing, discard, reason=reason.replace("\x00", ""), dead_letter=letter, now=at)
        return await self._change(message_id, change)

    async def backlog(self) -> Backlog:
        """Count messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""
        async with self._transaction() as connection:
            count, oldest = (await self._run(connection, "backlog", {}))[0]
        return Backlog(count, oldest)

    async def delete_processed(self, before: int, limit: int) -> int | None:
        """Delete messages that were processed before a time; see `InboxRepository.delete_processed`."""
        async with self._transaction() as connection:
            task = {"task": f"postroom inbox cleanup {self._tables.inbox_messages}"}
            if not (await self._run(connection, "lock_transaction", task))[0][0]:
                return None
            rows = await self._run(connection, "delete", {"before": utc(before), "limit": limit})
            if rows and not self._keep_history:
                streams = [self._stream(message_id) for (message_id,) in rows]
                await self._run(connection, "delete_events", {"streams": streams})
        return len(rows)

    @asynccontextmanager
    async def exclusive(self, task: str) -> AsyncIterator[bool]:
        """Try to lock a task on this inbox; the lock ends with the process at the latest."""
        # On a dedicated connection: reconnecting the shared one would silently release the lock.
        name = {"task": f"postroom inbox {task} {self._tables.inbox_messages}"}
        connection = await connect_async(self._url, f"postroom inbox {task}")
        async with connection:
            with unavailable(self._url):
                locked = bool((await self._run(connection, "lock", name))[0][0])
            yield locked

    async def close(self) -> None:
        """Finish pending changes and disconnect; closing twice is fine."""
        if self._writer is not None:
            await self._writer
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    # -- batches of changes ---

    async def _change(
        self,
        message_id: UUID,
        decide: Callable[[InboxMessage | None], list[InboxEvent]],
        new: _New | None = None,
    ) -> InboxMessage:
        result: asyncio.Future[InboxMessage] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Operation(message_id, new, decide, result))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), context=Context())  # of no message
        return await result

    async def _write(self) -> None:
        """Write pending changes, batch by batch, until there are none."""
        while self._waiting:
            batch = self._next_batch()
            outcomes = await self._try(batch)
            if len(batch) > 1 and any(
                map(_is_row_error, outcomes)
            ):  # one invalid row must not fail the others
                outcomes = [outcome for operation in batch for outcome in await self._try([operation])]
            for operation, outcome in zip(batch, outcomes, strict=True):
                if operation.result.cancelled():
                    continue
                if isinstance(outcome, Exception):
                    operation.result.set_exception(outcome)
                else:
                    operation.result.set_result(outcome)

    async def _try(self, batch: Sequence[_Operation]) -> list[InboxMessage | Exception]:
        try:
            return await self._apply(batch)
        except Exception as error:
            return [error] * len(batch)

    def _next_batch(self) -> list[_Operation]:
        """Return the next operations, at most one per message."""
        batch: dict[UUID, _Operation] = {}
        later = []
        for operation in self._waiting:
            if operation.message_id in batch or len(batch) == MAX_BATCH:
                later.append(operation)
            else:
                batch[operation.message_id] = operation
        self._waiting = later
        return list(batch.values())

    async def _apply(self, batch: Sequence[_Operation]) -> list[InboxMessage | Exception]:
        async with self._transaction() as connection:
            new = [operation.new for operation in batch if operation.new is not None]
            if new:
                await self._run(connection, "add", {"messages": as_json(new)})
            messages = await self._load(connection, batch)
            outcomes: list[InboxMessage | Exception] = []
            events: list[InboxEvent] = []
            for operation in batch:
                outcome, following = self._outcome(operation, messages)
                outcomes.append(outcome)
                events += following
            changed = {UUID(bytes=event.stream) for event in events}
            rows = [
                _row(outcome)
                for outcome in outcomes
                if isinstance(outcome, InboxMessage) and UUID(bytes=outcome.stream) in changed
            ]
            if events:
                await self._run(connection, "update", {"messages": as_json(rows)})
                await self._run(connection, "insert_events", {"events": as_json(stored_rows(events))})
        return outcomes

    async def _load(
        self, connection: "psycopg.AsyncConnection[tuple[Any, ...]]", batch: Sequence[_Operation]
    ) -> dict[UUID, InboxMessage | None]:
        """Lock messages and return their states: None for new rows; messages locked by others are missing."""
        rows = await self._run(connection, "load", {"ids": [operation.message_id for operation in batch]})
        messages = {row[0]: self._state(*row) for row in rows}
        received = [messages.get(operation.message_id) for operation in batch if operation.new is not None]
        unsettled = [message for message in received if message is not None and not message.is_settled]
        if unsettled:
            parameters = {
                "streams": [UUID(bytes=message.stream) for message in unsettled],
                "versions": [message.version for message in unsettled],
            }
            since = dict(await self._run(connection, "deliveries_in_progress", parameters))
            for message in unsettled:
                at = _micros(since.get(UUID(bytes=message.stream)))
                messages[message.message_id] = msgspec.structs.replace(message, in_flight_since=at)
        return messages

    def _outcome(
        self, operation: _Operation, messages: dict[UUID, InboxMessage | None]
    ) -> tuple[InboxMessage | PostroomError, list[InboxEvent]]:
        if operation.message_id not in messages:
            return self._absent(operation), []
        message = messages[operation.message_id]
        try:
            events = operation.decide(message)
        except PostroomError as error:
            return error, []
        for event in events:
            message = evolve(message, event)
        assert message is not None
        return message, events

    def _absent(self, operation: _Operation) -> PostroomError:
        if operation.new is None:
            return NotFound(
                f"Message {operation.message_id} is not in the inbox of {shown(self._url)}, or another "
                "transaction has locked it; deliver it again."
            )
        return Unavailable(
            f"Message {operation.message_id} is being handled by another process; deliver it again later.",
            BUSY_RETRY_MS,
        )

    def _state(
        self,
        message_id: UUID,
        subject: str,
        received_at: datetime,
        processed_at: datetime | None,
        attempts: int,
        last_error: str | None,
        version: int,
        dead_lettered_at: datetime | None,
    ) -> InboxMessage | None:
        if not version:  # inserted by this transaction
            return None
        return InboxMessage(
            self._stream(message_id).bytes,
            version,
            message_id,
            subject,
            micros(received_at),
            _micros(processed_at),
            attempts,
            last_error,
            _micros(dead_lettered_at),
        )

    def _stream(self, message_id: UUID) -> UUID:
        return UUID(bytes=inbox_stream(message_id, self._tables.inbox_messages))

    # -- connection ---

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator["psycopg.AsyncConnection[tuple[Any, ...]]"]:
        async with self._turn:
            if self._connection is None or self._connection.closed:
                self._connection = await connect_async(self._url, "postroom inbox")
                self._connection.prepare_threshold = None  # PgBouncer may switch server connections
            try:
                async with self._connection.transaction():
                    yield self._connection
            except psycopg.errors.UndefinedTable as error:
                raise Unavailable(
                    f"The database {shown(self._url)} has no inbox: {error.diag.message_primary}. Run "
                    "`postroom migrate --messaging URL` once, or configure the names of its tables."
                ) from error
            except psycopg.Error as error:
                raise describe(error, self._url) from error

    async def _run(
        self,
        connection: "psycopg.AsyncConnection[tuple[Any, ...]]",
        name: str,
        parameters: dict[str, Any],
    ) -> list[tuple[Any, ...]]:
        cursor = await connection.execute(self._sql[name], parameters)
        return await cursor.fetchall() if cursor.description is not None else []


def _is_row_error(outcome: object) -> bool:
    """Return whether a transaction failed because of the data of a row."""
    return isinstance(outcome, Exception) and isinstance(outcome.__cause__, psycopg.DataError)


def _on_existing(
    decide: Callable[..., list[InboxEvent]], message: InboxMessage | None, **arguments: Any
) -> list[InboxEvent]:
    assert message is not None, "a row of version 0 is never committed"
    return decide(message, **arguments)


def _row(message: InboxMessage) -> _Row:
    return _Row(
        message.message_id,
        _utc(message.processed_at),
        message.attempts,
        message.last_error,
        message.version,
        _utc(message.dead_lettered_at),
    )


def _utc(at: int | None) -> datetime | None:
    return None if at is None else utc(at)


def _micros(at: datetime | None) -> int | None:
    return None if at is None else micros(at)
