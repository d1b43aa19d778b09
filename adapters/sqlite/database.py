"""A SQLite store file: how it is created, connected to, and what its statements are."""

import os
import re
import sqlite3
from importlib.resources import files
from pathlib import Path
from typing import Literal

from postroom.domain.errors import Unavailable

Durability = Literal["full", "relaxed"]

BUSY_TIMEOUT_MS = 5_000
CHECKPOINT_PAGES = 4_000


def statements(resource: str) -> dict[str, str]:
    """Return the statements of a `.sql` file of this package by the names written above them."""
    text = files(__package__).joinpath(resource).read_text("utf-8")
    parts = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))


def create(path: Path) -> None:
    """Create the store file with its tables where it is missing, readable by its owner only (RFC-037: 0600).

    Raises: Unavailable when the file can't be made there or is no SQLite file.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        connection = connect(path)
        try:
            connection.executescript(files(__package__).joinpath("schema.sql").read_text("utf-8"))
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as error:
        raise Unavailable(
            f"The store {path} can't be opened: {error}. Check the path and its permissions."
        ) from error


def connect(path: Path, durability: Durability = "full") -> sqlite3.Connection:
    """Open a connection for writing.

    Arguments:
        durability: `full` syncs every commit to the disk; `relaxed` may lose the last commits in a power cut,
            but never when only the process dies (ADR 0005).
    """
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=128)
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durability == 'full' else 'NORMAL'}")
    connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    connection.execute("PRAGMA journal_size_limit = 67108864")
    return connection


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that can only read; readers never wait for the writer nor hold it up."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
    return connection
