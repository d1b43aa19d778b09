"""A SQLite store file: how it is created and connected to."""

import os
import sqlite3
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Literal

from postroom.domain.errors import Unavailable

Durability = Literal["full", "relaxed"]

BUSY_TIMEOUT_MS = 5_000
CHECKPOINT_PAGES = 4_000


def create(path: Path, *, can_shrink: bool = False) -> None:
    """Create the store file with its tables where it is missing, readable by its owner only (RFC-037: 0600).

    Arguments:
        can_shrink: make the file so that it can give space back to the disk bit by bit, which costs every
            append a little; a file that is there stays as it was made.

    Raises: Unavailable when the file can't be made there or is no SQLite file.
    """
    try:
        # Only where there is none: closing a file that SQLite has open drops this process's locks on it.
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with closing(connect(path, can_shrink=can_shrink)) as connection:
            connection.executescript(files(__package__).joinpath("schema.sql").read_text("utf-8"))
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(
            f"The store {path} can't be opened: {error}. Check the path and its permissions."
        ) from error


def connect(path: Path, durability: Durability = "full", *, can_shrink: bool = False) -> sqlite3.Connection:
    """Open a connection for writing.

    Arguments:
        durability: `full` syncs every commit to the disk; `relaxed` may lose the last commits in a power cut,
            but never when only the process dies (ADR 0005).
        can_shrink: see `create`; without effect on a file that has tables.
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=128)
    return _configured(
        connection,
        f"busy_timeout = {BUSY_TIMEOUT_MS}",
        *(["auto_vacuum = INCREMENTAL"] if can_shrink else []),  # before the first page is written
        "journal_mode = WAL",
        f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
        f"wal_autocheckpoint = {CHECKPOINT_PAGES}",
        "journal_size_limit = 67108864",
    )


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that can only read; readers never wait for the writer nor hold it up."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    return _configured(connection, f"busy_timeout = {BUSY_TIMEOUT_MS}")


def _configured(connection: sqlite3.Connection, *pragmas: str) -> sqlite3.Connection:
    try:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
