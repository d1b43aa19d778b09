"""Histories of outbox events and inbox messages, in the user's database and transaction.

The table is also an `AggregateRecorder` of the `eventsourcing` library, for its repositories and tools.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
import psycopg
from eventsourcing.persistence import IntegrityError, StoredEvent

from postroom.adapters.postgres.database import AsyncConnection, connect_shared
from postroom.adapters.postgres.errors import describe, shown
from postroom.adapters.postgres.messaging.settings import Tables, messaging_statements
from postroom.adapters.postgres.reconnecting import AsyncReconnecting
from postroom.adapters.sql.transaction import DatabaseRefused, constraint_errors, execute, for_psycopg
from postroom.application.messaging import CODEC
from postroom.application.ports.outbox import Aggregate, Decision
from postroom.application.recorders import VersionRange, VersionRecorder, check_originator
from postroom.domain.errors import Unavailable, UnusableServer
from postroom.domain.record import Event

if TYPE_CHECKING:
    from postroom.adapters.sql.transaction import Connection


UNIQUE_VIOLATION = "23505"
MAX_VERSION = 2**31 - 1
NO_LIMIT = 2**31 - 1
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class StoredRow(msgspec.Struct, frozen=True, gc=False):
    """A row of `aggregate_events` as a JSON parameter; `state` is hexadecimal."""

    stream: UUID
    version: int
    type: str
    at: datetime
    state: str


def stored_rows(events: Iterable[Event]) -> list[StoredRow]:
    """Return the rows of events."""
    return [
        StoredRow(UUID(bytes=event.stream), event.version, type_, utc(event.at), state.hex())
        for event in events
        for type_, state in [CODEC.to_row(event)]
    ]


def utc(at: int) -> datetime:
    """Return a time in µs since 1970 UTC as a datetime."""
    return _EPOCH + timedelta(microseconds=at)


def utc_or_none(at: int | None) -> datetime | None:
    """Return a time in µs since 1970 UTC as a datetime, if there is one."""
    return None if at is None else utc(at)


def micros(at: datetime) -> int:
    """Return a datetime in µs since 1970 UTC."""
    return (at - _EPOCH) // timedelta(microseconds=1)


class AggregateEvents(VersionRecorder):
    """Histories of aggregates, written in the user's transaction without committing it.

    Arguments:
        connection: a psycopg `Connection`, or a SQLAlchemy `Connection` or `Session`.
        wall: returns the time in µs since 1970 UTC, for events of the library, which have none.
    """

    def __init__(
        self, connection: "Connection", wall: Callable[[], int], tables: Tables | None = None
    ) -> None:
        self._connection = connection
        self._wall = wall
        self._sql = messaging_statements("aggregate_events.sql", tables or Tables())

    def history(self, stream: UUID) -> list[Event]:
        """Return the events of one outbox event or inbox message, oldest first."""
        return [
            CODEC.to_event(stream.bytes, version, type_, micros(at), bytes(state))
            for version, type_, at, state in self._select(stream, VersionRange())
        ]

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> None:
        """Append events, all or none.

        Raises:
            IntegrityError: an aggregate already has an event of the same version.
            ProgrammingError: an originator id is not a UUID.
        """
        if not stored_events:
            return
        at = utc(self._wall())
        rows = [
            StoredRow(
                check_originator(each.originator_id),
                each.originator_version,
                each.topic,
                at,
                each.state.hex(),
            )
            for each in stored_events
        ]
        execute(self._connection, self._sql["savepoint"], {})
        try:
            with constraint_errors():
                execute(self._connection, self._sql["insert"], {"events": as_json(rows)})
        except DatabaseRefused as error:
            execute(self._connection, self._sql["rollback"], {})
            raise IntegrityError(
                "One of the aggregates already has an event of the same version; reload it and repeat the "
                f"command ({error.constraint})."
            ) from error
        execute(self._connection, self._sql["release"], {})

    def _events(self, originator_id: UUID | str, versions: VersionRange) -> list[StoredEvent]:
        stream = check_originator(originator_id)
        return [
            StoredEvent(stream, version, type_, bytes(state))
            for version, type_, _, state in self._select(stream, versions)
        ]

    def _select(self, stream: UUID, versions: VersionRange) -> Sequence[tuple[Any, ...]]:
        parameters = {
            "stream": str(stream),
            "gt": max(versions.gt, -1),
            "lte": min(versions.lte, MAX_VERSION),
            "limit": min(versions.limit, NO_LIMIT),
        }
        statement = "select_backwards" if versions.desc else "select_forwards"
        return execute(self._connection, self._sql[statement], parameters)


def as_json(rows: Sequence[msgspec.Struct]) -> str:
    """Return rows as one JSON parameter, which every driver supports."""
    return msgspec.json.encode(rows).decode()


def as_uuid(text: str | None) -> UUID | None:
    """Return the value of a column for an id of any text; None if it is not a UUID."""
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None


class HeldEvent(msgspec.Struct, frozen=True, gc=False):
    """A row of the outbox as a JSON parameter."""

    id: UUID
    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    payload: msgspec.Raw
    occurred_at: datetime | None
    correlation_id: UUID | None
    causation_id: UUID | None
    attempts: int
    error: str | None
    has_failed: bool
    retry_at: datetime | None


class MessagingDatabase:
    """Base of the outbox and inbox in a service's database, on one connection that is opened on demand.

    Arguments:
        url: the database, in which `postroom migrate` created the tables.
        resource: name of the file with the statements.
        name: application name of the connection.
        contents: name of the contents of the tables, for the error that a table is missing.
    """

    def __init__(self, url: str, tables: Tables | None, resource: str, *, name: str, contents: str) -> None:
        self._url = url
        self._contents = contents
        statements = messaging_statements(resource, tables or Tables())
        self._sql: dict[str, Any] = {name: for_psycopg(text) for name, text in statements.items()}
        self._database = AsyncReconnecting(lambda: connect_shared(url, name))

    async def close(self) -> None:
        """Release the connection; closing twice is fine."""
        await self._database.close()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        connection = await self._database.connected()
        try:
            yield connection
        except psycopg.Error as error:
            raise self._unavailable(error) from error

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        async with self._connected() as connection, connection.transaction():
            yield connection

    async def _run(
        self, connection: AsyncConnection, name: str, parameters: dict[str, Any]
    ) -> list[tuple[Any, ...]]:
        cursor = await connection.execute(self._sql[name], parameters)
        return await cursor.fetchall() if cursor.description is not None else []

    def _unavailable(self, error: psycopg.Error) -> Unavailable:
        if isinstance(error, psycopg.errors.UndefinedTable | psycopg.errors.UndefinedColumn):
            return UnusableServer(
                f"The database {shown(self._url)} has no {self._contents}: {error.diag.message_primary}. Run "
                "`postroom migrate --messaging URL` once, or configure the names of its tables."
            )
        return describe(error, self._url)


class PostgresHeldEvents(MessagingDatabase):
    """Captured events that wait in the outbox of a database; see `HeldEvents`."""

    def __init__(self, url: str, tables: Tables | None = None) -> None:
        super().__init__(
            url, tables, "held_events.sql", name="postroom outbox capture held", contents="outbox"
        )

    async def find_waiting(self, aggregates: Collection[Aggregate]) -> set[Aggregate]:
        """Return which of the aggregates have unpublished events in the outbox."""
        types, ids = [type_ for type_, _ in aggregates], [id_ for _, id_ in aggregates]
        async with self._connected() as connection:
            rows = await self._run(connection, "find_waiting", {"types": types, "ids": ids})
        return {(type_, id_) for type_, id_ in rows}

    async def hold(self, events: Sequence[tuple[Decision, bytes]]) -> None:
        """Add events with their JSON payloads to the outbox, all or none; events that it has are skipped."""
        parameters = {
            "held": as_json([as_held(decision, payload) for decision, payload in events]),
            "events": as_json(stored_rows(change for (_, changes), _ in events for change in changes)),
        }
        async with self._connected() as connection:
            await self._run(connection, "hold", parameters)


def as_held(decision: Decision, payload: bytes) -> HeldEvent:
    """Return an event and its JSON payload as a row of the outbox."""
    event = decision.event
    return HeldEvent(
        event.id,
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        event.event_version,
        msgspec.Raw(payload),
        utc_or_none(event.occurred_at),
        as_uuid(event.correlation.correlation_id),
        as_uuid(event.correlation.causation_id),
        event.publish_attempts,
        event.publish_error,
        event.status == "parked" or event.retry_at is not None,
        utc_or_none(event.retry_at),
    )
