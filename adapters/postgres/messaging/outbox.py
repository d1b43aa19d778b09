"""The outbox as services use it: events are recorded in the service's own transaction."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from postroom.adapters.postgres.messaging.aggregate_events import (
    UNIQUE_VIOLATION,
    as_json,
    as_uuid,
    utc,
    utc_or_none,
)
from postroom.adapters.postgres.messaging.settings import Tables, messaging_statements
from postroom.adapters.sql.transaction import (
    DatabaseRefused,
    constraint_errors,
    execute,
    execute_async,
)
from postroom.application.messaging import CODEC
from postroom.application.outbox.new_event import NewEvent, RecordedEvent, check_size, record_event
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent

if TYPE_CHECKING:
    from postroom.adapters.sql.transaction import AsyncConnection, Connection


MAX_PAYLOAD_BYTES = 1_000_000
"""Below the default `max_payload` of NATS, with room for headers."""


def _wall() -> int:
    return time.time_ns() // 1_000


class _Recorder:
    """Base of `Outbox` and `AsyncOutbox`."""

    def __init__(
        self,
        tables: Tables | None = None,
        *,
        notify: bool = False,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        wall: Callable[[], int] = _wall,
        make_id: Callable[[], UUID] = uuid7,
    ) -> None:
        sql = messaging_statements("outbox.sql", tables or Tables())
        self._record, self._delay = sql["record"], sql["delay"]
        self._notify = notify
        self._max_payload_bytes = max_payload_bytes
        self._wall = wall
        self._make_id = make_id

    def _prepare(self, events: Sequence[NewEvent]) -> tuple[list["_Row"], dict[str, Any]]:
        now = self._wall()
        rows = [_row(record_event(event, now, self._make_id)) for event in events]
        limits = {"wake": self._notify, "max_bytes": self._max_payload_bytes}
        return rows, {"events": as_json(rows)} | limits

    def _check(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Raise `InvalidOutboxEvent` if one event is too large, in which case none was written."""
        ((_, id_, size),) = rows
        if id_ is not None:
            check_size(UUID(id_), size, self._max_payload_bytes)


class Outbox(_Recorder):
    """Recorder of events in the transaction of the change that they describe.

    Arguments:
        tables: names of the tables.
        notify: wake relays on commit. PostgreSQL serialises the commits of transactions that notify, which
            limits their rate.
        max_payload_bytes: maximum size of a payload as published; should be below the `max_payload` of NATS.
        wall: returns the time in µs since 1970 UTC.
        make_id: generates the ids of events without one.
    """

    def record(self, connection: "Connection", *events: NewEvent) -> list[UUID]:
        """Record events in the open transaction of a connection, in one round trip, without committing.

        Events with `publish_at` take a second round trip.

        Call it after writing or locking the aggregate: its events are published in the order of these calls.

        Arguments:
            connection: a psycopg `Connection`, a SQLAlchemy `Connection` or `Session`, which is flushed, or a
                connection of Django to PostgreSQL.

        Returns: the ids of the events, in their order.

        Raises:
            InvalidOutboxEvent: a field is invalid, or the id already exists (SDS-047 POL-047-001).
            FutureEvent: `occurred_at` is in the future (SDS-047 POL-047-002).
            InvalidRequest: the connection is in autocommit mode, so there is no transaction.
            Unavailable: the tables are missing.
        """
        if not events:
            return []
        recorded, parameters = self._prepare(events)
        with _policy_violations():
            rows = execute(connection, self._record, parameters)
        self._check(rows)
        if delays := _delays(recorded):
            execute(connection, self._delay, {"delays": as_json(delays)})
        return [row.stream for row in recorded]


class AsyncOutbox(_Recorder):
    """The asyncio form of `Outbox`; it takes the same arguments."""

    async def record(self, connection: "AsyncConnection", *events: NewEvent) -> list[UUID]:
        """Record events as `Outbox.record` does.

        Arguments:
            connection: a psycopg `AsyncConnection`, or a SQLAlchemy `AsyncConnection` or `AsyncSession`.
        """
        if not events:
            return []
        recorded, parameters = self._prepare(events)
        with _policy_violations():
            rows = await execute_async(connection, self._record, parameters)
        self._check(rows)
        if delays := _delays(recorded):
            await execute_async(connection, self._delay, {"delays": as_json(delays)})
        return [row.stream for row in recorded]


class _Row(msgspec.Struct, frozen=True, gc=False):
    """Parameters of the statement that records an event: its row, and the first event of its history."""

    stream: UUID
    version: int
    type: str
    at: datetime
    state: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    event_version: int
    payload: msgspec.Raw
    occurred_at: datetime
    correlation_id: UUID | None
    causation_id: UUID | None
    data_bytes: int | None
    publish_at: datetime | None


class _Delay(msgspec.Struct, frozen=True, gc=False):
    """Parameters of the statement that delays an event."""

    id: UUID
    publish_at: datetime


def _delays(rows: Sequence[_Row]) -> list[_Delay]:
    return [_Delay(row.stream, row.publish_at) for row in rows if row.publish_at is not None]


def _row(recorded: RecordedEvent) -> _Row:
    event = recorded.event
    assert event.occurred_at is not None, "only rows inserted by plain SQL may have none"
    type_, state = CODEC.to_row(event)
    return _Row(
        UUID(bytes=event.stream),
        event.version,
        type_,
        utc(event.at),
        state.hex(),
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        event.event_version,
        msgspec.Raw(recorded.payload),
        utc(event.occurred_at),
        as_uuid(event.correlation_id),
        as_uuid(event.causation_id),
        recorded.data_bytes,
        utc_or_none(event.publish_at),
    )


@contextmanager
def _policy_violations() -> Iterator[None]:
    """Translate violated constraints to the errors of the policies that they enforce."""
    try:
        with constraint_errors():
            yield
    except DatabaseRefused as error:
        if error.sqlstate == UNIQUE_VIOLATION:
            raise InvalidOutboxEvent(
                "The id of an event is already in the outbox; give each event its own id, or none, and roll "
                "back."
            ) from error
        if "chk_occurred_not_future" in (error.constraint or ""):
            raise FutureEvent(
                "The clock of this machine is more than a minute ahead of the database's; correct it and "
                "roll back."
            ) from error
        raise
