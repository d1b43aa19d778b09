"""Read models in a SQLite file beside the store: `<store>-views`. The event log's file is never written.

A SQLite file has one writer. So Spark's tasks stage what they folded as Parquet, a folder a part that is
renamed into place when it is whole, and the process that rebuilds appends them while later parts are folded.
"""

import fcntl
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import polars as pl

from postroom.application.ports.read_models import rebuild_lock_path, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.ddl import SQLITE, create_indexes, create_table, script, statements
from postroom.projections.fold import MESSAGES, Folded
from postroom.projections.projection import Projection, merge_rows, projections
from postroom.projections.search_text import search_tables
from postroom.projections.sinks import Done, Plan, Removed, Served, buckets, parts, with_bucket
from postroom.projections.sinks.versions import (
    OF_MESSAGES,
    SIDE_TABLES,
    Versions,
    owner,
    parked_rows,
    staged,
    wanted,
)

BUSY_TIMEOUT_MS = 30_000
LOCK_TRIES, LOCK_PAUSE_SECONDS = 3, 0.01
CACHE_KIB = 128 << 10
CHECKPOINT_PAGES = 10_000
ROWS_PER_BATCH = 20_000
APPENDED = ("mailbox", "text", "projection_parked")
"""Tables into which parts are appended as they come; what others have is merged or sorted first."""

_decode_bodies = msgspec.json.Decoder(BodyRules).decode


