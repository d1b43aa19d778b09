"""Reading a PostgreSQL store at one moment."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import starmap
from pathlib import Path
from typing import Any

from psycopg import IsolationLevel

from postroom.adapters.postgres.columns import to_commit
from postroom.adapters.postgres.database import Connection, connect, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements
from postroom.application.ports.backup import MailboxHead, RecordedRow
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, IndexEntry

OUTBOX = "outbox_messages"
TABLES = (
    "outbox_events",
    "outbox_retries",
    "inbox_messages",
    "aggregate_events",
    "inbox_queue",
    "inbox_readers",
)
"""Tables of outbox and inbox, which only PostgreSQL has; each is a file of a backup unless it is empty."""
SUFFIX = ".csv"
COMMIT_TYPES = ("int8", "int8", "int8", "int8", "bytea", "bytea", "bytea")
_ENTRY_TYPES = ("bytea", "int8", "int8", "int8")
SQL = statements("postroom.adapters.postgres", "backup.sql")


class PostgresStoreSnapshot:
    """The content of a PostgreSQL store as of one transaction; see `StoreSnapshot`."""

    def __init__(self, url: str, connection: Connection) -> None:
        self._url = url
        self._connection = connection
        self._ids = {name: id_ for id_, name in connection.execute(SQL["mailboxes"]).fetchall()}

    def mailboxes(self) -> list[str]:
        """Return the names of all logs, sorted."""
        return list(self._ids)

    def heads(self) -> list[MailboxHead]:
        """Return the ends of all logs; see `StoreSnapshot.heads`."""
        return [self._head(name) for name in self._ids]

    def commits(self, mailbox: str) -> Iterator[Commit]:
        """Yield the commits of a log; see `StoreSnapshot.commits`."""
        return map(to_commit, self._copy("copy_commits", mailbox, COMMIT_TYPES))

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        """Yield the entries of a log's index; see `StoreSnapshot.entries`."""
        return starmap(IndexEntry, self._copy("copy_entries", mailbox, _ENTRY_TYPES))

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        """Return the saved snapshots of a mailbox; see `StoreSnapshot.snapshots`."""
        return [StoredSnapshot(*row) for row in self._fetch("snapshots", mailbox)]

    def seal(self, mailbox: str) -> Seal | None:
        """Return the seal of a log; see `StoreSnapshot.seal`."""
        rows = self._fetch("seal", mailbox)
        return Seal(*rows[0]) if rows else None

    def recorded_messages(self) -> Iterator[RecordedRow]:
        """Yield the recorded messages; see `StoreSnapshot.recorded_messages`."""
        if has_table(self._connection, OUTBOX):
            with unavailable(self._url), self._connection.cursor(name="recorded") as cursor:
                cursor.execute(SQL["recorded_messages"])
                yield from map(RecordedRow._make, cursor)

    def copy_tables(self, folder: Path) -> None:
        """Write each table of outbox and inbox that has rows to a file `NAME.csv`."""
        for table in TABLES:
            if not has_rows(self._connection, table):
                continue
            path = folder / f"{table}{SUFFIX}"
            path.touch(0o600)
            with (
                path.open("wb") as file,
                unavailable(self._url),
                self._connection.cursor() as cursor,
                cursor.copy(SQL["copy_table"].format(table=table).encode()) as copy,
            ):
                for data in copy:
                    file.write(data)

    def _head(self, mailbox: str) -> MailboxHead:
        rows = self._fetch("head", mailbox)
        if not rows:
            return MailboxHead(mailbox, 0, 0, GENESIS.hex(), 0, 0)
        position, at, chain, epoch = rows[0]
        ((first,),) = self._fetch("first", mailbox)
        return MailboxHead(mailbox, first, position, chain.hex(), epoch, at)

    def _copy(self, statement: str, mailbox: str, types: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        text = SQL[statement].format(**self._bounds(mailbox))
        with (
            unavailable(self._url),
            self._connection.cursor() as cursor,
            cursor.copy(text.encode()) as copy,
        ):
            copy.set_types(types)
            yield from copy.rows()

    def _bounds(self, mailbox: str) -> dict[str, int]:
        return bounds(self._ids[mailbox])

    def _fetch(self, statement: str, mailbox: str) -> list[tuple[Any, ...]]:
        with unavailable(self._url):
            return self._connection.execute(SQL[statement], self._bounds(mailbox)).fetchall()


@contextmanager
def reading_store(url: str) -> Iterator[PostgresStoreSnapshot]:
    """Read a store in one repeatable-read transaction, which blocks neither owners nor writers.

    Retention drops no partition until it ends, and vacuum keeps the rows that it may read.

    Raises: Unavailable when the database can't be used.
    """
    with closing(connect(url, "postroom backup")) as connection:
        check_connection(connection, url, "store")
        connection.isolation_level = IsolationLevel.REPEATABLE_READ
        connection.read_only = True
        with unavailable(url), connection.transaction():
            connection.execute(SQL["lock"])
            connection.execute(SQL["configure"])
            yield PostgresStoreSnapshot(url, connection)


def bounds(mailbox: int) -> dict[str, int]:
    """Return the parameters of statements on the log of a mailbox."""
    base = mailbox * POSITIONS_PER_MAILBOX
    return {"id": mailbox, "base": base, "top": base + POSITIONS_PER_MAILBOX - 1}


def has_table(connection: Connection, table: str) -> bool:
    """Return whether the search path has a table."""
    return connection.execute(SQL["find_table"], {"table": table}).fetchone() == (True,)


def has_rows(connection: Connection, table: str) -> bool:
    """Return whether a table exists and has rows."""
    if not has_table(connection, table):
        return False
    return connection.execute(SQL["has_rows"].format(table=table).encode()).fetchone() == (True,)
