"""The inbox repository port over PostgreSQL (SDS-047 `PostgresInboxAdapter`)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.database import AsyncConnection, connect_async, lock_name
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.messaging.aggregate_events import (
    MessagingDatabase,
    as_json,
    micros,
    utc,
    utc_or_none,
)
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.messaging import CODEC
from postroom.application.ports.inbox import InboxRepository, PartitionBacklog
from postroom.application.ports.outbox import Backlog
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
MAX_KNOWN = 10_000
"""States of messages in flight that are kept; beyond that, all are forgotten."""

Decide = Callable[[InboxMessage | None], list[InboxEvent]]


class _Change(msgspec.Struct, frozen=True, gc=False):
    """A message's new row and the event that led to it, as a JSON parameter.

    Arguments:
        expected: version of the row before the change; 0 if there was none.
    """

    message_id: UUID
    subject: str
    received_at: datetime
    processed_at: datetime | None
    attempts: int
    last_error: str | None
    version: int
    dead_lettered_at: datetime | None
    expected: int
    stream: UUID
    type: str
    at: datetime
    state: str


class _Operation(NamedTuple):
    """A change of one message.

    Arguments:
        decide: returns the new event of the history, or none.
        can_be_new: whether the message may be missing from the inbox.
    """

    message_id: UUID
    decide: Decide
    can_be_new: bool
    result: "asyncio.Future[InboxMessage]"

    def succeed(self, message: InboxMessage) -> None:
        """Return the message's state to the caller, unless it was cancelled."""
        if not self.result.done():
            self.result.set_result(message)

    def fail(self, error: Exception) -> None:
        """Raise an error at the caller, unless it was cancelled."""
        if not self.result.done():
            self.result.set_exception(error)


