"""Creating and connecting to a SQLite store file."""

import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from threading import RLock
from typing import Any, Literal
from weakref import WeakSet

from postroom.adapters.sql.statements import Migration
from postroom.adapters.sqlite.store_file import (
    FileId,
    check_reader,
    check_store,
    check_writer,
    create_tables,
    file_id,
    is_frozen,
    lock_name,
    migrate_tables,
    name_byte,
    pending,
    read_format,
)
from postroom.application.threads import set_close_on_fork
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableStore

Durability = Literal["full", "relaxed"]

BUSY_TIMEOUT_MS, BULK_BUSY_TIMEOUT_MS = 5_000, 30_000
CHECKPOINT_PAGES, BULK_CHECKPOINT_PAGES = 4_000, 10_000


class _File:
    """A file that is open in this process.

    Its descriptors hold the lock of its name. They are closed after its last connection: closing any
    descriptor of a file ends all locks that SQLite has on it in this process.
    """

    def __init__(self, name: int) -> None:
        self.name = name
        self.connections: WeakSet[_Connection] = WeakSet()
        self.descriptors: list[int] = []

    def close(self) -> None:
        while self.descriptors:
            descriptor = self.descriptors.pop()
            set_close_on_fork(descriptor, False)
            os.close(descriptor)


_files: dict[FileId, _File] = {}
_inherited: dict[FileId, list["_Connection"]] = {}
"""Files that were open in the parent process at the fork; their connections must not be closed."""
_mutex = RLock()
"""Guards `_files`. The garbage collector may close connections in a thread that holds it."""
_is_opening = False
_closed: list["_Connection"] = []
"""Connections that were closed by the thread that opens another one meanwhile."""


class _Connection(sqlite3.Connection):
    """A connection that counts as a use of its file until it is closed."""

    file: FileId | None = None

    def close(self) -> None:
        super().close()
        with _mutex:
            if _is_opening:
                _closed.append(self)
                return
            file = None if self.file is None else _files.get(self.file)
            if file is not None:
                file.connections.discard(self)
                if not file.connections:
                    _files.pop(self.file, None)  # type: ignore[arg-type]  # not None, as there is a file
                    file.close()


class _FrozenConnection(_Connection):
    """A connection to a file that SQLite takes for immutable; it fails when the file changes nevertheless."""

    path: Path
    version: tuple[object, ...]

    def cursor(self, *arguments: Any, **options: Any) -> Any:
        self._check()
        return super().cursor(*arguments, **options)

    def execute(self, *arguments: Any) -> sqlite3.Cursor:
        self._check()
        return super().execute(*arguments)

    def _check(self) -> None:
        if _version(self.path) != self.version:
            raise sqlite3.OperationalError("another process has changed the file; open it again")


