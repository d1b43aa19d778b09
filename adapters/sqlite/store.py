"""A store in a SQLite file, and the checks of `postroom doctor`."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from postroom.adapters.sql.statements import statements
from postroom.adapters.sqlite.database import Durability, connect_reader
from postroom.adapters.sqlite.event_log import SqliteEventLog, mailbox_names
from postroom.adapters.sqlite.message_outbox import SqliteMessageOutbox, count_messages
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.adapters.sqlite.store_file import check_writer, has_file
from postroom.application.diagnosis import Check, Finding, shown_bytes
from postroom.application.ports.outbox import MessageCount
from postroom.domain.errors import Unavailable, UnusableStore

if TYPE_CHECKING:
    from postroom.adapters.sql.log_reader import Driver
    from postroom.adapters.sql.read_models import OpenArchive
    from postroom.adapters.sqlite.log_reader import SqliteLogReader
    from postroom.adapters.sqlite.read_model_store import SqliteReadModelStore
    from postroom.adapters.sqlite.read_model_updater import SqliteReadModelUpdater
    from postroom.adapters.sqlite.read_models import SqliteReadModels
    from postroom.application.ports.read_models import ContextBacklog


class SqliteStore:
    """A store in a SQLite file, with its read models in a second file; see `Store`."""

    def __init__(self, path: str) -> None:
        self.where = path
        # Resolved once: the working directory or a symbolic link may change before a take-over.
        self._file = _resolve(path)

    def event_log(
        self, mailbox: str, *, durability: Durability = "full", can_shrink: bool = False
    ) -> SqliteEventLog:
        """Open the log of a mailbox for writing; see `Store.event_log`."""
        return SqliteEventLog(self._file, mailbox, durability=durability, can_shrink=can_shrink)

    def existing_log(self, mailbox: str) -> SqliteEventLog:
        """Open the log of a mailbox for reading; see `Store.existing_log`."""
        return SqliteEventLog(self._file, mailbox, create_missing=False)

    def ownership(self) -> FileOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return FileOwnership(self._file)

    def socket_path(self, mailbox: str) -> Path:
        """Return the path of a mailbox's socket, beside the file; see `Store.socket_path`."""
        return self._file.with_name(f"{self._file.name}-socket-{quote(mailbox, safe='@$')}")

    def check_writer(self) -> None:
        """Check that this process may write the file, if it exists; raises UnusableStore."""
        check_writer(self._file)

    @property
    def identity(self) -> str:
        """Return the file's path, without symbolic links; see `Store.identity`."""
        return str(self._file)

    def message_outbox(self, mailbox: str) -> SqliteMessageOutbox:
        """Open the messages recorded for a mailbox; see `Store.message_outbox`."""
        return SqliteMessageOutbox(str(self._file), mailbox)

    def has_message_outbox(self) -> bool:
        """Return True: recording creates the table; see `Store.has_message_outbox`."""
        return True

    def count_messages(self) -> list[MessageCount]:
        """Count recorded messages; see `Store.count_messages`."""
        return count_messages(self._file)

    def mailboxes(self) -> list[str]:
        """Return the names of all mailboxes; see `Store.mailboxes`."""
        return mailbox_names(self._file)

    def log_reader(self, driver: "Driver" = "auto", *, allow_gaps: bool = False) -> "SqliteLogReader":
        """Return the log reader; see `Store.log_reader`."""
        from postroom.adapters.sqlite.log_reader import SqliteLogReader

        return SqliteLogReader(str(self._file), driver, allow_gaps)

    def read_models(self, open_archive: "OpenArchive | None" = None) -> "SqliteReadModels":
        """Open the read models for queries; see `Store.read_models`."""
        from postroom.adapters.sqlite.read_models import SqliteReadModels  # SQLAlchemy is slow to import

        return SqliteReadModels(self._file, open_archive)

    def read_model_store(self) -> "SqliteReadModelStore":
        """Return the read model store; see `Store.read_model_store`."""
        from postroom.adapters.sqlite.read_model_store import SqliteReadModelStore

        return SqliteReadModelStore(self._file)

    def read_model_updater(self) -> "SqliteReadModelUpdater":
        """Open the read models for updates; see `Store.read_model_updater`."""
        from postroom.adapters.sqlite.read_model_updater import SqliteReadModelUpdater

        return SqliteReadModelUpdater(self._file)

    def followed_log(self) -> "SqliteReadModelUpdater":
        """Open the logs for a follower; see `Store.followed_log`."""
        return self.read_model_updater()

    def queried_log(self, open_archive: "OpenArchive | None" = None) -> "SqliteReadModels":
        """Open the logs for queries; see `Store.queried_log`."""
        return self.read_models(open_archive)

    def save_context_backlog(self, backlog: "Sequence[ContextBacklog]") -> None:
        """Save the backlog of a context; see `Store.save_context_backlog`."""
        from postroom.adapters.sqlite.read_model_file import connect_catalog, views_path

        path = views_path(self._file)
        statement = statements("postroom.adapters.sql", "contexts.sql")["save"].format(schema="")
        try:
            with closing(connect_catalog(path)) as file:
                file.execute("BEGIN IMMEDIATE")
                file.executemany(statement, [msgspec.structs.asdict(each) for each in backlog])
                file.execute("COMMIT")
        except sqlite3.Error as error:
            raise Unavailable(f"The read models {path} can't be written: {error}. Check the path.") from error


