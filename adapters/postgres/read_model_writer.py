"""Writing the read models in PostgreSQL: by tasks through ADBC, and from new records."""

import sys
from array import array as array_of
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from postroom.adapters.postgres.columns import (
    ESCAPE,
    BinaryValue,
    PackedDumper,
    adbc_connection,
    adbc_database,
    array,
    array_head,
    escape,
    kind_name,
    unescape,
    unescape_row,
)
from postroom.adapters.postgres.database import connect, follow_lock
from postroom.adapters.postgres.errors import describe, shown, unavailable
from postroom.adapters.postgres.hints import TableHints
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.reconnecting import has_ended
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, in_schema, schema_of
from postroom.adapters.sql.ddl import POSTGRES, select_rows
from postroom.adapters.sql.read_model_updater import CursorConflict, SqlReadModelUpdater
from postroom.adapters.sql.statements import check_ids, statements
from postroom.adapters.sql.versions import now, parked_rows
from postroom.domain.errors import Unavailable
from postroom.projections.fold import MESSAGES, FoldResult, piece_schemas
from postroom.projections.incremental import Version
from postroom.projections.plan import Plan, with_bucket
from postroom.projections.ports.read_model_store import ActiveVersion, LockTimeout, PartWriter, RowReader
from postroom.projections.projection import Projection
from postroom.projections.search_text import compact_tables

_NAME = "postroom, writing read models"
_SETTINGS = {"statement_timeout": "0", "synchronous_commit": "off"}
_SQL = statements("postroom.adapters.postgres", "sql/rebuild.sql")


@dataclass(frozen=True)
class PostgresWriter(PartWriter):
    """A writer of parts; see `PartWriter`. The repr omits the URL, which may contain a password."""

    url: str = field(repr=False)
    version: int
    plan: Plan
    projections: Mapping[str, Projection]
    stores_envelopes = False

    def is_done(self, part: str) -> bool:
        """Return whether a part is marked."""
        with closing(connect(self.url, _NAME)) as connection:
            row = connection.execute(
                "SELECT FROM postroom.projection_part WHERE version = %s AND part = %s", (self.version, part)
            ).fetchone()
            return row is not None

    def write(self, part: str, result: FoldResult) -> int:
        tables = self._tables(part, result)
        rows = sum(frame.height for name, frame in result.rows.items() if name in self.projections)
        schema = schema_of(self.url) or DEFAULT_SCHEMA
        with _writing(self.url) as (connection, cursor):
            cursor.execute(
                f'INSERT INTO "{schema}".projection_part (version, part, rows, folded_at) VALUES '
                f"({self.version}, '{part}', {rows}, {now()}) ON CONFLICT DO NOTHING RETURNING rows"
            )
            if not cursor.fetchall():
                return 0
            for name, table in tables.items():
                if table.num_rows:
                    cursor.adbc_ingest(name, _escape_table(table), mode="append", db_schema_name=schema)
            if result.parked:
                parked = parked_rows(result.parked, self.plan.extents, self.version)
                cursor.executemany(
                    in_schema(schema_of(self.url), _SQL["park"]), _escape_table(_arrow(parked))
                )
            connection.commit()
        return rows

    def pieces(self, bucket: int) -> dict[str, pl.DataFrame]:
        pieces = {}
        for name, schema in piece_schemas(self.projections).items():
            table = f"postroom.pieces_{name}_v{self.version}"
            statement = f"SELECT {', '.join(schema)} FROM {table} WHERE bucket = {bucket}"
            pieces[name] = _fetch(self.url, statement, schema)
        return pieces

    def _tables(self, part: str, result: FoldResult) -> dict[str, pa.Table]:
        """Return the rows that a part adds, by table."""
        end = f"_v{self.version}"
        tables: dict[str, pa.Table] = {}
        for name, rows in result.rows.items():
            if name == MESSAGES and name in self.projections:
                compact = compact_tables(rows.sort("id"), self.plan.body_rules)
                tables[name + end] = _arrow(compact[MESSAGES].drop("text"))
                tables["header" + end] = _arrow(compact["header"])
                tables["text" + end] = _arrow(compact["search"])
            elif name in self.projections:
                tables[f"staged_{name}{end}"] = _arrow(rows.with_columns(pl.lit(part).alias("part")))
        for name, pieces in result.pieces.items():
            tables[f"pieces_{name}{end}"] = _arrow(with_bucket(pieces, self.plan.buckets))
        return tables


@contextmanager
def _writing(url: str) -> Iterator[tuple[Any, Any]]:
    """Open an ADBC connection in a transaction, which is rolled back unless it is committed."""
    from adbc_driver_manager import Error

    try:
        with adbc_connection(_database(url)) as connection, connection.cursor() as cursor:
            yield connection, cursor
    except Error as error:
        reason = str(error).replace(url, shown(url)).partition("\n")[0]
        raise Unavailable(f"The database {shown(url)} can't be used: {reason}") from None


