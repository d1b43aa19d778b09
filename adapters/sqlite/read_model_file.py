"""The read-model file of a SQLite store, and its lock files."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from blake3 import blake3

from postroom.adapters.sql.ddl import SQLITE, replace_views, script
from postroom.adapters.sqlite.database import connect, create_file
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable
from postroom.projections.ports.read_model_store import LockTimeout

CACHE_KIB = 128 << 10
NUL = " "
"""Stands for a NUL in text indexes."""
LOCK_SECONDS = 600.0
"""How long a rebuild waits for another process that writes to the file."""

T = TypeVar("T")


def views_path(store: str | Path) -> Path:
    """Return the path of a store's read-model file."""
    return Path(f"{store}-views")


def follow_lock_path(store: str | Path, target: str = "") -> Path:
    """Return the path of the lock file of a store's follower.

    Arguments:
        target: name of the target that the follower updates, empty for the store's own read models.
    """
    return Path(
        f"{store}-{f'into-{blake3(target.encode()).hexdigest(8)}' if target else 'views'}-follow-lock"
    )


def rebuild_lock_path(store: str | Path) -> Path:
    """Return the path of the lock file of rebuilds."""
    return Path(f"{store}-views-lock")


def index_text(texts: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of the table `search` of `compact_tables` with the text that the index gets."""
    # A text index reads no further than to a NUL.
    return texts.with_columns(pl.col("text").str.replace_all("\0", NUL, literal=True))


def index_rows(texts: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Return the rows of the text indexes for the table `search` of `compact_tables`."""
    row, texts = pl.col("id").alias("rowid"), index_text(texts)
    return {"text_index": texts.select(row, "text"), "word_index": texts.select(row, "words")}


class CatalogFile:
    """A connection to a SQLite file with a catalog of versions; see `versions.Database`."""

    schema = ""

    def __init__(self, where: str, connection: sqlite3.Connection) -> None:
        self.where = where
        self.connection = connection

    def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each value, and return its rows."""
        return wait_for_lock(self.where, lambda: self.connection.execute(statement, values).fetchall())

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside the context as one transaction."""
        wait_for_lock(self.where, partial(self.connection.execute, "BEGIN IMMEDIATE"))
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def tables(self) -> list[str]:
        """Return the names of all tables; text indexes come first, because they own shadow tables."""
        rows = self.connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY instr(name, '_index_v') = 0"
        )
        return [name for (name,) in rows.fetchall()]

    def replace_views(self, models: Mapping[str, int]) -> None:
        """Replace the views with stable names; see `Database.replace_views`."""
        for statement in replace_views(models, SQLITE):
            self.connection.execute(statement)

    def drop(self, table: str) -> bool:
        """Drop a table."""
        self.run(f"DROP TABLE IF EXISTS {table}", {})
        return True


@contextmanager
def open_catalog(path: Path) -> Iterator[CatalogFile]:
    """Open a read-model file; create it with its catalog if it is missing.

    Raises: Unavailable when it can't be used.
    """
    with closing(connect_catalog(path)) as connection:
        yield CatalogFile(str(path), connection)


def connect_catalog(path: Path) -> sqlite3.Connection:
    """Open a connection for writing to a read-model file; create it with its catalog if it is missing.

    Raises: Unavailable when it can't be used.
    """
    return wait_for_lock(str(path), lambda: _connect(path))


def is_locked(error: Exception) -> bool:
    """Return whether a statement failed only because another process writes to the file."""
    code = error.sqlite_errorcode if isinstance(error, sqlite3.OperationalError) else 0
    return code & 0xFF == sqlite3.SQLITE_BUSY


def wait_for_lock(where: str, execute: Callable[[], T]) -> T:
    """Call a function that begins to write; repeat the call while another process writes to the file.

    Arguments:
        where: the file, for messages.
        execute: changes nothing when it fails.

    Raises: LockTimeout after `LOCK_SECONDS`.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return execute()
        except sqlite3.OperationalError as error:
            if not is_locked(error):
                raise
            if time.monotonic() > deadline:
                raise LockTimeout(where) from error
        logger().warning("read_models.locked", read_models=where)


def _connect(path: Path) -> sqlite3.Connection:
    try:
        create_file(path)
        # A power cut may lose the version under construction, never the log.
        connection = connect(path, "relaxed", cache_kib=CACHE_KIB)
        try:
            connection.execute("PRAGMA threads = 2")
            connection.executescript(script(SQLITE, "catalog.sql"))
            upgrade_catalog(connection)
        except BaseException:
            connection.close()
            raise
    except (OSError, sqlite3.Error) as error:
        if is_locked(error):
            raise
        raise Unavailable(
            f"The read models {path} can't be used: {error}; delete the file and rebuild."
        ) from error
    return connection


def upgrade_catalog(connection: sqlite3.Connection) -> None:
    """Add columns that are missing from the catalog of an earlier release."""
    for table, names in {"projection": ("plan", "models"), "projection_cursor": ("chain",)}.items():
        columns = {name for _, name, *_ in connection.execute(f"PRAGMA table_info({table})")}
        for name in names:
            if name not in columns:
                connection.execute(f"ALTER TABLE {table} ADD COLUMN {name} TEXT")
