"""Creating and connecting to a SQLite store file."""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

from postroom.adapters.sql.statements import read_text
from postroom.domain.errors import InvalidRequest, Unavailable

Durability = Literal["full", "relaxed"]

BUSY_TIMEOUT_MS, BULK_BUSY_TIMEOUT_MS = 5_000, 30_000
_open: "WeakSet[_Connection]" = WeakSet()
_inherited: dict[tuple[int, int], list["_Connection"]] = {}
"""Files that were open in the process from which this one was forked, with connections not to be closed."""
CHECKPOINT_PAGES, BULK_CHECKPOINT_PAGES = 4_000, 10_000


class _Connection(sqlite3.Connection):
    """A connection that is listed while it is open."""

    path: Path

    def close(self) -> None:
        _open.discard(self)
        super().close()


def create(path: Path, *, can_shrink: bool = False) -> None:
    """Create the store file with its tables if it is missing, with mode 0600 (RFC-037).

    Arguments:
        can_shrink: enable incremental vacuum, so that freed space can be reclaimed, at a small cost per
            append; an existing file is not changed.

    Raises: Unavailable when the file can't be created or is not a SQLite file.
    """
    try:
        create_file(path)
        with closing(connect(path, can_shrink=can_shrink)) as connection:
            connection.executescript(read_text("postroom.adapters.sqlite", "schema.sql"))
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(
            f"The store {path} can't be opened: {reason}. Check the path and its permissions."
        ) from error


def create_file(path: Path) -> None:
    """Create an empty file with mode 0600 if it is missing."""
    # Never open an existing file: closing it would drop the POSIX locks of SQLite in this process.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def connect(
    path: Path, durability: Durability = "full", *, can_shrink: bool = False, cache_kib: int | None = None
) -> sqlite3.Connection:
    """Open a connection for writing.

    Arguments:
        durability: `full` syncs every commit to the disk; `relaxed` may lose the last commits in a power cut,
            but never when only the process crashes (ADR 0005).
        can_shrink: see `create`; ignored for a file that has tables.
        cache_kib: page cache in KiB for bulk writes, which also have a longer busy timeout and fewer
            checkpoints; None for ordinary writes.
    """
    is_bulk = cache_kib is not None
    connection = open_file(path, isolation_level=None, check_same_thread=False, cached_statements=128)
    return _configure(
        connection,
        f"busy_timeout = {BULK_BUSY_TIMEOUT_MS if is_bulk else BUSY_TIMEOUT_MS}",
        *(["auto_vacuum = INCREMENTAL"] if can_shrink else []),  # before the first page is written
        "journal_mode = WAL",
        f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
        f"wal_autocheckpoint = {BULK_CHECKPOINT_PAGES if is_bulk else CHECKPOINT_PAGES}",
        "journal_size_limit = 67108864",
        *([f"cache_size = -{cache_kib}"] if is_bulk else []),
    )


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection; readers and the writer don't block each other."""
    connection = open_file(path, "ro", isolation_level=None, check_same_thread=False)
    return _configure(connection, f"busy_timeout = {BUSY_TIMEOUT_MS}")


def open_file(path: Path, mode: Literal["ro", "rw", "rwc"] = "rwc", **options: Any) -> sqlite3.Connection:
    """Open a file.

    SQLite counts a process's locks in its memory, which a forked process inherits without the locks: if it
    opened a file that was open at the fork, the two would overwrite each other.

    Arguments:
        options: see `sqlite3.connect`.

    Raises: InvalidRequest for a file that was open when this process was forked.
    """
    if _inherited and file_id(path) in _inherited:
        raise InvalidRequest(
            f"The file {path} was open in the process from which this one was forked, so SQLite can't use it "
            "here; fork before it is opened, or start the process with `spawn`."
        )
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(uri, uri=True, factory=_Connection, **options)
    connection.path = path
    _open.add(connection)
    return connection


def file_id(path: Path) -> tuple[int, int] | None:
    """Return the identity of a file, or None if it can't be found."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _list_inherited() -> None:
    for connection in list(_open):
        file = file_id(connection.path)
        if file is not None:
            _inherited.setdefault(file, []).append(connection)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_list_inherited)


def _configure(connection: sqlite3.Connection, *pragmas: str) -> sqlite3.Connection:
    try:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