class SqliteSink:
    """The read models of a SQLite store; see `Sink`.

    Arguments:
        store: path of the store.
    """

    def __init__(self, store: str) -> None:
        self._store = store
        self._path = views_path(store)
        self.where = str(self._path)

    def served(self) -> Served | None:
        """Tell about the active version; see `Sink.served`."""
        if not self._path.exists():
            return None
        with self._database() as database:
            return Versions(database).served()

    @contextmanager
    def build(
        self, plan: Callable[[Served | None], Plan], *, restart: bool = False
    ) -> Iterator["SqliteBuild"]:
        """Begin a version or go on with one; see `Sink.build`."""
        with rebuild_lock(rebuild_lock_path(self._store), self.where), self._database() as database:
            versions = Versions(database)
            served = versions.served()
            planned = plan(served)
            found = None if restart else versions.unfinished(planned.request)
            if found is None:
                versions.unfinished(())
                version = versions.begin(planned, served, lambda number: _create(database, planned, number))
            else:
                version, planned = found
                versions.go_on(version, planned)
            versions.clean()
            staging = self._path.with_name(f"{self._path.name}-staging-v{version}")
            for orphan in staging.parent.glob(f"{self._path.name}-staging-v*"):
                if orphan != staging:
                    shutil.rmtree(orphan, ignore_errors=True)
            staging.mkdir(mode=0o700, exist_ok=True)
            yield SqliteBuild(versions, database, version, planned, staging)

    def roll_back(self, to: int | None = None) -> int:
        """Make an earlier version active again; see `Sink.roll_back`."""
        if not self._path.exists():
            raise NotFound(
                f"The store {self._store} has no read models; build them with `postroom project rebuild`."
            )
        with self._database() as database:
            return Versions(database).roll_back(to)

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield rows of the active version; see `Sink.rows`."""
        projection = projections()[model]
        names = list(columns or projection.schema)
        with self._database() as database, database.transaction():
            served = Versions(database).served()
            if served is None or model not in served.models:
                return
            schema = {name: projection.schema[name] for name in names}
            cursor = database.connection.execute(
                f"SELECT {', '.join(names)} FROM {model}_v{served.models[model]} "
                f"ORDER BY {', '.join(projection.key)}"
            )
            while rows := cursor.fetchmany(ROWS_PER_BATCH):
                yield pl.DataFrame(rows, schema=schema, orient="row")

    @contextmanager
    def _database(self) -> Iterator["SqliteDatabase"]:
        with closing(connect_views(self._path)) as connection:
            yield SqliteDatabase(self.where, connection)


class SqliteDatabase:
    """The one connection that writes the file, as `Versions` uses it."""

    schema = ""

    def __init__(self, where: str, connection: sqlite3.Connection) -> None:
        self.where = where
        self.connection = connection

    def run(self, statement: str, facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each fact, and return its rows."""
        return self.connection.execute(statement, facts).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make what is run inside one transaction."""
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.connection.execute("ROLLBACK")
            raise
        self.connection.execute("COMMIT")

    def tables(self) -> list[str]:
        """Return the names of all tables; those that belong to an index of text go with it."""
        found = self.connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY instr(name, '_index_v') = 0"
        )
        return [name for (name,) in found.fetchall()]

    def drop(self, table: str) -> bool:
        """Drop a table."""
        self.connection.execute(f"DROP TABLE IF EXISTS {table}")
        return True


class SqliteBuild:
    """A version that is being built; see `Build`."""

    def __init__(
        self, versions: Versions, database: SqliteDatabase, version: int, plan: Plan, staging: Path
    ) -> None:
        self.version = version
        self.plan = plan
        self._versions = versions
        self._database = database
        self._staging = staging

    @property
    def is_loaded(self) -> bool:
        """Tell whether all rows are in their tables and indexed."""
        return "indexed" in self._marks()

    def writer(self) -> "SqliteWriter":
        """Return what tasks write with."""
        return SqliteWriter(self._staging, self.version, self.plan, wanted(self.plan))

    def parts_done(self) -> frozenset[str]:
        """Return which parts are staged; see `Build.parts_done`."""
        return frozenset(each.name for each in self._staging.iterdir() if not each.name.startswith("."))

    def load(self, done: Done) -> None:
        """Append what was staged, part by part, in the order of their rows; see `Build.load`."""
        marks, there = self._marks(), self.parts_done()
        all_ = [part.name for part in (*parts(self.plan), *buckets(self.plan))]
        ready = [part for part in all_ if part in there and part not in marks]
        loaded = sum(part in marks for part in all_)
        for number, part in enumerate(ready, loaded + 1):
            with self._database.transaction():
                rows = 0
                for table in APPENDED:
                    for batch in self._read(part, table):
                        rows += self._insert(self._table(table), batch)
                self._versions.mark(self.version, part, rows)
            done(number, len(all_))

    def remove_truncated(self, removed: Removed) -> None:
        """Remove what the log lost to retention; see `Build.remove_truncated`."""
        self.plan = msgspec.structs.replace(self.plan, removed=removed)
        with self._database.transaction():
            for before, after in removed:
                for table in OF_MESSAGES:
                    if table in self._tables():
                        self._database.connection.execute(
                            f"DELETE FROM {table}_v{self.version} WHERE id >= ? AND id < ?", (before, after)
                        )
            self._versions.go_on(self.version, self.plan)

    def merge(self) -> None:
        """Merge the rows of each key, and sort the custom headers; see `Build.merge`."""
        for name, projection in wanted(self.plan).items():
            if name == MESSAGES:
                self._fill("header", _sorted_headers)
            else:
                self._fill(name, partial(_merged, projection))

    def counts(self) -> dict[str, int]:
        """Return how many rows each model has."""
        return {
            name: self._database.run(f"SELECT count(*) FROM {name}_v{self.version}", {})[0][0]
            for name in self.plan.models
        }

    def parked(self) -> int:
        """Return how many records could not be folded."""
        return self._versions.parked(self.version)

    def index(self, done: Done) -> None:
        """Build indexes and what search needs; see `Build.index`."""
        all_: list[str] = []
        if MESSAGES in self.plan.models:
            all_ += statements(SQLITE, "indexes.sql", version=self.version)
            all_ += statements(SQLITE, "search_indexes.sql", version=self.version)
        for projection in wanted(self.plan).values():
            all_ += create_indexes(projection, self.version, SQLITE)
        marks = self._marks()
        for number, statement in enumerate(all_, 1):
            mark = f"index-{number:03d}"
            if mark not in marks:
                with self._database.transaction():
                    self._database.connection.execute(statement)
                    self._versions.mark(self.version, mark, 0)
            done(number, len(all_))
        with self._database.transaction():
            self._versions.start_cursor(self.version, self.plan)
            self._versions.mark(self.version, "indexed", 0)

    def differences(self) -> list[str]:
        """Compare with the active version; see `Build.differences`."""
        return self._versions.differences(self.version, self.plan)

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one; see `Build.flip`."""
        self._versions.flip(self.version, self.plan, counts, seconds)
        shutil.rmtree(self._staging, ignore_errors=True)

    def fail(self, error: str) -> None:
        """Drop this version; see `Build.fail`."""
        self._versions.end(self.version, "failed", error)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _marks(self) -> frozenset[str]:
        return self._versions.parts_done(self.version)

    def _table(self, name: str) -> str:
        return name if name == "projection_parked" else f"{name}_v{self.version}"

    def _tables(self) -> list[str]:
        return [table for model in self.plan.models for table in (model, *SIDE_TABLES.get(model, ()))]

    def _read(self, part: str, name: str) -> Iterator[pl.DataFrame]:
        with suppress(FileNotFoundError):
            yield pl.read_parquet(self._staging / part / f"{name}.parquet")

    def _fill(self, name: str, prepare: Callable[[pl.DataFrame], pl.DataFrame]) -> None:
        """Fill a table with all that was staged for it, if that was not done before."""
        mark = f"merge-{name}"
        if mark in self._marks():
            return
        # Not of the folders that a killed task left half-written, whose names begin with a dot.
        files = sorted(self._staging.glob(f"[!.]*/{name}.parquet"))
        with self._database.transaction():
            rows = 0
            if files:
                rows = self._insert(f"{name}_v{self.version}", prepare(pl.read_parquet(files)))
            self._versions.mark(self.version, mark, rows)

    def _insert(self, table: str, rows: pl.DataFrame) -> int:
        # Not by ADBC, though it is twice as fast: it brings an SQLite of its own, and two of them in one
        # process undo each other's file locks.
        values = ", ".join("?" * rows.width)
        # A record may be parked by the fold of its range and again with what ranges left over.
        how = "INSERT OR IGNORE" if table == "projection_parked" else "INSERT"
        statement = f"{how} INTO {table} ({', '.join(rows.columns)}) VALUES ({values})"
        self._database.connection.executemany(statement, rows.iter_rows())
        return rows.height