def create(path: Path, *, can_shrink: bool = False) -> None:
    """Create the store file with its tables if it is missing, with mode 0600 (RFC-037), or migrate it.

    Arguments:
        can_shrink: enable incremental vacuum, so that freed space can be reclaimed, at a small cost per
            append; an existing file is not changed.

    Raises: Unavailable when the file can't be created or is not a SQLite file, UnusableStore when it has the
        format of another version.
    """
    try:
        create_file(path)
        with closing(connect(path, can_shrink=can_shrink)) as connection:
            current = check_store(connection, path)
            if current is None:
                create_tables(connection)
            elif pending(current):
                migrate_tables(connection, path, connect_reader)
    except (OSError, sqlite3.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise Unavailable(
            f"The store {path} can't be opened: {reason}. Check the path and its permissions."
        ) from error


def migrate(path: Path, *, dry_run: bool = False) -> list[Migration]:
    """Bring an existing store to the format of this version; otherwise the next owner does.

    Arguments:
        dry_run: change nothing.

    Returns: the migrations that were applied, or would be.
    Raises: as `create`.
    """
    with closing(connect_reader(path)) as connection:
        steps = pending(read_format(connection))
    if steps and not dry_run:
        create(path)
    return steps


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

    Raises: UnusableStore as `check_writer`.
    """
    check_writer(path)
    is_bulk = cache_kib is not None
    connection = open_file(path, isolation_level=None, check_same_thread=False, cached_statements=128)
    return _configure(
        connection,
        f"busy_timeout = {BULK_BUSY_TIMEOUT_MS if is_bulk else BUSY_TIMEOUT_MS}",
        *(["auto_vacuum = INCREMENTAL"] if can_shrink else []),  # must precede the first page
        "journal_mode = WAL",
        f"synchronous = {'FULL' if durability == 'full' else 'NORMAL'}",
        f"wal_autocheckpoint = {BULK_CHECKPOINT_PAGES if is_bulk else CHECKPOINT_PAGES}",
        "journal_size_limit = 67108864",
        *([f"cache_size = -{cache_kib}"] if is_bulk else []),
    )


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a read-only connection; readers and the writer don't block each other.

    Raises: UnusableStore as `check_reader` and `is_frozen`, and for a store in the format of another version.
    """
    check_reader(path)
    mode: Mode = "ro&immutable=1" if is_frozen(path) else "ro"
    connection = open_file(path, mode, isolation_level=None, check_same_thread=False)
    _configure(connection, f"busy_timeout = {BUSY_TIMEOUT_MS}")
    try:
        with suppress(sqlite3.Error):  # the statement that follows says what is wrong
            check_store(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def written_files(path: Path) -> tuple[Path, Path]:
    """Return the files that a commit changes: the database and its write-ahead log."""
    file = path.resolve()  # SQLite writes its log beside the target of a link
    return file, file.with_name(f"{file.name}-wal")


Mode = Literal["ro", "rw", "rwc", "ro&immutable=1"]


def open_file(path: Path, mode: Mode = "rwc", **options: Any) -> sqlite3.Connection:
    """Open a SQLite file, of a store or of a user.

    SQLite counts a process's locks in its memory, which a forked process inherits without the locks: if it
    opened a file that was open at the fork, the two would overwrite each other.

    Arguments:
        options: see `sqlite3.connect`.

    Raises: InvalidRequest for a file that was open when this process was forked, UnusableStore for one that
        a process uses under another name.
    """
    global _is_opening
    if _inherited and file_id(path) in _inherited:
        raise InvalidRequest(
            f"The file {path} was open in the process from which this one was forked, so SQLite can't use it "
            "here; fork before it is opened, or start the process with `spawn`."
        )
    is_immutable = mode.endswith("immutable=1")
    version = _version(path) if is_immutable else ()
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with _mutex:
        _is_opening = True
        try:
            connection = sqlite3.connect(
                uri, uri=True, factory=_FrozenConnection if is_immutable else _Connection, **options
            )
            is_sole_name = _use(connection, path)
        finally:
            _is_opening = False
            while _closed:
                _closed.pop().close()
    if not is_sole_name:
        connection.close()
        raise UnusableStore(
            f"The file {path} is open in a process that uses another name of it, and each name has its own "
            "write-ahead log; use one name, or mount the folder instead of the file."
        )
    if isinstance(connection, _FrozenConnection):
        connection.path, connection.version = path, version
    return connection


def _use(connection: _Connection, path: Path) -> bool:
    """Count the use of a file, and lock its name; return False if another name of it is in use."""
    id_, name = file_id(path), name_byte(path)
    is_locked = True
    if id_ not in _files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        set_close_on_fork(descriptor, True)
        status = os.fstat(descriptor)
        id_ = status.st_dev, status.st_ino
        _files.setdefault(id_, _File(name)).descriptors.append(descriptor)
        is_locked = lock_name(descriptor, name)
    connection.file = id_
    _files[id_].connections.add(connection)
    return is_locked and _files[id_].name == name


def _version(path: Path) -> tuple[object, ...]:
    """Return values that change when a file is written, or replaced, or opened in WAL mode."""
    try:
        status = path.stat()
    except OSError:
        return ()
    is_open = os.path.exists(f"{os.path.realpath(path)}-wal")
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, is_open


def _forget_files() -> None:
    global _mutex, _is_opening
    _mutex, _is_opening = RLock(), False  # a thread of the parent may hold the former lock
    _closed.clear()
    for id_, file in _files.items():
        _inherited.setdefault(id_, []).extend(file.connections)
    _files.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_files)


def _configure(connection: sqlite3.Connection, *pragmas: str) -> sqlite3.Connection:
    try:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
