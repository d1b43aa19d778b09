"""The lease tables port over a SQLite file, which also has the log of leases unless that is on JetStream."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Lock

from msgspec.structs import asdict

from postroom.adapters.sql.statements import read_text, statements
from postroom.adapters.sqlite.database import connect, create_file
from postroom.application.ports.lease_store import LeaseRow
from postroom.domain.errors import InvalidRequest, Unavailable

_SQL = statements("postroom.adapters.sqlite", "leases.sql")


class SqliteLeaseTables:
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
        """Apply changes, all or none; see `LeaseTables.apply`."""
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
        """Mark active leases as expiring whose TTL has ended at `now`; see `LeaseTables.mark_expiring`."""
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
