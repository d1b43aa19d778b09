"""The format of a SQLite store: check, creation, and migration after a copy (ADR 0101)."""

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from postroom.adapters.files.durable import sync
from postroom.adapters.sql.migrations import Migration, read_migrations
from postroom.adapters.sql.statements import read_text, statements
from postroom.application.mailbox.codec import FORMAT, RECORDS, check_format, own_version
from postroom.application.telemetry import logger

APPLICATION_ID = int.from_bytes(b"Post")
"""`PRAGMA application_id` of a store, by which `file` and others know it; a user's own is left."""
_PACKAGE = "postroom.adapters.sqlite"
_SQL = statements(_PACKAGE, "format.sql")


class Format(NamedTuple):
    """The number of a format, and the version of Postroom that wrote the store first in it."""

    number: int
    version: str = ""


def read_format(connection: sqlite3.Connection) -> Format | None:
    """Return the format of a file, or None if it has no logs."""
    has_logs, has_records, has_format = connection.execute(_SQL["tables"]).fetchone()
    if has_format:
        row = connection.execute(_SQL["format"]).fetchone()
        if row is not None:
            return Format(*row)
    if not has_logs:
        return None
    return Format(RECORDS if has_records else 1)


def check_store(connection: sqlite3.Connection, path: Path) -> Format | None:
    """Return the format of a file after checking that this version can read it; None if it has no logs.

    Raises: UnusableStore.
    """
    current = read_format(connection)
    if current is not None:
        check_format(str(path), *current)
    return current


def pending(current: Format | None) -> list[Migration]:
    """Return the migrations that bring a store to this version's format."""
    if current is None or current.number >= FORMAT:
        return []
    return [step for step in read_migrations(_PACKAGE, "store") if step.number > current.number]


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables of a file that has no logs; repetition changes nothing."""
    # In one transaction: after a power cut, some of the tables would look like an older format.
    connection.execute("BEGIN IMMEDIATE")
    _execute_all(connection, read_text(_PACKAGE, "schema.sql"))
    _record(connection, FORMAT)
    connection.execute("COMMIT")


def migrate_tables(
    connection: sqlite3.Connection, path: Path, open_reader: Callable[[Path], sqlite3.Connection]
) -> None:
    """Copy a store beside itself and bring it to this version's format, unless another process has.

    Nobody can write the store between the copy and the end of the migration.

    Arguments:
        open_reader: opens another connection to the file.

    Raises: sqlite3.Error and OSError; then nothing has changed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        current = read_format(connection)
        steps = pending(current)
        if current is not None and steps:
            copy = Path(f"{path}-format-{current.number}")
            with closing(open_reader(path)) as reader:
                _copy(reader, copy)
            for step in steps:
                _apply(connection, step)
            logger().info("store.migrated", store=str(path), format=FORMAT, copy=str(copy))
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _copy(reader: sqlite3.Connection, copy: Path) -> None:
    """Copy a store durably; replace a copy that a failed migration left."""
    temporary = Path(f"{copy}.unfinished")
    temporary.unlink(missing_ok=True)
    os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    try:
        reader.execute(_SQL["copy"], {"path": str(temporary)})
        sync(temporary)
        temporary.replace(copy)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(copy.parent)


def _apply(connection: sqlite3.Connection, step: Migration) -> None:
    _execute_all(connection, step.text)
    _record(connection, step.number)


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Execute statements within a transaction, which `executescript` would commit first."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            connection.execute(statement)
            statement = ""


def _record(connection: sqlite3.Connection, format_: int) -> None:
    connection.execute(_SQL["record"], {"format": format_, "version": own_version()})
    ((id_,),) = connection.execute("PRAGMA application_id").fetchall()
    if id_ == 0:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