@dataclass(frozen=True)
class SqliteWriter:
    """Stage parts from Spark's tasks, on a disk that they share with who rebuilds; see `Writer`."""

    staging: Path
    version: int
    plan: Plan
    wanted: Mapping[str, Projection]

    def is_done(self, part: str) -> bool:
        """Tell whether a part is in its place."""
        return (self.staging / part).exists()

    def write(self, part: str, folded: Folded) -> int:
        """Stage a part; see `Writer.write`."""
        folder = self.staging / f".{part}-{uuid4().hex}"
        folder.mkdir(mode=0o700)
        for name, rows in self._files(folded).items():
            if rows.height:
                rows.write_parquet(folder / f"{name}.parquet", compression="lz4", statistics=False)
        try:
            folder.rename(self.staging / part)
        except OSError:
            # Somebody else was faster.
            shutil.rmtree(folder)
            if not self.is_done(part):
                raise
            return 0
        return sum(rows.height for name, rows in folded.rows.items() if name in self.wanted)

    def pieces(self, bucket: int) -> dict[str, pl.DataFrame]:
        """Return what was staged of a bucket; see `Writer.pieces`."""
        found = {}
        for name, schema in staged(self.wanted).items():
            files = sorted(self.staging.glob(f"part-*/pieces-{name}.parquet"))
            found[name] = pl.DataFrame(schema=schema)
            if files:
                of_bucket = pl.scan_parquet(files).filter(pl.col("bucket") == bucket)
                found[name] = of_bucket.select(*schema).collect()
        return found

    def _files(self, folded: Folded) -> dict[str, pl.DataFrame]:
        files = {name: rows for name, rows in folded.rows.items() if name in self.wanted}
        if MESSAGES in files:
            files[MESSAGES] = files[MESSAGES].sort("id")
            for side, searched in search_tables(files[MESSAGES], _decode_bodies(self.plan.bodies)).items():
                found = pl.from_arrow(searched)
                assert isinstance(found, pl.DataFrame)
                files[side] = found
        for name, pieces in folded.pieces.items():
            files[f"pieces-{name}"] = with_bucket(pieces, self.plan.buckets)
        files["projection_parked"] = parked_rows(folded.parked, self.plan.cuts, self.version)
        return files


def _create(database: SqliteDatabase, plan: Plan, version: int) -> None:
    """Make the tables of a version."""
    for projection in wanted(plan).values():
        database.connection.execute(create_table(projection, version, SQLITE))
        if projection.name == MESSAGES:
            for statement in statements(SQLITE, "search_tables.sql", version=version):
                database.connection.execute(statement)


def _sorted_headers(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.sort("name", "value", "timestamp", "id")


def _merged(projection: Projection, rows: pl.DataFrame) -> pl.DataFrame:
    return merge_rows(projection, rows).sort(*projection.key)


@contextmanager
def rebuild_lock(lock: Path, where: str) -> Iterator[None]:
    """Hold the lock that ends with the process at the latest."""
    file = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if not _is_locked(file):
            other = os.pread(file, 300, 0).decode(errors="replace")
            raise Unavailable(
                f"The read models {where} are being rebuilt by {other}; wait until that is done.", 10_000
            )
        os.ftruncate(file, 0)
        os.pwrite(file, owner().encode(), 0)
        yield
    finally:
        os.close(file)


def _is_locked(file: int) -> bool:
    """Tell whether the lock could be had; whoever only looks at it lets go at once."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


def connect_views(path: Path) -> sqlite3.Connection:
    """Open the file of read models of a SQLite store to write to it, and make it where there is none.

    Raises: Unavailable when it can't be used.
    """
    # Only where there is none: closing a file that SQLite has open drops this process's locks on it.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        for pragma in (
            f"busy_timeout = {BUSY_TIMEOUT_MS}",
            "journal_mode = WAL",
            "synchronous = NORMAL",  # a power cut may cost a version, never the log
            f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
            "journal_size_limit = 67108864",
            f"cache_size = -{CACHE_KIB}",
            "threads = 2",
        ):
            connection.execute(f"PRAGMA {pragma}")
        connection.executescript(script("sqlite", "catalog.sql"))
        _upgrade(connection)
    except sqlite3.Error as error:
        connection.close()
        raise Unavailable(
            f"The read models {path} can't be used: {error}; delete the file and rebuild."
        ) from error
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Add to the catalog of an earlier release what it lacks."""
    columns = {name for _, name, *_ in connection.execute("PRAGMA table_info(projection)")}
    for name in ("plan", "models"):
        if name not in columns:
            connection.execute(f"ALTER TABLE projection ADD COLUMN {name} TEXT")
