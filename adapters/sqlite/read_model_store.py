"""The read model store port over the SQLite file `<store>-views`; the log is never written.

A SQLite file has one writer. So tasks stage their rows, and the process that rebuilds inserts them into the
tables while later parts are folded.
"""

import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl

from postroom.adapters.sql.ddl import (
    SQLITE,
    create_indexes,
    create_table,
    read_columns,
    select_rows,
    statements,
)
from postroom.adapters.sql.staging import (
    CatalogBuild,
    StagingWriter,
    make_staging,
    parts_staged,
    rebuild_lock,
    staged_files,
)
from postroom.adapters.sql.statements import check_ids
from postroom.adapters.sql.statements import statements as named_statements
from postroom.adapters.sql.versions import OF_MESSAGES, Versions
from postroom.adapters.sqlite.database import connect_reader
from postroom.adapters.sqlite.read_model_file import (
    CatalogFile,
    index_text,
    open_catalog,
    rebuild_lock_path,
    views_path,
)
from postroom.adapters.sqlite.store_file import has_file
from postroom.domain.errors import NotFound
from postroom.projections.fold import MESSAGES
from postroom.projections.plan import Plan, Truncated, bucket_parts, log_parts
from postroom.projections.ports.read_model_store import ActiveVersion, OnProgress, RowReader, VerifiableStore
from postroom.projections.projection import Projection, load_projections, merge_rows
from postroom.projections.search_text import compact_tables

ROWS_PER_BATCH = 20_000
COPIED = (MESSAGES, "search")
"""Tables whose rows are staged in a SQLite file."""
STAGED_ROWS = "rows.db"
_SQL = named_statements("postroom.adapters.sqlite", "sql/staging.sql")
APPENDED = ("header", "text", "projection_parked")
"""Tables into which parts are inserted directly; rows of the others are merged first."""
REPEATED = ("header", "projection_parked")
"""Tables into which several parts may insert the same row."""


class SqliteReadModelStore(VerifiableStore):
    """The read models of a SQLite store; see `ReadModelStore`.

    Arguments:
        store: path of the store.
    """

    def __init__(self, store: str | Path) -> None:
        self._store = store
        self._path = views_path(store)
        self.where = str(self._path)

    def active_version(self) -> ActiveVersion | None:
        if not has_file(self._path):
            return None
        with self._catalog() as catalog:
            return Versions(catalog).active_version()

    @contextmanager
    def build(
        self, plan: Callable[[ActiveVersion | None], Plan], *, restart: bool = False
    ) -> Iterator["SqliteBuild"]:
        with rebuild_lock(rebuild_lock_path(self._store), self.where), self._catalog() as catalog:
            versions = Versions(catalog)
            version, planned = versions.open(plan, partial(_create, catalog), restart=restart)
            staging = make_staging(self._path.with_name(f"{self._path.name}-staging"), version)
            yield SqliteBuild(versions, catalog, version, planned, staging)

    def roll_back(self, to: int | None = None) -> int:
        if not has_file(self._path):
            raise NotFound(
                f"The store {self._store} has no read models; build them with `postroom views rebuild`."
            )
        with self._catalog() as catalog:
            return Versions(catalog).roll_back(to)

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        projection = load_projections()[model]
        names = list(columns or projection.stored_schema)
        with self._catalog() as catalog:
            catalog.connection.execute("BEGIN")  # only reads, so that it keeps nobody from writing
            active = Versions(catalog).active_version()
            if active is None or model not in active.models:
                return
            schema = {name: projection.schema[name] for name in names}
            cursor = catalog.connection.execute(
                f"SELECT {read_columns(model, names, SQLITE)} FROM {model}_v{active.models[model]} "
                f"ORDER BY {', '.join(projection.key)}"
            )
            while rows := cursor.fetchmany(ROWS_PER_BATCH):
                yield pl.DataFrame(rows, schema=schema, orient="row")

    def row_reader(self, version: ActiveVersion) -> "SqliteRowReader":
        return SqliteRowReader(self._path, version)

    def _catalog(self) -> AbstractContextManager[CatalogFile]:
        return open_catalog(self._path)


