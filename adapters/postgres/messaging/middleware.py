"""Middlewares of the inbox over PostgreSQL: `acknowledge(transaction(inbox(outbox(handler))))`.

    handle = pipeline(
        acknowledge(source),
        transaction(async_sessionmaker(engine)),
        inbox(),
        outbox(),
        place_order,
    )

See `postroom.application.inbox.middleware`. The tables must exist: run `postroom migrate`.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import psycopg

from postroom.adapters.postgres.messaging.aggregate_events import as_json, micros, stored_rows, utc
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox
from postroom.adapters.postgres.messaging.settings import Tables, messaging_statements
from postroom.adapters.sql.transaction import execute_async
from postroom.application.inbox.middleware import (
    Begin,
    Handler,
    Middleware,
    current_transaction,
    make_acknowledge,
    make_inbox,
    make_outbox,
    make_transaction,
    pipeline,
    subject_of,
)
from postroom.application.inbox.request import inbox_id
from postroom.application.outbox.new_event import NewEvent
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.source import Source, SourceMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import (
    DeliveryPolicy,
    InboxEvent,
    InboxMessage,
    evolve,
    inbox_stream,
    process,
    receive,
)
from postroom.domain.policy import backoff_ms
from postroom.domain.subject import is_correlation_id

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

__all__ = ["acknowledge", "current_transaction", "inbox", "outbox", "pipeline", "transaction"]

Connect = Callable[[], "Awaitable[psycopg.AsyncConnection[Any]]"]


def acknowledge(
    source: Source, policy: DeliveryPolicy | None = None
) -> Callable[[Handler], Callable[[SourceMessage], Awaitable[None]]]:
    """Acknowledge each message if the inner handler succeeds; otherwise nack it with a backoff.

    Messages are not dead-lettered: a message that always fails is redelivered up to the consumer's limit. For
    dead letters, use `postroom inbox consume`.

    Arguments:
        source: source that delivered the message.
        policy: number and spacing of attempts; None takes the defaults.
    """
    bounds = policy or DeliveryPolicy()
    return make_acknowledge(source, lambda delivered: backoff_ms(bounds, delivered, random.random()))


def transaction(database: "async_sessionmaker[Any] | AsyncEngine | Connect | Any") -> Middleware:
    """Begin a transaction for each event; `current_transaction` returns it.

    Arguments:
        database: a SQLAlchemy `async_sessionmaker` or `AsyncEngine`, a psycopg `AsyncConnectionPool`, or a
            function that opens a psycopg `AsyncConnection`.
    """
    return make_transaction(_begin(database))


def inbox(tables: Tables | None = None, *, wall: Callable[[], int] | None = None) -> Middleware:
    """Skip messages that were already processed (SDS-047 POL-047-003).

    The row and its history are written in the surrounding transaction. Worker and handler may share a table:
    the row that the worker inserted is updated. Services that share a database and consume the same messages
    need a table each, named in `tables`.

    Arguments:
        wall: returns the time in µs since 1970 UTC.
    """
    names = tables or Tables()
    sql = messaging_statements("inbox.sql", names)
    now = wall or _wall

    async def deduplicate(transaction: Any, request: HandlerRequest) -> bool:
        message_id = inbox_id(request.message_id)
        parameters = {
            "message_id": str(message_id),
            "subject": subject_of(request).replace("\x00", ""),
            "at": utc(now()).isoformat(),
        }
        rows = await execute_async(transaction, sql["insert_processed"], parameters)
        if not rows:
            return False
        events = _history(names.inbox_messages, message_id, *rows[0])
        await execute_async(transaction, sql["insert_events"], {"events": as_json(stored_rows(events))})
        return True

    return make_inbox(deduplicate)


def outbox(tables: Tables | None = None, *, recorder: AsyncOutbox | None = None) -> Middleware:
    """Record the `NewEvent`s that the handler returns in the surrounding transaction.

    Causation and correlation ids default to the ids of the current message.

    Arguments:
        recorder: outbox that records the events; None creates one for `tables`.
    """
    events_outbox = recorder or AsyncOutbox(tables)

    async def record(transaction: Any, request: HandlerRequest, events: Sequence[Any]) -> None:
        await events_outbox.record(transaction, *(_with_causation(event, request) for event in events))

    return make_outbox(record)


def _history(
    table: str,
    message_id: UUID,
    is_new: bool,
    version: int,
    subject: str,
    received_at: datetime,
    processed_at: datetime,
    attempts: int,
    last_error: str | None,
) -> list[InboxEvent]:
    """Return the new events of a message whose row was just marked processed."""
    if is_new:
        (received,) = receive(None, message_id, table, subject, micros(received_at))
        return [received, *process(evolve(None, received), micros(processed_at))]
    stream = inbox_stream(message_id, table)
    before = InboxMessage(
        stream, version - 1, message_id, subject, micros(received_at), None, attempts, last_error
    )
    return process(before, micros(processed_at))


def _with_causation(event: Any, request: HandlerRequest) -> NewEvent:
    if not isinstance(event, NewEvent):
        raise InvalidRequest(
            f"The handler of {subject_of(request)} returned {type(event).__qualname__}; return a list of "
            "NewEvent for the outbox, or omit the middleware outbox."
        )
    cause = inbox_id(request.message_id) if request.message_id else None
    return msgspec.structs.replace(
        event,
        causation_id=event.causation_id or cause,
        correlation_id=event.correlation_id or _correlation_id(request.correlation_id) or cause,
    )


def _correlation_id(text: str | None) -> str | None:
    return text if text and is_correlation_id(text) else None


def _begin(database: Any) -> Begin:
    """Return a function that begins a transaction on a database of any supported kind."""
    if hasattr(database, "begin") and _is_async(database):
        begin: Begin = database.begin
        return begin
    if hasattr(database, "connection"):  # psycopg's pools
        return lambda: _in_pool(database.connection())
    if callable(database) and not hasattr(database, "begin"):
        return lambda: _in_new_connection(database)
    raise InvalidRequest(
        "Pass `transaction` an async_sessionmaker, an AsyncEngine, an AsyncConnectionPool or a function that "
        f"opens a psycopg AsyncConnection; it was {type(database).__module__}.{type(database).__qualname__}."
    )


def _is_async(database: Any) -> bool:
    """Return whether a SQLAlchemy sessionmaker or engine is an asyncio one."""
    from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker

    return isinstance(database, AsyncEngine | async_sessionmaker)


@asynccontextmanager
async def _in_pool(
    context: "AbstractAsyncContextManager[psycopg.AsyncConnection[Any]]",
) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
    async with context as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _in_new_connection(connect: Connect) -> AsyncIterator["psycopg.AsyncConnection[Any]"]:
    async with await connect() as connection, connection.transaction():
        yield connection


def _wall() -> int:
    return time.time_ns() // 1_000