def _resolve(path: str) -> Path:
    try:
        return Path(os.path.realpath(path))
    except OSError as error:  # the working directory was removed
        raise Unavailable(f"The store {path} can't be found: {error}; use an absolute path.") from error


LOW_BYTES, LOW_SHARE = 1 << 30, 0.05
FULL_BYTES = 64 << 20
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs")
IN_MEMORY = ("tmpfs", "ramfs")
_MOUNTS = Path("/proc/self/mountinfo")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def store_checks(path: str, durability: Durability, has_socket: Callable[[Path], bool]) -> list[Check]:
    """Return the checks of a store.

    Arguments:
        path: of the SQLite file, which need not exist.
        has_socket: returns whether a socket can be at a path.
    """
    store = Path(os.path.realpath(path))
    return [
        Check("store", lambda: check_store(path, durability)),
        Check("file modes", lambda: check_modes(_files(store))),
        Check("file system", lambda: check_file_system(store)),
        Check("disk", lambda: check_disk(store)),
        Check("socket", lambda: check_socket(store, has_socket)),
    ]


def check_store(path: str, durability: Durability) -> Iterator[Finding]:
    """Find whether the file can be used, and how safely it is written."""
    file = Path(os.path.realpath(path))
    folder = file.parent
    if not folder.is_dir():
        yield Finding("store", "failure", f"the folder {folder} does not exist", f"Run: mkdir -p {folder}")
        return
    if not os.access(folder, os.W_OK | os.X_OK):  # for the write-ahead log
        advice = f"Let user {os.geteuid()} write there."
        yield Finding("store", "failure", f"the folder {folder} is not writable", advice)
        return
    if not has_file(file):
        yield Finding("store", "warning", f"{path} does not exist yet", "The first send creates it.")
        return
    if not os.access(file, os.R_OK | os.W_OK):
        advice = f"Let user {os.geteuid()} read and write it."
        yield Finding("store", "failure", f"{path} is not readable and writable", advice)
        return
    try:
        with closing(connect_reader(file)) as connection:
            ((mode,),) = connection.execute("PRAGMA journal_mode").fetchall()
    except UnusableStore as error:
        finding, _, advice = str(error).partition("; ")
        yield Finding("store", "failure", finding, advice[:1].upper() + advice[1:])
        return
    yield Finding("store", "ok", f"{path}, {_shown_size(file)}")
    if mode != "wal":
        advice = "The next owner switches to WAL; see that no other program opens the file."
        yield Finding("durability", "warning", f"journal mode {mode}, not wal", advice)
    elif durability == "relaxed":
        advice = 'Set durability = "full", unless the last commits before a power cut may be lost.'
        yield Finding("durability", "warning", "relaxed: only process crashes are survived", advice)
    else:
        yield Finding("durability", "ok", "every commit is synced to the write-ahead log")