@dataclass(frozen=True)
class SqliteRowReader(RowReader):
    """A reader of the rows of a version; see `RowReader`."""

    path: Path
    version: ActiveVersion

    def rows(self, projection: Projection, where: str = "") -> pl.DataFrame:
        with closing(connect_reader(self.path)) as connection:
            version = self.version.models[projection.name]
            rows = connection.execute(select_rows(projection, version, SQLITE, where)).fetchall()
        return pl.DataFrame(rows, schema=projection.stored_schema, orient="row")


class SqliteStagingWriter(StagingWriter):
    """A writer that stages messages and their texts in a SQLite file.

    SQLite copies whole records from one file to another, so the rebuilding process creates no Python values,
    and other threads run meanwhile.
    """

    def _stage(self, folder: Path, name: str, rows: pl.DataFrame) -> None:
        if name not in COPIED:
            super()._stage(folder, name, rows)
            return
        table, create = name, _SQL["create_search"]
        if name != MESSAGES:
            rows = index_text(rows)
        else:
            table = f"{name}_v{self.version}"
            run = statements(SQLITE, "search_tables.sql", version=self.version)
            create = next(each for each in run if each.startswith(f"CREATE TABLE {table} "))
        with closing(sqlite3.connect(folder / STAGED_ROWS, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # an incomplete file is discarded
            connection.execute(create)
            connection.execute("BEGIN")
            connection.executemany(_insert_statement(table, rows), rows.iter_rows())
            connection.execute("COMMIT")


class SqliteBuild(CatalogBuild):
    """A version that is being built; see `Build`."""

    def __init__(
        self, versions: Versions, catalog: CatalogFile, version: int, plan: Plan, staging: Path
    ) -> None:
        super().__init__(versions, version, plan)
        self._catalog = catalog
        self._staging = staging

    def writer(self) -> StagingWriter:
        """Return the writer for tasks."""
        plan = self.plan
        return SqliteStagingWriter(
            self._staging, self.version, plan, plan.projections(), compact_tables, stores_envelopes=False
        )

    def parts_done(self) -> frozenset[str]:
        """Return the parts that are staged; see `Build.parts_done`."""
        return parts_staged(self._staging)

    def load(self, progress: OnProgress) -> None:
        """Insert the staged parts in order; see `Build.load`."""
        marks, staged = self._marks(), self.parts_done()
        names = [part.name for part in (*log_parts(self.plan), *bucket_parts(self.plan))]
        ready = [name for name in names if name in staged and name not in marks]
        loaded = sum(name in marks for name in names)
        for number, part in enumerate(ready, loaded + 1):
            with self._attached(part) as is_attached, self._catalog.transaction():
                rows = self._copy_messages() if is_attached else 0
                for table in APPENDED:
                    with suppress(FileNotFoundError):
                        rows += self._insert(
                            table, pl.read_parquet(self._staging / part / f"{table}.parquet", glob=False)
                        )
                self._versions.mark(self.version, part, rows)
            progress(number, len(names))

    def remove_truncated(self, truncated: Truncated) -> None:
        """Remove what retention truncated; see `Build.remove_truncated`."""
        # The text indexes keep entries of messages that no other table has: searches ignore them.
        with self._catalog.transaction():
            for before, after in truncated:
                for table in set(OF_MESSAGES).intersection(self._tables()):
                    self._catalog.connection.execute(
                        f"DELETE FROM {table}_v{self.version} WHERE id >= ? AND id < ?", (before, after)
                    )
            self._note_truncated(truncated)

    def merge(self) -> None:
        """Merge the rows of each key; see `Build.merge`."""
        for name, projection in self.plan.projections().items():
            if name != MESSAGES:
                self._fill(name, partial(_merge, projection))

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each model."""
        return {
            name: self._catalog.run(f"SELECT count(*) FROM {name}_v{self.version}", {})[0][0]
            for name in self.plan.models
        }

    def index(self, progress: OnProgress) -> None:
        """Build the indexes and the search tables; see `Build.index`."""
        run: list[str] = []
        if MESSAGES in self.plan.models:
            unique = "UNIQUE" if self.plan.has_unique_ids else ""
            run += statements(SQLITE, "indexes.sql", version=self.version, unique=unique)
            run += statements(SQLITE, "search_indexes.sql", version=self.version)
        for projection in self.plan.projections().values():
            run += create_indexes(projection, self.version, SQLITE)
        marks = self._marks()
        for number, statement in enumerate(run, 1):
            mark = f"index-{number:03d}"
            if mark not in marks:
                try:
                    with self._catalog.transaction():
                        self._catalog.connection.execute(statement)
                        self._versions.mark(self.version, mark, 0)
                except sqlite3.IntegrityError as error:
                    check_ids(error, self._catalog.where)
                    raise
            progress(number, len(run))
        with self._catalog.transaction():
            self._note_indexed()

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one; see `Build.flip`."""
        super().flip(counts, seconds)
        shutil.rmtree(self._staging, ignore_errors=True)

    def fail(self, error: str) -> None:
        """Drop this version; see `Build.fail`."""
        super().fail(error)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _fill(self, name: str, prepare: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        """Fill a table with the rows staged for it, unless it is marked as filled."""
        mark = f"merge-{name}"
        if mark in self._marks():
            return
        files = staged_files(self._staging, name)
        with self._catalog.transaction():
            rows = self._insert(name, prepare(pl.read_parquet(files, glob=False))) if files else 0
            self._versions.mark(self.version, mark, rows)

    @contextmanager
    def _attached(self, part: str) -> Iterator[bool]:
        """Attach the file of a part's messages; yield False if it has none."""
        file, connection = self._staging / part / STAGED_ROWS, self._catalog.connection
        if not file.exists():
            yield False
            return
        connection.execute("ATTACH ? AS staged", (f"{file.absolute().as_uri()}?mode=ro",))
        try:
            yield True
        finally:
            connection.execute("DETACH staged")

    def _copy_messages(self) -> int:
        """Copy the messages of the attached file, index their texts, and return their number."""
        execute = self._catalog.connection.execute
        names = ("copy_mailbox", "index_text", "index_words")
        copied, *_ = [execute(_SQL[name].format(version=self.version)).rowcount for name in names]
        return copied

    def _insert(self, name: str, rows: pl.DataFrame) -> int:
        # Not by ADBC, though it is twice as fast: it links its own SQLite library, and two such libraries in
        # one process cancel each other's POSIX locks.
        table = name if name == "projection_parked" else f"{name}_v{self.version}"
        self._catalog.connection.executemany(
            _insert_statement(table, rows, repeated=name in REPEATED), rows.iter_rows()
        )
        return rows.height


def _insert_statement(table: str, rows: pl.DataFrame, *, repeated: bool = False) -> str:
    verb = "INSERT OR IGNORE" if repeated else "INSERT"
    return f"{verb} INTO {table} ({', '.join(rows.columns)}) VALUES ({', '.join('?' * rows.width)})"


def _create(catalog: CatalogFile, plan: Plan, version: int) -> None:
    """Create the tables of a version."""
    for projection in plan.projections().values():
        run = [create_table(projection, version, SQLITE)]
        if projection.name == MESSAGES:
            run = statements(SQLITE, "search_tables.sql", version=version)
        for statement in run:
            catalog.connection.execute(statement)


def _merge(projection: Projection, rows: pl.DataFrame) -> pl.DataFrame:
    return merge_rows(projection, rows).sort(*projection.key)
