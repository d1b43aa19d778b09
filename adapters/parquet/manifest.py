"""Manifests: what files the archive of a mailbox has, and their hashes."""

import re
from collections.abc import Collection, Iterable

import msgspec
import pyarrow as pa
from blake3 import blake3

from postroom.adapters.parquet.archive_folder import ArchiveFolder, FileGone
from postroom.application.ports.event_log import Segment
from postroom.domain.errors import BrokenLog

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
        before, chain: hashes, in hex, of the commit before `first` and of the one that ends at `last`.
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
