"""Peers in SQLite: each makes the search model in a file of its own, with the tables and indexes of ours.

No process uses ADBC and `sqlite3` on one file, as the two SQLites don't see each other's locks.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.benchmarks.pipeline.clock import Clock
from tests.benchmarks.pipeline.frames import Fold, fold_with_polars
from tests.benchmarks.pipeline.log import read_commits, read_log
from tests.benchmarks.pipeline.script import script

TABLES = ("mailbox", "header", "topic", "text")
INDEXED = {"text_index": "text", "word_index": "words"}
"""The text indexes, and what each is on; they have no copy of it."""
BATCH = 50_000


def by_frames(store: str, target: Path, clock: Clock, fold: Fold) -> None:
    """Read by the rebuild's reader, fold in this process, load by `sqlite3`, which makes what ours is."""
    version, indexes = _prepare(store, target)
    with clock.phase("read"):
        read = read_log(store)
    with clock.phase("fold"):
        rows = fold(read)
        del read
    with closing(_connect(target)) as connection:
        with clock.phase("load"):
            for name in TABLES[:-1]:
                table = getattr(rows, name)
                _insert(connection, f"{name}_v{version}", table.column_names, _rows(table))
            for name, column in INDEXED.items():
                texts = rows.text.select(["id", column])
                _insert(connection, f"{name}_v{version}", ["rowid", column], _rows(texts))
        with clock.phase("index"):
            for statement in indexes:
                connection.execute(statement)


def floor(store: str, target: Path, clock: Clock) -> None:
    """Read the log, write the finished rows, and build the indexes."""
    with clock.phase("prepare"):
        version, indexes = _prepare(store, target)
        tables: dict[str, tuple[list[str], list[Any]]] = {}
        with closing(sqlite3.connect(f"{store}-views")) as views:
            for name in TABLES:
                cursor = views.execute(f"SELECT * FROM {name}_v{version}")
                tables[name] = ([column[0] for column in cursor.description], cursor.fetchall())
        texts = fold_with_polars(read_log(store)).text
    with clock.phase("read"):
        read_commits(store)
    with closing(_connect(target)) as connection:
        with clock.phase("load"):
            for name, (columns, rows) in tables.items():
                _insert(connection, f"{name}_v{version}", columns, [rows])
            for name, column in INDEXED.items():
                _insert(
                    connection, f"{name}_v{version}", ["rowid", column], _rows(texts.select(["id", column]))
                )
        with clock.phase("index"):
            for statement in indexes:
                connection.execute(statement)


def _prepare(store: str, target: Path) -> tuple[int, list[str]]:
    """Make the tables as ours are, and return their version and the statements that make their indexes."""
    with closing(sqlite3.connect(f"{store}-views")) as views:
        version = int(views.execute(script("version_sqlite.sql")).fetchone()[0])
        schema = views.execute(script("schema_sqlite.sql"), {"version": version}).fetchall()
    tables = [f"{name}_v{version}" for name in TABLES]
    indexes = [statement for type_, table, statement in schema if type_ == "index" and table in tables]
    with closing(_connect(target)) as connection:
        for type_, table, statement in schema:
            is_text_index = statement.startswith("CREATE VIRTUAL TABLE")
            if type_ == "table" and (table in tables or is_text_index):
                connection.execute(statement)
    return version, [*indexes, f"ANALYZE mailbox_v{version}"]


def _connect(target: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{target.absolute().as_uri()}", isolation_level=None, uri=True)
    for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "cache_size = -262144", "threads = 2"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _insert(
    connection: sqlite3.Connection, table: str, columns: list[str], batches: Iterable[Iterable[Any]]
) -> None:
    statement = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    connection.execute("BEGIN")
    for rows in batches:
        connection.executemany(statement, rows)
    connection.execute("COMMIT")


def _rows(table: Any) -> Iterator[Iterator[tuple[Any, ...]]]:
    for batch in table.to_batches(BATCH):
        yield zip(*(column.to_pylist() for column in batch.columns), strict=True)
