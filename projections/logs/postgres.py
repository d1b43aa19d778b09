"""The event log in a PostgreSQL database."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from postroom.adapters.postgres.columns import ESCAPE, unescape
from postroom.adapters.postgres.database import Connection, connect, shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements
from postroom.domain.errors import Unavailable
from postroom.projections.cut import PLACES, MailboxCut, Range
from postroom.projections.logs.conditions import Condition
from postroom.projections.logs.reading import Driver, Run, read_by_sql, rows_per_batch, to_batch

NAME = "postroom, reading the log"
ROWS_PER_CHUNK = 1_000
"""Rows that libpq hands over at once."""
BYTES_PER_BATCH = 16 << 20
"""Bytes that ADBC hands over at once, about."""
_SQL = statements("postroom.projections", "sql/postgres/log.sql")


@dataclass(frozen=True)
class PostgresLog:
    """Read the log of a PostgreSQL store; see `Log`. Its URL, which may hold a password, is not shown."""

    url: str = field(repr=False)
    driver: Driver = "auto"

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of the mailboxes; see `Log.mailboxes`."""
        with self._reader() as connection:
            return dict(connection.execute(_SQL["mailboxes"]).fetchall())

    def heads(self) -> dict[str, int]:
        """Return the last positions; see `Log.heads`."""
        with self._reader() as connection:
            names = connection.execute(_SQL["mailboxes"]).fetchall()
            ends = ((name, _end(connection, "last", id_, PLACES - 1)) for name, id_ in names)
            return {name: end[0] for name, end in ends if end is not None}

    def cuts(self, through: Mapping[str, int] | None = None) -> list[MailboxCut]:
        """Return extents of mailbox logs; see `Log.cuts`."""
        cuts = []
        with self._reader() as connection:
            for name, id_ in connection.execute(_SQL["mailboxes"]).fetchall():
                last_wanted = PLACES - 1 if through is None else through.get(name, 0)
                first = _end(connection, "first", id_, last_wanted) if last_wanted else None
                last = _end(connection, "last", id_, last_wanted) if first is not None else None
                if first is not None and last is not None:  # retention may remove the log in between
                    cuts.append(MailboxCut(id_, name, *first, *last))
        return cuts

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield records; see `Log.read`."""
        connect_ = self._adbc if self.driver != "python" and _has_adbc() else self._psycopg
        with connect_() as run:
            for batch in read_by_sql(run, "postroom.log", _bytes_literal, ranges, columns, where):
                yield _unescaped(batch)

    @contextmanager
    def _reader(self) -> Iterator[Connection]:
        with closing(connect(self.url, NAME)) as connection, unavailable(self.url):
            check_connection(connection, self.url, "store")
            connection.execute(_SQL["configure"])
            yield connection

    @contextmanager
    def _adbc(self) -> Iterator[Run]:
        from adbc_driver_manager import AdbcConnection, AdbcStatement, Error

        def run(sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
            with AdbcStatement(connection) as statement:
                statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(BYTES_PER_BATCH)})
                statement.set_sql_query(sql)
                handle, _ = statement.execute_query()
                with pa.RecordBatchReader.from_stream(handle) as reader:
                    for batch in reader:
                        yield batch.cast(schema)

        try:
            with AdbcConnection(_adbc_database(self.url, os.getpid())) as connection:
                with AdbcStatement(connection) as statement:
                    statement.set_sql_query(_SQL["configure"])
                    statement.execute_update()
                yield run
        except Error as error:
            said = str(error).replace(self.url, shown(self.url)).partition("\n")[0]
            raise Unavailable(f"The database {shown(self.url)} can't be read: {said}") from None

    @contextmanager
    def _psycopg(self) -> Iterator[Run]:
        def run(statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
            with connection.cursor(binary=True) as cursor:
                rows = cursor.stream(statement.encode(), size=ROWS_PER_CHUNK)
                while batch := list(islice(rows, rows_per_batch(schema))):
                    yield to_batch(batch, schema)

        with closing(connect(self.url, NAME)) as connection, unavailable(self.url):
            connection.execute(_SQL["configure"])
            yield run


@lru_cache(maxsize=4)
def _adbc_database(url: str, process: int) -> Any:
    """Return what ADBC knows of a database: finding it out takes long, and holds no connection afterwards."""
    from adbc_driver_postgresql import connect

    return connect(url)


def _end(connection: Connection, which: str, mailbox: int, through: int) -> tuple[Any, ...] | None:
    bounds = {"base": mailbox * PLACES, "through": mailbox * PLACES + through}
    return connection.execute(_SQL[which], bounds).fetchone()


def _bytes_literal(value: bytes) -> str:
    return f"'\\x{value.hex()}'::bytea"


def _unescaped(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return text as it was before the log wrote it; hardly any has what needs that."""
    arrays = [_unescaped_column(column) for column in batch.columns]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


def _unescaped_column(column: pa.Array) -> pa.Array:
    if column.type != pa.string() or not pc.any(pc.match_substring(column, ESCAPE)).as_py():
        return column
    texts = (None if text is None else unescape(text) for text in column.to_pylist())
    return pa.array(texts, pa.string())


def _has_adbc() -> bool:
    try:
        import adbc_driver_postgresql  # noqa: F401
    except ImportError:
        return False
    return True