def check_modes(files: list[Path]) -> Iterator[Finding]:
    """Find files that other users can read or write, or that are another user's."""
    existing = [each for each in files if each.exists()]
    is_fine = True
    for file in existing:
        status = file.stat()
        if status.st_mode & _OTHERS:
            is_fine = False
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            yield Finding("file modes", "failure", f"{file} has mode {mode}", f"Run: chmod 600 {file}")
        if status.st_uid != os.geteuid():
            is_fine = False
            advice = "Run every process of a store as one user."
            yield Finding("file modes", "warning", f"{file} is user {status.st_uid}'s", advice)
    if is_fine:
        count = len(existing)
        yield Finding("file modes", "ok", f"{count} of this user alone" if count else "no files yet")


def check_file_system(store: Path, mounts: Path = _MOUNTS) -> Iterator[Finding]:
    """Find file systems that may lose acknowledged writes, or that several hosts share."""
    kind = file_system(store, mounts)
    if kind is None:
        yield Finding("file system", "ok", "its type can't be seen here")
    elif kind in NETWORK or kind.startswith("fuse."):
        advice = "Use a local disk, or PostgreSQL: SQLite's locks and WAL don't work between hosts."
        yield Finding("file system", "warning", f"{kind}, which hosts may share", advice)
    elif kind in IN_MEMORY:
        advice = "Use a disk, unless everything may be lost."
        yield Finding("file system", "warning", f"{kind}: a restart of the machine loses it", advice)
    elif kind == "overlay":
        advice = "Mount a volume: what is written here ends with the container."
        yield Finding("file system", "warning", "overlay, the layer of a container", advice)
    else:
        yield Finding("file system", "ok", kind)


def check_disk(store: Path) -> Iterator[Finding]:
    """Find how much room is left on the disk."""
    usage = shutil.disk_usage(_existing(store))
    text = f"{shown_bytes(usage.free)} of {shown_bytes(usage.total)} are free"
    advice = "Free space, or let retention remove more: history_retention, max_store_bytes."
    inodes = os.statvfs(_existing(store))
    if usage.free < FULL_BYTES or (inodes.f_files and not inodes.f_favail):
        yield Finding("disk", "failure", text if inodes.f_favail else "no inodes are free", advice)
    elif usage.free < LOW_BYTES or usage.free < LOW_SHARE * usage.total:
        yield Finding("disk", "warning", text, advice)
    else:
        yield Finding("disk", "ok", text)


def check_socket(store: Path, has_socket: Callable[[Path], bool]) -> Iterator[Finding]:
    """Find where the owners of mailboxes answer other processes."""
    path = store.with_name(f"{store.name}-socket-{'x' * 40}")  # names of mailboxes differ in length
    if has_socket(path):
        yield Finding("socket", "ok", "beside the store")
        return
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime is None:
        advice = "Set XDG_RUNTIME_DIR to the same folder for all processes, or shorten the store's name."
        yield Finding("socket", "warning", "the store's name is too long for it; it is in /tmp", advice)
    else:
        yield Finding("socket", "ok", f"in {runtime}, as the store's name is too long for it")


def file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system of a path; None if it can't be found.

    Arguments:
        mounts: the list of mounts, as of proc(5).
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        mount, separator, rest = line.partition(" - ")
        point = mount.split()[4].encode().decode("unicode_escape")  # a space is \040
        if separator and path.is_relative_to(point) and len(point) >= best:  # the last mount covers others
            best, kind = len(point), rest.split()[0]
    return kind


def _files(store: Path) -> list[Path]:
    try:
        return sorted(each for each in store.parent.glob(f"{store.name}*") if each.is_file())
    except OSError:
        return []


def _existing(path: Path) -> Path:
    """Return the path, or the closest folder above it that exists."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _shown_size(file: Path) -> str:
    """Return the size of a file with its write-ahead log."""
    log = file.with_name(f"{file.name}-wal")
    return shown_bytes(file.stat().st_size + (log.stat().st_size if log.exists() else 0))
