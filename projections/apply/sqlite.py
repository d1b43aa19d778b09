"""The tables of the read models in a SQLite file beside the store."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import polars as pl

from postroom.adapters.sql.statements import statements
from postroom.application.ports.read_models import follow_lock_path, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.apply import Version
from postroom.projections.apply.tables import Moved, SqlTables

BUSY_TIMEOUT_MS = 30_000
CACHE_KIB = 64 << 10
CHECKPOINT_PAGES = 10_000

_SQL = statements("postroom.projections", "sql/sqlite/apply.sql")


class SqliteTables(SqlTables):
    """Apply batches in a SQLite file; readers are never blocked, and the log is only read; see `Tables`."""

    def __init__(self, store: str) -> None:
        super().__init__(str(views_path(store)))
        self._store = Path(store)
        self._db: sqlite3.Connection | None = None
        self._log: sqlite3.Connection | None = None
        self._file: int | None = None

    def close(self) -> None:
        """Close the files; see `Tables.close`."""
        for connection in (self._db, self._log):
            if connection is not None:
                connection.close()
        self._db = self._log = None

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Lock a file beside the store; see `Tables.leading`."""
        path = follow_lock_path(self._store)
        with open(os.open(path, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def _table(self, name: str) -> str:
        return name

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            if self._db is not None and not self._db.in_transaction and self._file != _file(self.where):
                self.close()  # it was deleted, to be built anew
            if self._db is None:
                self._db = self._connect()
                self._file = _file(self.where)
            yield self._db
        except sqlite3.Error as error:
            self.close()
            raise Unavailable(
                f"The read models {self.where} can't be brought up to date: {error}. Check the file and its "
                "permissions; if it is damaged, delete it and rebuild."
            ) from error

    def _connect(self) -> sqlite3.Connection:
        for path in (self._store, Path(self.where)):
            if not path.is_file():
                raise NotFound(
                    f"The store {self._store} has no read models yet; build them with `postroom project "
                    "rebuild`."
                )
        # Used by one thread at a time, but not always the same.
        db = sqlite3.connect(self.where, isolation_level=None, check_same_thread=False, cached_statements=256)
        try:
            for pragma in (
                f"busy_timeout = {BUSY_TIMEOUT_MS}",
                "journal_mode = WAL",
                "synchronous = NORMAL",  # a power cut may take the last batches back, cursor and rows alike
                f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
                "journal_size_limit = 67108864",
                f"cache_size = -{CACHE_KIB}",
            ):
                db.execute(f"PRAGMA {pragma}")
        except BaseException:
            db.close()
            raise
        return db

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise

    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            return db.execute(statement).fetchall()

    def _read_log(self, statement: str) -> list[tuple[Any, ...]]:
        try:
            if self._log is None:
                uri = f"{self._store.absolute().as_uri()}?mode=ro"
                self._log = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
                self._log.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            return self._log.execute(statement).fetchall()
        except sqlite3.Error as error:
            self.close()
            raise Unavailable(
                f"The store {self._store} can't be read: {error}. Check the path and its permissions."
            ) from error

    def _write(self, statement: str, given: pl.DataFrame) -> None:
        with self._connection() as db:
            db.executemany(_with_rows(statement, given), given.iter_rows())

    def _fetch(self, statement: str, given: pl.DataFrame) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            wanted = _with_rows(statement, given)
            return [row for values in given.iter_rows() for row in db.execute(wanted, values)]

    def _hold(self, version: Version) -> None:
        if self._read(self._sql("hold", version=version.number, lock="")) != [(version.status,)]:
            raise Moved

    def _index_text(self, number: int, texts: pl.DataFrame) -> None:
        self._insert(f"text_index_v{number}", texts.select(pl.col("id").alias("rowid"), "text"))
        self._insert(f"word_index_v{number}", texts.select(pl.col("id").alias("rowid"), "words"))

    def _unindex_text(self, number: int, ids: pl.DataFrame) -> None:
        for name in ("unindex_text", "unindex_words"):
            self._write(_SQL[name].format(version=number, rows="{rows}"), ids)


def _file(path: str) -> int | None:
    """Return what tells a file from another one that is put in its place."""
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _with_rows(statement: str, given: pl.DataFrame) -> str:
    return statement.format(rows="SELECT " + ", ".join(f"? AS {name}" for name in given.columns))
