"""The read model store port over targets for other tools: a folder, or ClickHouse.

Tasks stage their rows as Parquet files on a disk that is shared with the rebuilding process. When all files
are complete, the target creates tables from them; see `Target`.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import polars as pl

from postroom.adapters.sql.staging import (
    CatalogBuild,
    StagingWriter,
    make_staging,
    parts_staged,
    rebuild_lock,
    staged_files,
)
from postroom.adapters.sql.versions import Versions
from postroom.adapters.sqlite.read_model_file import CatalogFile
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.fold import MESSAGES
from postroom.projections.plan import Plan, Truncated
from postroom.projections.ports.read_model_store import ActiveVersion, Build, OnProgress, ReadModelStore
from postroom.projections.projection import Projection, load_projections, merge_rows
from postroom.projections.search_text import search_tables
from postroom.projections.verify import describe_changes


class Target(Protocol):
    """A place for tables, which are named after model and version, such as `mailbox_v3`.

    Arguments:
        where: name of the target for messages, without a password.
        staging: prefix of the paths of a rebuild's temporary files and folders.
        search_tables: tables of `search_text` that the target contains, too.
    """

    where: str
    staging: Path
    search_tables: Sequence[Projection]

    def exists(self) -> bool:
        """Return whether there is a catalog of versions."""

    def catalog(self) -> AbstractContextManager[CatalogFile]:
        """Open the catalog of versions; create it if it is missing."""

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Create or replace a table from files, which may be hard-linked."""

    def count(self, table: str) -> int:
        """Return the number of rows of a table."""

    def read(self, table: str, projection: Projection, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield columns of a table in batches, in the order of its key."""

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Make these versions of the models visible to readers."""


class TargetReadModelStore(ReadModelStore):
    """The read models in a target; see `ReadModelStore`."""

    def __init__(self, target: Target) -> None:
        self.where = target.where
        self._target = target

    def active_version(self) -> ActiveVersion | None:
        if not self._target.exists():
            return None
        with self._target.catalog() as database:
            return Versions(database).active_version()

    @contextmanager
    def build(
        self, plan: Callable[[ActiveVersion | None], Plan], *, restart: bool = False
    ) -> Iterator["TargetBuild"]:
        target = self._target
        try:
            target.staging.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"The folder {target.staging.parent} can't be used: {error.strerror}. Check its permissions."
            ) from error
        lock = target.staging.with_name(f"{target.staging.name}-lock")
        with rebuild_lock(lock, self.where), target.catalog() as catalog:
            versions = Versions(catalog)
            active = versions.active_version()
            if active is not None:  # an earlier publication may have been interrupted
                target.publish(active.version, active.models)
            version, planned = versions.open(plan, lambda *_: None, restart=restart)
            yield TargetBuild(versions, target, version, planned, make_staging(target.staging, version))

    def roll_back(self, to: int | None = None) -> int:
        if not self._target.exists():
            raise NotFound(
                f"There are no read models in {self.where}; build them with `postroom views rebuild --into`."
            )
        with self._target.catalog() as database:
            versions = Versions(database)
            version = versions.roll_back(to)
            active = versions.active_version()
            assert active is not None
            self._target.publish(active.version, active.models)
            return version

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        active = self.active_version()
        if active is not None and model in active.models:
            projection = load_projections()[model]
            names = list(columns or projection.schema)
            yield from self._target.read(f"{model}_v{active.models[model]}", projection, names)


