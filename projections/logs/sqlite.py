"""The event log in a SQLite file."""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.cut import PLACES, MailboxCut
from postroom.projections.logs.reading import ROWS_PER_BATCH, quoted, to_batch

# A first row of values, because the ADBC driver takes a column's type from what it sees first, and NULL says
# nothing.
_TYPED = {pa.int64(): "0", pa.string(): "''", pa.binary(): "x''"}


@dataclass(frozen=True)
class SqliteLog:
    """Read the log of a SQLite store; see `Log`."""

    store: str
    driver: Literal["adbc", "python"] = "adbc"

    table = "log"
    event = "substr(type, 1, instr(type, '.') - 1)"

    def starts_with(self, prefix: str) -> str:
        """Return a range, because LIKE ignores case and would not see an index."""
        return f"type >= {quoted(prefix)} AND type < {quoted(prefix[:-1] + chr(ord(prefix[-1]) + 1))}"

    def cuts(self) -> list[MailboxCut]:
        """Return the present extent of every mailbox log; see `Log.cuts`."""
        if not Path(self.store).is_file():
            raise NotFound(f"There is no store at {self.store}; name one with --store or POSTROOM_STORE.")
        try:
            with closing(sqlite3.connect(self._uri, uri=True)) as connection:
                names = connection.execute("SELECT id, name FROM mailbox_names ORDER BY id").fetchall()
                return [cut for id_, name in names if (cut := _cut(connection, id_, name)) is not None]
        except sqlite3.Error as error:
            raise Unavailable(
                f"The store {self.store} can't be read: {error}. Check the path and its permissions."
            ) from error

    def batches(self, statements: Iterable[str], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of SELECT statements; see `Log.batches`."""
        read = self._read_adbc if self.driver == "adbc" and _has_adbc() else self._read_sqlite3
        typed = ", ".join(f"{_TYPED[column.type]} AS {column.name}" for column in schema)
        for statement in statements:
            yield from read(f"SELECT {typed} UNION ALL {statement}", schema)

    @property
    def _uri(self) -> str:
        return f"{Path(self.store).absolute().as_uri()}?mode=ro"

    def _read_adbc(self, statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from adbc_driver_sqlite import dbapi

        options = {"adbc.sqlite.query.batch_rows": str(ROWS_PER_BATCH)}
        with (
            dbapi.connect(self._uri, autocommit=True) as connection,
            connection.cursor(adbc_stmt_kwargs=options) as cursor,
        ):
            cursor.execute(statement)
            skip = 1  # the typed row
            for batch in cursor.fetch_record_batch():
                yield batch.slice(skip).cast(schema)
                skip = 0

    def _read_sqlite3(self, statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with closing(sqlite3.connect(self._uri, uri=True)) as connection:
            cursor = connection.execute(statement)
            cursor.fetchone()  # the typed row
            while rows := cursor.fetchmany(ROWS_PER_BATCH):
                yield to_batch(rows, schema)


def _cut(connection: sqlite3.Connection, id_: int, name: str) -> MailboxCut | None:
    bounds = (id_ * PLACES, (id_ + 1) * PLACES)
    end = "SELECT place, at FROM log WHERE place > ? AND place < ? ORDER BY place {} LIMIT 1"
    first = connection.execute(end.format("ASC"), bounds).fetchone()
    if first is None:
        return None
    last, at = connection.execute(end.format("DESC"), bounds).fetchone()
    return MailboxCut(id_, name, first[0] % PLACES, last % PLACES, at)


def _has_adbc() -> bool:
    try:
        import adbc_driver_sqlite.dbapi  # noqa: F401
    except ImportError:
        return False
    return True
