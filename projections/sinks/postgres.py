"""Read models in the PostgreSQL database that holds the log, in the same schema.

Spark's tasks write rows straight into the tables, by ADBC, with a mark in the same transaction. What ranges
left over is staged in unlogged tables, which a crash of the server empties: then the version is begun anew.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import msgspec
import polars as pl
import psycopg
import pyarrow as pa
from psycopg import sql
from psycopg.rows import tuple_row

from postroom.adapters.postgres.columns import ESCAPE, INDEXED_CHARS, escape, unescape
from postroom.adapters.postgres.database import Connection, connect, shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.sql.statements import statements as named_statements
from postroom.domain.errors import Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.ddl import (
    POSTGRES,
    create_indexes,
    create_table,
    merge_into,
    statements,
)
from postroom.projections.fold import MESSAGES, Folded
from postroom.projections.projection import Projection, projections
from postroom.projections.search_text import search_tables
from postroom.projections.sinks import Done, Plan, Removed, Served, with_bucket
from postroom.projections.sinks.versions import (
    OF_MESSAGES,
    SIDE_TABLES,
    Versions,
    now,
    parked_rows,
    staged,
    wanted,
)

CONNECTIONS = 2
"""On which indexes are built side by side."""
ROWS_PER_BATCH = 20_000
_SQL = named_statements("postroom.projections", "sql/postgres/versions.sql")
_SQL_TYPES = {pl.Int64(): "BIGINT", pl.String(): 'TEXT COLLATE "C"', pl.Binary(): "BYTEA"}
_decode_bodies = msgspec.json.Decoder(BodyRules).decode


class PostgresSink:
    """The read models of a PostgreSQL store; see `Sink`.

    Arguments:
        url: of the database.
    """

    def __init__(self, url: str) -> None:
        self.where = shown(url)
        self._url = url

    def served(self) -> Served | None:
        """Tell about the active version; see `Sink.served`."""
        with self._database("postroom rebuild") as database:
            return Versions(database).served()

    @contextmanager
    def build(
        self, plan: Callable[[Served | None], Plan], *, restart: bool = False
    ) -> Iterator["PostgresBuild"]:
        """Begin a version or go on with one; see `Sink.build`."""
        with self._database("postroom rebuild") as database:
            database.connection.execute(_SQL["configure"])
            self._lock(database)
            versions = Versions(database)
            served = versions.served()
            planned = plan(served)
            found = None if restart else versions.unfinished(planned.request)
            if found is not None and database.is_empty(f"pieces_v{found[0]}"):
                found = None  # the server crashed, and with it went what was staged
            if found is None:
                versions.unfinished(())
                version = versions.begin(planned, served, lambda number: _create(database, planned, number))
            else:
                version, planned = found
                versions.go_on(version, planned)
            versions.clean()
            yield PostgresBuild(self._url, versions, database, version, planned)

    def roll_back(self, to: int | None = None) -> int:
        """Make an earlier version active again; see `Sink.roll_back`."""
        with self._database("postroom roll back") as database:
            return Versions(database).roll_back(to)

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield rows of the active version; see `Sink.rows`."""
        projection = projections()[model]
        names = list(columns or projection.schema)
        with self._database("postroom read models") as database, database.transaction():
            served = Versions(database).served()
            if served is None or model not in served.models:
                return
            schema = {name: projection.schema[name] for name in names}
            with database.connection.cursor("rows", row_factory=tuple_row) as cursor:
                cursor.execute(
                    sql.SQL("SELECT {} FROM {} ORDER BY {}").format(
                        _names(names), _table(f"{model}_v{served.models[model]}"), _names(projection.key)
                    )
                )
                while rows := cursor.fetchmany(ROWS_PER_BATCH):
                    yield _unescaped(pl.DataFrame(rows, schema=schema, orient="row"))

    @contextmanager
    def _database(self, name: str) -> Iterator["PostgresDatabase"]:
        with closing(connect(self._url, name)) as connection, unavailable(self._url):
            check_connection(connection, self._url, "store")
            yield PostgresDatabase(self.where, connection)

    def _lock(self, database: "PostgresDatabase") -> None:
        """Take the lock that ends with the connection, and so with the process at the latest."""
        try:
            database.connection.execute(_SQL["lock"])
        except psycopg.errors.LockNotAvailable as error:
            building = Versions(database).run("building")
            other = building[0][1] if building else "another process"
            raise Unavailable(
                f"The read models {self.where} are being rebuilt by {other}; wait until that is done.", 10_000
            ) from error