class TargetBuild(CatalogBuild, Build):
    """A version that is being built; see `Build`."""

    def __init__(self, versions: Versions, target: Target, version: int, plan: Plan, staging: Path) -> None:
        super().__init__(versions, version, plan)
        self._target = target
        self._staging = staging

    def writer(self) -> StagingWriter:
        """Return the writer for tasks."""
        return StagingWriter(
            self._staging,
            self.version,
            self.plan,
            self.plan.projections(),
            search_tables if self._target.search_tables else None,
        )

    def parts_done(self) -> frozenset[str]:
        return parts_staged(self._staging)

    def load(self, progress: OnProgress) -> None:
        """Do nothing: the staged files become the tables."""

    def remove_truncated(self, truncated: Truncated) -> None:
        """Record truncated ranges, which `merge` omits."""
        self._note_truncated(truncated)

    def merge(self) -> None:
        """Create the tables from the staged files."""
        for name, projection in self.plan.projections().items():
            mark = f"merge-{name}"
            if mark not in self._marks():
                files = self._staged_messages() if name == MESSAGES else self._merge_staged(projection)
                self._target.fill(f"{name}_v{self.version}", projection, files)
                self._versions.mark(self.version, mark, 0)
        if MESSAGES in self.plan.models:
            # Rows of messages that were truncated meanwhile match nothing.
            for each in self._target.search_tables:
                self._target.fill(
                    f"{each.name}_v{self.version}", each, staged_files(self._staging, each.name)
                )
        for file in staged_files(self._staging, "projection_parked"):
            self._park(pl.read_parquet(file, glob=False))

    def index(self, progress: OnProgress) -> None:
        """Set the cursors: nothing is indexed."""
        with self._versions.database.transaction():
            self._note_indexed()

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each model."""
        return {name: self._target.count(f"{name}_v{self.version}") for name in self.plan.models}

    def differences(self) -> list[str]:
        active = self._versions.active_version()
        differences = []
        for name, projection in self.plan.projections().items():
            if active is None or active.models.get(name, self.version) == self.version:
                continue
            rows, others = self._rows(projection, self.version), self._rows(projection, active.models[name])
            added, removed = (
                rows.join(others, projection.key, "anti"),
                others.join(rows, projection.key, "anti"),
            )
            both = rows.join(others, projection.key, "semi")
            changed = both.join(others, list(projection.schema), "anti", nulls_equal=True)
            different = pl.concat([added, removed, changed]).sort(projection.key).select(projection.key)
            if different.height:
                heights = added.height, removed.height, changed.height
                differences.append(describe_changes(projection, *heights, different.row(0), active.version))
        return differences

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        super().flip(counts, seconds)
        active = self._versions.active_version()
        assert active is not None
        self._target.publish(active.version, active.models)
        shutil.rmtree(self._staging, ignore_errors=True)

    def fail(self, error: str) -> None:
        super().fail(error)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _staged_messages(self) -> list[Path]:
        """Return the files of messages, without those that retention truncated during the rebuild."""
        if not self.plan.truncated:
            return staged_files(self._staging, MESSAGES)
        is_retained = ~pl.any_horizontal(
            (pl.col("id") >= before) & (pl.col("id") < after) for before, after in self.plan.truncated
        )
        files = []
        for file in staged_files(self._staging, MESSAGES):
            files.append(self._staging / f".retained-{file.parent.name}.parquet")
            pl.scan_parquet(file, glob=False).filter(is_retained).sink_parquet(files[-1])
        return files

    def _merge_staged(self, projection: Projection) -> list[Path]:
        """Return a file with the staged rows merged by key."""
        staged = staged_files(self._staging, projection.name)
        if not staged:
            return []
        file = self._staging / f".merged-{projection.name}.parquet"
        merge_rows(projection, pl.read_parquet(staged, glob=False)).sort(*projection.key).write_parquet(file)
        return [file]

    def _park(self, parked: pl.DataFrame) -> None:
        names = ", ".join(parked.columns)
        values = ", ".join(f":{name}" for name in parked.columns)
        for row in parked.iter_rows(named=True):
            self._versions.database.run(
                f"INSERT OR IGNORE INTO projection_parked ({names}) VALUES ({values})", row
            )

    def _rows(self, projection: Projection, version: int) -> pl.DataFrame:
        frames = self._target.read(f"{projection.name}_v{version}", projection, list(projection.schema))
        return pl.concat([pl.DataFrame(schema=projection.schema), *frames])
