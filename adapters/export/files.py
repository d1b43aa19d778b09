"""Exports as files in folders by day and topic."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from postroom.adapters.export.folder import Manifest, whole_folder, write_manifest
from postroom.adapters.export.partitions import File, Partitions
from postroom.application.ports.export import ExportedMessage, ExportSize, ExportSource


@contextmanager
def export_files(
    target: Path, kind: str, by_topic: bool, open_file: Callable[[Path], File], overwrite: bool
) -> Iterator["FilesExport"]:
    """Write an export as `{target}/day=2026-11-20/topic=github.push/part-0.{kind}`.

    Arguments:
        by_topic: partition by day and topic; else by day only.
        open_file: creates the file at a path.

    Raises: InvalidRequest when the target contains anything else, Unavailable when it can't be written.
    """
    with whole_folder(target, kind, overwrite) as folder:
        partitions = Partitions(folder, f".{kind}", by_topic, open_file)
        try:
            yield FilesExport(folder, kind, partitions)
        except BaseException:
            partitions.abandon()
            raise


class FilesExport:
    """An export as files; see `Export`."""

    def __init__(self, folder: Path, kind: str, partitions: Partitions) -> None:
        self._folder = folder
        self._kind = kind
        self._partitions = partitions

    def write(self, messages: Sequence[ExportedMessage]) -> None:
        """Add messages; see `Export.write`."""
        self._partitions.write(messages)

    def complete(self, source: ExportSource) -> ExportSize:
        """Close the files and write the manifest; see `Export.complete`."""
        parts = self._partitions.close()
        written = ExportSize(len(parts), sum(part.path.stat().st_size for part in parts))
        write_manifest(self._folder, Manifest(self._kind, source, written.files, written.bytes))
        return written
