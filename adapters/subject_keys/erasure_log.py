"""The erasure log port over a file of lines."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

from postroom.adapters.files.durable import sync
from postroom.domain.errors import Unavailable

MODE = 0o600


class FileErasureLog:
    """Erasure log in a file that the first lock creates; see `ErasureLog`.

    A last line that a crash left incomplete is ignored, and replaced by the next one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[bytes]:
        """Return the lines; see `ErasureLog.read`."""
        try:
            return self._path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise self._failure(error) from error

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file against other processes; see `ErasureLog.locked`."""
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        except OSError as error:
            raise self._failure(error) from error
        try:
            sync(self._path.parent)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise Unavailable(
                    f"Another process writes {self._path}; try again when it has ended."
                ) from None
            yield
        finally:
            os.close(descriptor)

    def append(self, line: bytes) -> None:
        """Append a line; see `ErasureLog.append`."""
        try:
            with self._path.open("r+b", buffering=0) as file:
                end = file.read().rfind(b"\n") + 1
                file.truncate(end)
                file.seek(end)
                data = line + b"\n"
                if file.write(data) < len(data):
                    file.truncate(end)
                    raise Unavailable(f"The disk of {self._path} is full; free some space and try again.")
                os.fsync(file.fileno())
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> Unavailable:
        return Unavailable(f"The erasure log {self._path} can't be used: {error.strerror}.")
