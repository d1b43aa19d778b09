"""The folder of a log archive: on this machine, or in an object store, by PyArrow's file systems.

The manifest of a mailbox lists its files and their hashes.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import lru_cache
from pathlib import Path
from tempfile import mkstemp
from time import time

import msgspec
import pyarrow as pa
from blake3 import blake3
from pyarrow import fs

from postroom.adapters.files import sync
from postroom.application.ports.event_log import Segment
from postroom.domain.errors import BrokenLog, InvalidRequest, Unavailable

_TEMPORARY = ".tmp"
_UNFINISHED_SECONDS = 60
"""Age of a temporary file from which it is removed if no process has it locked."""
_URLS = ("s3://", "file://")
"""Beginnings of supported URLs; PyArrow retries others, such as gs://, for minutes."""


class FileGone(Unavailable):
    """A file that was listed does not exist any more, as compaction merges files."""


class ArchiveFolder:
    """A folder with a folder of files for each mailbox.

    Files of this machine have mode 0600 and are renamed into place when they are durable; an object store
    shows an object once it is complete.

    Arguments:
        address: path of a folder, or URL such as `s3://bucket/prefix`.

    Raises: InvalidRequest when the URL is not one of an object store.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        # One client for each process, as clients of object stores do not survive a fork.
        self.files, self._root = _open(self.address, os.getpid())
        self.is_local = isinstance(self.files, fs.LocalFileSystem)

    def path(self, *names: str) -> str:
        """Return the path of a folder or file in the file system."""
        return "/".join((self._root, *names))

    def url(self, path: str) -> str:
        """Return a path as Spark names it."""
        return path if self.is_local else f"s3a://{path}"

    def list(self, *names: str) -> list[fs.FileInfo]:
        """Return the files and folders of a folder; an empty list if it is missing."""
        selector = fs.FileSelector(self.path(*names), allow_not_found=True)
        with self.unavailable(selector.base_dir, "read"):
            infos = list(self.files.get_file_info(selector))
        if not infos and self.is_local:
            with self.unavailable(self._root, "opened"), suppress(FileNotFoundError):
                os.stat(f"{self._root}/.")  # PyArrow takes a file for a missing folder
        return infos

    def read(self, path: str) -> pa.Buffer:
        """Return the content of a file.

        Raises: FileGone when it does not exist.
        """
        with self.unavailable(path, "read"), self.files.open_input_file(path) as file:
            return file.read_buffer()

    def write(self, path: str, content: pa.Buffer) -> None:
        """Write a file durably, all or nothing; create its folder if it is missing."""
        with self.unavailable(path, "written"):
            if self.is_local:
                _write(Path(path), content)
            else:
                with self.files.open_output_stream(path) as file:
                    file.write(content)

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        with self.unavailable(path, "written"), suppress(FileNotFoundError):
            self.files.delete_file(path)

    @contextmanager
    def unavailable(self, path: str, action: str) -> Iterator[None]:
        """Raise Unavailable for errors of files and of PyArrow; `action` completes "can't be".

        Raises: FileGone when the file is missing.
        """
        try:
            yield
        except (OSError, ValueError, pa.ArrowException) as error:
            type_ = FileGone if action == "read" and self._is_missing(path) else Unavailable
            hint = (
                "the folder, its permissions and its disk"
                if self.is_local
                else "the bucket and the credentials"
            )
            raise type_(f"The archive {path} can't be {action}: {error}. Check {hint}.") from error

    def _is_missing(self, path: str) -> bool:
        try:
            return bool(self.files.get_file_info(path).type == fs.FileType.NotFound)
        except (OSError, pa.ArrowException):
            return False


def is_url(address: str) -> bool:
    """Return whether an address is one of an object store."""
    return "://" in address


@lru_cache(maxsize=16)
def _open(address: str, process: int) -> tuple[fs.FileSystem, str]:
    if not is_url(address):
        return fs.LocalFileSystem(), address.rstrip("/") or "/"
    problem = "it has no bucket"
    if not address.startswith(_URLS):
        problem = "it is not one of those that are supported"
    else:
        try:
            files, root = fs.FileSystem.from_uri(address)
            if root:
                return files, root.rstrip("/")
        except (OSError, ValueError, pa.ArrowException) as error:
            problem = str(error)
    raise InvalidRequest(
        f"The archive {address} can't be opened: {problem}. Name a folder, or an object store as "
        "s3://BUCKET/PREFIX."
    )


def _write(path: Path, content: pa.Buffer) -> None:
    folder = path.parent
    _make_folder(folder)
    _remove_unfinished(folder)
    descriptor, temporary = mkstemp(_TEMPORARY, ".", folder)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            flock(file, LOCK_EX)  # held until the file is renamed or its process ends
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    sync(folder)


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents durably, with mode 0700, where they are missing."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync(each.parent)


def _remove_unfinished(folder: Path) -> None:
    """Remove the incomplete files of processes that ended."""
    for path in folder.glob(f".*{_TEMPORARY}"):
        with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime + _UNFINISHED_SECONDS < time():
                flock(file, LOCK_EX | LOCK_NB)
                path.unlink(missing_ok=True)


NAME = "manifest.json"
_HASH = re.compile(r"[0-9a-f]{64}")


def is_named(file: str, first: int, last: int) -> bool:
    """Return whether the name of a file says that it has the positions from `first` to `last`."""
    return file.startswith(f"{first:013d}-{last:013d}.")


class Entry(msgspec.Struct, frozen=True):
    """A file of the archive.

    Arguments:
        file: its name.
        first, last: its positions.
        before, chain: hashes in hex of the commit before `first`, and of the commit that ends at `last`.
        bytes: its size.
        blake3: hash of its content, in hex.
    """

    file: str
    first: int
    last: int
    before: str | None
    chain: str
    bytes: int
    blake3: str

    def __post_init__(self) -> None:
        if self.last < self.first or not is_named(self.file, self.first, self.last):
            raise ValueError(f"{self.file!r} has other positions than {self.first} to {self.last}")
        before = self.chain if self.before is None else self.before
        if not all(map(_HASH.fullmatch, (before, self.chain, self.blake3))):
            raise ValueError(f"a hash of {self.file} does not have 64 hexadecimal digits")

    @classmethod
    def of(cls, name: str, segment: Segment, content: pa.Buffer) -> "Entry":
        """Return the entry of a segment's file."""
        before = None if segment.before is None else segment.before.hex()
        hash_ = blake3(content).hexdigest()
        return cls(name, segment.first, segment.last, before, segment.chain.hex(), content.size, hash_)

    def segment(self, mailbox: str) -> Segment:
        """Return the segment that the file has."""
        before = None if self.before is None else bytes.fromhex(self.before)
        return Segment(mailbox, self.first, self.last, before, bytes.fromhex(self.chain))


