"""Reading a PostgreSQL store at one moment, and restoring one."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from itertools import starmap
from pathlib import Path
from typing import Any
from uuid import UUID

from psycopg import IsolationLevel

from postroom.adapters.postgres.columns import index_rows, to_commit
from postroom.adapters.postgres.database import Connection, connect
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.event_log import PARTITION_POSITIONS
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.read_model_store import PostgresDatabase
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.versions import Versions
from postroom.application.mailbox.codec import compress
from postroom.application.ports.backup import MailboxHead, RecordedRow, StoreLoader, StoreSnapshot
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import GENESIS, POSITIONS_PER_MAILBOX, Commit, IndexEntry
from postroom.domain.errors import InvalidRequest, Unavailable

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


class PostgresStoreSnapshot(StoreSnapshot):
    """The content of a PostgreSQL store as of one transaction; see `StoreSnapshot`."""

    def __init__(self, url: str, connection: Connection) -> None:
        self._url = url
        self._connection = connection
        self._ids = {name: id_ for id_, name in connection.execute(SQL["mailboxes"]).fetchall()}

    def mailboxes(self) -> list[str]:
        """Return the names of all logs, sorted."""
        return list(self._ids)

    def heads(self) -> list[MailboxHead]:
        return [self._head(name) for name in self._ids]

    def commits(self, mailbox: str) -> Iterator[Commit]:
        return map(to_commit, self._copy("copy_commits", mailbox, COMMIT_TYPES))

    def entries(self, mailbox: str) -> Iterator[IndexEntry]:
        return starmap(IndexEntry, self._copy("copy_entries", mailbox, _ENTRY_TYPES))

    def snapshots(self, mailbox: str) -> list[StoredSnapshot]:
        return [StoredSnapshot(*row) for row in self._fetch("snapshots", mailbox)]

    def seal(self, mailbox: str) -> Seal | None:
        rows = self._fetch("seal", mailbox)
        return Seal(*rows[0]) if rows else None

    def recorded_messages(self) -> Iterator[RecordedRow]:
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

    Until the transaction ends, retention drops no partition, and VACUUM keeps the rows that it may read.

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


_INDEX_TYPES = ("uuid", "int8", "int8")


class PostgresStoreLoader(StoreLoader):
    """Loader of a PostgreSQL store; see `StoreLoader`.

    Mailboxes get new ids. An owner from before the restore appends under the former id, which is refused.
    """

    def __init__(self, url: str, connection: Connection) -> None:
        self._url = url
        self._connection = connection
        self._bounds: dict[str, dict[str, int]] = {}

    def mailboxes(self) -> list[str]:
        """Return the names of all logs, sorted."""
        return [name for _, name in self._connection.execute(SQL["mailboxes"]).fetchall()]

    def clear(self) -> None:
        """Remove all logs and read models.

        Raises: InvalidRequest when outbox or inbox have rows, Unavailable when a session uses the log.
        """
        run = self._connection.execute
        tables = [table for table in (OUTBOX, *TABLES) if has_rows(self._connection, table)]
        if tables:
            raise InvalidRequest(
                f"The database {shown(self._url)} has rows in {', '.join(tables)}, which belong to "
                "the tables of its service; delete them, or restore into another database."
            )
        for id_, name in run(SQL["mailboxes"]).fetchall():
            where = bounds(id_)
            run(SQL["remove_all"], where)
            run(SQL["drop_partitions"], where)
            if run(SQL["count_commits"], where).fetchone() != (0,):
                raise Unavailable(
                    f"A session reads the log of mailbox {name} in {shown(self._url)}; end it, and "
                    "restore again."
                )
            for statement in ("forget_snapshots", "forget_seal", "forget_mailbox"):
                run(SQL[statement], where)
        database = PostgresDatabase(shown(self._url), self._connection)
        database.replace_views({})
        for table in Versions(database).tables():
            database.execute("drop", table)
        run(SQL["retire_read_models"])

    def add_mailbox(self, mailbox: str, first: int, last: int) -> None:
        values = {"name": mailbox, "positions": PARTITION_POSITIONS, "removed": first - 1}
        row = self._connection.execute(SQL["add_mailbox"], values).fetchone()
        assert row is not None  # INSERT ... RETURNING
        self._bounds[mailbox] = bounds(row[0])
        self._connection.execute(SQL["make_partitions"], {"id": row[0], "through": max(first, last)})

    def append(self, mailbox: str, commits: Sequence[Commit]) -> None:
        base = self._bounds[mailbox]["base"]
        rows = (
            (base + first, *columns, compress(events), compress(envelopes))
            for first, *columns, events, envelopes, _, _ in commits
        )
        self._copy("copy_into_log", COMMIT_TYPES, rows)
        for commit in commits:
            if commit.entries:
                self.add_entries(mailbox, commit.entries)

    def add_entries(self, mailbox: str, entries: Sequence[IndexEntry]) -> None:
        base = self._bounds[mailbox]["base"]
        rows = (
            (UUID(bytes=stream), version, base + position)
            for stream, version, position in index_rows(entries)
        )
        self._copy("copy_into_index", _INDEX_TYPES, rows)

    def save_snapshots(self, mailbox: str, snapshots: Sequence[StoredSnapshot]) -> None:
        base = self._bounds[mailbox]["base"]
        for each in snapshots:
            self._connection.execute(SQL["add_snapshot"], (base + each.position, each.chain, each.state))

    def save_seal(self, mailbox: str, seal: Seal) -> None:
        self._connection.execute(SQL["add_seal"], (self._bounds[mailbox]["base"], *seal))

    def record_messages(self, rows: Sequence[RecordedRow]) -> None:
        self._require_table(OUTBOX)
        self._connection.cursor().executemany(SQL["record_message"], rows)

    def load_tables(self, folder: Path) -> None:
        """Load the tables of outbox and inbox from the files of a backup."""
        for table in TABLES:
            path = folder / f"{table}{SUFFIX}"
            if not path.exists():
                continue
            self._require_table(table)
            with path.open("rb") as file:
                columns = file.readline().decode().strip()
                file.seek(0)
                statement = SQL["load_table"].format(table=table, columns=columns)
                with self._connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
                    while data := file.read(1 << 20):
                        copy.write(data)
            if table in ("outbox_events", "inbox_queue"):
                statement = SQL["restart_positions"].format(table=table)
                self._connection.execute(statement.encode(), {"table": table})

    def _copy(self, statement: str, types: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(SQL[statement].encode()) as copy:
            copy.set_types(types)
            for row in rows:
                copy.write_row(row)

    def _require_table(self, table: str) -> None:
        if not has_table(self._connection, table):
            raise InvalidRequest(
                f"The database {shown(self._url)} has no table {table}, and the backup has rows of it; run "
                "`postroom migrate --messaging URL` first."
            )


@contextmanager
def loading_store(url: str) -> Iterator[PostgresStoreLoader]:
    """Load a store; all of it is committed when the context ends, or nothing.

    Raises: Unavailable when the database can't be used.
    """
    with closing(connect(url, "postroom restore")) as connection:
        check_connection(connection, url, "store")
        with unavailable(url), connection.transaction():
            connection.execute(SQL["configure"])
            connection.execute(SQL["lock_for_restore"])
            yield PostgresStoreLoader(url, connection)
