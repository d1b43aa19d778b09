"""Read models as Parquet: a folder for each version of each model, and a file that names the active ones."""

import os
import shutil
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import polars as pl

from postroom.adapters.sqlite.read_model_file import CatalogFile, connect_catalog
from postroom.projections.projection import Projection

CATALOG, SERVED = "_catalog.db", "_served.json"
"""Tools that read all files of a folder skip names that begin with `_`."""
ROWS_PER_BATCH = 50_000


class ParquetTarget:
    """Tables as folders of Parquet files, such as `{folder}/mailbox_v3`; see `Target`.

    `{folder}/_served.json` is replaced atomically and names the active folder of each model.
    """

    search_tables: Sequence[Projection] = ()

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).absolute()
        self.where = str(self.folder)
        self.staging = self.folder / "_staging"

    def exists(self) -> bool:
        """Return whether there is a catalog."""
        return (self.folder / CATALOG).exists()

    @contextmanager
    def catalog(self) -> Iterator[CatalogFile]:
        """Open the catalog, a SQLite file in the folder; see `Target.catalog`."""
        with closing(connect_catalog(self.folder / CATALOG)) as connection:
            yield FolderCatalog(self, connection)

    def fill(self, table: str, projection: Projection, files: Sequence[Path]) -> None:
        """Link the files into a folder; see `Target.fill`."""
        self.drop(table)
        path = self.path(table)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}-{uuid4().hex}")
        temporary.mkdir(mode=0o700)
        for number, file in enumerate(files):
            os.link(file, temporary / f"part-{number:06d}.parquet")
        if not files:  # an empty table still has its columns
            pl.DataFrame(schema=projection.schema).write_parquet(temporary / "part-000000.parquet")
        temporary.rename(path)

    def count(self, table: str) -> int:
        """Return the number of rows of a table, from the metadata of its files."""
        return int(self._scan(table).select(pl.len()).collect().item())

    def read(self, table: str, projection: Projection, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield columns of a table; see `Target.read`."""
        rows = self._scan(table).sort(*projection.key).select(*columns).collect(engine="streaming")
        yield from rows.iter_slices(ROWS_PER_BATCH)

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Replace the file that names the active tables; see `Target.publish`."""
        tables = {model: f"{model}_v{number}" for model, number in sorted(models.items())}
        served = msgspec.json.encode({"version": version, "tables": tables})
        temporary = self.folder / f".{SERVED}-{uuid4().hex}"
        temporary.write_bytes(served + b"\n")
        temporary.replace(self.folder / SERVED)

    def path(self, table: str) -> Path:
        """Return the folder of a table."""
        return self.folder / table

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return [each.name for each in self.folder.iterdir() if each.is_dir()]

    def drop(self, table: str) -> bool:
        """Remove a table."""
        shutil.rmtree(self.path(table), ignore_errors=True)
        return True

    def _scan(self, table: str) -> pl.LazyFrame:
        return pl.scan_parquet(self.path(table) / "*.parquet")


class FolderCatalog(CatalogFile):
    """The catalog of tables that are folders, not tables of the catalog's own file."""

    def __init__(self, target: ParquetTarget, connection: sqlite3.Connection) -> None:
        super().__init__(target.where, connection)
        self._target = target

    def tables(self) -> list[str]:
        """Return the names of all tables."""
        return self._target.tables()

    def drop(self, table: str) -> bool:
        """Remove a table."""
        return self._target.drop(table)
