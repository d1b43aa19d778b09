"""The event log in a SQLite file."""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from postroom.adapters.sql.statements import statements
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.cut import PLACES, MailboxCut, Range
from postroom.projections.logs.conditions import Condition
from postroom.projections.logs.reading import ROWS_PER_BATCH, read_by_sql, to_batch

# A first row of values, because the ADBC driver takes a column's type from what it sees first, and NULL says
# nothing.
_TYPED = {pa.int64(): "0", pa.string(): "''", pa.binary(): "x''"}
_SQL = statements("postroom.projections", "sql/sqlite/log.sql")


@dataclass(frozen=True)
class SqliteLog:
    """Read the log of a SQLite store; see `Log`."""

    store: str
    driver: Literal["adbc", "python"] = "adbc"

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of the mailboxes; see `Log.mailboxes`."""
        with self._reader() as connection:
            return dict(connection.execute(_SQL["mailboxes"]).fetchall())

    def heads(self) -> dict[str, int]:
        """Return the last positions; see `Log.heads`."""
        with self._reader() as connection:
            return dict(connection.execute(_SQL["heads"]).fetchall())

    def cuts(self, through: Mapping[str, int] | None = None) -> list[MailboxCut]:
        """Return extents of mailbox logs; see `Log.cuts`."""
        cuts = []
        with self._reader() as connection:
            for name, id_ in connection.execute(_SQL["mailboxes"]).fetchall():
                last_wanted = PLACES - 1 if through is None else through.get(name, 0)
                bounds = {"base": id_ * PLACES, "through": id_ * PLACES + last_wanted}
                first = connection.execute(_SQL["first"], bounds).fetchone() if last_wanted else None
                if first is not None:
                    cuts.append(
                        MailboxCut(id_, name, *first, *connection.execute(_SQL["last"], bounds).fetchone())
                    )
        return cuts

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield records; see `Log.read`."""
        run = self._run_adbc if self.driver == "adbc" and _has_adbc() else self._run_sqlite3
        return read_by_sql(run, "log", _bytes_literal, ranges, columns, where)

    @property
    def _uri(self) -> str:
        return f"{Path(self.store).absolute().as_uri()}?mode=ro"

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        if not Path(self.store).is_file():
            raise NotFound(f"There is no store at {self.store}; name one with --store or POSTROOM_STORE.")
        try:
            with closing(sqlite3.connect(self._uri, uri=True, isolation_level=None)) as connection:
                connection.execute("BEGIN")  # all statements see the same
                yield connection
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"The store {self.store} can't be read: {error}. Check the path and its permissions."
        )

    def _run_adbc(self, statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        options = {"adbc.sqlite.query.batch_rows": str(ROWS_PER_BATCH)}
        typed = ", ".join(f"{_TYPED[column.type]} AS {column.name}" for column in schema)
        try:
            with (
                dbapi.connect(self._uri, autocommit=True) as connection,
                connection.cursor(adbc_stmt_kwargs=options) as cursor,
            ):
                cursor.execute(f"SELECT {typed} UNION ALL SELECT * FROM ({statement})")
                skip = 1  # the typed row
                for batch in cursor.fetch_record_batch():
                    yield batch.slice(skip).cast(schema)
                    skip = 0
        except Error as error:
            raise self._unreadable(error) from error

    def _run_sqlite3(self, statement: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        with self._reader() as connection:
            cursor = connection.execute(statement)
            while rows := cursor.fetchmany(ROWS_PER_BATCH):
                yield to_batch(rows, schema)


def _bytes_literal(value: bytes) -> str:
    return f"x'{value.hex()}'"


def _has_adbc() -> bool:
    try:
        import adbc_driver_sqlite.dbapi  # noqa: F401
    except ImportError:
        return False
    return True
