"""Putting a restored file in the place of a SQLite store."""

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from postroom.adapters.files import sync
from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import open_file
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.adapters.sqlite.store_file import SIDE_FILES
from postroom.domain.errors import InvalidRequest, Unavailable

WAIT_MS = 2_000
_NO_DATABASE = b"replaced by postroom restore".ljust(100)
"""Header that SQLite refuses."""
_SQL = statements("postroom.adapters.sqlite", "backup.sql")

Ends = Mapping[int, int | None]
"""The place of the last commit by mailbox id; None for an empty log."""


def check_side_files(store: Path) -> None:
    """Check that a missing store has left no files that SQLite would apply to the next store of its name.

    Raises: InvalidRequest naming the file.
    """
    if store.exists():
        return
    for suffix in SIDE_FILES:
        file = Path(f"{store}{suffix}")
        if file.exists():
            raise InvalidRequest(
                f"The file {file} is left of a store that was removed, and SQLite would apply it to the "
                "restored one; move it elsewhere."
            )


def log_ends(store: Path) -> Ends:
    """Return the ends of a store's logs, for comparison by `replace_store`."""
    with _unavailable(store), closing(open_file(store, "ro")) as connection:
        return _ends(connection)


def finish(file: Path) -> None:
    """Make a restored file complete in itself, without a write-ahead log."""
    with _unavailable(file), closing(open_file(file, "rw", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")


def replace_store(file: Path, store: Path, ends: Ends | None) -> None:
    """Rename a complete, synced file to `store` durably, and remove the read models of the store it replaces.

    The file is replaced, not overwritten: an owner that still has the old one open notices, and acknowledges
    nothing more (`StoreReplaced`).

    Arguments:
        ends: ends of the logs of the old store when it was examined; None without an old store.

    Raises: Unavailable when another process uses the old store, or has appended to it since.
    """
    if ends is None:
        if store.exists():
            raise Unavailable(f"The store {store} was created meanwhile; restore again.")
        _take_place(file, store)
        return
    # Closed last: closing a descriptor of a file releases all locks that this process has on it.
    with store.open("r+b", buffering=0) as old, _exclusive(store) as connection:
        if _ends(connection) != ends:
            raise Unavailable(f"A process appended to the store {store} meanwhile; restore again.")
        _take_place(file, store)
        # A process that opened the old file and waits for its lock must fail, not write where nobody reads.
        if os.fstat(old.fileno()).st_nlink == 0:  # unless an operator keeps it under another name
            old.write(_NO_DATABASE)


def _take_place(file: Path, store: Path) -> None:
    views = views_path(store)
    for path in (views, *(Path(f"{views}{suffix}") for suffix in SIDE_FILES)):
        path.unlink(missing_ok=True)  # they are of other records
    os.rename(file, store)
    sync(store.parent)


@contextmanager
def _exclusive(store: Path) -> Iterator[sqlite3.Connection]:
    """Use a store that no other process has open, and whose file contains all of it.

    The renamed file must not get the write-ahead log of the old one. SQLite removes the log when it changes
    the journal mode, which it does only if no other connection is open, not even in a process that hangs.
    """
    with _unavailable(store), closing(open_file(store, "rw", isolation_level=None)) as connection:
        connection.execute(f"PRAGMA busy_timeout = {WAIT_MS}")
        try:
            ((mode,),) = connection.execute("PRAGMA journal_mode = DELETE").fetchall()
            if mode == "delete":
                connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise
            mode = None
        if mode != "delete":
            raise Unavailable(
                f"Another process has the store {store} open; stop the processes that use it, and those that "
                "hang, and restore again."
            )
        yield connection


def _ends(connection: sqlite3.Connection) -> Ends:
    return dict(connection.execute(_SQL["ends"]).fetchall())


@contextmanager
def _unavailable(store: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise Unavailable(
            f"The store {store} can't be read: {error}. If it is damaged, move it elsewhere with the files "
            f"{store.name}-*, and restore again."
        ) from error
