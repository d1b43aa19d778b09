"""Reading and writing rows of the read models in PostgreSQL from tasks, by ADBC.

Rows are written directly into the tables, with a mark in the same transaction. Pieces are staged in unlogged
tables, which a crash of the server empties; the version is then restarted.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import polars as pl
import pyarrow as pa

from postroom.adapters.postgres.adbc import adbc_connection, adbc_database
from postroom.adapters.postgres.columns import ESCAPE, escape, unescape
from postroom.adapters.postgres.database import connect, shown, unavailable
from postroom.adapters.postgres.url import DEFAULT_SCHEMA, in_schema, schema_of
from postroom.adapters.sql.ddl import POSTGRES, select_rows
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.versions import now, parked_rows
from postroom.domain.errors import Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.fold import MESSAGES, FoldResult, piece_schemas
from postroom.projections.plan import Plan, with_bucket
from postroom.projections.ports.read_model_store import ActiveVersion
from postroom.projections.projection import Projection
from postroom.projections.search_text import search_tables

_NAME = "postroom, writing read models"
_SETTINGS = {"statement_timeout": "0", "synchronous_commit": "off"}
_SQL = statements("postroom.adapters.postgres", "sql/rebuild.sql")
_decode_bodies = msgspec.json.Decoder(BodyRules).decode


@dataclass(frozen=True)
class PostgresWriter:
    """A writer of parts; see `PartWriter`. The repr omits the URL, which may contain a password."""

    url: str = field(repr=False)
    version: int
    plan: Plan
    projections: Mapping[str, Projection]

    def is_done(self, part: str) -> bool:
        """Return whether a part is marked."""
        with closing(connect(self.url, _NAME)) as connection:
            row = connection.execute(
                "SELECT FROM postroom.projection_part WHERE version = %s AND part = %s", (self.version, part)
            ).fetchone()
            return row is not None

    def write(self, part: str, result: FoldResult) -> int:
        """Write a part in one transaction; see `PartWriter.write`."""
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
        """Return the staged pieces of a bucket; see `PartWriter.pieces`."""
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
                rows = rows.sort("id")
                tables[name + end] = _arrow(rows)
                for side, table in search_tables(rows, _decode_bodies(self.plan.bodies)).items():
                    tables[side + end] = table
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
class PostgresRowReader:
    """A reader of a version's rows; see `RowReader`. The repr omits the URL, which may contain a password."""

    url: str = field(repr=False)
    version: ActiveVersion

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        """Return rows; see `RowReader.rows`."""
        version = self.version.models[projection.name]
        return _fetch(self.url, select_rows(projection, version, POSTGRES.schema, where), projection.schema)


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
