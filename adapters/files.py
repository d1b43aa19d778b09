"""Files: writes that survive a crash, locks, and changes that the kernel reports (inotify(7))."""

import ctypes
import errno
import fcntl
import os
import select
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from postroom.application.threads import set_close_on_fork


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a lock file."""
    with suppress(FileNotFoundError), open(path, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


_MODIFIED, _ATTRIBUTES, _MOVED_TO, _CREATED, _DELETED, _MOVED = 0x2, 0x4, 0x80, 0x100, 0x400, 0x800
_ONCE = 0x80000000
_EVENTS = _MODIFIED | _ATTRIBUTES | _MOVED_TO | _CREATED | _DELETED | _MOVED | _ONCE
_BYTES = 65_536


class FileChanges:
    """Watch for the next change of each of some files: its content, its name, or new names in a folder.

    The kernel reports a change when it begins, so what a database commits can be read only a little later.
    Nothing is reported on systems without inotify, or when its limit of watches is reached.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        """Readable when a file has changed; negative if no change is reported."""
        if not sys.platform.startswith("linux"):
            return
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor >= 0:
            set_close_on_fork(self.descriptor, True)

    def watch(self, files: Iterable[Path]) -> bool:
        """Watch these files for their next change; return whether every file that exists is watched."""
        watched = 0
        for file in files if self.descriptor >= 0 else ():
            if self._libc.inotify_add_watch(self.descriptor, os.fsencode(file), _EVENTS) >= 0:
                watched += 1
            elif ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR):
                return False
        return watched > 0

    def wait(self, seconds: float) -> bool:
        """Wait for a change, at most so long; forget what was told, and return whether anything was."""
        arrivals = select.poll()
        arrivals.register(self.descriptor, select.POLLIN)
        is_told = bool(arrivals.poll(seconds * 1_000))
        self.clear()
        return is_told

    def clear(self) -> None:
        """Forget the changes that were reported."""
        try:
            while self.descriptor >= 0:
                os.read(self.descriptor, _BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        """End all watches; closing twice is fine."""
        if self.descriptor >= 0:
            set_close_on_fork(self.descriptor, False)
            os.close(self.descriptor)
            self.descriptor = -1