class Manifest(msgspec.Struct, frozen=True):
    """The files of a mailbox's archive, in the order of positions.

    Files that it does not list are valid, too: an earlier release has written them, or another process has
    written the manifest at the same time.
    """

    mailbox: str
    segments: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        if len(self.by_name) < len(self.segments):
            raise ValueError("it lists a file twice")

    @property
    def by_name(self) -> dict[str, Entry]:
        """Return the entries by file name."""
        return {entry.file: entry for entry in self.segments}

    def with_changes(self, added: Iterable[Entry], removed: Collection[str] = ()) -> "Manifest":
        """Return a manifest with new entries, which replace older ones, and without some files."""
        entries = self.by_name | {entry.file: entry for entry in added}
        remaining = [entry for name, entry in entries.items() if name not in removed]
        return Manifest(self.mailbox, tuple(sorted(remaining, key=lambda each: (each.first, each.last))))


def read_manifest(folder: ArchiveFolder, mailbox: str) -> Manifest:
    """Return the manifest of a mailbox; an empty one if it is missing.

    Raises: BrokenLog when it is not a manifest of this mailbox.
    """
    path = folder.path(mailbox, NAME)
    try:
        manifest = msgspec.json.decode(folder.read(path), type=Manifest)
    except FileGone:
        return Manifest(mailbox)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _unusable(path, str(error)) from error
    if manifest.mailbox != mailbox:
        raise _unusable(path, f"it is one of {manifest.mailbox}")
    return manifest


def write_manifest(folder: ArchiveFolder, manifest: Manifest) -> None:
    """Replace the manifest of a mailbox."""
    content = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    folder.write(folder.path(manifest.mailbox, NAME), pa.py_buffer(content + b"\n"))


def _unusable(path: str, problem: str) -> BrokenLog:
    return BrokenLog(
        f"The manifest {path} can't be used: {problem}. Restore it from a backup, or delete it and run "
        "`postroom segments build`, which writes a new one.",
        0,
    )
