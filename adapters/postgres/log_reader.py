"""The log reader port over a PostgreSQL database, and its connections."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import psycopg
import pyarrow as pa

from postroom.adapters.postgres.columns import BinaryValue, PackedDumper, adbc_database
from postroom.adapters.postgres.database import (
    Closable,
    Connection,
    Reconnecting,
    closing_on_failure,
    connect,
    in_transaction,
    shown,
    unavailable,
)
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.url import in_schema, schema_of
from postroom.adapters.sql.log_reader import Driver, Rows, envelopes_column, rows_of, to_commits
from postroom.adapters.sql.statements import statements
from postroom.application.ports.event_log import Head
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.domain.errors import Unavailable
from postroom.projections.commit_columns import read_ranges
from postroom.projections.log_reader import Condition, LogBounds, LogExtent, Range

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
        self._lock = Lock()
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
        """Close the connections, and later those that are in use."""
        with self._lock:
            self._is_closed = True
            connections, self._connections = self._connections, []
        for each in connections:
            each.close()


@dataclass(frozen=True)
class PostgresLogReader:
    """A reader of the log of a PostgreSQL store; see `LogReader`. The repr omits the URL and its password."""

    url: str = field(repr=False)
    driver: Driver = "auto"
    allow_gaps: bool = False
    _idle: _IdleConnections | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def connected(self) -> "Iterator[PostgresLogReader]":
        """Keep the connections of `read` open; see `LogReader.connected`."""
        with closing(_IdleConnections()) as idle:
            yield replace(self, _idle=idle)

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of the mailboxes; see `LogReader.mailboxes`."""
        with self._reader() as connection:
            return dict(connection.execute(_SQL["mailboxes"]).fetchall())

    def heads(self) -> dict[str, int]:
        """Return the last positions; see `LogReader.heads`."""
        with self._reader() as connection:
            names = connection.execute(_SQL["mailboxes"]).fetchall()
            ends = ((name, _end(connection, "last", id_, POSITIONS_PER_MAILBOX - 1)) for name, id_ in names)
            return {name: end[0] for name, end in ends if end is not None}

    def bounds(self) -> dict[str, LogBounds]:
        """Return the recorded bounds of logs; see `LogReader.bounds`."""
        with self._reader() as connection:
            return {name: LogBounds(*bounds) for name, *bounds in connection.execute(_SQL["bounds"])}

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        """Return extents of mailbox logs; see `LogReader.extents`."""
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
        """Yield records; see `LogReader.read`."""
        with self._connect() as run:
            select = partial(_commits, run, envelopes="envelope" in columns)
            yield from read_ranges(select, ranges, columns, where, allow_gaps=self.allow_gaps)

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        """Yield the commits that overlap a range; see `LogReader.commits`."""
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
            error: the driver's, raised if the connection was lost while it was idle.
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


TIMEOUT = "60s"
"""Time limit of a statement: one append, or one page of a read."""
UNCERTAIN_APPEND_WAIT_MS = 5_000

