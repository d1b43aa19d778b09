"""Views in a SQLite file beside the store: `<store>-views`. The event log's file is never written."""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import polars as pl
import pyarrow as pa

from postroom.application.ports.read_models import rebuild_lock_path, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.cut import MailboxCut, encode_cuts
from postroom.projections.search_text import search_tables
from postroom.projections.views.versions import now, owner, script, statements

TABLES = ("mailbox", "backlog", "dead_letters", "header", "topic", "text_index", "word_index", "text")
"""What each version has; an index of text goes before its text when dropped."""
OF_MESSAGES = ("mailbox", "dead_letters", "header", "text")
"""Those whose rows have the place of a message as `id`."""

BUSY_TIMEOUT_MS = 30_000
LOCK_TRIES, LOCK_PAUSE_SECONDS = 3, 0.01
CACHE_KIB = 128 << 10
CHECKPOINT_PAGES = 10_000


@contextmanager
def open_sqlite_views(store: str, bodies: BodyRules) -> Iterator["SqliteViews"]:
    """Open the read models of a SQLite store for a rebuild; see `open_views`."""
    path = views_path(store)
    with _rebuild_lock(rebuild_lock_path(store), path), closing(_connect(path)) as connection:
        views = SqliteViews(path, connection, bodies)
        views.drop_orphans()
        yield views


class SqliteViews:
    """The read-model file of one store; see `Views`.

    Arguments:
        path: of the file.
        connection: to it, by the only writer.
        bodies: whose bodies are searched for words.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, bodies: BodyRules) -> None:
        self._bodies = bodies
        self.where = str(path)
        self.staging = path.with_name(f"{path.name}-staging-")
        self.connection = connection

    def begin(self, cuts: Sequence[MailboxCut]) -> int:
        """Make the empty tables of a new version; see `Views.begin`."""
        with _transaction(self.connection) as db:
            db.execute(
                "INSERT INTO projection (status, owner, started_at, cuts) VALUES ('building', ?, ?, ?)",
                (owner(), now(), encode_cuts(cuts)),
            )
            version = int(db.execute("SELECT max(version) FROM projection").fetchone()[0])
            for script_ in ("tables.sql", "search_tables.sql"):
                for statement in statements("sqlite", script_, version=version):
                    db.execute(statement)
        return version

    def load(
        self, table: str, version: int, batches: Iterator[pa.Table], loaded: Callable[[int], None]
    ) -> int:
        """Write rows into a table of a version, and what is searched beside messages; see `Views.load`."""
        rows = 0
        for batch in batches:
            rows += self._insert(f"{table}_v{version}", batch)
            if table == "mailbox":
                for name, beside in search_tables(pl.DataFrame(batch), self._bodies).items():
                    self._insert(f"{name}_v{version}", beside)
            loaded(rows)
        return rows

    def index(self, version: int, done: Callable[[int, int], None]) -> None:
        """Build indexes and the topics; see `Views.index`."""
        all_ = [
            statement
            for script_ in ("indexes.sql", "search_indexes.sql")
            for statement in statements("sqlite", script_, version=version)
        ]
        for number, statement in enumerate(all_, 1):
            with _transaction(self.connection) as db:
                db.execute(statement)
            done(number, len(all_))

    def remove_truncated(self, version: int, before: int, after: int) -> None:
        """Remove what the log lost to retention; see `Views.remove_truncated`."""
        with _transaction(self.connection) as db:
            for table in OF_MESSAGES:
                db.execute(f"DELETE FROM {table}_v{version} WHERE id >= ? AND id < ?", (before, after))

    def flip(self, version: int, counts: dict[str, int], seconds: dict[str, float]) -> None:
        """Make a version the active one; see `Views.flip`."""
        with _transaction(self.connection) as db:
            db.execute("UPDATE projection SET status = 'retired' WHERE status = 'active'")
            db.execute(
                "UPDATE projection SET status = 'active', finished_at = ?, counts = ?, seconds = ?"
                " WHERE version = ?",
                (
                    now(),
                    msgspec.json.encode(counts).decode(),
                    msgspec.json.encode(seconds).decode(),
                    version,
                ),
            )

    def fail(self, version: int, error: str) -> None:
        """Drop a version that could not be built; see `Views.fail`."""
        with suppress(sqlite3.Error):  # of a full disk, say: the next rebuild cleans up
            self._drop(version, "failed", error)

    def drop_old(self) -> None:
        """Drop every version but the active one and the one before it; see `Views.drop_old`."""
        rows = self.connection.execute(
            "SELECT version FROM projection WHERE status = 'retired' ORDER BY finished_at DESC, version DESC"
        ).fetchall()
        for (version,) in rows[1:]:
            self._drop(version, "dropped")

    def drop_orphans(self) -> None:
        """Drop what killed rebuilds left: the lock is ours, so whoever was building is dead."""
        rows = self.connection.execute("SELECT version FROM projection WHERE status = 'building'").fetchall()
        for (version,) in rows:
            self._drop(version, "failed", "the rebuild was killed")

    def _drop(self, version: int, status: str, error: str | None = None) -> None:
        with _transaction(self.connection) as db:
            for table in TABLES:
                db.execute(f"DROP TABLE IF EXISTS {table}_v{version}")
            db.execute(
                "UPDATE projection SET status = ?, error = ? WHERE version = ?", (status, error, version)
            )

    def _insert(self, table: str, batch: pa.Table) -> int:
        # Not by ADBC, though it is twice as fast: it brings an SQLite of its own, and two of them in one
        # process undo each other's file locks.
        rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
        values = ", ".join("?" * batch.num_columns)
        with _transaction(self.connection) as db:
            db.executemany(f"INSERT INTO {table} ({', '.join(batch.column_names)}) VALUES ({values})", rows)
        return int(batch.num_rows)


def roll_back_sqlite(store: str) -> int:
    """Make the version before the active one active again; see `roll_back`."""
    path = views_path(store)
    if not path.exists():
        raise NotFound(f"The store {store} has no read models; build them with `postroom project rebuild`.")
    with closing(_connect(path)) as connection, _transaction(connection) as db:
        found = db.execute("SELECT max(version) FROM projection WHERE status = 'retired'").fetchone()[0]
        if found is None:
            raise NotFound(
                f"The read models {path} have no earlier version to go back to; rebuild them instead."
            )
        db.execute("UPDATE projection SET status = 'retired' WHERE status = 'active'")
        db.execute("UPDATE projection SET status = 'active' WHERE version = ?", (found,))
    return int(found)


@contextmanager
def _rebuild_lock(lock: Path, views: Path) -> Iterator[None]:
    """Hold the lock that ends with the process at the latest."""
    file = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if not _is_locked(file):
            other = os.pread(file, 300, 0).decode(errors="replace")
            raise Unavailable(
                f"The read models {views} are being rebuilt by {other}; wait until that is done.", 10_000
            )
        os.ftruncate(file, 0)
        os.pwrite(file, owner().encode(), 0)
        yield
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """Tell whether the lock could be had; whoever only looks at it lets go at once."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


def _connect(path: Path) -> sqlite3.Connection:
    # Only where there is none: closing a file that SQLite has open drops this process's locks on it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            "journal_mode = WAL",
            "synchronous = NORMAL",  # a power cut may cost a version, never the log
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            "journal_size_limit = 67108864",
            f"cache_size = -{CACHE_KIB}",
            "threads = 2",
        ):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(script("sqlite", "catalog.sql"))
    except sqlite3.Error as error:
        connection.close()
        raise Unavailable(
            f"The read models {path} can't be used: {error}; delete the file and rebuild."
        ) from error
    return connection


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
