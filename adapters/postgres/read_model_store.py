"""The read model store port over the database and schema of a PostgreSQL log."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from threading import Lock
from typing import Any

import polars as pl
import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from postroom.adapters.postgres.columns import INDEXED_BYTES, INDEXED_CHARS, escape
from postroom.adapters.postgres.database import NO_SETTINGS, Connection, Settings, connect
from postroom.adapters.postgres.errors import shown, unavailable
from postroom.adapters.postgres.migrate import check_connection
from postroom.adapters.postgres.read_model_writer import PostgresRowReader, PostgresWriter, unescape_frame
from postroom.adapters.sql.ddl import (
    POSTGRES,
    create_indexes,
    create_table,
    merge_into,
    read_columns,
    replace_views,
    statements,
)
from postroom.adapters.sql.staging import CatalogBuild
from postroom.adapters.sql.statements import check_ids
from postroom.adapters.sql.statements import statements as named_statements
from postroom.adapters.sql.versions import OF_MESSAGES, Versions
from postroom.domain.errors import Unavailable
from postroom.projections.fold import MESSAGES, piece_schemas
from postroom.projections.plan import Plan, Truncated
from postroom.projections.ports.read_model_store import (
    ActiveVersion,
    LockTimeout,
    OnProgress,
    VerifiableStore,
)
from postroom.projections.projection import load_projections

CONNECTIONS = 2
"""Connections that build indexes concurrently."""
LOCK_TIMEOUT_MS = 60_000
"""How long a transaction waits for the batch of a follower, which locks its version, and for queries."""
ROWS_PER_BATCH = 20_000
_BUILD = {
    "lock_timeout": "2s",
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    "maintenance_work_mem": "256MB",
    # Two connections build indexes, each on one core.
    "max_parallel_maintenance_workers": "0",
    # Commits become durable in order, so a flip never precedes its rows; what a crash undoes is rebuilt.
    "synchronous_commit": "off",
    # The server stops building an index when the rebuild is killed.
    "client_connection_check_interval": "1s",
}
_SQL = named_statements("postroom.adapters.postgres", "sql/rebuild.sql")
_SQL_TYPES = {pl.Int64(): "BIGINT", pl.String(): 'TEXT COLLATE "C"', pl.Binary(): "BYTEA"}


class PostgresReadModelStore(VerifiableStore):
    """The read models of a PostgreSQL store; see `ReadModelStore`.

    Arguments:
        url: URL of the database.
    """

    def __init__(self, url: str) -> None:
        self.where = shown(url)
        self._url = url

    def active_version(self) -> ActiveVersion | None:
        with self._database("postroom rebuild") as database:
            return Versions(database).active_version()

    @contextmanager
    def build(
        self, plan: Callable[[ActiveVersion | None], Plan], *, restart: bool = False
    ) -> Iterator["PostgresBuild"]:
        with self._database("postroom rebuild", _BUILD, "a rebuild") as database:
            self._lock(database)
            versions = Versions(database)
            version, planned = versions.open(
                plan,
                partial(_create, database),
                restart=restart,
                # A crash of the server empties unlogged tables.
                is_usable=lambda number: not database.is_empty(f"pieces_v{number}"),
            )
            yield PostgresBuild(self._url, versions, database, version, planned)

    def roll_back(self, to: int | None = None) -> int:
        with self._database("postroom roll back") as database:
            return Versions(database).roll_back(to)

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        projection = load_projections()[model]
        names = list(columns or projection.stored_schema)
        with self._database("postroom read models") as database, database.transaction():
            active = Versions(database).active_version()
            if active is None or model not in active.models:
                return
            schema = {name: projection.schema[name] for name in names}
            with database.connection.cursor("rows", row_factory=tuple_row) as cursor:
                cursor.execute(
                    sql.SQL("SELECT {} FROM {} ORDER BY {}").format(
                        sql.SQL(read_columns(model, names, POSTGRES)),
                        _table(f"{model}_v{active.models[model]}"),
                        _names(projection.key),
                    )
                )
                while rows := cursor.fetchmany(ROWS_PER_BATCH):
                    yield unescape_frame(pl.DataFrame(rows, schema=schema, orient="row"))

    def row_reader(self, version: ActiveVersion) -> PostgresRowReader:
        return PostgresRowReader(self._url, version)

    @contextmanager
    def _database(
        self, name: str, settings: Settings = NO_SETTINGS, session_for: str = ""
    ) -> Iterator["PostgresDatabase"]:
        connection = connect(self._url, name, settings, session_for=session_for)
        with closing(connection), unavailable(self._url):
            check_connection(connection, self._url, "store")
            yield PostgresDatabase(self.where, connection)

    def _lock(self, database: "PostgresDatabase") -> None:
        """Acquire the lock of rebuilds, which is released when the connection ends."""
        try:
            database.connection.execute(_SQL["lock"])
        except psycopg.errors.LockNotAvailable as error:
            building = Versions(database).run("building")
            other = building[0][1] if building else "another process"
            raise Unavailable(
                f"The read models {self.where} are being rebuilt by {other}; retry when it is done.", 10_000
            ) from error


class PostgresDatabase:
    """A connection with the catalog of versions, in autocommit mode; see `versions.Database`."""

    schema = "postroom."

    def __init__(self, where: str, connection: Connection) -> None:
        self.where = where
        self.connection = connection

    def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each value, and return its rows."""
        cursor = self.connection.execute(
            re.sub(r":(\w+)", r"%(\1)s", statement).encode(),
            {name: escape(value) if isinstance(value, str) else value for name, value in values.items()},
        )
        return [] if cursor.description is None else cursor.fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the statements inside the context as one transaction."""
        try:
            with self.connection.transaction():
                self.connection.execute(_SQL["wait_in_transaction"].format(ms=LOCK_TIMEOUT_MS))
                yield
        except psycopg.errors.LockNotAvailable as error:
            raise LockTimeout(self.where) from error

    def tables(self) -> list[str]:
        """Return the names of all tables, without partitions."""
        return [name for (name,) in self.connection.execute(_SQL["tables"]).fetchall()]

    def replace_views(self, models: Mapping[str, int]) -> None:
        """Replace the views with stable names; see `Database.replace_views`."""
        for statement in replace_views(models, POSTGRES):
            self.connection.execute(statement.encode())

    def drop(self, table: str) -> bool:
        """Drop a table unless a reader still uses it; see `Database.drop`."""
        try:
            self.execute("drop", table)
        except psycopg.errors.LockNotAvailable:
            return False
        return True

    def execute(self, name: str, table: str, **values: object) -> list[tuple[Any, ...]]:
        """Run a statement on a table, and return its rows."""
        cursor = self.connection.execute(sql.SQL(_SQL[name]).format(_table(table)), values)
        return [] if cursor.description is None else cursor.fetchall()

    def is_empty(self, table: str) -> bool:
        """Return whether a table has no rows."""
        return bool(self.execute("is_empty", table)[0][0])


class PostgresBuild(CatalogBuild):
    """A version that is being built; see `Build`."""

    def __init__(
        self, url: str, versions: Versions, database: PostgresDatabase, version: int, plan: Plan
    ) -> None:
        super().__init__(versions, version, plan)
        self._url = url
        self._database = database

    def writer(self) -> PostgresWriter:
        """Return the writer for tasks."""
        return PostgresWriter(self._url, self.version, self.plan, self.plan.projections())

    def parts_done(self) -> frozenset[str]:
        """Return the parts that were written; see `Build.parts_done`."""
        return self._marks()

    def load(self, progress: OnProgress) -> None:
        """Do nothing: tasks write into the tables."""

    def remove_truncated(self, truncated: Truncated) -> None:
        """Remove what retention truncated; see `Build.remove_truncated`."""
        with self._database.transaction():
            for before, after in truncated:
                for table in set(OF_MESSAGES).intersection(self._tables()):
                    self._database.execute("remove", f"{table}_v{self.version}", before=before, after=after)
            self._note_truncated(truncated)

    def merge(self) -> None:
        """Merge the rows of each key; see `Build.merge`."""
        finished = self.parts_done()
        for name, projection in self.plan.projections().items():
            if name != MESSAGES and f"merge-{name}" not in finished:
                with self._database.transaction():
                    statement = merge_into(projection, self.version, f"staged_{name}_v{self.version}")
                    self._database.connection.execute(statement.encode())
                    self._versions.mark(self.version, f"merge-{name}", 0)

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each model."""
        return {
            name: int(self._database.execute("count", f"{name}_v{self.version}")[0][0])
            for name in self.plan.models
        }

    def index(self, progress: OnProgress) -> None:
        """Build indexes on two connections; see `Build.index`."""
        unique = "UNIQUE" if self.plan.has_unique_ids else ""
        limits = {"indexed_chars": INDEXED_CHARS, "indexed_bytes": INDEXED_BYTES}
        values = {"version": self.version, "unique": unique, **limits}
        run: list[str] = []
        if MESSAGES in self.plan.models:
            run += statements(POSTGRES, "search_indexes.sql", **values)
            run += statements(POSTGRES, "indexes.sql", **values)
        for projection in self.plan.projections().values():
            run += create_indexes(projection, self.version, POSTGRES)
        # VACUUM would wait for the other indexes of its table.
        last = [each for each in run if each.startswith("VACUUM")]
        self._run_once([each for each in run if each not in last], progress)
        for statement in (*last, self._vacuum()):
            self._database.connection.execute(statement.encode())
        with self._database.transaction():
            for table in self._tables():
                self._database.execute("enable_autovacuum", f"{table}_v{self.version}")
            self._note_indexed()

    def _vacuum(self) -> str:
        """Return the statement that updates the statistics and the visibility map, for index-only scans."""
        tables = ", ".join(POSTGRES.table(f"{name}_v{self.version}") for name in self.plan.models)
        return f"VACUUM (ANALYZE) {tables}"

    def _run_once(self, run: Sequence[str], progress: OnProgress) -> None:
        """Run statements concurrently, with a mark for each, so that none is repeated after a crash."""
        done = self.parts_done()
        remaining = [(f"index-{number:03d}", each) for number, each in enumerate(run)]
        remaining = [each for each in remaining if each[0] not in done]
        lock = Lock()
        count = len(run) - len(remaining)

        def work() -> None:
            nonlocal count
            settings = _BUILD | {"lock_timeout": "0"}
            with closing(connect(self._url, "postroom rebuild", settings)) as connection:
                versions = Versions(PostgresDatabase(self._database.where, connection))
                while True:
                    with lock:
                        if not remaining:
                            return
                        mark, statement = remaining.pop(0)
                    if statement.startswith("VACUUM"):  # not allowed in a transaction, but repeatable
                        connection.execute(statement.encode())
                    else:
                        with connection.transaction():
                            connection.execute(statement.encode())
                            versions.mark(self.version, mark, 0)
                    with lock:
                        count += 1
                        progress(count, len(run))

        with ThreadPoolExecutor(CONNECTIONS) as pool, unavailable(self._url):
            for future in [pool.submit(work) for _ in range(CONNECTIONS)]:
                try:
                    future.result()
                except psycopg.errors.UniqueViolation as error:
                    check_ids(error, self._database.where)
                    raise


