"""Peers in PostgreSQL: each makes the search model in the schema `bench`, with tables and indexes as ours."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any

import psycopg
from psycopg import sql

from tests.benchmarks.pipeline.clock import Clock
from tests.benchmarks.pipeline.frames import Fold
from tests.benchmarks.pipeline.log import read_log
from tests.benchmarks.pipeline.script import script

TABLES = ("mailbox", "header", "topic", "text")
CONNECTIONS = 2
"""How many load and index at once: as many as the machine has cores."""

Connection = psycopg.Connection[tuple[Any, ...]]


def by_frames(store: str, clock: Clock, fold: Fold) -> None:
    """Read by the rebuild's reader, fold in this process, load by ADBC."""
    with closing(_connect(store)) as connection:
        indexes = _prepare(connection)
    with clock.phase("read"):
        read = read_log(store)
    with clock.phase("fold"):
        rows = fold(read)
        del read
    with clock.phase("load"), ThreadPoolExecutor(CONNECTIONS) as pool:
        half = -(-rows.mailbox.num_rows // CONNECTIONS)
        loading = [
            pool.submit(_load, store, "mailbox", rows.mailbox.slice(n * half, half))
            for n in range(CONNECTIONS)
        ]
        loading += [pool.submit(_load, store, name, getattr(rows, name)) for name in TABLES[1:]]
        for each in loading:
            each.result()
    with clock.phase("index"):
        _index(store, indexes)


def floor(store: str, clock: Clock) -> None:
    """Copy the log out to nowhere and the finished rows in, and build the indexes."""
    with closing(_connect(store)) as connection:
        with clock.phase("prepare"):
            indexes = _prepare(connection)
            version = _version(connection)
            rows = {name: list(_copied_out(connection, f"{name}_v{version}")) for name in TABLES}
        with clock.phase("read"):
            for _ in _copied_out(connection, "log"):
                pass
        with clock.phase("load"):
            for name, blocks in rows.items():
                statement = sql.SQL("COPY bench.{} FROM STDIN (FORMAT BINARY)").format(sql.Identifier(name))
                with connection.cursor().copy(statement) as copy:
                    for block in blocks:
                        copy.write(block)
    with clock.phase("index"):
        _index(store, indexes)


def clean_up(store: str) -> None:
    """Remove what a peer made, and have written what would be written during the next run."""
    with closing(_connect(store)) as connection:
        connection.execute("DROP SCHEMA IF EXISTS bench CASCADE")
        connection.execute("CHECKPOINT")


def _connect(store: str) -> Connection:
    connection = psycopg.connect(store, autocommit=True)
    connection.execute(script("configure_postgres.sql").encode())
    return connection


def _prepare(connection: Connection) -> list[str]:
    """Make the tables as ours are without their indexes, and return the statements that make those."""
    version = _version(connection)
    connection.execute("CREATE SCHEMA bench")
    indexes: list[str] = []
    for name in TABLES:
        connection.execute(
            sql.SQL("CREATE TABLE bench.{} (LIKE postroom.{}) WITH (autovacuum_enabled = false)").format(
                sql.Identifier(name), sql.Identifier(f"{name}_v{version}")
            )
        )
        rows = connection.execute(
            "SELECT indexdef FROM pg_indexes WHERE schemaname = 'postroom' AND tablename = %s",
            [f"{name}_v{version}"],
        )
        indexes += (row[0].replace(f" ON postroom.{name}_v{version} ", f" ON bench.{name} ") for row in rows)
    return indexes


def _version(connection: Connection) -> int:
    row = connection.execute(script("version_postgres.sql").encode()).fetchone()
    assert row is not None
    return int(row[0])


def _index(store: str, indexes: list[str]) -> None:
    _run_all(store, indexes)
    _run_all(store, [f"VACUUM (FREEZE, ANALYZE) bench.{name}" for name in TABLES])


def _run_all(store: str, work: list[str]) -> None:
    """Run statements on several connections, in their order."""
    left: SimpleQueue[str] = SimpleQueue()
    for statement in work:
        left.put(statement)

    def run() -> None:
        with closing(_connect(store)) as connection:
            while True:
                try:
                    statement = left.get_nowait()
                except Empty:
                    return
                connection.execute(statement.encode())

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for each in [pool.submit(run) for _ in range(CONNECTIONS)]:
            each.result()


def _load(store: str, table: str, rows: Any) -> None:
    from adbc_driver_postgresql import dbapi

    with dbapi.connect(store, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.adbc_ingest(table, rows, mode="append", db_schema_name="bench")


def _copied_out(connection: Connection, table: str) -> Iterator[bytes]:
    statement = sql.SQL("COPY (SELECT * FROM postroom.{}) TO STDOUT (FORMAT BINARY)")
    with connection.cursor().copy(statement.format(sql.Identifier(table))) as copy:
        for block in copy:
            yield bytes(block)
