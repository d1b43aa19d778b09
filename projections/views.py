"""The read-model file: versioned tables beside the store, flipped in one transaction.

A rebuild makes the tables of a new version, loads and indexes them, and then makes that version the active
one; readers look the active version up in the transaction they read in, so they see the old one or the new
one, whole. The version before stays for `roll_back`. The event log's file is never written.
"""

import fcntl
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import TracebackType

import msgspec
import pyarrow as pa

from postroom.application.ports.read_models import rebuild_lock_path, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.cut import MailboxCut, encode_cuts

TABLES = ("mailbox", "backlog", "dead_letters", "header", "topic", "text_index", "text")
"""What each version has; an index of text goes before its text when dropped."""

BUSY_TIMEOUT_MS = 30_000
LOCK_TRIES, LOCK_PAUSE_SECONDS = 3, 0.01
CACHE_KIB = 128 << 10
CHECKPOINT_PAGES = 10_000


class Views:
    """Build a version of the read models of one store; one process at a time, as long as the context lasts.

    Arguments:
        store: path of the SQLite store.

    Raises: Unavailable on entering, when another rebuild is running or the file can't be used.
    """

    def __init__(self, store: str) -> None:
        self.path = views_path(store)
        self._lock = os.open(rebuild_lock_path(store), os.O_CREAT | os.O_RDWR, 0o600)
        self.connection: sqlite3.Connection

    def __enter__(self) -> "Views":
        if not _locked(self._lock):
            owner = os.pread(self._lock, 100, 0).decode(errors="replace")
            os.close(self._lock)
            raise Unavailable(
                f"The read models {self.path} are being rebuilt by {owner}; wait until that is done.", 10_000
            )
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, _owner().encode(), 0)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        self.connection = _connect(self.path)
        self.connection.executescript(_script("catalog.sql"))
        self._drop_orphans()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.connection.close()
        os.close(self._lock)

    def begin(self, cuts: Sequence[MailboxCut]) -> int:
        """Make the empty tables of a new version and return its number."""
        with _transaction(self.connection) as db:
            db.execute(
                "INSERT INTO projection (status, owner, started_at, cuts) VALUES ('building', ?, ?, ?)",
                (_owner(), _now(), encode_cuts(cuts)),
            )
            version = int(db.execute("SELECT max(version) FROM projection").fetchone()[0])
            for statement in _statements("tables.sql", version):
                db.execute(statement)
        return version

    def load(
        self, table: str, version: int, batches: Iterator[pa.Table], loaded: Callable[[int], None]
    ) -> int:
        """Write rows into a table of a version, each batch in a transaction of its own.

        Arguments:
            loaded: called with the number of rows after every batch.

        Returns: how many rows were written.
        """
        rows = 0
        for batch in batches:
            rows += self._insert(f"{table}_v{version}", batch)
            loaded(rows)
        return rows

    def index(self, version: int, done: Callable[[int, int], None]) -> None:
        """Build what is made from the loaded tables: indexes, the topics, the custom headers, the text.

        Arguments:
            done: called with how many of how many statements are done.
        """
        statements = _statements("indexes.sql", version)
        for number, statement in enumerate(statements, 1):
            with _transaction(self.connection) as db:
                db.execute(statement)
            done(number, len(statements))

    def remove_truncated(self, version: int, before: int, after: int) -> None:
        """Remove what the log lost to retention during the rebuild: places from `before`, below `after`."""
        with _transaction(self.connection) as db:
            for table in ("mailbox", "dead_letters"):
                db.execute(f"DELETE FROM {table}_v{version} WHERE id >= ? AND id < ?", (before, after))

    def flip(self, version: int, counts: dict[str, int], seconds: dict[str, float]) -> None:
        """Make a version the active one, in one short transaction; the one before stays for `roll_back`."""
        with _transaction(self.connection) as db:
            db.execute("UPDATE projection SET status = 'retired' WHERE status = 'active'")
            db.execute(
                "UPDATE projection SET status = 'active', finished_at = ?, counts = ?, seconds = ?"
                " WHERE version = ?",
                (
                    _now(),
                    msgspec.json.encode(counts).decode(),
                    msgspec.json.encode(seconds).decode(),
                    version,
                ),
            )

    def fail(self, version: int, error: str) -> None:
        """Drop a version that could not be built, and keep the reason."""
        self._drop(version, "failed", error)

    def drop_old(self) -> None:
        """Drop every version but the active one and the one before it."""
        rows = self.connection.execute(
            "SELECT version FROM projection WHERE status = 'retired' ORDER BY finished_at DESC, version DESC"
        ).fetchall()
        for (version,) in rows[1:]:
            self._drop(version, "dropped")

    def _drop_orphans(self) -> None:
        # We hold the lock, so whoever was building is dead.
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


def roll_back(store: str) -> int:
    """Make the version before the active one active again, and return its number.

    Raises: NotFound when there is none.
    """
    path = views_path(store)
    if not path.exists():
        raise NotFound(f"The store {store} has no read models; build them with `postroom project rebuild`.")
    connection = _connect(path)
    try:
        with _transaction(connection) as db:
            found = db.execute("SELECT max(version) FROM projection WHERE status = 'retired'").fetchone()[0]
            if found is None:
                raise NotFound(
                    f"The read models {path} have no earlier version to go back to; rebuild them instead."
                )
            db.execute("UPDATE projection SET status = 'retired' WHERE status = 'active'")
            db.execute("UPDATE projection SET status = 'active' WHERE version = ?", (found,))
        return int(found)
    finally:
        connection.close()


def _locked(file: int) -> bool:
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
    try:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.create_function("unicode_lower", 1, str.lower, deterministic=True)
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
    except sqlite3.Error as error:
        raise Unavailable(
            f"The read models {path} can't be opened: {error}; delete the file and rebuild."
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


def _script(name: str) -> str:
    return (files(__package__) / "sql" / name).read_text("utf-8")


def _statements(name: str, version: int) -> list[str]:
    text = re.sub(r"--.*", "", _script(name)).replace("{version}", str(version))
    return [statement.strip() for statement in text.split(";") if statement.strip()]


def _owner() -> str:
    return f"process {os.getpid()}"


def _now() -> int:
    return time.time_ns() // 1_000