class PostgresInbox(MessagingDatabase, InboxRepository):
    """The inbox in the service's database, on one connection that is opened on demand.

    Concurrent changes are batched: a busy worker commits once for dozens of messages, by one statement. A
    change expects the row as this inbox left it when the delivery started, and no row for a new message.
    Otherwise it writes nothing; the inbox reads the row, and decides the change once more. A message that is
    locked by a handler's transaction is refused as busy instead of waiting.

    Arguments:
        url: the database, in which `postroom migrate` created the tables.
        keep_history: keep the histories of messages that are cleaned up.
    """

    def __init__(self, url: str, tables: Tables | None = None, *, keep_history: bool = False) -> None:
        super().__init__(url, tables, "inbox.sql", name="postroom inbox", contents="inbox of this version")
        self._keep_history = keep_history
        self._tables = tables or Tables()
        self._turn = asyncio.Lock()
        self._waiting: list[_Operation] = []
        self._known: dict[UUID, InboxMessage] = {}
        self._writer: asyncio.Task[None] | None = None

    async def insert(
        self, message_id: UUID, subject: str, at: int, *, redrive: bool = False, busy_ms: int = 0
    ) -> InboxMessage:
        subject = subject.replace("\x00", "")
        inbox = self._tables.inbox_messages

        def decide(message: InboxMessage | None) -> list[InboxEvent]:
            return receive(message, message_id, inbox, subject, at, redrive=redrive, busy_ms=busy_ms)

        return await self._change(message_id, decide, can_be_new=True)

    async def mark_processed(self, message_id: UUID, at: int) -> InboxMessage:
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
        change = partial(_on_existing, discard, reason=reason.replace("\x00", ""), dead_letter=letter, now=at)
        return await self._change(message_id, change)

    async def backlog(self) -> Backlog:
        """Count messages that are neither processed nor dead-lettered (SDS-047 QRY-051)."""
        async with self._transaction() as connection:
            count, oldest = (await self._run(connection, "backlog", {}))[0]
        return Backlog(count, oldest)

    async def queue_backlog(self, consumer: str | None = None) -> list[PartitionBacklog]:
        async with self._transaction() as connection:
            rows = await self._run(connection, "queue_backlog", {"consumer": consumer})
        return [PartitionBacklog(*row) for row in rows]

    async def delete_processed(self, before: int, limit: int) -> int | None:
        async with self._transaction() as connection:
            task = {"task": lock_name(self._url, f"inbox cleanup {self._tables.inbox_messages}")}
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
        name = {"task": lock_name(self._url, f"inbox {task} {self._tables.inbox_messages}")}
        name_, user = f"postroom inbox {task}", f"the {task} of an inbox"
        connection = await connect_async(self._url, name_, session_for=user)
        async with connection:
            with unavailable(self._url):
                locked = bool((await self._run(connection, "lock", name))[0][0])
            try:
                yield locked
            finally:
                with suppress(psycopg.Error):  # the server releases it with the connection, but later
                    await self._run(connection, "unlock", {})

    async def close(self) -> None:
        """Finish pending changes and disconnect; closing twice is fine."""
        if self._writer is not None:
            await self._writer
        await super().close()

    # -- batches of changes ---

    async def _change(self, message_id: UUID, decide: Decide, *, can_be_new: bool = False) -> InboxMessage:
        result: asyncio.Future[InboxMessage] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Operation(message_id, decide, can_be_new, result))
        if self._writer is None or self._writer.done():
            # Without the context of any message.
            self._writer = asyncio.create_task(self._write(), context=Context())
        return await result

    async def _write(self) -> None:
        """Write pending changes, batch by batch, until there are none."""
        while self._waiting:
            await self._answer(self._next_batch())

    async def _answer(self, batch: Sequence[_Operation]) -> None:
        try:
            await self._apply(batch)
        except Exception as error:
            rest = [operation for operation in batch if not operation.result.done()]
            if len(batch) > 1 and isinstance(error.__cause__, psycopg.DataError):
                for operation in rest:  # one invalid row must not fail the others
                    await self._answer([operation])
            else:
                for operation in rest:
                    operation.fail(error)

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

    async def _apply(self, batch: Sequence[_Operation]) -> None:
        async with self._connected() as connection:
            expected: dict[UUID, InboxMessage | None] = {
                each.message_id: self._known.pop(each.message_id, None)
                for each in batch
                if each.can_be_new or each.message_id in self._known
            }
            rest = await self._try(connection, batch, expected, is_current=False)
            if rest:
                rest = await self._try(connection, rest, await self._load(connection, rest), is_current=True)
        for operation in rest:  # the row was changed since it was read, or is locked
            operation.fail(self._busy(operation))

    async def _try(
        self,
        connection: AsyncConnection,
        operations: Sequence[_Operation],
        messages: dict[UUID, InboxMessage | None],
        *,
        is_current: bool,
    ) -> list[_Operation]:
        """Change the messages whose rows are as expected; return the operations of the others.

        Arguments:
            messages: the expected states: None without a row, missing if unknown.
            is_current: whether the states were just read, so that operations that change nothing, or fail,
                are answered.
        """
        rest: list[_Operation] = []
        changes: list[_Change] = []
        changed: list[tuple[_Operation, InboxMessage]] = []
        for operation in operations:
            message = messages.get(operation.message_id)
            try:
                events = self._decide(operation, message) if operation.message_id in messages else []
            except PostroomError as error:
                if is_current:
                    operation.fail(error)
                else:
                    rest.append(operation)
                continue
            if events:
                (event,) = events
                new = evolve(message, event)
                changes.append(_change(0 if message is None else message.version, new, event))
                changed.append((operation, new))
            elif is_current and message is not None:
                operation.succeed(message)
            else:
                rest.append(operation)
        if changes:
            written = set(await self._run(connection, "write", {"changes": as_json(changes)}))
            for operation, new in changed:
                if (operation.message_id,) in written:
                    self._remember(new)
                    operation.succeed(new)
                else:
                    rest.append(operation)
        return rest

    def _decide(self, operation: _Operation, message: InboxMessage | None) -> list[InboxEvent]:
        if message is None and not operation.can_be_new:
            raise NotFound(f"Message {operation.message_id} is not in the inbox of {shown(self._url)}.")
        return operation.decide(message)

    def _remember(self, message: InboxMessage) -> None:
        """Keep the state of a message in flight, whose next change is the end of the delivery."""
        if message.in_flight_since is None:
            return
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[message.message_id] = message

    async def _load(
        self, connection: AsyncConnection, operations: Sequence[_Operation]
    ) -> dict[UUID, InboxMessage | None]:
        """Return the states of messages, None for those without a row."""
        ids = [operation.message_id for operation in operations]
        parameters = {"ids": ids, "streams": [self._stream(id_) for id_ in ids]}
        rows = await self._run(connection, "load", parameters)
        return dict.fromkeys(ids) | {row[0]: self._state(*row) for row in rows}

    def _busy(self, operation: _Operation) -> PostroomError:
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
        in_flight_since: datetime | None,
    ) -> InboxMessage | None:
        if not version:  # inserted by plain SQL
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
            _micros(in_flight_since),
        )

    def _stream(self, message_id: UUID) -> UUID:
        return UUID(bytes=inbox_stream(message_id, self._tables.inbox_messages))

    # -- connection ---

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        async with self._turn, super()._connected() as connection:
            yield connection


def _change(expected: int, message: InboxMessage, event: InboxEvent) -> _Change:
    type_, state = CODEC.to_row(event)
    return _Change(
        message.message_id,
        message.subject,
        utc(message.received_at),
        utc_or_none(message.processed_at),
        message.attempts,
        message.last_error,
        message.version,
        utc_or_none(message.dead_lettered_at),
        expected,
        UUID(bytes=event.stream),
        type_,
        utc(event.at),
        state.hex(),
    )


def _on_existing(
    decide: Callable[..., list[InboxEvent]], message: InboxMessage | None, **arguments: Any
) -> list[InboxEvent]:
    assert message is not None, "a row of version 0 is never committed"
    return decide(message, **arguments)


def _micros(at: datetime | None) -> int | None:
    return None if at is None else micros(at)