def _fetch(url: str, statement: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return the rows of a SELECT statement, with text unescaped."""
    if _database(url) is None:
        with closing(connect(url, _NAME, _SETTINGS)) as connection, unavailable(url):
            rows = connection.execute(statement.encode(), binary=True).fetchall()
        return unescape_frame(pl.DataFrame(rows, schema, orient="row"))
    with _writing(url) as (_, cursor):
        cursor.execute(in_schema(schema_of(url), statement))
        frame = pl.DataFrame(cursor.fetch_arrow_table())
    return unescape_frame(frame.cast(schema))  # type: ignore[arg-type]


def _database(url: str) -> Any:
    return adbc_database(url, _NAME, _SETTINGS)


@dataclass(frozen=True)
class PostgresRowReader(RowReader):
    """A reader of a version's rows; see `RowReader`. The repr omits the URL, which may contain a password."""

    url: str = field(repr=False)
    version: ActiveVersion

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        version = self.version.models[projection.name]
        statement = select_rows(projection, version, POSTGRES, where)
        return _fetch(self.url, statement, projection.stored_schema)


def _arrow(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _escape_table(table: pa.Table) -> pa.Table:
    """Return a table with its text escaped for PostgreSQL; few columns need it."""
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_large_string(column.type) and any(map(_has_escaped, column.chunks)):
            texts = (None if text is None else escape(text) for text in column.to_pylist())
            table = table.set_column(number, name, pa.array(texts, pa.large_string()))
    return table


def _has_escaped(chunk: pa.Array) -> bool:
    data = chunk.buffers()[2]
    if data is None:
        return False
    text = data.to_pybytes()
    return b"\0" in text or ESCAPE.encode() in text


def unescape_frame(frame: pl.DataFrame) -> pl.DataFrame:
    """Reverse `_escape_table`."""
    escaped = [
        column.name
        for column in frame.iter_columns()
        if column.dtype == pl.String and column.str.contains(ESCAPE, literal=True).any()
    ]
    return frame.with_columns(pl.col(name).map_elements(unescape, pl.String) for name in escaped)


_UPDATER_SETTINGS = {
    "lock_timeout": "10s",
    "idle_in_transaction_session_timeout": "60s",
    # Batches undone by a crash are applied again, as the cursor is undone with their rows.
    "synchronous_commit": "off",
    # Lookups by key have an index, whatever the statistics say.
    "enable_seqscan": "off",
    "jit": "off",
}
_UPDATE_SQL = statements("postroom.adapters.postgres", "sql/update.sql")
_TYPES: dict[Any, type] = {pl.Int64: int, pl.String: str, pl.Binary: bytes, pl.Null: str}

BULK_ROWS = 100
"""Columns with fewer rows are packed value by value, which has less overhead."""

Connection = psycopg.Connection[tuple[Any, ...]]


class PostgresReadModelUpdater(SqlReadModelUpdater):
    """An updater of a PostgreSQL database; see `ReadModelUpdater`."""

    dialect = POSTGRES
    other_columns = ("text",)
    min, max = "least", "greatest"

    def __init__(self, url: str) -> None:
        super().__init__(shown(url))
        self._url = url
        self._db: Connection | None = None
        self._hints: TableHints | None = None
        self._is_in_transaction = False

    def close(self) -> None:
        """Close the connection; see `FollowedLog.close`."""
        if self._db is not None:
            self._db.close()
            self._db = None

    @contextmanager
    def leader_lock(self, target: str = "") -> Iterator[bool]:
        """Acquire an advisory lock on a separate connection; see `FollowedLog.leader_lock`."""
        name = "postroom views follow, leader"
        with closing(connect(self._url, name, session_for="a follower")) as connection:
            try:
                (is_leader,) = connection.execute(
                    _UPDATE_SQL["try_lock"], [follow_lock(self._url, target)]
                ).fetchone() or (False,)
            except psycopg.Error as error:
                raise describe(error, self._url) from error
            hints = self._hints = TableHints(connection, self._url, "log")
            try:
                yield bool(is_leader)
            finally:
                self._hints = None
                with suppress(psycopg.Error):  # the server releases it with the connection
                    hints.close()
                    connection.execute(_UPDATE_SQL["unlock"])

    def wait_for_commit(self, seconds: float) -> bool | None:
        """Wait for a notification in the session of the lock; see `FollowedLog.wait_for_commit`."""
        return None if self._hints is None else self._hints.wait(seconds)

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        if self._db is not None and self._is_in_transaction:
            yield self._db  # errors are handled where the transaction ends
            return
        if self._db is not None and has_ended(self._db):
            self.close()
        try:
            if self._db is None:
                self._db = connect(self._url, "postroom views follow", _UPDATER_SETTINGS)
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

    def _index_text(self, number: int, tables: dict[str, pl.DataFrame]) -> None:
        self._insert(f"text_v{number}", tables["search"])

    def _unindex_text(self, number: int, texts: pl.DataFrame) -> None:
        """Do nothing: PostgreSQL maintains its indexes."""


def _with_rows(statement: str, rows: pl.DataFrame) -> str:
    arrays = ", ".join(f"%s::{kind_name(_TYPES[type_])}[]" for type_ in rows.dtypes)
    select = f"SELECT * FROM unnest({arrays}) AS source ({', '.join(rows.columns)})"
    return statement.format(rows=select, values=select)


def _arrays(rows: pl.DataFrame) -> list[BinaryValue]:
    if rows.height < BULK_ROWS:
        return [array(_TYPES[column.dtype.base_type()], column.to_list()) for column in rows]
    return [pack_column(column) for column in rows]


def pack_column(column: pl.Series) -> BinaryValue:
    """Pack a column like `array`, in bulk, which is faster for many values."""
    type_ = _TYPES[column.dtype.base_type()]
    if type_ is str and column.str.contains("[\0\x1a]").any():
        return array(str, column.to_list())  # rare: the text must be escaped
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
