"""Snapshots as they are stored: which of a log's parts make one, and the mailbox that it holds."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from postroom.application.mailbox.commit_ends import ends_with
from postroom.application.mailbox.snapshot_rows import decode_part, digest_of
from postroom.application.ports.event_log import EventLogReader, StoredSnapshot
from postroom.domain.mailbox.collect import Moment
from postroom.domain.mailbox.events import StoredSettings
from postroom.domain.mailbox.snapshot import SnapshotPart, restore_snapshot
from postroom.domain.mailbox.state import Mailbox


class SavedPart(NamedTuple):
    """What an owner knows of a part that is in the store.

    Arguments:
        items: number of messages and keys in it.
        first: position of its first row.
        digest: of its last row.
    """

    moment: Moment
    items: int
    first: int
    digest: bytes


class UsableSnapshot:
    """A snapshot of a log whose rows are complete."""

    def __init__(self, mailbox: str, rows: list["_Row"]) -> None:
        """Initialise with the rows, oldest first."""
        self._mailbox = mailbox
        self._rows = rows

    @property
    def position(self) -> int:
        """Return the position of the last event that it covers."""
        return self._rows[-1].position

    @property
    def settings(self) -> StoredSettings:
        """Return the settings of the mailbox in it."""
        part = self._rows[-1].part
        assert part is not None, "the snapshot is usable"
        return part.head.settings

    @property
    def parts(self) -> list[SavedPart]:
        """Return the summaries of its parts, oldest first."""
        parts: list[SavedPart] = []
        first, items = 0, 0
        for row in self._rows:
            part = row.part
            assert part is not None, "the snapshot is usable"
            first, items = first or row.position, items + part.items
            if not part.rows_after:
                parts.append(SavedPart(Moment(row.position, part.head.at), items, first, row.digest))
                first, items = 0, 0
        return parts

    def restore(self) -> Mailbox | None:
        """Return the mailbox that it holds, or None if it can't be decoded."""
        parts = [row.part for row in self._rows if row.part is not None]
        with _without_gc():
            return restore_snapshot(parts, self._mailbox)


@contextmanager
def _without_gc() -> Iterator[None]:
    """Switch off the garbage collector: nothing is freed, and its passes take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Row:
    """A row of the store, and what is in it: None if that is damaged or of another version."""

    def __init__(self, stored: StoredSnapshot) -> None:
        self.position = stored.position
        self.chain = stored.chain
        self.digest = digest_of(stored.state)
        part = decode_part(stored.state)
        is_placed = part is not None and part.position == stored.position
        self.part: SnapshotPart | None = part if is_placed else None


def usable_snapshots(log: EventLogReader, through: int | None = None) -> Iterator[UsableSnapshot]:
    """Yield the snapshots of a log at or before position `through`, newest first.

    A snapshot is usable if a commit ends at its position with the same chain hash, and all its
    rows are in the store. Rows that belong to no snapshot, as after an append that failed, are passed over.
    """
    stored = log.snapshots()
    rows: list[_Row] = []  # newest first, as far as they were needed
    index = 0
    while index < len(rows) or _read_row(stored, rows):
        newest = rows[index]
        index += 1
        if (
            newest.part is None
            or newest.part.rows_after
            or (through is not None and newest.position > through)
        ):
            continue
        if not ends_with(log, newest.position, newest.chain):
            continue
        needed = _needed_by(index - 1, rows, stored)
        if needed is not None:
            yield UsableSnapshot(log.mailbox, needed)


def _needed_by(index: int, rows: list[_Row], stored: Iterator[StoredSnapshot]) -> list[_Row] | None:
    """Return the rows that the snapshot of a row needs, oldest first; None if one is missing."""
    row = rows[index]
    part = row.part
    assert part is not None, "the caller has checked it"
    needed, first = [row], part.since or row.position
    while needed[-1].position > first:
        index += 1
        if index == len(rows) and not _read_row(stored, rows):
            return None
        older = rows[index]
        if older.part is not None and older.digest == part.previous:
            needed.append(older)
            part = older.part
    return needed[::-1] if needed[-1].position == first else None


def _read_row(stored: Iterator[StoredSnapshot], rows: list[_Row]) -> bool:
    row = next(stored, None)
    if row is not None:
        rows.append(_Row(row))
    return row is not None
