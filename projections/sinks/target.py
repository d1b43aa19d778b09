"""Read models built for others to read: in a folder or in ClickHouse, instead of where search reads them.

Spark's tasks stage what they folded as Parquet, on a disk that they share with who rebuilds, as for SQLite.
What differs is what becomes of the files when all of them are there: see `Target`.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import polars as pl

from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.fold import MESSAGES, Folded
from postroom.projections.projection import Projection, merge_rows, projections
from postroom.projections.sinks import Done, Plan, Removed, Served, with_bucket
from postroom.projections.sinks.sqlite import SqliteDatabase, SqliteWriter, rebuild_lock
from postroom.projections.sinks.versions import Versions, parked_rows, wanted


class Target(Protocol):
    """What keeps the tables; one is named after its model and version, such as `mailbox_v3`.

    Arguments:
        where: as it may be shown, without a password.
        staging: what the paths of files and folders begin with that a rebuild needs.
    """

    where: str
    staging: Path

    def is_there(self) -> bool:
        """Tell whether there is a catalog of versions."""

    def catalog(self) -> AbstractContextManager[SqliteDatabase]:
        """Open the catalog of versions, made where it is missing."""

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Make a table of the rows in files, which may be taken; what is left of an earlier try goes."""

    def count(self, table: str) -> int:
        """Return how many rows a table has."""

    def read(self, table: str, projection: Projection, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield columns of a table in batches, in the order of its key."""

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Have readers see these versions of the models; those that they see already stay."""


class TargetSink:
    """Read models in a target; see `Sink`."""

    def __init__(self, target: Target) -> None:
        self.where = target.where
        self._target = target

    def served(self) -> Served | None:
        """Tell about the active version; see `Sink.served`."""
        if not self._target.is_there():
            return None
        with self._target.catalog() as database:
            return Versions(database).served()

    @contextmanager
    def build(
        self, plan: Callable[[Served | None], Plan], *, restart: bool = False
    ) -> Iterator["TargetBuild"]:
        """Begin a version or go on with one; see `Sink.build`."""
        target = self._target
        try:
            target.staging.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise Unavailable(
                f"The folder {target.staging.parent} can't be used: {error.strerror}. Check it and its "
                "permissions."
            ) from error
        lock = target.staging.with_name(f"{target.staging.name}-lock")
        with rebuild_lock(lock, self.where), target.catalog() as database:
            versions = Versions(database)
            served = versions.served()
            if served is not None:  # whoever made it the active one may have been killed before this
                target.publish(served.version, served.models)
            planned = plan(served)
            found = None if restart else versions.unfinished(planned.request)
            if found is None:
                versions.unfinished(())
                version = versions.begin(planned, served, lambda number: None)
            else:
                version, planned = found
                versions.go_on(version, planned)
            versions.clean()
            yield TargetBuild(versions, target, version, planned, self._staging(version))

    def roll_back(self, to: int | None = None) -> int:
        """Make an earlier version active again; see `Sink.roll_back`."""
        if not self._target.is_there():
            raise NotFound(
                f"There are no read models in {self.where}; build them with `postroom project rebuild`."
            )
        with self._target.catalog() as database:
            versions = Versions(database)
            version = versions.roll_back(to)
            served = versions.served()
            assert served is not None
            self._target.publish(served.version, served.models)
            return version

    def rows(self, model: str, columns: Sequence[str] = ()) -> Iterator[pl.DataFrame]:
        """Yield rows of the active version; see `Sink.rows`."""
        served = self.served()
        if served is not None and model in served.models:
            projection = projections()[model]
            names = list(columns or projection.schema)
            yield from self._target.read(f"{model}_v{served.models[model]}", projection, names)

    def _staging(self, version: int) -> Path:
        """Return the folder in which a version is staged; what others left is removed."""
        start = self._target.staging
        staging = start.with_name(f"{start.name}-v{version}")
        for orphan in start.parent.glob(f"{start.name}-v*"):
            if orphan != staging:
                shutil.rmtree(orphan, ignore_errors=True)
        staging.mkdir(mode=0o700, exist_ok=True)
        return staging


class TargetBuild:
    """A version that is being built; see `Build`."""

    def __init__(self, versions: Versions, target: Target, version: int, plan: Plan, staging: Path) -> None:
        self.version = version
        self.plan = plan
        self._versions = versions
        self._target = target
        self._staging = staging

    @property
    def is_loaded(self) -> bool:
        """Tell whether all rows are in their tables."""
        return "indexed" in self._marks()

    def writer(self) -> "TargetWriter":
        """Return what tasks write with."""
        return TargetWriter(self._staging, self.version, self.plan, wanted(self.plan))

    def parts_done(self) -> frozenset[str]:
        """Return which parts are staged; see `Build.parts_done`."""
        return frozenset(each.name for each in self._staging.iterdir() if not each.name.startswith("."))

    def load(self, done: Done) -> None:
        """Do nothing: the staged files become the tables."""

    def remove_truncated(self, removed: Removed) -> None:
        """Note what the log lost to retention, which `merge` leaves out; see `Build.remove_truncated`."""
        self.plan = msgspec.structs.replace(self.plan, removed=removed)
        self._versions.go_on(self.version, self.plan)

    def merge(self) -> None:
        """Make the tables of what was staged; see `Build.merge`."""
        for name, projection in wanted(self.plan).items():
            mark = f"merge-{name}"
            if mark not in self._marks():
                files = self._staged_messages() if name == MESSAGES else self._merged(projection)
                self._target.fill(f"{name}_v{self.version}", projection, files)
                self._versions.mark(self.version, mark, 0)
        for file in self._files("projection_parked"):
            self._park(pl.read_parquet(file))

    def index(self, done: Done) -> None:
        """Note how far the version has come: nothing is indexed; see `Build.index`."""
        with self._versions.database.transaction():
            self._versions.start_cursor(self.version, self.plan)
            if not self.is_loaded:
                self._versions.mark(self.version, "indexed", 0)

    def counts(self) -> dict[str, int]:
        """Return how many rows each model has."""
        return {name: self._target.count(f"{name}_v{self.version}") for name in self.plan.models}

    def parked(self) -> int:
        """Return how many records could not be folded."""
        return self._versions.parked(self.version)

    def differences(self) -> list[str]:
        """Compare with the active version; see `Build.differences`."""
        served = self._versions.served()
        found = []
        for name, projection in wanted(self.plan).items():
            if served is None or served.models.get(name, self.version) == self.version:
                continue
            rows, known = self._rows(projection, self.version), self._rows(projection, served.models[name])
            new, gone = (rows.join(known, projection.key, "anti"), known.join(rows, projection.key, "anti"))
            both = rows.join(known, projection.key, "semi")
            changed = both.join(known, list(projection.schema), "anti", nulls_equal=True)
            different = pl.concat([new, gone, changed]).sort(projection.key).select(projection.key)
            if different.height:
                key = ", ".join(f"{column} {value}" for column, value in different.row(0, named=True).items())
                found.append(
                    f"{name}: {new.height:,} rows are new, {gone.height:,} are gone, {changed.height:,} "
                    f"differ from version {served.version}; the first is that of {key}"
                )
        return found

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one; see `Build.flip`."""
        self._versions.flip(self.version, self.plan, counts, seconds)
        served = self._versions.served()
        assert served is not None
        self._target.publish(served.version, served.models)
        shutil.rmtree(self._staging, ignore_errors=True)

    def fail(self, error: str) -> None:
        """Drop this version; see `Build.fail`."""
        self._versions.end(self.version, "failed", error)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _marks(self) -> frozenset[str]:
        return self._versions.parts_done(self.version)

    def _files(self, name: str) -> list[Path]:
        return sorted(self._staging.glob(f"[!.]*/{name}.parquet"))

    def _staged_messages(self) -> list[Path]:
        """Return the files with all messages but those that the log lost to retention meanwhile."""
        if not self.plan.removed:
            return self._files(MESSAGES)
        kept = ~pl.any_horizontal(
            (pl.col("id") >= before) & (pl.col("id") < after) for before, after in self.plan.removed
        )
        files = []
        for file in self._files(MESSAGES):
            files.append(self._staging / f".kept-{file.parent.name}.parquet")
            pl.scan_parquet(file).filter(kept).sink_parquet(files[-1])
        return files

    def _merged(self, projection: Projection) -> list[Path]:
        """Return a file with one row of all staged rows of each key."""
        staged = self._files(projection.name)
        if not staged:
            return []
        file = self._staging / f".merged-{projection.name}.parquet"
        merge_rows(projection, pl.read_parquet(staged)).sort(*projection.key).write_parquet(file)
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


class TargetWriter(SqliteWriter):
    """Stage parts from Spark's tasks; the tables that only search needs are left out."""

    def _files(self, folded: Folded) -> dict[str, pl.DataFrame]:
        files = {name: rows for name, rows in folded.rows.items() if name in self.wanted}
        for name, pieces in folded.pieces.items():
            files[f"pieces-{name}"] = with_bucket(pieces, self.plan.buckets)
        files["projection_parked"] = parked_rows(folded.parked, self.plan.cuts, self.version)
        return files
