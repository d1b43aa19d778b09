"""The folder of a log archive: on this machine, or in an object store, by PyArrow's file systems."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from functools import lru_cache
from pathlib import Path
from tempfile import mkstemp
from time import time

import pyarrow as pa
from pyarrow import fs

from postroom.adapters.files.durable import sync
from postroom.domain.errors import InvalidRequest, Unavailable

_TEMPORARY = ".tmp"
_UNFINISHED_SECONDS = 60
"""Age of a temporary file from which it is removed if no process has it locked."""
_URLS = ("s3://", "file://")
"""Beginnings of supported URLs; PyArrow retries others, such as gs://, for minutes."""


class FileGone(Unavailable):
    """A file that was listed does not exist any more, as compaction merges files."""


class ArchiveFolder:
    """A folder with a folder of files for each mailbox.

    Files of this machine have mode 0600 and are renamed into place when they are durable; an object of a
    store is there once it is complete.

    Arguments:
        address: path of a folder, or URL such as `s3://bucket/prefix`.

    Raises: InvalidRequest when the URL is not one of an object store.
    """

    def __init__(self, address: str | Path) -> None:
        self.address = str(address)
        # By process, as clients of object stores do not survive a fork.
        self.files, self._root = _open(self.address, os.getpid())
        self.is_local = isinstance(self.files, fs.LocalFileSystem)

    def path(self, *names: str) -> str:
        """Return the path of a folder or file in the file system."""
        return "/".join((self._root, *names))

    def url(self, path: str) -> str:
        """Return a path as Spark names it."""
        return path if self.is_local else f"s3a://{path}"

    def list(self, *names: str) -> list[fs.FileInfo]:
        """Return the files and folders of a folder; none if it is missing."""
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
        """Write a file that is durable and complete, or not there, when this returns; make its folder."""
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
            flock(file, LOCK_EX)  # until it is renamed or its process ends
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
