"""Durability of files and folders."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
