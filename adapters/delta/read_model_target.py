"""Read models as Delta tables, one for each model, written by delta-rs; each version is one commit per table.

Earlier versions remain in the tables' history until `VACUUM` removes their files.
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

from postroom.adapters.parquet.read_model_target import ParquetTarget
from postroom.domain.errors import Unavailable
from postroom.projections.projection import Projection, load_projections

VERSION = "postroom_version"
"""Key of the version in the custom metadata of a commit."""
_TYPES = {"int": pa.int64(), "text": pa.string(), "bytes": pa.binary()}


class DeltaTarget(ParquetTarget):
    """Delta tables of Parquet files in folders such as `{folder}/mailbox/v3`; see `Target`."""

    def path(self, table: str) -> Path:
        """Return the folder of a table's version."""
        model, _, number = table.rpartition("_v")
        return self.folder / model / f"v{number}"

    def tables(self) -> list[str]:
        """Return the names of the tables that may be dropped: those that were never committed."""
        folders = (path for path in self.folder.glob("*/v*") if path.is_dir())
        return [
            f"{path.parent.name}_{path.name}"
            for path in folders
            if path.name not in self._committed_versions(path.parent.name)
        ]

    def drop(self, table: str) -> bool:
        """Remove a table that was never committed; others belong to the history of their Delta table."""
        path = self.path(table)
        if path.name not in self._committed_versions(path.parent.name):
            shutil.rmtree(path, ignore_errors=True)
        return True

    def publish(self, version: int, models: Mapping[str, int]) -> None:
        """Commit the files of each model that changed; see `Target.publish`."""
        for model, number in models.items():
            try:
                self._commit(load_projections()[model], number)
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
        adds = [_add_action(file, folder) for file in sorted((folder / f"v{number}").glob("*.parquet"))]
        schema = Schema.from_arrow(
            pa.schema(
                pa.field(each.name, _TYPES[each.type], nullable=not each.is_required)
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

    def _committed_versions(self, model: str) -> set[str]:
        table = _table(self.folder / model)
        return set() if table is None else {f"v{commit.get(VERSION)}" for commit in table.history()}


def _table(folder: Path) -> DeltaTable | None:
    return DeltaTable(folder) if (folder / "_delta_log").is_dir() else None


def _add_action(file: Path, folder: Path) -> AddAction:
    stat = file.stat()
    return AddAction(
        path=file.relative_to(folder).as_posix(),
        size=stat.st_size,
        partition_values={},
        modification_time=int(stat.st_mtime * 1_000),
        data_change=True,
        stats=msgspec.json.encode({"numRecords": pq.read_metadata(file).num_rows}).decode(),
    )