_WRITER = {
    "statement_timeout": TIMEOUT,
    "idle_session_timeout": "0",
    # New partitions have no statistics yet; every statement here has an index.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
_READER = {
    "default_transaction_read_only": "on",
    "statement_timeout": TIMEOUT,
    "idle_session_timeout": "0",
    # A custom plan prunes partitions before locking them.
    "plan_cache_mode": "force_custom_plan",
    # New partitions have no statistics yet; every query here has an index.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "jit": "off",
}

SQL = statements("postroom.adapters.postgres", "log.sql")


class _Session(NamedTuple):
    """Identity of a server process: its pid may be reused, but not with the same start time."""

    pid: int
    started: Any


class LogConnections:
    """One connection that reads and one that writes, each opened on first use and reopened when it was ended.

    An append whose connection was lost may still commit: its session is terminated before the next read or
    append, so that these see its outcome.

    Arguments:
        is_relaxed: do not wait for the disk; see `PostgresEventLog`.

    Attributes:
        bounds: parameters of every statement: id and positions of the mailbox.
        is_synced: whether the server syncs its log to the disk; False until something was written.
    """

    def __init__(self, url: str, mailbox: str, *, is_relaxed: bool) -> None:
        self.bounds: dict[str, int] = {}
        self.is_synced = False
        self._url = url
        self._mailbox = mailbox
        self._is_relaxed = is_relaxed
        self._session: _Session | None = None
        self._verified: _Session | None = None
        self._uncertain: _Session | None = None
        self._reader = Reconnecting(self._open_reader)
        self._writer = Reconnecting(self._open_writer)

    def close(self) -> None:
        """Close both; idempotent."""
        self._writer.close()
        self._reader.close()

    def fetch(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a statement; once more if the connection was lost.

        Raises: Unavailable when the database can't be used or is not migrated.
        """

        def fetch(reader: Connection) -> list[tuple[Any, ...]]:
            self._end_uncertain_append(reader)
            return reader.execute(SQL[statement], self.bounds | values, binary=True).fetchall()

        with unavailable(self._url):
            return self._reader.run(fetch)

    def write(self, statement: str, **values: Any) -> int:
        """Execute an idempotent statement and return the number of rows; again if the connection was lost."""
        with unavailable(self._url):
            return self._writer.run(
                lambda writer: writer.execute(SQL[statement], self.bounds | values).rowcount
            )

    def call(self, statement: str, **values: Any) -> Any:
        """Execute an idempotent statement that writes, and return its only value, as `write` does."""

        def call(writer: Connection) -> Any:
            (result,) = writer.execute(SQL[statement], self.bounds | values).fetchone() or (None,)
            return result

        with unavailable(self._url):
            return self._writer.run(call)

    def append(
        self,
        statement: str,
        values: dict[str, BinaryValue],
        holds: Callable[[Head | None], bool],
    ) -> bool:
        """Insert commits, and return whether the log holds them.

        Arguments:
            holds: called with the end of the log before the first append of a session, as the server of a
                failover may have another one. Returns whether the log holds the commits already, and raises
                an error if they can't be appended there.

        Raises: psycopg.Error, as what it means depends on the end of the log.
        """
        with self._writer.use() as writer:
            if self._verified is not self._session:
                self._end_uncertain_append(writer)
                rows = writer.execute(SQL["head"], self.bounds, binary=True).fetchall()
                if holds(Head(*rows[0]) if rows else None):
                    # Another commit waits for what the lost session may not have: disk and standbys.
                    writer.execute(SQL["mark_removed"], self.bounds | {"through": 0})
                    return True
                self._verified = self._session
            try:
                return writer.execute(statement, values, prepare=True).rowcount > 0
            except psycopg.Error:
                if writer.broken:  # the server may have executed it, or still will
                    self._uncertain = self._session
                raise

    def _end_uncertain_append(self, connection: Connection) -> None:
        uncertain = self._uncertain
        if uncertain is None:
            return
        session = uncertain._asdict() | {"wait_ms": UNCERTAIN_APPEND_WAIT_MS}
        if connection.execute(SQL["end_session"], session).fetchone() == (False,):
            raise Unavailable(
                f"The database {shown(self._url)} is still running an append whose connection was lost; "
                "retry shortly."
            )
        if self._uncertain is uncertain:  # else another append's outcome has become uncertain meanwhile
            self._uncertain = None

    def _open_reader(self) -> Connection:
        reader = connect(self._url, f"postroom, reads {self._mailbox}", _READER)
        with unavailable(self._url), closing_on_failure(reader):
            check_connection(reader, self._url, "store")
            reader.adapters.register_dumper(BinaryValue, PackedDumper)
        return reader

    def _open_writer(self) -> Connection:
        name, owner = f"postroom, appends to {self._mailbox}", f"the owner of {self._mailbox}"
        settings = _WRITER | ({"synchronous_commit": "off"} if self._is_relaxed else {})
        # Only `off` is changed: an operator may have chosen a stronger setting than `on`.
        sync = "" if self._is_relaxed else "on"
        writer = connect(self._url, name, settings, session_for=owner, sync=sync)
        with unavailable(self._url), closing_on_failure(writer):
            writer.adapters.register_dumper(BinaryValue, PackedDumper)
            pid, started, self.is_synced = writer.execute(SQL["session"]).fetchone() or (0, None, False)
            self._session = _Session(pid, started)
        return writer
