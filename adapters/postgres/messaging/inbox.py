"""The inbox repository port over PostgreSQL (SDS-047 `PostgresInboxAdapter`)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.database import connect_async, describe, shown, unavailable
from postroom.adapters.postgres.messaging.aggregate_events import as_json, micros, stored_rows, utc
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.postgres.messaging.transaction import for_psycopg
from postroom.application.ports.outbox_repository import Backlog
from postroom.domain.errors import NotFound, PostroomError, Unavailable
from postroom.domain.inbox import (
    InboxEvent,
    InboxMessage,
    dead_letter,
    evolve,
    fail,
    inbox_stream,
    process,
    receive,
)

MAX_BATCH = 500
BUSY_RETRY_MS = 1_000


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
    """What is to be done with one message.

    Arguments:
        new: the row to make where there is none; None expects it to be there.
        decide: returns the events that follow.
    """

    message_id: UUID
    new: _New | None
    decide: Callable[[InboxMessage | None], list[InboxEvent]]
    result: "asyncio.Future[InboxMessage]"


class PostgresInbox:
    """Keep the inbox in the context's own database, on one connection that is made when it is needed.

    What several deliveries ask for at once is done in one transaction: a busy worker commits once for dozens
    of messages. A message that a handler's transaction is just changing is left alone, not waited for.

    Arguments:
        url: the database, in which `postroom migrate` made the tables.
        keep_history: leave the histories of removed messages where they are.
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

    async def insert(self, message_id: UUID, subject: str, at: int, *, redrive: bool = False) -> InboxMessage:
        """Note that a delivery of a message begins; see `InboxRepository.insert`."""
        subject = subject.replace("\x00", "")
        return await self._do(
            message_id,
            lambda known: receive(
                known, message_id, self._tables.inbox_messages, subject, at, redrive=redrive
            ),
            _New(message_id, subject, utc(at)),
        )

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
        """Note that the handler has dealt with the message; see `InboxRepository.mark_processed`."""
        return await self._do(message_id, partial(_if_known, process, now=at))

    async def record_error(self, message_id: UUID, error: str, at: int) -> InboxMessage:
        """Note that a delivery failed and will be repeated."""
        reason = error.replace("\x00", "")
        return await self._do(message_id, partial(_if_known, fail, reason=reason, now=at))

    async def mark_dead_lettered(self, message_id: UUID, reason: str, at: int) -> InboxMessage:
        """Note that the message went to the dead-letter subject."""
        reason = reason.replace("\x00", "")
        return await self._do(message_id, partial(_if_known, dead_letter, reason=reason, now=at))

    async def backlog(self) -> Backlog:
        """Count what is neither processed nor a dead letter (SDS-047 QRY-051)."""
        async with self._transaction() as connection:
            count, oldest = (await self._run(connection, "backlog", {}))[0]
        return Backlog(count, None if oldest is None else micros(oldest))

    async def remove_processed(self, before: int, limit: int) -> int:
        """Forget messages that were processed before a time; see `InboxRepository.remove_processed`."""
        async with self._transaction() as connection:
            removed = await self._run(connection, "remove", {"before": utc(before), "limit": limit})
            if removed and not self._keep_history:
                streams = [self._stream(message_id) for (message_id,) in removed]
                await self._run(connection, "remove_events", {"streams": streams})
        return len(removed)

    @asynccontextmanager
    async def alone(self, task: str) -> AsyncIterator[bool]:
        """Try to be the only one to do a task on this inbox; a claim ends with its process at the latest."""
        # On a connection of its own: a claim that is lost with it must not be taken for one that is held.
        name = {"task": f"postroom inbox {task} {self._tables.inbox_messages}"}
        connection = await connect_async(self._url, f"postroom inbox {task}")
        async with connection:
            with unavailable(self._url):
                claimed = bool((await self._run(connection, "claim", name))[0][0])
            yield claimed

    async def close(self) -> None:
        """Finish what was asked for and disconnect; closing twice is fine."""
        if self._writer is not None:
            await self._writer
        if self._connection is not None:
            await self._connection.close()
            self._connection = None

    # -- changing messages, many at once ---

    async def _do(
        self,
        message_id: UUID,
        decide: Callable[[InboxMessage | None], list[InboxEvent]],
        new: _New | None = None,
    ) -> InboxMessage:
        result: asyncio.Future[InboxMessage] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Operation(message_id, new, decide, result))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())
        return await result

    async def _write(self) -> None:
        """Do what is waiting, batch by batch, until nothing is."""
        while self._waiting:
            batch = self._take()
            try:
                outcomes = await self._apply(batch)
            except Exception as error:
                outcomes = [error] * len(batch)
            for operation, outcome in zip(batch, outcomes, strict=True):
                if operation.result.cancelled():
                    continue
                if isinstance(outcome, Exception):
                    operation.result.set_exception(outcome)
                else:
                    operation.result.set_result(outcome)

    def _take(self) -> list[_Operation]:
        """Return the next operations, of no message more than one."""
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
            ids = [operation.message_id for operation in batch]
            known = {row[0]: self._state(*row) for row in await self._run(connection, "load", {"ids": ids})}
            outcomes: list[InboxMessage | Exception] = []
            events: list[InboxEvent] = []
            for operation in batch:
                outcome, following = self._outcome(operation, known)
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

    def _outcome(
        self, operation: _Operation, known: dict[UUID, InboxMessage | None]
    ) -> tuple[InboxMessage | PostroomError, list[InboxEvent]]:
        if operation.message_id not in known:
            return self._absent(operation), []
        message = known[operation.message_id]
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
                f"Message {operation.message_id} is not in the inbox of {shown(self._url)}, or somebody is "
                "changing it just now; deliver it again."
            )
        return Unavailable(
            f"Message {operation.message_id} is being handled by somebody else just now; deliver it again.",
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
        if not version:  # the row was made a moment ago
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

    # -- the connection ---

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator["psycopg.AsyncConnection[tuple[Any, ...]]"]:
        async with self._turn:
            if self._connection is None or self._connection.closed:
                self._connection = await connect_async(self._url, "postroom inbox")
                self._connection.prepare_threshold = None  # PgBouncer may hand the next one to another server
            try:
                async with self._connection.transaction():
                    yield self._connection
            except psycopg.errors.UndefinedTable as error:
                raise Unavailable(
                    f"The database {shown(self._url)} has no inbox: {error.diag.message_primary}. Run "
                    "`postroom migrate --messaging URL` once, or say what its tables are called."
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


def _if_known(
    decide: Callable[..., list[InboxEvent]], message: InboxMessage | None, **facts: Any
) -> list[InboxEvent]:
    assert message is not None, "a row of version 0 is never committed"
    return decide(message, **facts)


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
