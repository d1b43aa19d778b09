"""Loading a backup into a PostgreSQL store, in one transaction."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

from postroom.adapters.postgres.backup import (
    COMMIT_TYPES,
    OUTBOX,
    SQL,
    SUFFIX,
    TABLES,
    bounds,
    has_rows,
    has_table,
)
from postroom.adapters.postgres.columns import index_rows
from postroom.adapters.postgres.database import Connection, connect, shown, unavailable
from postroom.adapters.postgres.event_log import PARTITION_POSITIONS
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.read_model_store import PostgresDatabase
from postroom.adapters.sql.versions import Versions
from postroom.application.mailbox.codec import compress
from postroom.application.ports.backup import RecordedRow
from postroom.application.ports.event_log import Seal, StoredSnapshot
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import InvalidRequest, Unavailable

_ENTRY_TYPES = ("uuid", "int8", "int8")


class PostgresStoreLoader:
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
        """Create a log with its partitions; see `StoreLoader.add_mailbox`."""
        values = {"name": mailbox, "positions": PARTITION_POSITIONS, "removed": first - 1}
        row = self._connection.execute(SQL["add_mailbox"], values).fetchone()
        assert row is not None  # INSERT ... RETURNING
        self._bounds[mailbox] = bounds(row[0])
        self._connection.execute(SQL["make_partitions"], {"id": row[0], "through": max(first, last)})

    def append(self, mailbox: str, commits: Sequence[Commit]) -> None:
        """Append commits to a log; see `StoreLoader.append`."""
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
        """Add entries to a log's index; see `StoreLoader.add_entries`."""
        base = self._bounds[mailbox]["base"]
        rows = (
            (UUID(bytes=stream), version, base + position)
            for stream, version, position in index_rows(entries)
        )
        self._copy("copy_into_index", _ENTRY_TYPES, rows)

    def save_snapshots(self, mailbox: str, snapshots: Sequence[StoredSnapshot]) -> None:
        """Save snapshots of a mailbox; see `StoreLoader.save_snapshots`."""
        base = self._bounds[mailbox]["base"]
        for each in snapshots:
            self._connection.execute(SQL["add_snapshot"], (base + each.position, each.chain, each.state))

    def save_seal(self, mailbox: str, seal: Seal) -> None:
        """Save the seal of a log; see `StoreLoader.save_seal`."""
        self._connection.execute(SQL["add_seal"], (self._bounds[mailbox]["base"], *seal))

    def record_messages(self, rows: Sequence[RecordedRow]) -> None:
        """Insert recorded messages; see `StoreLoader.record_messages`."""
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
