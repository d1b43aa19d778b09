"""Read models as Delta tables, one a model, written by delta-rs: a version is one commit in each.

The tables' own history has the versions before; what no version needs any more goes when they are vacuumed.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, CommitProperties, create_table_with_add_actions

from postroom.domain.errors import Unavailable
from postroom.projections.ddl import is_required
from postroom.projections.projection import Projection, projections
from postroom.projections.sinks.parquet import ParquetTarget

VERSION = "postroom_version"
"""Where a commit says which version's rows the table has from then on."""
_TYPES = {"int": pa.int64(), "text": pa.string(), "bytes": pa.binary()}


class DeltaTarget(ParquetTarget):
    """Tables as folders of Parquet files, such as `{folder}/mailbox/v3`, of a Delta table; see `Target`."""

    def path(self, table: str) -> Path:
        """Return the folder of a table's version."""
        model, _, number = table.rpartition("_v")
        return self.folder / model / f"v{number}"

    def tables(self) -> list[str]:
        """Return the names of all tables that may be dropped: those that no commit knows."""
        folders = (path for path in self.folder.glob("*/v*") if path.is_dir())
        return [
            f"{path.parent.name}_{path.name}"
            for path in folders
            if path.name not in self._committed(path.parent.name)
        ]

    def drop(self, table: str) -> bool:
        """Remove a table that was never committed; the history of a Delta table keeps the others."""
        path = self.path(table)
        if path.name not in self._committed(path.parent.name):
            shutil.rmtree(path, ignore_errors=True)
        return True

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Commit the files of each model that has others now; see `Target.publish`."""
        for model, number in models.items():
            try:
                self._commit(projections()[model], number)
            except DeltaError as error:
                raise Unavailable(
                    f"The Delta table {self.folder / model} can't be committed: {error}."
                ) from error
        super().publish(version, models)

    def _commit(self, projection: Projection, number: int) -> None:
        folder = self.folder / projection.name
        table = _table(folder)
        if table is not None and table.history(1)[0].get(VERSION) == str(number):
            return
        adds = [_added(file, folder) for file in sorted((folder / f"v{number}").glob("*.parquet"))]
        schema = Schema.from_arrow(
            pa.schema(
                pa.field(each.name, _TYPES[each.type], nullable=not is_required(each))
                for each in projection.columns
            )
        )
        properties = CommitProperties(custom_metadata={VERSION: str(number)})
        if table is None:
            create_table_with_add_actions(
                str(folder), schema, adds, "error", name=projection.name, commit_properties=properties
            )
        else:
            table.create_write_transaction([*adds], "overwrite", schema, commit_properties=properties)

    def _committed(self, model: str) -> set[str]:
        table = _table(self.folder / model)
        return set() if table is None else {f"v{commit.get(VERSION)}" for commit in table.history()}


def _table(folder: Path) -> DeltaTable | None:
    return DeltaTable(folder) if (folder / "_delta_log").is_dir() else None


def _added(file: Path, folder: Path) -> AddAction:
    status = file.stat()
    return AddAction(
        path=file.relative_to(folder).as_posix(),
        size=status.st_size,
        partition_values={},
        modification_time=int(status.st_mtime * 1_000),
        data_change=True,
        stats=msgspec.json.encode({"numRecords": pq.read_metadata(file).num_rows}).decode(),
    )
