"""Files: writes that survive a crash, and locks."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path


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
