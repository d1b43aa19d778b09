"""Locks on files."""

import fcntl
from contextlib import suppress
from pathlib import Path


def is_file_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a lock file."""
    with suppress(FileNotFoundError), open(path, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