def _create(database: PostgresDatabase, plan: Plan, version: int) -> None:
    """Create the tables of a version and its staging tables."""
    run: list[str] = []
    for projection in plan.projections().values():
        if projection.name == MESSAGES:
            run += statements(POSTGRES, "search_tables.sql", version=version)
        else:
            run.append(create_table(projection, version, POSTGRES))
            columns = _column_definitions(projection.schema)
            run.append(
                f"CREATE UNLOGGED TABLE postroom.staged_{projection.name}_v{version} ({columns}, part TEXT)"
            )
    for name, schema in piece_schemas(plan.projections()).items():
        table = f"postroom.pieces_{name}_v{version}"
        run.append(
            f"CREATE TABLE {table} ({_column_definitions(schema)}, bucket BIGINT) PARTITION BY LIST (bucket)"
        )
        run += (
            f"CREATE UNLOGGED TABLE {table}_{bucket} PARTITION OF {table} FOR VALUES IN ({bucket})"
            for bucket in range(plan.buckets)
        )
    # It is empty after a crash, like all unlogged tables.
    run.append(f"CREATE UNLOGGED TABLE postroom.pieces_v{version} AS SELECT 1 AS row")
    for statement in run:
        database.connection.execute(statement.encode())


def _column_definitions(schema: Mapping[str, pl.DataType]) -> str:
    return ", ".join(f"{name} {_SQL_TYPES[type_]}" for name, type_ in schema.items())


def _table(name: str) -> sql.Composed:
    return sql.SQL("postroom.{}").format(sql.Identifier(name))


def _names(names: Sequence[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, names))
