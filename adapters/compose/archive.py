"""Construction of the archive of a store's logs, in a folder or an object store."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from postroom.adapters.compose.store import open_store
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.segments import BuiltSegments, build_closed_segments
from postroom.application.ports.event_log import LogArchive


def has_archive(folder: str | Path, mailbox: str = "") -> bool:
    """Return whether there is a folder of an archive, or of one of its mailboxes; true for object stores."""
    return "://" in str(folder) or (Path(folder) / mailbox).is_dir()


def open_archive(folder: str | Path) -> LogArchive:
    """Return the archive in which retention stores the commits that it removes.

    Raises: MissingExtra when PyArrow is not installed.
    """
    with explain_missing_extra("archive"):
        from postroom.adapters.parquet.log_archive import ParquetLogArchive

    return ParquetLogArchive(folder)


def build_segments(
    store: str,
    mailbox: str,
    archive: LogArchive,
    *,
    is_whole: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> BuiltSegments:
    """Copy the closed part of a mailbox's log to segments, whether or not another process owns it.

    Arguments:
        store: address of the store.
        is_whole: copy the rest of the log, too, to a smaller segment.
        progress: called with the position after each segment.
    """
    with closing(open_store(store).existing_log(mailbox)) as log:
        return build_closed_segments(log, archive, is_whole=is_whole, progress=progress)
