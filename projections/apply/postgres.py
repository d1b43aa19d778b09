"""The tables of the read models in the PostgreSQL database that holds the log."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from postroom.adapters.postgres.columns import (
    Packed,
    PackedDumper,
    array,
    array_head,
    kind_name,
    restored,
)
from postroom.adapters.postgres.database import connect, describe, shown
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements
from postroom.projections.apply import Version
from postroom.projections.apply.tables import Moved, SqlTables

_SQL = statements("postroom.projections", "sql/postgres/apply.sql")
_TYPES: dict[Any, type] = {pl.Int64: int, pl.String: str, pl.Binary: bytes, pl.Null: str}

FEW = 100
"""So few rows are packed value by value, which costs less to begin."""

Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresTables(SqlTables):
    """Apply batches in a PostgreSQL database; see `Tables`."""

    min, max = "least", "greatest"

    def __init__(self, url: str) -> None:
        super().__init__(shown(url))
        self._url = url
        self._db: Connection | None = None
        self._is_in_transaction = False

    def close(self) -> None:
        """Close the connection; see `Tables.close`."""
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def leading(self) -> Iterator[bool]:
        """Take a lock that ends with its connection; see `Tables.leading`."""
        with closing(connect(self._url, "postroom project follow, leading")) as connection:
            try:
                (leads,) = connection.execute(_SQL["lead"]).fetchone() or (False,)
            except psycopg.Error as error:
                raise describe(error, self._url) from error
            try:
                yield bool(leads)
            finally:
                with suppress(psycopg.Error):  # of a server that is gone, say: the lock went with it
                    connection.execute(_SQL["end_leading"])

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        if self._db is not None and self._is_in_transaction:
            yield self._db  # whose errors are seen to when the transaction ends
            return
        try:
            if self._db is None:
                self._db = connect(self._url, "postroom project follow")
                check_connection(self._db, self._url, "store")
                self._db.adapters.register_dumper(Packed, PackedDumper)
                self._db.execute(_SQL["configure"])
            yield self._db
        except psycopg.Error as error:
            self.close()
            raise describe(error, self._url) from error

    def _table(self, name: str) -> str:
        return f"postroom.{name}"

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection() as db, db.transaction(), db.pipeline():
            self._is_in_transaction = True
            try:
                yield
            finally:
                self._is_in_transaction = False

    def _read(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            return db.execute(statement.encode()).fetchall()

    def _read_log(self, statement: str) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            return [restored(row) for row in db.execute(statement.encode(), binary=True).fetchall()]

    def _write(self, statement: str, given: pl.DataFrame) -> None:
        with self._connection() as db:
            db.execute(_with_rows(statement, given).encode(), _arrays(given))

    def _fetch(self, statement: str, given: pl.DataFrame) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            found = db.execute(_with_rows(statement, given).encode(), _arrays(given), binary=True)
            return [restored(row) for row in found.fetchall()]

    def _hold(self, version: Version) -> None:
        # A flip waits until the batch is committed, so that no two versions that share a table both apply it.
        if self._read(self._sql("hold", version=version.number, lock=" FOR SHARE")) != [(version.status,)]:
            raise Moved

    def _index_text(self, number: int, texts: pl.DataFrame) -> None:
        """Do nothing: PostgreSQL's indexes follow their tables."""

    def _unindex_text(self, number: int, ids: pl.DataFrame) -> None:
        """Do nothing; see `_index_text`."""


def _with_rows(statement: str, given: pl.DataFrame) -> str:
    arrays = ", ".join(f"%s::{kind_name(_TYPES[type_])}[]" for type_ in given.dtypes)
    return statement.format(rows=f"SELECT * FROM unnest({arrays}) AS given ({', '.join(given.columns)})")


def _arrays(given: pl.DataFrame) -> list[Packed]:
    if given.height < FEW:
        return [array(_TYPES[column.dtype.base_type()], column.to_list()) for column in given]
    return [packed(column) for column in given]


def packed(column: pl.Series) -> Packed:
    """Return a column as the array that `array` makes of its values, packed at once: it is for many."""
    type_ = _TYPES[column.dtype.base_type()]
    if type_ is str and column.str.contains("[\0\x1a]").any():
        return array(str, column.to_list())  # what has to be escaped is rare
    sizes: Iterable[int]
    if type_ is int:
        sizes = column.is_null().replace_strict({True: -1, False: 8}, return_dtype=pl.Int32)
        values = _fixed("q", column.fill_null(0)).cast(pa.large_binary())
        if column.has_nulls():
            values = pc.if_else(column.is_null().to_arrow(), b"", values)
    else:
        column = column.cast(pl.Binary)
        sizes = column.bin.size().cast(pl.Int32).fill_null(-1)
        values = column.fill_null(b"").to_arrow(compat_level=pl.CompatLevel.oldest())
    items = pc.binary_join_element_wise(
        _fixed("i", sizes).cast(pa.large_binary()), values, pa.scalar(b"", pa.large_binary())
    )
    # The items of an Arrow array stand one behind the other, as those of the database's do.
    data = items.buffers()[2].slice(0, pc.sum(pc.binary_length(items)).as_py())
    return Packed(array_head(type_, len(column), has_null=column.has_nulls()) + data)


def _fixed(format_: str, values: Iterable[int]) -> pa.Array:
    """Return integers in the database's order of bytes, as an array of bytes."""
    given = list(values)
    data = struct.pack(f"!{len(given)}{format_}", *given)
    return pa.Array.from_buffers(
        pa.binary(struct.calcsize(f"!{format_}")), len(given), [None, pa.py_buffer(data)]
    )
