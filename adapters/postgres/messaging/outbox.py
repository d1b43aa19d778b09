"""The outbox, for the code of a service: events are recorded in its own transaction."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from postroom.adapters.postgres.messaging.aggregate_events import UNIQUE_VIOLATION, as_json, utc
from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.postgres.messaging.transaction import (
    DatabaseRefused,
    execute,
    execute_async,
    refusals,
)
from postroom.application.aggregate_codec import CODEC
from postroom.application.outbox.new_event import MAX_PAYLOAD_BYTES, NewEvent, Recorded, decide_recorded
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent

if TYPE_CHECKING:
    from postroom.adapters.postgres.messaging.transaction import AsyncConnection, Connection


def _wall() -> int:
    return time.time_ns() // 1_000


class _Recorder:
    """What the two outboxes have in common."""

    def __init__(
        self,
        tables: Tables | None = None,
        *,
        notify: bool = False,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        wall: Callable[[], int] = _wall,
        make_id: Callable[[], UUID] = uuid7,
    ) -> None:
        self._record = messaging_statements("outbox.sql", tables or Tables())["record"]
        self._notify = notify
        self._max_payload_bytes = max_payload_bytes
        self._wall = wall
        self._make_id = make_id

    def _prepare(self, events: Sequence[NewEvent]) -> tuple[list[UUID], dict[str, Any]]:
        now = self._wall()
        rows = [_row(decide_recorded(event, now, self._make_id, self._max_payload_bytes)) for event in events]
        return [row.stream for row in rows], {"events": as_json(rows), "wake": self._notify}


class Outbox(_Recorder):
    """Record events beside what they are about, in one transaction.

    Arguments:
        tables: what the tables are called.
        notify: wake the relays at the commit, so that they need not wait for their next poll. PostgreSQL lets
            transactions that do so commit one after the other only, which bounds how many can a second.
        max_payload_bytes: refuse larger payloads; should be below the `max_payload` of NATS.
        wall: what time it is, in µs since 1970 UTC.
        make_id: makes the ids of events that come without.
    """

    def record(self, connection: "Connection", *events: NewEvent) -> list[UUID]:
        """Record events in a connection's open transaction, in one round trip; nothing is committed.

        Call it after what the events are about was written, or at least locked: the events of an aggregate
        are published in the order of these calls.

        Arguments:
            connection: a psycopg `Connection`, or a SQLAlchemy `Connection` or `Session`, which is flushed.

        Returns: the ids of the events, in their order.

        Raises:
            InvalidOutboxEvent: an event lacks something, or its id is taken (SDS-047 POL-047-001).
            FutureEvent: an event would have occurred in the future (SDS-047 POL-047-002).
            InvalidRequest: there is no transaction, because the connection is in autocommit mode.
        """
        if not events:
            return []
        ids, parameters = self._prepare(events)
        with _rejections():
            execute(connection, self._record, parameters)
        return ids


class AsyncOutbox(_Recorder):
    """Record events as `Outbox` does, from asyncio; it takes the same arguments."""

    async def record(self, connection: "AsyncConnection", *events: NewEvent) -> list[UUID]:
        """Record events as `Outbox.record` does.

        Arguments:
            connection: a psycopg `AsyncConnection`, or a SQLAlchemy `AsyncConnection` or `AsyncSession`.
        """
        if not events:
            return []
        ids, parameters = self._prepare(events)
        with _rejections():
            await execute_async(connection, self._record, parameters)
        return ids


class _Row(msgspec.Struct, frozen=True, gc=False):
    """An event on its way into the statement that records it: its row, and the first event of its history."""

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


def _row(recorded: Recorded) -> _Row:
    event = recorded.event
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
        event.correlation_id,
        event.causation_id,
    )


@contextmanager
def _rejections() -> Iterator[None]:
    """Say what the database refused in the words of the policies."""
    try:
        with refusals():
            yield
    except DatabaseRefused as error:
        if error.sqlstate == UNIQUE_VIOLATION:
            raise InvalidOutboxEvent(
                "The id of an event is in the outbox already; give each event its own id, or none, and roll "
                "back."
            ) from error
        if "chk_occurred_not_future" in (error.constraint or ""):
            raise FutureEvent(
                "The clock of this machine is more than a minute ahead of the database's; set it right and "
                "roll back."
            ) from error
        raise
