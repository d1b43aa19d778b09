"""Anchor files: one JSON line per anchor, oldest first, and their commits to git."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from stat import S_ISREG

from postroom.adapters.files import sync
from postroom.application.anchors import Anchor, decode_anchor, encode_anchor
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

MAX_BYTES = 1 << 30
MODE = 0o644


class AnchorFile:
    """An anchor file, to which one process at a time appends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[Anchor]:
        """Return the anchors, oldest first.

        Raises: NotFound if the file does not exist, InvalidRequest if it is empty or a line is not a complete
            anchor, Unavailable if the file can't be read.
        """
        try:
            with self.path.open("rb") as file:
                self._check(file.fileno())
                lines = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            raise NotFound(f"The file {self.path} does not exist; create it with postroom anchor.") from None
        except OSError as error:
            raise self.failure(error) from error
        if not lines:
            raise InvalidRequest(
                f"The file {self.path} is empty, so no log can be compared with it; restore it, or name "
                "another file."
            )
        if not lines.endswith(b"\n"):
            raise InvalidRequest(
                f"The last line of {self.path} is incomplete: the file was cut, or postroom anchor was "
                "killed; restore the file, or run postroom anchor again."
            )
        return self._decode(lines)

    @contextmanager
    def locked(self) -> "Iterator[LockedFile]":
        """Create the file if it does not exist, and lock it for the duration of the context.

        An incomplete last line, left by a crash, is ignored.

        Raises: the errors of `read`; Unavailable if another process holds the lock.
        """
        try:
            is_new = not self.path.exists()
            # Non-blocking, as opening a pipe waits for its reader.
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, MODE)
        except OSError as error:
            raise self.failure(error) from error
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            self._check(descriptor)
            try:
                flock(descriptor, LOCK_EX | LOCK_NB)
            except BlockingIOError:
                raise Unavailable(f"Another process is writing {self.path}; try again.") from None
            content = file.read()
            anchors = self._decode(content)
            if is_new:
                sync(self.path.parent)
            yield LockedFile(self, descriptor, anchors, content.rfind(b"\n") + 1)

    def _check(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        if not S_ISREG(status.st_mode) or status.st_size > MAX_BYTES:
            raise InvalidRequest(f"{self.path} is not an anchor file; name a regular file of up to 1 GiB.")

    def _decode(self, content: bytes) -> list[Anchor]:
        lines = content.split(b"\n")[:-1]
        return [decode_anchor(line, f"Line {n} of {self.path}") for n, line in enumerate(lines, 1)]

    def failure(self, error: OSError) -> Unavailable:
        """Return the error of a failed system call on the file."""
        return Unavailable(f"The file {self.path} can't be used: {error.strerror}.")


class LockedFile:
    """An anchor file that this process has locked.

    Arguments:
        anchors: the anchors in the file.
        size: size of the complete lines in bytes.
    """

    def __init__(self, file: AnchorFile, descriptor: int, anchors: list[Anchor], size: int) -> None:
        self.anchors = anchors
        self._file = file
        self._descriptor = descriptor
        self._size = size

    def append(self, anchors: Sequence[Anchor]) -> None:
        """Append anchors durably, all or none; raise Unavailable on failure."""
        lines = b"".join(encode_anchor(each) + b"\n" for each in anchors)
        try:
            os.ftruncate(self._descriptor, self._size)  # removes an incomplete line, left by a crash
            written = os.pwrite(self._descriptor, lines, self._size)
            if written < len(lines):
                os.ftruncate(self._descriptor, self._size)
                raise Unavailable(f"The disk of {self._file.path} is full; free some space and try again.")
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._file.failure(error) from error
        self._size += len(lines)


TIMEOUT_SECONDS = 60


def check_repository(file: Path) -> None:
    """Raise InvalidRequest unless a file's folder is in the work tree of a git repository."""
    if _git(file, "rev-parse", "--is-inside-work-tree").stdout.strip() != "true":
        raise InvalidRequest(f"{file.parent} is not in a git repository; run git init there, or omit --git.")


def commit(file: Path, message: str) -> None:
    """Commit a file, without other staged changes; do nothing if it is unchanged.

    Raises: Unavailable with the output of git if it fails.
    """
    for arguments in (("add", "--", file.name), ("commit", "--quiet", "-m", message, "--", file.name)):
        if (
            arguments[0] == "commit"
            and not _git(file, "diff", "--cached", "--quiet", "--", file.name).returncode
        ):
            return
        done = _git(file, *arguments)
        if done.returncode:
            reason = (done.stderr or done.stdout).strip().partition("\n")[0]
            raise Unavailable(f"The anchors are in {file}, but git {arguments[0]} failed: {reason}")


def _git(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["git", "-C", str(file.absolute().parent), *arguments],
            capture_output=True,
            check=False,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT_SECONDS,
        )
    except FileNotFoundError:
        raise InvalidRequest("--git needs the program git, which is not installed; install it.") from None
    except subprocess.TimeoutExpired:
        raise Unavailable(f"git {arguments[0]} took longer than {TIMEOUT_SECONDS} s; try again.") from None
