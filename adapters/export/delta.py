"""An export as a Delta table, written by delta-rs in one commit."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, CommitProperties, create_table_with_add_actions

from postroom.adapters.export.folder import make_private, whole_folder, writing
from postroom.adapters.export.parquet import ParquetFile
from postroom.adapters.export.partitions import Part, Partitions
from postroom.application.ports.export import ExportedMessage, ExportSize, ExportSource
from postroom.domain.errors import InvalidRequest, Unavailable

NAME = "postroom export"
"""Name in the metadata of every exported table; only tables with it are replaced."""
SOURCE = "postroom_export"
"""Key of the source in the custom metadata of a commit."""
PARTITION_COLUMNS = {"day": pa.field("day", pa.date32()), "topic": pa.field("topic", pa.string())}


@contextmanager
def export_delta(target: Path, schema: pa.Schema, by_topic: bool, overwrite: bool) -> Iterator["DeltaExport"]:
    """Write an export as a Delta table partitioned by day and topic.

    Replacing an export commits a new version of the table, whose history retains the earlier exports.

    Arguments:
        schema: columns of the files.
        by_topic: partition by day and topic; else by day only.

    Raises: InvalidRequest when the target contains anything else, Unavailable when it can't be written.
    """
    if not (target / "_delta_log").is_dir():
        with whole_folder(target, "delta", overwrite) as folder, _files(folder, schema, by_topic) as export:
            yield export
        return
    table = _replaceable(target, by_topic, overwrite)
    with writing(target), _files(target, schema, by_topic, table) as export:
        yield export


def _replaceable(target: Path, by_topic: bool, overwrite: bool) -> DeltaTable:
    """Return the table in a folder; raise `InvalidRequest` when it may not be replaced."""
    try:
        table = DeltaTable(target)
    except DeltaError as error:
        raise Unavailable(f"The Delta table {target} can't be read: {error}.") from error
    metadata = table.metadata()
    if metadata.name != NAME:
        raise InvalidRequest(
            f"The folder {target} contains a Delta table that is not an export; name another folder."
        )
    if not overwrite:
        raise InvalidRequest(
            f"The folder {target} already contains an export; add --overwrite to replace it, or name another "
            "folder."
        )
    if metadata.partition_columns != _partition_columns(by_topic):
        raise InvalidRequest(
            f"The Delta table {target} is partitioned by {' and '.join(metadata.partition_columns)}; use the "
            "same --by, or name another folder."
        )
    return table


@contextmanager
def _files(
    folder: Path, schema: pa.Schema, by_topic: bool, table: DeltaTable | None = None
) -> Iterator["DeltaExport"]:
    """Yield an export whose files have unique names; remove them unless it is committed."""
    partitions = Partitions(folder, f"-{uuid4()}.parquet", by_topic, lambda path: ParquetFile(path, schema))
    try:
        yield DeltaExport(folder, schema, _partition_columns(by_topic), partitions, table)
    except BaseException:
        partitions.abandon()
        raise


class DeltaExport:
    """An export as a Delta table; see `Export`.

    Arguments:
        schema: columns of the files.
        partitioned_by: the partition columns.
        table: the table to replace; None creates one.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        partitioned_by: list[str],
        partitions: Partitions,
        table: DeltaTable | None,
    ) -> None:
        self._folder = folder
        self._schema = pa.schema([*schema, *(PARTITION_COLUMNS[name] for name in partitioned_by)])
        self._partitioned_by = partitioned_by
        self._partitions = partitions
        self._table = table

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages; see `Export.write`."""
        self._partitions.write(messages)

    def complete(self, source: ExportSource) -> ExportSize:
        """Commit the files; see `Export.complete`."""
        actions = [_add_action(part, self._folder) for part in self._partitions.close()]
        try:
            self._commit(actions, source)
        except DeltaError as error:
            raise Unavailable(f"The Delta table {self._folder} can't be committed: {error}.") from error
        return ExportSize(len(actions), sum(action.size for action in actions))

    def _commit(self, actions: list[AddAction], source: ExportSource) -> None:
        schema, by = Schema.from_arrow(self._schema), self._partitioned_by
        properties = CommitProperties(custom_metadata={SOURCE: msgspec.json.encode(source).decode()})
        if self._table is None:
            create_table_with_add_actions(
                str(self._folder), schema, actions, "error", by, NAME, commit_properties=properties
            )
        else:
            self._table.create_write_transaction(
                [*actions], "overwrite", schema, by, commit_properties=properties
            )
            make_private(self._folder)


def _partition_columns(by_topic: bool) -> list[str]:
    return ["day", "topic"] if by_topic else ["day"]


def _add_action(part: Part, folder: Path) -> AddAction:
    stat = part.path.stat()
    return AddAction(
        path=part.path.relative_to(folder).as_posix(),
        size=stat.st_size,
        partition_values=part.values,
        modification_time=int(stat.st_mtime * 1_000),
        data_change=True,
        stats=msgspec.json.encode({"numRecords": part.messages}).decode(),
    )
