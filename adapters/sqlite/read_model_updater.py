"""The read model updater port over the read-model file of a SQLite store."""

import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from postroom.adapters.files import FileChanges
from postroom.adapters.sql.read_model_updater import CursorConflict, SqlReadModelUpdater
from postroom.adapters.sql.statements import check_ids, statements
from postroom.adapters.sqlite.database import connect, connect_reader, written_files
from postroom.adapters.sqlite.read_model_file import (
    follow_lock_path,
    index_rows,
    index_text,
    is_locked,
    upgrade_catalog,
    views_path,
)
from postroom.adapters.sqlite.store_file import FileId, file_id, has_file
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.incremental import Version
from postroom.projections.ports.read_model_store import LockTimeout

CACHE_KIB = 64 << 10
ROWS_PER_STATEMENT = 1_000
"""SQLite allows 32,766 values."""

_SQL = statements("postroom.adapters.sqlite", "sql/update.sql")


class SqliteReadModelUpdater(SqlReadModelUpdater):
    """An updater of a SQLite file, which does not block readers; see `ReadModelUpdater`."""

    def __init__(self, store: str | Path) -> None:
        super().__init__(str(views_path(store)))
        self._store = Path(store)
        self._db: sqlite3.Connection | None = None
        self._log: sqlite3.Connection | None = None
        self._file: FileId | None = None
        self._log_file: FileId | None = None
        self._changes: FileChanges | None = None
        self._is_watching = False

    def close(self) -> None:
        """Close the files; see `FollowedLog.close`."""
        for connection in (self._db, self._log):
            if connection is not None:
                connection.close()
        self._db = self._log = None
        if self._changes is not None:
            self._changes.close()
            self._changes = None

    def wait_for_commit(self, seconds: float) -> bool | None:
        """Wait for the kernel to report a change; see `FollowedLog.wait_for_commit`."""
        if self._changes is None:
            self._changes = FileChanges()
            self._watch()
            return True  # for what was committed before
        if not self._is_watching:
            self._watch()
            return None
        is_told = self._changes.wait(seconds)
        if is_told:
            self._watch()
        return is_told

    def _watch(self) -> None:
        self._is_watching = self._changes is not None and self._changes.watch(written_files(self._store))

    @contextmanager
    def leader_lock(self, target: str = "") -> Iterator[bool]:
        """Lock a file next to the store; see `FollowedLog.leader_lock`."""
        path = follow_lock_path(self._store, target)
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
            if (
                self._db is not None
                and not self._db.in_transaction
                and self._file != file_id(Path(self.where))
            ):
                self.close()  # the file was deleted or replaced
            if self._db is None:
                self._db = self._connect()
                self._file = file_id(Path(self.where))
            yield self._db
        except sqlite3.Error as error:
            self.close()
            if isinstance(error, sqlite3.IntegrityError):
                check_ids(error, self.where)
            if is_locked(error):
                raise LockTimeout(self.where) from error
            raise Unavailable(
                f"The read models {self.where} can't be updated: {error}. Check the file and its "
                "permissions; if it is damaged, delete it and rebuild."
            ) from error

    def _connect(self) -> sqlite3.Connection:
        for path in (self._store, Path(self.where)):
            if not has_file(path):
                raise NotFound(
                    f"The store {self._store} has no read models yet; build them with `postroom views "
                    "rebuild`."
                )
        # Batches undone by a power cut are applied again, as cursors are undone with the rows.
        connection = connect(Path(self.where), "relaxed", cache_kib=CACHE_KIB)
        upgrade_catalog(connection)
        return connection

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
            if self._log is not None and self._log_file != file_id(self._store):
                self._log.close()  # the file was replaced
                self._log = None
            if self._log is None:
                self._log = connect_reader(self._store)
                self._log_file = file_id(self._store)
            return self._log.execute(statement).fetchall()
        except sqlite3.Error as error:
            self.close()
            raise Unavailable(
                f"The store {self._store} can't be read: {error}. Check the path and its permissions."
            ) from error

    def _write(self, statement: str, rows: pl.DataFrame) -> None:
        if "{values}" not in statement:
            self._fetch(statement, rows)
            return
        # One at a time: before a statement with a SELECT, FTS5 writes all it has to the file.
        with self._connection() as db:
            db.executemany(statement.format(values=_values(rows.head(1))), rows.iter_rows())

    def _fetch(self, statement: str, rows: pl.DataFrame) -> list[tuple[Any, ...]]:
        names = ", ".join(f"column{number} AS {name}" for number, name in enumerate(rows.columns, 1))
        results: list[tuple[Any, ...]] = []
        with self._connection() as db:
            for part in rows.iter_slices(ROWS_PER_STATEMENT):
                query = statement.format(rows=f"SELECT {names} FROM ({_values(part)})")
                results += db.execute(query, list(chain.from_iterable(part.iter_rows())))
        return results

    def _lock(self, version: Version) -> None:
        if self._read(self._sql("lock_version", version=version.number, lock="")) != [(version.status,)]:
            raise CursorConflict

    def _index_text(self, number: int, tables: dict[str, pl.DataFrame]) -> None:
        self._insert(f"text_v{number}", tables["text"])
        for name, rows in index_rows(tables["search"]).items():
            self._insert(f"{name}_v{number}", rows)

    def _unindex_text(self, number: int, texts: pl.DataFrame) -> None:
        for name in ("unindex_text", "unindex_words"):
            self._write(_SQL[name].format(version=number, rows="{rows}"), index_text(texts))


def _values(rows: pl.DataFrame) -> str:
    row = f"({', '.join('?' * rows.width)})"
    return f"VALUES {', '.join([row] * rows.height)}"
