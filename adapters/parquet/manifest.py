"""Manifests: what files the archive of a mailbox has, and their hashes."""

from collections.abc import Collection, Iterable

import msgspec
import pyarrow as pa
from blake3 import blake3

from postroom.adapters.parquet.archive_folder import ArchiveFolder, FileGone
from postroom.application.ports.event_log import Segment
from postroom.domain.errors import BrokenLog

NAME = "manifest.json"


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

    Files that are not in it are valid as well: those of earlier releases, or of another process that wrote it
    at the same time.
    """

    mailbox: str
    segments: tuple[Entry, ...] = ()

    @property
    def by_name(self) -> dict[str, Entry]:
        """Return the entries by file name."""
        return {entry.file: entry for entry in self.segments}

    def with_changes(self, added: Iterable[Entry], removed: Collection[str] = ()) -> "Manifest":
        """Return the manifest with entries added, in place of those of the same files, and others removed."""
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
    except msgspec.DecodeError as error:
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
