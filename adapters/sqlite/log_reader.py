"""The log reader port over a SQLite file."""

import sqlite3
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from postroom.adapters.sql.log_reader import Driver, Rows, envelopes_column, rows_of, to_commits
from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import BUSY_TIMEOUT_MS, connect_reader
from postroom.adapters.sqlite.store_file import check_reader, has_file, is_frozen
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.commit_columns import read_ranges
from postroom.projections.log_reader import Condition, LogBounds, LogExtent, LogReader, Range

COMMITS_PER_BATCH = 100
"""Commits per batch that ADBC fetches."""
_SQL = statements("postroom.adapters.sqlite", "sql/log_reader.sql")


@dataclass(frozen=True)
class SqliteLogReader(LogReader):
    """A reader of the log of a SQLite store; see `LogReader`.

    ADBC links its own SQLite library, and two such libraries in one process cancel each other's POSIX locks
    on a file. So `auto` uses ADBC only in Spark tasks, whose processes use no other library.
    """

    store: str
    driver: Driver = "auto"
    allow_gaps: bool = False

    def connected(self) -> AbstractContextManager["SqliteLogReader"]:
        return nullcontext(self)

    def mailboxes(self) -> dict[str, int]:
        with self._open() as query:
            return dict(query(_SQL["mailboxes"]))

    def heads(self) -> dict[str, int]:
        with self._open() as query:
            return dict(query(_SQL["heads"]))

    def bounds(self) -> dict[str, LogBounds]:
        with self._open() as query:
            return {name: LogBounds(*bounds) for name, *bounds in query(_SQL["bounds"])}

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        extents = []
        with self._open() as query:
            for name, id_ in query(_SQL["mailboxes"]):
                end = POSITIONS_PER_MAILBOX - 1 if through is None else through.get(name, 0)
                bounds = {"base": id_ * POSITIONS_PER_MAILBOX, "through": end}
                first = query(_SQL["first"].format(**bounds)) if end else []
                last = query(_SQL["last"].format(**bounds)) if first else []
                if last:  # retention may empty the log in between
                    extents.append(LogExtent(id_, name, *first[0], *last[0]))
        return extents

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        select = partial(self.commits, envelopes="envelope" in columns)
        return read_ranges(select, ranges, columns, where, allow_gaps=self.allow_gaps)

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        extent, first, last = range_
        bounds = {"base": extent.place(0), "first": first, "last": last}
        statement = _SQL["commits"].format(**bounds, envelopes=envelopes_column(is_read=envelopes))
        return to_commits((self._run_adbc if self._uses_adbc else self._run_sqlite3)(statement))

    @property
    def _uri(self) -> str:
        path = Path(self.store)
        check_reader(path)
        return f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' * is_frozen(path)}"

    @property
    def _uses_adbc(self) -> bool:
        return _has_adbc() and (self.driver == "adbc" or (self.driver == "auto" and _is_spark_task()))

    @contextmanager
    def _open(self) -> Iterator[Callable[[str], list[tuple[Any, ...]]]]:
        """Open the store while the context lasts; yield a function that runs a statement."""
        if not has_file(Path(self.store)):
            raise NotFound(f"There is no store at {self.store}; name one with --store or POSTROOM_STORE.")
        if self._uses_adbc:
            with self._adbc() as cursor:

                def query(statement: str) -> list[tuple[Any, ...]]:
                    cursor.execute(statement)
                    return list(cursor.fetchall())

                yield query
        else:
            with self._sqlite3() as connection:
                yield lambda statement: connection.execute(statement).fetchall()

    def _run_adbc(self, statement: str) -> Rows:
        with self._adbc({"adbc.sqlite.query.batch_rows": str(COMMITS_PER_BATCH)}) as cursor:
            cursor.execute(statement)
            yield from rows_of(cursor.fetch_record_batch())

    def _run_sqlite3(self, statement: str) -> Rows:
        with self._sqlite3() as connection:
            yield from connection.execute(statement)

    @contextmanager
    def _adbc(self, options: Mapping[str, str] | None = None) -> Iterator[Any]:
        from adbc_driver_manager import Error
        from adbc_driver_sqlite import dbapi

        try:
            with (
                dbapi.connect(self._uri, autocommit=True) as connection,
                connection.cursor(adbc_stmt_kwargs=dict(options or {})) as cursor,
            ):
                # Another task that opens or closes the file may lock it for a moment; ADBC would not wait.
                cursor.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
                yield cursor
        except Error as error:
            raise self._unreadable(error) from error

    @contextmanager
    def _sqlite3(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(connect_reader(Path(self.store))) as connection:
                yield connection
        except sqlite3.Error as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"The store {self.store} can't be read: {error}. Check the path and its permissions."
        )


def _has_adbc() -> bool:
    try:
        import adbc_driver_sqlite.dbapi  # noqa: F401
    except ImportError:
        return False
    return True


def _is_spark_task() -> bool:
    pyspark = sys.modules.get("pyspark")
    return pyspark is not None and pyspark.TaskContext.get() is not None
