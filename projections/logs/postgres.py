"""The event log in a PostgreSQL database."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from postroom.adapters.postgres.columns import ESCAPE, unescape
from postroom.adapters.postgres.database import connect, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements
from postroom.projections.cut import PLACES, MailboxCut
from postroom.projections.logs.reading import ROWS_PER_BATCH, quoted, to_batch

NAME = "postroom rebuild, reading"
_SQL = statements("postroom.projections", "sql/postgres/log.sql")


@dataclass(frozen=True)
class PostgresLog:
    """Read the log of a PostgreSQL store; see `Log`. Its URL, which may hold a password, is not shown."""

    url: str = field(repr=False)
    driver: Literal["adbc", "python"] = "adbc"

    table = "postroom.log"
    event = "split_part(type, '.', 1)"

    def starts_with(self, prefix: str) -> str:
        """Return the condition; see `Log.starts_with`."""
        return f"starts_with(type, {quoted(prefix)})"

    def cuts(self) -> list[MailboxCut]:
        """Return the present extent of every mailbox log; see `Log.cuts`."""
        with closing(connect(self.url, NAME)) as connection, unavailable(self.url):
            check_connection(connection, self.url, "store")
            connection.execute(_SQL["configure"])
            names = connection.execute(_SQL["mailboxes"]).fetchall()
            return [cut for id_, name in names if (cut := _cut(connection, id_, name)) is not None]

    def batches(self, statements: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of SELECT statements; see `Log.batches`."""
        read = self._read_adbc if self.driver == "adbc" and _has_adbc() else self._read_psycopg
        return (_unescaped(batch) for batch in read(statements, schema))

    def _read_adbc(self, statements: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self.url, autocommit=True) as connection, connection.cursor() as cursor:
            cursor.execute(_SQL["configure"])
            for statement in statements:
                cursor.execute(statement)
                for batch in cursor.fetch_record_batch():
                    yield batch.cast(schema)

    def _read_psycopg(self, statements: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with closing(connect(self.url, NAME)) as connection, unavailable(self.url):
            connection.execute(_SQL["configure"])
            with connection.cursor(binary=True) as cursor:
                for statement in statements:
                    cursor.execute(statement.encode())
                    while rows := cursor.fetchmany(ROWS_PER_BATCH):
                        yield to_batch(rows, schema)


def _cut(connection: psycopg.Connection[tuple[Any, ...]], id_: int, name: str) -> MailboxCut | None:
    bounds = {"base": id_ * PLACES, "top": (id_ + 1) * PLACES}
    first = connection.execute(_SQL["first"], bounds).fetchone()
    last = connection.execute(_SQL["last"], bounds).fetchone()
    if first is None or last is None:
        return None
    return MailboxCut(id_, name, first[0] % PLACES, last[0] % PLACES, last[1])


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
        import adbc_driver_postgresql.dbapi  # noqa: F401
    except ImportError:
        return False
    return True
