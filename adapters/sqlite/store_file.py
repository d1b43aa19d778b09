"""The file of a store: the name, the user and the mode with which it may be used (ADR 0100)."""

import fcntl
import os
import sqlite3
import stat
import struct
from collections.abc import Callable
from contextlib import closing, suppress
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from postroom.adapters.files import sync
from postroom.adapters.sql.statements import Migration, read_migrations, read_text, statements
from postroom.application.mailbox.codec import FORMAT, RECORDS, check_format
from postroom.application.telemetry import logger
from postroom.application.version import own_version
from postroom.domain.errors import UnusableStore

WRITABLE_BY_OTHERS = 0o022
SIDE_FILES = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite reads together with a database."""
FileId = tuple[int, int]
"""Device and inode of a file, which are not used again while it is open."""

_FIRST, _END = 1 << 62, (1 << 62) + (1 << 61)
"""Bytes that stand for the names of a file, far behind those that SQLite locks."""
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` on 64-bit Linux: type, whence, start, length, process."""


def file_id(path: Path) -> FileId | None:
    """Return the identity of a file, or None if it can't be found."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def has_file(path: Path) -> bool:
    """Return whether there is a file; raise UnusableStore when the folder may not be searched."""
    try:
        return path.exists()
    except PermissionError as error:
        raise UnusableStore(
            f"The store {path} is in a folder that user {os.geteuid()} may not search; run as the user of "
            "the store, or name another store."
        ) from error


def check_reader(path: Path) -> None:
    """Check that a file has one name and may be read by this process; a missing one is accepted.

    Raises: UnusableStore.
    """
    if not has_file(path):
        return
    check_name(path)
    status = path.stat()
    if not os.access(path, os.R_OK):
        raise UnusableStore(
            f"The store {path} belongs to user {status.st_uid} and has the mode {_mode(status)}, so user "
            f"{os.geteuid()} may not read it; run as user {status.st_uid}, or name another store."
        )


def check_writer(path: Path) -> None:
    """Check that only this user may write a file and those beside it.

    Any other user who may write the file decides what it contains. A file that others may only read is
    accepted, as an application may have made it for its own tables; `doctor` reports it.

    Raises: UnusableStore.
    """
    check_reader(path)
    for file in (path, *(Path(f"{path}{suffix}") for suffix in SIDE_FILES)):
        try:
            check_own_file(file, file.stat() if file == path else file.lstat())
        except (FileNotFoundError, NotADirectoryError):
            continue
    if has_file(path) and not os.access(path, os.W_OK):
        raise UnusableStore(
            f"The store {path} can't be written by user {os.geteuid()}; make it writable, or only read it."
        )


def check_own_file(file: Path, status: os.stat_result) -> None:
    """Check that a file is a regular one, of this user or root, and that no other user may write it.

    Raises: UnusableStore.
    """
    if not stat.S_ISREG(status.st_mode):
        raise UnusableStore(f"{file} is not a file; remove it, or name another store.")
    if status.st_uid not in (os.geteuid(), 0):
        raise UnusableStore(
            f"The file {file} belongs to user {status.st_uid}, not to user {os.geteuid()} of this process; "
            f"run as user {status.st_uid}, or name another store."
        )
    if status.st_mode & WRITABLE_BY_OTHERS:
        raise UnusableStore(
            f"Other users may write the file {file}, whose mode is {_mode(status)}; run chmod 600 on it if "
            "no other user has written it, or name another store."
        )


def check_name(path: Path) -> None:
    """Check that an existing file has no second name, under which another write-ahead log would be beside it.

    Raises: UnusableStore for a file with hard links, and for one that is mounted by itself.
    """
    real = Path(os.path.realpath(path))
    links = real.stat().st_nlink
    if links > 1:
        raise UnusableStore(
            f"The store {path} has {links} names (hard links), each with a write-ahead log and an owner of "
            f"its own; remove the others, which `find / -xdev -samefile {path}` lists, or use symbolic links."
        )
    mount = _mount_id(real)
    if mount is not None and mount != _mount_id(real.parent):
        raise UnusableStore(
            f"The store {path} is mounted as a single file, so its write-ahead log is not shared, and is "
            "lost with the container; mount its folder instead, and name the file in it."
        )


def is_frozen(path: Path) -> bool:
    """Return whether a closed file is at a path where nobody can write, such as on read-only media.

    SQLite can read a file in WAL mode there only as immutable, which ignores a write-ahead log.

    Raises: UnusableStore when the file was not closed, and can't be recovered there.
    """
    if not has_file(path):
        return False
    real = os.path.realpath(path)
    if os.access(os.path.dirname(real), os.W_OK) or os.path.exists(f"{real}-shm"):
        return False
    with suppress(FileNotFoundError):
        if os.path.getsize(f"{real}-wal"):
            raise UnusableStore(
                f"The store {path} was not closed, and can't be recovered where nothing can be written; copy "
                f"it and {real}-wal to a writable folder."
            )
    return True


def name_byte(path: Path) -> int:
    """Return the byte that stands for a file's name: its folder, by any path, and its name in the folder."""
    real = Path(os.path.realpath(path))
    folder = real.parent.stat()
    name = f"{folder.st_dev} {folder.st_ino} ".encode() + os.fsencode(real.name)
    return _FIRST + (int.from_bytes(blake2b(name, digest_size=8).digest()) >> 3)


def lock_name(descriptor: int, name: int) -> bool:
    """Lock the byte of a file's name; return False if a process has locked the byte of another name.

    The lock is shared by all processes that use this name, and ends with the descriptor. It is an OFD lock,
    which, unlike SQLite's locks, does not end when another descriptor is closed.
    """
    if not hasattr(fcntl, "F_OFD_SETLK"):
        return True
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, name, 1, 0))
        others = ((_FIRST, name), (name + 1, _END))
        return not any(_is_locked(descriptor, start, end) for start, end in others if start < end)
    except OSError:  # a file system without locks
        return True


def _is_locked(descriptor: int, start: int, end: int) -> bool:
    """Return whether another descriptor has a lock on any of these bytes."""
    lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, end - start, 0)
    kind = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, lock))[0]
    return bool(kind != fcntl.F_UNLCK)


def _mount_id(path: Path) -> str | None:
    """Return the id of the mount that a path leads to, or None if the system does not report it."""
    # Closing an O_PATH descriptor does not end the locks of this process; closing any other would.
    flag = getattr(os, "O_PATH", None)
    if flag is None:
        return None
    try:
        descriptor = os.open(path, flag | os.O_CLOEXEC)
        try:
            text = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return next((line.split()[1] for line in text.splitlines() if line.startswith("mnt_id:")), None)


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):04o}"


APPLICATION_ID = int.from_bytes(b"Post")
"""`PRAGMA application_id` of a store, by which `file` and other tools recognise it; a user's own is left."""
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
