"""A disk that loses its power: an apsw VFS that knows which writes were synced, and what others leave.

The files themselves are real ones, so SQLite reads what it wrote. Beside each file the VFS keeps what is
durable (its content at the last sync) and the writes since. At a cut, all of those writes are lost, or any of
them, or any 512-byte sectors of them: a disk may write them in any order before the power goes.
"""

import os
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import apsw

SECTOR = 512
CUTS = ("all unsynced writes lost", "some unsynced writes lost", "some unsynced sectors lost")

Write = tuple[int, bytes] | int
"""Bytes at an offset, or the size that a file was truncated to."""


class DurableFile:
    """What of one file survives."""

    def __init__(self, content: bytes) -> None:
        self.synced = content
        self.unsynced: list[Write] = []

    def sync(self) -> None:
        self.synced = _applied(self.synced, self.unsynced)
        self.unsynced = []

    def after_cut(self, kind: str, chance: random.Random) -> bytes:
        if kind == CUTS[0]:
            return self.synced
        writes = (
            self.unsynced
            if kind == CUTS[1]
            else [part for write in self.unsynced for part in _sectors(write)]
        )
        return _applied(self.synced, [write for write in writes if chance.random() < 0.5])


class Disk(apsw.VFS):
    """Files and what of them is durable; calls `at_each_operation` before each write and around each sync."""

    NAME = "power-cut"

    def __init__(self, at_each_operation: Callable[[], None]) -> None:
        self.files: dict[str, DurableFile] = {}
        self.at_each_operation = at_each_operation
        super().__init__(self.NAME, "unix")

    def xOpen(self, name: Any, flags: list[int]) -> "CutFile":  # noqa: N802  # apsw's name
        return CutFile(self, name, flags)

    def xDelete(self, path: str, sync: bool) -> None:  # noqa: N802  # apsw's name
        super().xDelete(path, sync)
        self.files.pop(path, None)

    def after_cut(self, kind: str, chance: random.Random) -> dict[str, bytes]:
        """Return what a power cut now would leave of each file."""
        return {path: file.after_cut(kind, chance) for path, file in self.files.items()}


class CutFile(apsw.VFSFile):
    """One open file; all openings of a path share what is durable of it."""

    def __init__(self, disk: Disk, name: Any, flags: list[int]) -> None:
        super().__init__("unix", name, flags)
        self._disk = disk
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        if path not in disk.files:
            with open(path, "rb") as file:
                disk.files[path] = DurableFile(file.read())
        self._durable = disk.files[path]

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802  # apsw's name
        self._disk.at_each_operation()
        super().xWrite(data, offset)
        self._durable.unsynced.append((offset, bytes(data)))

    def xTruncate(self, size: int) -> None:  # noqa: N802  # apsw's name
        self._disk.at_each_operation()
        super().xTruncate(size)
        self._durable.unsynced.append(size)

    def xSync(self, flags: int) -> None:  # noqa: N802  # apsw's name
        self._disk.at_each_operation()
        super().xSync(flags)
        self._durable.sync()
        self._disk.at_each_operation()


def restore(files: dict[str, bytes], directory: str) -> None:
    """Write what a cut left to another directory, as a machine finds it when its power is back."""
    for path, content in files.items():
        with open(os.path.join(directory, os.path.basename(path)), "wb") as file:
            file.write(content)


def _applied(content: bytes, writes: list[Write]) -> bytes:
    image = bytearray(content)
    for write in writes:
        if isinstance(write, int):
            del image[write:]
            continue
        offset, data = write
        if len(image) < offset:
            image.extend(bytes(offset - len(image)))
        image[offset : offset + len(data)] = data
    return bytes(image)


def _sectors(write: Write) -> list[Write]:
    if isinstance(write, int):
        return [write]
    offset, data = write
    cuts = [0, *range(SECTOR - offset % SECTOR, len(data), SECTOR), len(data)]
    return [(offset + start, data[start:end]) for start, end in pairwise(cuts)]
