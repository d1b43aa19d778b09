"""Histories of outbox events and inbox messages, in the user's database and transaction.

The table is also an `AggregateRecorder` of the `eventsourcing` library, for its repositories and tools.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec
from eventsourcing.persistence import AggregateRecorder, IntegrityError, StoredEvent

from postroom.adapters.postgres.messaging.tables import Tables, messaging_statements
from postroom.adapters.sql.transaction import DatabaseRefused, constraint_errors, execute
from postroom.application.messaging.cleanup import CODEC
from postroom.application.recorders import check_originator
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


def micros(at: datetime) -> int:
    """Return a datetime in µs since 1970 UTC."""
    return (at - _EPOCH) // timedelta(microseconds=1)


class AggregateEvents(AggregateRecorder):
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
            for version, type_, at, state in self._select(stream, None, None, False, None)
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

    def select_events(
        self,
        originator_id: UUID | str,
        *,
        gt: int | None = None,
        lte: int | None = None,
        desc: bool = False,
        limit: int | None = None,
    ) -> list[StoredEvent]:
        """Return events of one aggregate in the order of their versions, within the bounds `gt` and `lte`."""
        stream = check_originator(originator_id)
        return [
            StoredEvent(stream, version, type_, bytes(state))
            for version, type_, _, state in self._select(stream, gt, lte, desc, limit)
        ]

    def _select(
        self, stream: UUID, gt: int | None, lte: int | None, desc: bool, limit: int | None
    ) -> Sequence[tuple[Any, ...]]:
        parameters = {
            "stream": str(stream),
            "gt": -1 if gt is None else gt,
            "lte": MAX_VERSION if lte is None else lte,
            "limit": NO_LIMIT if limit is None else limit,
        }
        return execute(
            self._connection, self._sql["select_backwards" if desc else "select_forwards"], parameters
        )


def as_json(rows: Sequence[msgspec.Struct]) -> str:
    """Return rows as one JSON parameter, which every driver supports."""
    return msgspec.json.encode(rows).decode()


def as_uuid(text: str | None) -> UUID | None:
    """Return the value of a column for an id of any text; None if it is not a UUID."""
    try:
        return None if text is None else UUID(text)
    except ValueError:
        return None