class PostgresDatabase:
    """One connection as `Versions` uses it; each statement is a transaction by itself."""

    schema = "postroom."

    def __init__(self, where: str, connection: Connection) -> None:
        self.where = where
        self.connection = connection

    def run(self, statement: str, facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each fact, and return its rows."""
        cursor = self.connection.execute(
            re.sub(r":(\w+)", r"%(\1)s", statement).encode(),
            {name: escape(value) if isinstance(value, str) else value for name, value in facts.items()},
        )
        return [] if cursor.description is None else cursor.fetchall()

    def transaction(self) -> Any:
        """Make what is run inside one transaction."""
        return self.connection.transaction()

    def tables(self) -> list[str]:
        """Return the names of all tables; partitions belong to theirs."""
        return [name for (name,) in self.connection.execute(_SQL["tables"]).fetchall()]

    def drop(self, table: str) -> bool:
        """Drop a table; a reader that has been at it for two versions is left alone until the next time."""
        try:
            self.execute("drop", table)
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    def execute(self, name: str, table: str, **facts: object) -> list[tuple[Any, ...]]:
        """Run a statement about a table, and return its rows."""
        cursor = self.connection.execute(sql.SQL(_SQL[name]).format(_table(table)), facts)
        return [] if cursor.description is None else cursor.fetchall()

    def is_empty(self, table: str) -> bool:
        """Tell whether a table has no rows."""
        return bool(self.execute("is_empty", table)[0][0])


class PostgresBuild:
    """A version that is being built; see `Build`."""

    def __init__(
        self, url: str, versions: Versions, database: PostgresDatabase, version: int, plan: Plan
    ) -> None:
        self.version = version
        self.plan = plan
        self._url = url
        self._versions = versions
        self._database = database

    @property
    def is_loaded(self) -> bool:
        """Tell whether all rows are in their tables and indexed."""
        return "indexed" in self.parts_done()

    def writer(self) -> "PostgresWriter":
        """Return what tasks write with."""
        return PostgresWriter(self._url, self.version, self.plan, wanted(self.plan))

    def parts_done(self) -> frozenset[str]:
        """Return which parts were written; see `Build.parts_done`."""
        return self._versions.parts_done(self.version)

    def load(self, done: Done) -> None:
        """Do nothing: the tasks write into the tables."""

    def remove_truncated(self, removed: Removed) -> None:
        """Remove what the log lost to retention; see `Build.remove_truncated`."""
        self.plan = msgspec.structs.replace(self.plan, removed=removed)
        with self._database.transaction():
            for before, after in removed:
                for table in OF_MESSAGES:
                    if table in self._tables():
                        self._database.execute(
                            "remove", f"{table}_v{self.version}", before=before, after=after
                        )
            self._versions.go_on(self.version, self.plan)

    def merge(self) -> None:
        """Merge the rows of each key; see `Build.merge`."""
        finished = self.parts_done()
        for name, projection in wanted(self.plan).items():
            if name != MESSAGES and f"merge-{name}" not in finished:
                with self._database.transaction():
                    statement = merge_into(projection, self.version, f"staged_{name}_v{self.version}")
                    self._database.connection.execute(statement.encode())
                    self._versions.mark(self.version, f"merge-{name}", 0)

    def counts(self) -> dict[str, int]:
        """Return how many rows each model has."""
        return {
            name: int(self._database.execute("count", f"{name}_v{self.version}")[0][0])
            for name in self.plan.models
        }

    def parked(self) -> int:
        """Return how many records could not be folded."""
        return self._versions.parked(self.version)

    def index(self, done: Done) -> None:
        """Build indexes on two connections; see `Build.index`."""
        values = {"version": self.version, "indexed_chars": INDEXED_CHARS}
        all_: list[str] = []
        if MESSAGES in self.plan.models:
            all_ += statements(POSTGRES, "search_indexes.sql", **values)
            all_ += statements(POSTGRES, "indexes.sql", **values)
        for projection in wanted(self.plan).values():
            all_ += create_indexes(projection, self.version, POSTGRES)
        # Which would wait for the indexes of its table.
        last = [each for each in all_ if each.startswith("VACUUM")]
        self._run_once([each for each in all_ if each not in last], done)
        for statement in (*last, self._vacuum()):
            self._database.connection.execute(statement.encode())
        with self._database.transaction():
            for table in self._tables():
                self._database.execute("vacuum_again", f"{table}_v{self.version}")
            self._versions.start_cursor(self.version, self.plan)
            self._versions.mark(self.version, "indexed", 0)

    def differences(self) -> list[str]:
        """Compare with the active version; see `Build.differences`."""
        return self._versions.differences(self.version, self.plan)

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one; see `Build.flip`."""
        self._versions.flip(self.version, self.plan, counts, seconds)

    def fail(self, error: str) -> None:
        """Drop this version; see `Build.fail`."""
        self._versions.end(self.version, "failed", error)

    def _vacuum(self) -> str:
        """Return what tells the planner about the rows, and what makes indexes answer by themselves."""
        tables = ", ".join(POSTGRES.table(f"{name}_v{self.version}") for name in self.plan.models)
        return f"VACUUM (ANALYZE) {tables}"

    def _tables(self) -> list[str]:
        return [table for model in self.plan.models for table in (model, *SIDE_TABLES.get(model, ()))]

    def _run_once(self, all_: Sequence[str], done: Done) -> None:
        """Run statements side by side, each with a mark, so that none runs again after a kill."""
        finished = self.parts_done()
        waiting = [(f"index-{number:03d}", each) for number, each in enumerate(all_)]
        waiting = [each for each in waiting if each[0] not in finished]
        lock = Lock()
        count = len(all_) - len(waiting)

        def work() -> None:
            nonlocal count
            with closing(connect(self._url, "postroom rebuild")) as connection:
                connection.execute(_SQL["configure"])
                connection.execute(_SQL["wait_for_locks"])
                versions = Versions(PostgresDatabase(self._database.where, connection))
                while True:
                    with lock:
                        if not waiting:
                            return
                        mark, statement = waiting.pop(0)
                    if statement.startswith(
                        "VACUUM"
                    ):  # which may not be in a transaction, but may be repeated
                        connection.execute(statement.encode())
                    else:
                        with connection.transaction():
                            connection.execute(statement.encode())
                            versions.mark(self.version, mark, 0)
                    with lock:
                        count += 1
                        done(count, len(all_))

        with ThreadPoolExecutor(CONNECTIONS) as pool, unavailable(self._url):
            for future in [pool.submit(work) for _ in range(CONNECTIONS)]:
                future.result()


@dataclass(frozen=True)
class PostgresWriter:
    """Write parts from Spark's tasks; see `Writer`. Its URL, which may hold a password, is not shown."""

    url: str = field(repr=False)
    version: int
    plan: Plan
    wanted: Mapping[str, Projection]

    def is_done(self, part: str) -> bool:
        """Tell whether a part is marked."""
        with closing(connect(self.url, "postroom, writing read models")) as connection:
            found = connection.execute(
                "SELECT FROM postroom.projection_part WHERE version = %s AND part = %s", (self.version, part)
            )
            return found.fetchone() is not None

    def write(self, part: str, folded: Folded) -> int:
        """Write a part in one transaction; see `Writer.write`."""
        tables = self._tables(part, folded)
        rows = sum(frame.height for name, frame in folded.rows.items() if name in self.wanted)
        with _adbc(self.url) as (connection, cursor):
            cursor.execute(
                "INSERT INTO postroom.projection_part (version, part, rows, folded_at) VALUES "
                f"({self.version}, '{part}', {rows}, {now()}) ON CONFLICT DO NOTHING RETURNING rows"
            )
            if not cursor.fetchall():
                return 0
            for name, table in tables.items():
                if table.num_rows:
                    cursor.adbc_ingest(name, _storable(table), mode="append", db_schema_name="postroom")
            if folded.parked:
                parked = parked_rows(folded.parked, self.plan.cuts, self.version)
                cursor.executemany(_SQL["park"], _storable(_arrow(parked)))
            connection.commit()
        return rows

    def pieces(self, bucket: int) -> dict[str, pl.DataFrame]:
        """Return what was staged of a bucket; see `Writer.pieces`."""
        found = {}
        for name, schema in staged(self.wanted).items():
            table = f"postroom.pieces_{name}_v{self.version}"
            statement = f"SELECT {', '.join(schema)} FROM {table} WHERE bucket = {bucket}"
            found[name] = fetch(self.url, statement, schema)
        return found

    def _tables(self, part: str, folded: Folded) -> dict[str, pa.Table]:
        """Return what a part adds to which table."""
        end = f"_v{self.version}"
        tables: dict[str, pa.Table] = {}
        for name, rows in folded.rows.items():
            if name == MESSAGES and name in self.wanted:
                rows = rows.sort("id")
                tables[name + end] = _arrow(rows)
                for side, searched in search_tables(rows, _decode_bodies(self.plan.bodies)).items():
                    tables[side + end] = searched
            elif name in self.wanted:
                tables[f"staged_{name}{end}"] = _arrow(rows.with_columns(pl.lit(part).alias("part")))
        for name, pieces in folded.pieces.items():
            tables[f"pieces_{name}{end}"] = _arrow(with_bucket(pieces, self.plan.buckets))
        return tables


@contextmanager
def _adbc(url: str) -> Iterator[tuple[Any, Any]]:
    """Open a connection of ADBC with a transaction that ends with the context, committed or not."""
    from adbc_driver_manager import Error
    from adbc_driver_postgresql import dbapi

    try:
        with dbapi.connect(url) as connection, connection.cursor() as cursor:
            cursor.execute(_SQL["configure_writer"])
            cursor.fetchall()
            yield connection, cursor
    except Error as error:
        said = str(error).replace(url, shown(url)).partition("\n")[0]
        raise Unavailable(f"The database {shown(url)} refused read models: {said}") from None


def fetch(url: str, statement: str, schema: Mapping[str, pl.DataType]) -> pl.DataFrame:
    """Return the rows of a SELECT statement, text as it was before it was stored."""
    with _adbc(url) as (_, cursor):
        cursor.execute(statement)
        frame = pl.from_arrow(cursor.fetch_arrow_table())
    assert isinstance(frame, pl.DataFrame)
    return _unescaped(frame.cast(schema))  # type: ignore[arg-type]


def _create(database: PostgresDatabase, plan: Plan, version: int) -> None:
    """Make the tables of a version, and those in which pieces of it are staged."""
    run: list[str] = []
    for projection in wanted(plan).values():
        run.append(create_table(projection, version, POSTGRES))
        if projection.name == MESSAGES:
            run += statements(POSTGRES, "search_tables.sql", version=version)
        else:
            columns = _declared(projection.schema)
            run.append(
                f"CREATE UNLOGGED TABLE postroom.staged_{projection.name}_v{version} ({columns}, part TEXT)"
            )
    for name, schema in staged(wanted(plan)).items():
        table = f"postroom.pieces_{name}_v{version}"
        run.append(f"CREATE TABLE {table} ({_declared(schema)}, bucket BIGINT) PARTITION BY LIST (bucket)")
        run += (
            f"CREATE UNLOGGED TABLE {table}_{bucket} PARTITION OF {table} FOR VALUES IN ({bucket})"
            for bucket in range(plan.buckets)
        )
    # Whose row tells that what was staged is still there.
    run.append(f"CREATE UNLOGGED TABLE postroom.pieces_v{version} AS SELECT 1 AS row")
    for statement in run:
        database.connection.execute(statement.encode())


def _declared(schema: Mapping[str, pl.DataType]) -> str:
    return ", ".join(f"{name} {_SQL_TYPES[type_]}" for name, type_ in schema.items())


def _arrow(frame: pl.DataFrame) -> pa.Table:
    return frame.to_arrow(compat_level=pl.CompatLevel.oldest())


def _storable(table: pa.Table) -> pa.Table:
    """Return a table whose text PostgreSQL can hold; hardly any has what must be escaped."""
    for number, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        if pa.types.is_large_string(column.type) and any(map(_has_escaped, column.chunks)):
            texts = (None if text is None else escape(text) for text in column.to_pylist())
            table = table.set_column(number, name, pa.array(texts, pa.large_string()))
    return table


def _has_escaped(chunk: pa.Array) -> bool:
    data = chunk.buffers()[2]
    if data is None:
        return False
    written = data.to_pybytes()
    return b"\0" in written or ESCAPE.encode() in written


def _unescaped(frame: pl.DataFrame) -> pl.DataFrame:
    """Return text as it was before `_storable`."""
    odd = [
        column.name
        for column in frame.iter_columns()
        if column.dtype == pl.String and column.str.contains(ESCAPE, literal=True).any()
    ]
    return frame.with_columns(pl.col(name).map_elements(unescape, pl.String) for name in odd)


def _table(name: str) -> sql.Identifier:
    return sql.Identifier("postroom", name)


def _names(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
