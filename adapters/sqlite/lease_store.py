"""The ports of the lease store and the lease tables over a SQLite file."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import UUID

import msgspec
from eventsourcing.persistence import OperationalError, StoredEvent
from msgspec.structs import asdict

from postroom.adapters.files import FileChanges
from postroom.adapters.sql.lease_store import SqlLeaseRecorder, SqlLeaseStore
from postroom.adapters.sql.statements import read_text, statements
from postroom.adapters.sqlite.database import Durability, connect, connect_reader, create_file, written_files
from postroom.adapters.sqlite.store_file import file_id
from postroom.application.ports.lease_store import RENEWAL, LeaseRow, LeaseTables
from postroom.application.recorders import check_originator, conflict
from postroom.domain.errors import InvalidRequest, Unavailable

_SQL = statements("postroom.adapters.sqlite", "leases.sql")


class SqliteLeaseTables(LeaseTables):
    """RFC-049's tables in a SQLite file; a power cut may lose the last changes, which are folded again."""

    def __init__(self, path: str | Path) -> None:
        """Open the file at `path`, and create it with its tables if it is missing.

        Raises: Unavailable when the file can't be used, InvalidRequest for a file that has other tables.
        """
        self._path = Path(path)
        self._lock = Lock()
        create_lease_file(self._path)
        with self._unavailable():
            self._connection = connect(self._path, "relaxed")
            self._connection.execute("PRAGMA foreign_keys = ON")

    def position(self) -> int:
        """Return the position up to which the tables are folded."""
        with self._lock, self._unavailable():
            return self._position()

    def apply(self, after: int, through: int, rows: Sequence[LeaseRow], removals: Sequence[str]) -> bool:
        with self._transaction() as connection:
            if self._position() != after:
                return False
            ended = [{"mailbox": mailbox} for mailbox in removals]
            connection.executemany(_SQL["remove_route"], ended)
            connection.executemany(_SQL["remove_lease"], ended)
            for row in rows:
                values = asdict(row)
                connection.execute(_SQL["put_lease"], values)
                connection.execute(_SQL["remove_route" if row.status == "expired" else "put_route"], values)
            connection.execute(_SQL["move_cursor"], {"position": through})
            return True

    def clear(self) -> None:
        """Remove all rows and return to position 0."""
        with self._transaction() as connection:
            connection.execute(_SQL["clear_routes"])
            connection.execute(_SQL["clear_leases"])
            connection.execute(_SQL["move_cursor"], {"position": 0})

    def mark_expiring(self, now: int) -> int:
        with self._lock, self._unavailable():
            return self._connection.execute(_SQL["mark_expiring"], {"now": now}).rowcount

    def close(self) -> None:
        """Close the connection; closing twice is fine."""
        with self._lock:
            self._connection.close()

    def _position(self) -> int:
        position: int = self._connection.execute(_SQL["cursor"]).fetchone()[0]
        return position

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._unavailable():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _unavailable(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise Unavailable(
                f"The lease tables in {self._path} can't be used: {error}. Check the file and its disk."
            ) from error


def create_lease_file(path: Path) -> None:
    """Create a file with the log of leases and the lease tables if it is missing, with mode 0600.

    Raises: Unavailable when it can't be created, InvalidRequest for a file that has other tables.
    """
    try:
        create_file(path)
        with closing(connect(path)) as connection:
            if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'mailbox_names'").fetchone():
                raise InvalidRequest(
                    f"The file {path} is a store of mailboxes; name another file for the "
                    "leases, which an admin keeps apart."
                )
            connection.executescript(read_text("postroom.adapters.sqlite", "lease_schema.sql"))
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(
            f"The lease store {path} can't be opened: {reason}. Check the path and its permissions."
        ) from error


POLL_SECONDS = 0.02
COMMIT_SECONDS = 0.1
"""How long a wait looks for events after the file changed, as a commit can be read only when it ends."""


class SqliteLeaseRecorder(SqlLeaseRecorder):
    """Recorder of events in a SQLite file: one transaction and one sync per insert.

    Arguments:
        path: of a file that has the tables.
    """

    def __init__(self, path: Path, durability: Durability) -> None:
        super().__init__(POLL_SECONDS)
        self._path = path
        self._file = file_id(path)
        self._write_lock, self._read_lock = Lock(), Lock()
        self._writer = connect(path, durability)
        try:
            self._reader = connect_reader(path)
        except BaseException:
            self._writer.close()
            raise

    def wait(self, after: int, timeout_ms: int) -> None:
        deadline = time.monotonic() + timeout_ms / 1_000
        with closing(FileChanges()) as changes:
            if changes.watch(written_files(self._path)) and (self.max_notification_id() or 0) <= after:
                changes.wait(timeout_ms / 1_000)
                deadline = min(deadline, time.monotonic() + COMMIT_SECONDS)
        super().wait(after, max(0, round((deadline - time.monotonic()) * 1_000)))

    def insert_events(self, stored_events: Sequence[StoredEvent], **kwargs: Any) -> Sequence[int]:
        if not stored_events:
            return []
        rows = [_row(event) for event in stored_events]
        with self._write_lock, self._operational_errors(), self._transaction() as writer:
            self._refuse_conflicts(writer, rows)
            start = (writer.execute(_SQL["last_position"]).fetchone()[0] or 0) + 1
            positions = range(start, start + len(rows))
            writer.executemany(
                _SQL["append"],
                [row | {"position": position} for row, position in zip(rows, positions, strict=True)],
            )
        self._note_append()
        return list(positions)

    def remove_old_events(self) -> int:
        with self._write_lock, self._operational_errors(), self._transaction() as writer:
            return writer.execute(_SQL["remove_old_events"], {"renewal": RENEWAL}).rowcount

    def close(self) -> None:
        with self._write_lock, self._read_lock:
            self._writer.close()
            self._reader.close()

    def _refuse_conflicts(self, writer: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
        last: dict[bytes, int] = {}
        for row in rows:
            aggregate, version = row["aggregate"], row["version"]
            if aggregate not in last:
                newest = writer.execute(_SQL["last_version"], {"aggregate": aggregate}).fetchone()[0]
                last[aggregate] = -1 if newest is None else newest
            if version <= last[aggregate]:
                raise conflict(UUID(bytes=aggregate), f"already has an event of version {last[aggregate]}")
            last[aggregate] = version

    def _fetch(self, statement: str, values: dict[str, Any]) -> list[Any]:
        with self._read_lock, self._operational_errors():
            columns = {name: _as_column(value) for name, value in values.items()}
            return self._reader.execute(_SQL[statement], columns).fetchall()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        # An open file outlives its name, so SQLite would go on, and leases would be granted that nobody sees.
        if file_id(self._path) != self._file:
            raise OperationalError(
                f"The lease store {self._path} was removed or replaced while it was open; "
                "start the admin again."
            )
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            yield self._writer
            self._writer.execute("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    @contextmanager
    def _operational_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise OperationalError(
                f"the lease store {self._path} can't be used: {error}; check the file and its disk."
            ) from error


class SqliteLeaseStore(SqlLeaseStore):
    """The events of leases in a SQLite file in WAL mode, which several processes of a machine may use."""

    def __init__(self, path: str | Path, *, durability: Durability = "full") -> None:
        """Open the file at `path`, and create it with its tables if it is missing.

        Arguments:
            durability: see `postroom.adapters.sqlite.database.connect`.

        Raises: Unavailable when the file can't be used, InvalidRequest for a file that has other tables.
        """
        self.path = Path(path)
        create_lease_file(self.path)
        try:
            super().__init__(SqliteLeaseRecorder(self.path, durability))
        except sqlite3.Error as error:
            raise Unavailable(f"The lease store {self.path} can't be opened: {error}.") from error


def _as_column(value: Any) -> Any:
    if isinstance(value, UUID):
        return value.bytes
    return msgspec.json.encode(value).decode() if isinstance(value, list) else value


def _row(event: StoredEvent) -> dict[str, Any]:
    return {
        "aggregate": check_originator(event.originator_id).bytes,
        "version": event.originator_version,
        "topic": event.topic,
        "state": event.state,
    }
