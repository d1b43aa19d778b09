"""The log reader port over a PostgreSQL database."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import psycopg
import pyarrow as pa

from postroom.adapters.postgres.columns import adbc_database
from postroom.adapters.postgres.database import (
    Closable,
    Connection,
    closing_on_failure,
    connect,
    in_transaction,
)
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.url import in_schema, schema_of
from postroom.adapters.sql.log_reader import Driver, Rows, envelopes_column, rows_of, to_commits
from postroom.adapters.sql.statements import statements
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.domain.errors import Unavailable
from postroom.projections.commit_columns import read_ranges
from postroom.projections.log_reader import Condition, LogBounds, LogExtent, LogReader, Range

NAME = "postroom, reading the log"
COMMITS_PER_CHUNK = 100
"""Commits per chunk that libpq fetches."""
BYTES_PER_BATCH = 16 << 20
"""Approximate bytes per batch that ADBC fetches."""
_SETTINGS = {
    "default_transaction_read_only": "on",
    # A custom plan prunes partitions before locking them.
    "plan_cache_mode": "force_custom_plan",
    # New partitions have no statistics yet; every query here has an index.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}
_SQL = statements("postroom.adapters.postgres", "sql/log_reader.sql")


C = TypeVar("C", bound=Closable)
Run = Callable[[str], Rows]
"""A function that runs a statement in a transaction of its own, and yields the rows."""


class _IdleConnections:
    """Connections, all of one driver, that no read uses at the moment."""

    def __init__(self) -> None:
        self._lock = RLock()  # reentrant, as garbage collection may end a read
        self._connections: list[Any] = []
        self._is_closed = False

    def take(self) -> Any | None:
        """Return an idle connection, which the server may have closed, or None."""
        with self._lock:
            return self._connections.pop() if self._connections else None

    def put(self, connection: Closable) -> None:
        """Keep a connection for the next read; after `close`, close it."""
        with self._lock:
            if not self._is_closed:
                self._connections.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections, and those in use when they are returned."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, []
        for each in connections:
            each.close()


@dataclass(frozen=True)
class PostgresLogReader(LogReader):
    """A reader of the log of a PostgreSQL store; see `LogReader`. The repr omits the URL and its password."""

    url: str = field(repr=False)
    driver: Driver = "auto"
    allow_gaps: bool = False
    _idle: _IdleConnections | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def connected(self) -> "Iterator[PostgresLogReader]":
        with closing(_IdleConnections()) as idle:
            yield replace(self, _idle=idle)

    def mailboxes(self) -> dict[str, int]:
        with self._reader() as connection:
            return dict(connection.execute(_SQL["mailboxes"]).fetchall())

    def heads(self) -> dict[str, int]:
        with self._reader() as connection:
            names = connection.execute(_SQL["mailboxes"]).fetchall()
            ends = ((name, _end(connection, "last", id_, POSITIONS_PER_MAILBOX - 1)) for name, id_ in names)
            return {name: end[0] for name, end in ends if end is not None}

    def bounds(self) -> dict[str, LogBounds]:
        with self._reader() as connection:
            return {name: LogBounds(*bounds) for name, *bounds in connection.execute(_SQL["bounds"])}

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        extents = []
        with self._reader() as connection:
            for name, id_ in connection.execute(_SQL["mailboxes"]).fetchall():
                end = POSITIONS_PER_MAILBOX - 1 if through is None else through.get(name, 0)
                first = _end(connection, "first", id_, end) if end else None
                last = _end(connection, "last", id_, end) if first is not None else None
                if first is not None and last is not None:  # retention may empty the log in between
                    extents.append(LogExtent(id_, name, *first, *last))
        return extents

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        with self._connect() as run:
            select = partial(_commits, run, envelopes="envelope" in columns)
            yield from read_ranges(select, ranges, columns, where, allow_gaps=self.allow_gaps)

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        with self._connect() as run:
            yield from _commits(run, range_, envelopes=envelopes)

    def _connect(self) -> AbstractContextManager[Run]:
        database = adbc_database(self.url, NAME, _SETTINGS) if self.driver != "python" else None
        return self._psycopg() if database is None else self._adbc(database)

    @contextmanager
    def _reader(self) -> Iterator[Connection]:
        with closing(connect(self.url, NAME, _SETTINGS)) as connection, unavailable(self.url):
            check_connection(connection, self.url, "store")
            yield connection

    @contextmanager
    def _adbc(self, database: Any) -> Iterator[Run]:
        from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

        def run(sql: str) -> Rows:
            with AdbcStatement(connection) as statement:
                statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BYTES_PER_BATCH)})
                statement.set_sql_query(in_schema(schema_of(self.url), sql))
                handle, _ = statement.execute_query()
                with pa.RecordBatchReader.from_stream(handle) as reader:
                    yield from rows_of(reader)

        def ping(connection: Any) -> None:
            with AdbcStatement(connection) as statement:
                statement.set_sql_query(_SQL["ping"])
                statement.execute_update()

        try:
            with self._connection(lambda: AdbcConnection(database), ping, Error) as connection:
                yield run
        except Error as error:
            reason = str(error).replace(self.url, shown(self.url)).partition("\n")[0]
            raise Unavailable(f"The database {shown(self.url)} can't be read: {reason}") from None

    @contextmanager
    def _psycopg(self) -> Iterator[Run]:
        def run(statement: str) -> Rows:
            with in_transaction(connection), connection.cursor(binary=True) as cursor:
                yield from cursor.stream(statement.encode(), size=COMMITS_PER_CHUNK)

        def ping(connection: Connection) -> None:
            connection.execute(_SQL["ping"])

        opened = self._connection(lambda: connect(self.url, NAME, _SETTINGS), ping, psycopg.Error)
        with unavailable(self.url), opened as connection:
            yield run

    @contextmanager
    def _connection(
        self, open_: Callable[[], C], ping: Callable[[C], None], error: type[Exception]
    ) -> Iterator[C]:
        """Use an idle connection or a new one; whatever interrupts a read closes its connection.

        Arguments:
            error: error of the driver for a connection that was lost while it was idle.
        """
        connection = self._take(ping, error) or open_()
        with closing_on_failure(connection):
            yield connection
        if self._idle is None:
            connection.close()
        else:
            self._idle.put(connection)

    def _take(self, ping: Callable[[C], None], error: type[Exception]) -> C | None:
        """Return an idle connection that answers; close those that do not."""
        while self._idle is not None:
            connection: C | None = self._idle.take()
            if connection is None:
                return None
            try:
                ping(connection)
            except error:
                connection.close()
            else:
                return connection
        return None


def _end(connection: Connection, which: str, mailbox: int, through: int) -> tuple[Any, ...] | None:
    bounds = {"base": mailbox * POSITIONS_PER_MAILBOX, "through": through}
    return connection.execute(_SQL[which], bounds).fetchone()


def _commits(run: Run, range_: Range, *, envelopes: bool) -> Generator[Commit, None, None]:
    extent, first, last = range_
    base, place = extent.place(0), extent.place(first)
    # A statement of its own: constant bounds prune partitions before they are locked.
    begin = next((begin for (begin,) in run(_SQL["begin"].format(base=base, place=place))), place)
    bounds = {"base": base, "begin": begin, "end": extent.place(last)}
    return to_commits(run(_SQL["commits"].format(**bounds, envelopes=envelopes_column(is_read=envelopes))))
