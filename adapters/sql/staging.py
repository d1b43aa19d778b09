"""Staging: rows folded by tasks, as Parquet files on a disk shared with the process that rebuilds.

Each part is a folder, renamed to its final name when it is complete. The process that rebuilds loads the
files into tables, or links them as tables. Incomplete (dot-prefixed) folders of killed tasks are skipped.
"""

import fcntl
import glob
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import msgspec
import polars as pl
import pyarrow as pa

from postroom.adapters.sql.versions import SIDE_TABLES, Versions, owner, parked_rows
from postroom.domain.errors import Unavailable
from postroom.domain.search import BodyRules
from postroom.projections.fold import MESSAGES, FoldResult, piece_schemas
from postroom.projections.plan import Plan, Truncated, with_bucket
from postroom.projections.ports.read_model_store import Build, PartWriter
from postroom.projections.projection import Projection

LOCK_TRIES, LOCK_PAUSE_SECONDS = 3, 0.01

SearchTables = Callable[[pl.DataFrame, BodyRules], Mapping[str, pl.DataFrame | pa.Table]]
"""Returns tables by name for rows of messages, and the topics whose bodies are searched."""


@dataclass(frozen=True)
class StagingWriter(PartWriter):
    """A writer that stages parts in a folder; see `PartWriter`.

    Arguments:
        folder: the staging folder.
        search_tables: makes further tables from messages, or replaces them; see `projections.search_text`.
        stores_envelopes: see `PartWriter`.
    """

    folder: Path
    version: int
    plan: Plan
    projections: Mapping[str, Projection]
    search_tables: SearchTables | None = None
    stores_envelopes: bool = True

    def is_done(self, part: str) -> bool:
        """Return whether a part is staged."""
        return (self.folder / part).exists()

    def write(self, part: str, result: FoldResult) -> int:
        folder = self.folder / f".{part}-{uuid4().hex}"
        folder.mkdir(mode=0o700)
        for name, rows in self._files(result).items():
            if rows.height:
                self._stage(folder, name, rows)
        try:
            folder.rename(self.folder / part)
        except OSError:
            # Another attempt at this part may have completed.
            shutil.rmtree(folder)
            if not self.is_done(part):
                raise
            return 0
        return sum(rows.height for name, rows in result.rows.items() if name in self.projections)

    def pieces(self, bucket: int) -> dict[str, pl.DataFrame]:
        pieces = {}
        for name, schema in piece_schemas(self.projections).items():
            files = sorted(self.folder.glob(f"part-*/pieces-{name}.parquet"))
            pieces[name] = pl.DataFrame(schema=schema)
            if files:
                rows = pl.scan_parquet(files, glob=False).filter(pl.col("bucket") == bucket)
                pieces[name] = rows.select(*schema).collect()
        return pieces

    def _stage(self, folder: Path, name: str, rows: pl.DataFrame) -> None:
        """Write the rows of a table."""
        rows.write_parquet(folder / f"{name}.parquet", compression="lz4", statistics=False)

    def _files(self, result: FoldResult) -> dict[str, pl.DataFrame]:
        files = {name: rows for name, rows in result.rows.items() if name in self.projections}
        if self.search_tables is not None and MESSAGES in files:
            files[MESSAGES] = files[MESSAGES].sort("id")
            tables = self.search_tables(files[MESSAGES], self.plan.body_rules)
            files |= {name: pl.DataFrame(table) for name, table in tables.items()}
        for name, pieces in result.pieces.items():
            files[f"pieces-{name}"] = with_bucket(pieces, self.plan.buckets)
        files["projection_parked"] = parked_rows(result.parked, self.plan.extents, self.version)
        return files


def make_staging(start: Path, version: int) -> Path:
    """Create and return the staging folder of a version, and remove the folders of other versions.

    Arguments:
        start: common prefix of the folders' paths.
    """
    folder = start.with_name(f"{start.name}-v{version}")
    for orphan in start.parent.glob(f"{glob.escape(start.name)}-v*"):
        if orphan != folder:
            shutil.rmtree(orphan, ignore_errors=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def parts_staged(folder: Path) -> frozenset[str]:
    """Return the names of the parts in a staging folder."""
    return frozenset(each.name for each in folder.iterdir() if not each.name.startswith("."))


def staged_files(folder: Path, name: str) -> list[Path]:
    """Return the files of a table in a staging folder, in the order of the parts."""
    return sorted(folder.glob(f"[!.]*/{name}.parquet"))


@contextmanager
def rebuild_lock(lock: Path, where: str) -> Iterator[None]:
    """Hold the lock of a rebuild, which the operating system releases when the process ends."""
    file = os.open(lock, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        if not _try_lock(file):
            other = os.pread(file, 300, 0).decode(errors="replace")
            raise Unavailable(
                f"The read models {where} are being rebuilt by {other}; retry when it is done.", 10_000
            )
        os.ftruncate(file, 0)
        os.pwrite(file, owner().encode(), 0)
        yield
    finally:
        os.close(file)


def _try_lock(file: int) -> bool:
    """Acquire the lock if it is free; retry, as a process that only tests it holds it for a moment."""
    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_SECONDS)
        else:
            return True
    return False


INDEXED = "indexed"
"""Mark of a version that is loaded and indexed."""


class CatalogBuild(Build):
    """The methods of `Build` that only use the catalog."""

    def __init__(self, versions: Versions, version: int, plan: Plan) -> None:
        self.version = version
        self.plan = plan
        self._versions = versions

    @property
    def is_loaded(self) -> bool:
        """Return whether all rows are loaded and indexed."""
        return INDEXED in self._marks()

    def parked(self) -> int:
        """Return the number of records that could not be folded."""
        return self._versions.parked(self.version)

    def differences(self) -> list[str]:
        return self._versions.differences(self.version, self.plan)

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        self._versions.flip(self.version, self.plan, counts, seconds)

    def fail(self, error: str) -> None:
        self._versions.end(self.version, "failed", error)

    def _marks(self) -> frozenset[str]:
        return self._versions.parts_done(self.version)

    def _note_truncated(self, truncated: Truncated) -> None:
        self.plan = msgspec.structs.replace(self.plan, truncated=truncated)
        self._versions.continue_(self.version, self.plan)

    def _note_indexed(self) -> None:
        """Set the cursors and the mark; within a transaction."""
        self._versions.start_cursor(self.version, self.plan)
        if not self.is_loaded:
            self._versions.mark(self.version, INDEXED, 0)

    def _tables(self) -> list[str]:
        """Return the tables of the models, without their version."""
        return [table for model in self.plan.models for table in (model, *SIDE_TABLES.get(model, ()))]
