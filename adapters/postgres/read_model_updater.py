"""The read model updater port over the database of a PostgreSQL log."""

import sys
from array import array as array_of
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from postroom.adapters.postgres.columns import (
    BinaryValue,
    PackedDumper,
    array,
    array_head,
    kind_name,
    unescape_row,
)
from postroom.adapters.postgres.database import connect, describe, follow_lock, has_ended, shown
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.read_model_updater import CursorConflict, SqlReadModelUpdater
from postroom.adapters.sql.statements import check_ids, statements
from postroom.projections.incremental.cursors import Version
from postroom.projections.ports.read_model_store import LockTimeout

_SETTINGS = {
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
    # Batches undone by a crash are applied again, as the cursor is undone with their rows.
    "synchronous_commit": "off",
    # Lookups by key have an index, whatever the statistics say.
    "enable_seqscan": "off",
    "jit": "off",
}
_SQL = statements("postroom.adapters.postgres", "sql/update.sql")
_TYPES: dict[Any, type] = {pl.Int64: int, pl.String: str, pl.Binary: bytes, pl.Null: str}

BULK_ROWS = 100
"""Columns with fewer rows are packed value by value, which has less overhead."""

Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresReadModelUpdater(SqlReadModelUpdater):
    """An updater of a PostgreSQL database; see `ReadModelUpdater`."""

    min, max = "least", "greatest"

    def __init__(self, url: str) -> None:
        super().__init__(shown(url))
        self._url = url
        self._db: Connection | None = None
        self._is_in_transaction = False

    def close(self) -> None:
        """Close the connection; see `ReadModelUpdater.close`."""
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def leader_lock(self, target: str = "") -> Iterator[bool]:
        """Acquire an advisory lock on a separate connection; see `ReadModelUpdater.leader_lock`."""
        name = "postroom views follow, leader"
        with closing(connect(self._url, name, session_for="a follower")) as connection:
            try:
                (is_leader,) = connection.execute(
                    _SQL["try_lock"], [follow_lock(self._url, target)]
                ).fetchone() or (False,)
            except psycopg.Error as error:
                raise describe(error, self._url) from error
            try:
                yield bool(is_leader)
            finally:
                with suppress(psycopg.Error):  # the server releases it with the connection
                    connection.execute(_SQL["unlock"])

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        if self._db is not None and self._is_in_transaction:
            yield self._db  # errors are handled where the transaction ends
            return
        if self._db is not None and has_ended(self._db):
            self.close()
        try:
            if self._db is None:
                self._db = connect(self._url, "postroom views follow", _SETTINGS)
                check_connection(self._db, self._url, "store")
                self._db.adapters.register_dumper(BinaryValue, PackedDumper)
            yield self._db
        except psycopg.Error as error:
            self.close()
            if isinstance(error, psycopg.errors.UniqueViolation):
                check_ids(error, self.where)
            if isinstance(error, psycopg.errors.LockNotAvailable):
                raise LockTimeout(self.where) from error
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
            return [unescape_row(row) for row in db.execute(statement.encode(), binary=True).fetchall()]

    def _write(self, statement: str, rows: pl.DataFrame) -> None:
        with self._connection() as db:
            db.execute(_with_rows(statement, rows).encode(), _arrays(rows))

    def _fetch(self, statement: str, rows: pl.DataFrame) -> list[tuple[Any, ...]]:
        with self._connection() as db:
            cursor = db.execute(_with_rows(statement, rows).encode(), _arrays(rows), binary=True)
            return [unescape_row(row) for row in cursor.fetchall()]

    def _lock(self, version: Version) -> None:
        # Prevents a flip before the commit: two versions that share a table must not both apply the batch.
        if self._read(self._sql("lock_version", version=version.number, lock=" FOR SHARE")) != [
            (version.status,)
        ]:
            raise CursorConflict

    def _index_text(self, number: int, texts: pl.DataFrame) -> None:
        """Do nothing: PostgreSQL maintains its indexes."""

    def _unindex_text(self, number: int, ids: pl.DataFrame) -> None:
        """Do nothing; see `_index_text`."""


def _with_rows(statement: str, rows: pl.DataFrame) -> str:
    arrays = ", ".join(f"%s::{kind_name(_TYPES[type_])}[]" for type_ in rows.dtypes)
    return statement.format(rows=f"SELECT * FROM unnest({arrays}) AS source ({', '.join(rows.columns)})")


def _arrays(rows: pl.DataFrame) -> list[BinaryValue]:
    if rows.height < BULK_ROWS:
        return [array(_TYPES[column.dtype.base_type()], column.to_list()) for column in rows]
    return [pack_column(column) for column in rows]


def pack_column(column: pl.Series) -> BinaryValue:
    """Pack a column like `array`, in bulk, which is faster for many values."""
    type_ = _TYPES[column.dtype.base_type()]
    if type_ is str and column.str.contains("[\0\x1a]").any():
        return array(str, column.to_list())  # rare: text to be escaped
    if type_ is int:
        sizes = column.is_null().replace_strict({True: -1, False: 8}, return_dtype=pl.Int32)
        values = _pack_integers("q", column.fill_null(0)).cast(pa.large_binary())
        if column.has_nulls():
            values = pc.if_else(column.is_null().to_arrow(), b"", values)
    else:
        column = column.cast(pl.Binary)
        sizes = column.bin.size().cast(pl.Int32).fill_null(-1)
        values = column.fill_null(b"").to_arrow(compat_level=pl.CompatLevel.oldest())
    items = pc.binary_join_element_wise(
        _pack_integers("i", sizes).cast(pa.large_binary()), values, pa.scalar(b"", pa.large_binary())
    )
    # The items of an Arrow array are contiguous, like those of a PostgreSQL array.
    data = items.buffers()[2].slice(0, pc.sum(pc.binary_length(items)).as_py())
    return BinaryValue(array_head(type_, len(column), has_null=column.has_nulls()) + data)


def _pack_integers(type_code: str, values: pl.Series) -> pa.Array:
    """Pack integers in network byte order, each as a binary value.

    Arguments:
        type_code: of `array`, with the size of the values.
    """
    integers = array_of(type_code)
    source = values.to_arrow()
    size = integers.itemsize
    integers.frombytes(source.buffers()[1][source.offset * size : (source.offset + len(source)) * size])
    if sys.byteorder == "little":
        integers.byteswap()
    return pa.Array.from_buffers(pa.binary(size), len(source), [None, pa.py_buffer(integers)])
