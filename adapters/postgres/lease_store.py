"""The ports of the lease store and the lease tables over a PostgreSQL database."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
from eventsourcing.persistence import (
    DataError,
    IntegrityError,
    OperationalError,
    StoredEvent,
)
from msgspec.structs import asdict

from postroom.adapters.postgres.database import (
    NO_SETTINGS,
    Connection,
    Settings,
    closing_on_failure,
    connect,
)
from postroom.adapters.postgres.errors import describe, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.reconnecting import Reconnecting
from postroom.adapters.sql.lease_store import SqlLeaseRecorder, SqlLeaseStore
from postroom.adapters.sql.statements import statements
from postroom.application.ports.lease_store import RENEWAL, LeaseRow, LeaseTables
from postroom.application.recorders import check_originator, conflict
from postroom.domain.errors import PostroomError

TIMEOUT = "10s"
"""Time limit of a statement, the wait for the appends of others included."""
POLL_SECONDS = 0.05
_SETTINGS = {"statement_timeout": TIMEOUT, "idle_session_timeout": "0", "jit": "off"}
_SQL = statements("postroom.adapters.postgres", "leases.sql")


def open_session(url: str, name: str, settings: Settings = NO_SETTINGS) -> Connection:
    """Open a connection to a lease store, with settings beside the common ones.

    Raises: Unavailable when the database can't be used or is not migrated.
    """
    # Wait for durable commits, even if the server does not by default.
    connection = connect(url, name, {**_SETTINGS, **settings}, sync="local")
    with unavailable(url), closing_on_failure(connection):
        check_connection(connection, url, "leases")
    return connection


class PostgresLeaseRecorder(SqlLeaseRecorder):
    """Recorder of events in a table: one statement per insert, so that a paused process holds no lock.

    Reads and inserts use separate connections, which are reopened when they were ended.
    """

    def __init__(self, url: str) -> None:
        super().__init__(POLL_SECONDS)
        self._url = url
        self._reader = Reconnecting(lambda: open_session(url, "postroom, reads leases"))
        self._writer = Reconnecting(lambda: open_session(url, "postroom, writes leases"))

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        if not stored_events:
            return []
        ids = [check_originator(event.originator_id) for event in stored_events]
        values = {
            "aggregates": ids,
            "versions": [event.originator_version for event in stored_events],
            "topics": [event.topic for event in stored_events],
            "states": [event.state for event in stored_events],
        }
        try:
            with self._errors(), self._writer.use() as writer:
                (last,) = writer.execute(_SQL["append"], values).fetchone() or (0,)
        except IntegrityError as error:
            names = ", ".join(sorted({str(id_) for id_ in ids}))
            raise conflict(names, "already has an event of the same or a later version") from error
        self._note_append()
        return list(range(last - len(stored_events) + 1, last + 1))

    def remove_old_events(self) -> int:
        with self._errors():
            return self._writer.run(
                lambda writer: writer.execute(_SQL["remove_old_events"], {"renewal": RENEWAL}).rowcount
            )

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def _fetch(self, statement: str, values: dict[str, Any]) -> list[Any]:
        with self._errors():
            return self._reader.run(
                lambda reader: reader.execute(_SQL[statement], values, binary=True).fetchall()
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except psycopg.IntegrityError as error:
            raise IntegrityError(str(error)) from error
        except psycopg.DataError as error:
            raise DataError(str(describe(error, self._url))) from error
        except psycopg.Error as error:
            raise OperationalError(str(describe(error, self._url))) from error
        except PostroomError as error:
            raise OperationalError(str(error)) from error


class PostgresLeaseStore(SqlLeaseStore):
    """The events of leases in a PostgreSQL database."""

    def __init__(self, url: str) -> None:
        """Open the database at `url`.

        Raises: Unavailable when it can't be used or is not migrated, InvalidRequest for a malformed URL.
        """
        open_session(url, "postroom, checks leases").close()
        super().__init__(PostgresLeaseRecorder(url))


class PostgresLeaseTables(LeaseTables):
    """RFC-049's tables in a PostgreSQL database, in the schema `postroom`."""

    def __init__(self, url: str) -> None:
        """Take the database at `url`, which is opened at the first use."""
        self._url = url
        self._database = Reconnecting(self._open)

    def position(self) -> int:
        """Return the position up to which the tables are folded."""
        with unavailable(self._url), self._database.use() as connection:
            return _position(connection, "cursor")

    def apply(self, after: int, through: int, rows: Sequence[LeaseRow], removals: Sequence[str]) -> bool:
        with unavailable(self._url), self._database.use() as connection, connection.transaction():
            if _position(connection, "lock_cursor") != after:
                return False
            leases = [asdict(row) for row in rows]
            ended = [{"mailbox": mailbox} for mailbox in removals]
            expired = [values for values in leases if values["status"] == "expired"]
            routed = [values for values in leases if values["status"] != "expired"]
            cursor = connection.cursor()
            cursor.executemany(_SQL["remove_route"], ended + expired)
            cursor.executemany(_SQL["remove_lease"], ended)
            cursor.executemany(_SQL["put_lease"], leases)
            cursor.executemany(_SQL["put_route"], routed)
            cursor.execute(_SQL["move_cursor"], {"position": through})
            return True

    def clear(self) -> None:
        """Remove all rows and return to position 0."""
        with unavailable(self._url), self._database.use() as connection, connection.transaction():
            _position(connection, "lock_cursor")
            connection.execute(_SQL["clear_routes"])
            connection.execute(_SQL["clear_leases"])
            connection.execute(_SQL["move_cursor"], {"position": 0})

    def mark_expiring(self, now: int) -> int:
        with unavailable(self._url), self._database.use() as connection:
            return connection.execute(_SQL["mark_expiring"], {"now": now}).rowcount

    def close(self) -> None:
        """Close the connection; closing twice is fine."""
        self._database.close()

    def _open(self) -> Connection:
        # The row of the cursor is locked while the tables change, also if the process is paused meanwhile.
        settings = {"idle_in_transaction_session_timeout": TIMEOUT}
        return open_session(self._url, "postroom, lease tables", settings)


def _position(connection: Connection, statement: str) -> int:
    (position,) = connection.execute(_SQL[statement]).fetchone() or (0,)
    return int(position)
