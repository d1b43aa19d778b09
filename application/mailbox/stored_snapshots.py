"""Snapshots as stored, and the mailbox of the newest one and the records after it (ADR 0067)."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec
from blake3 import blake3

from postroom.application.mailbox.codec import compress, decompress
from postroom.application.mailbox.segments import ends_with
from postroom.application.ports.event_log import EventLogReader, StoredSnapshot
from postroom.domain.errors import BrokenLog, NotFound, PostroomError
from postroom.domain.mailbox.batch import evolve_batch, is_batch
from postroom.domain.mailbox.events import StoredSettings
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.snapshot import READABLE, Moment, SnapshotPart, restore_snapshot
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import Message, MessageSent
from postroom.domain.message_decider import evolve as evolve_message
from postroom.domain.record import Event, Record

DIGEST_BYTES = 32
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SnapshotPart).decode


def encode_part(part: SnapshotPart) -> bytes:
    """Return the bytes of a row, which begin with the digest of those that follow."""
    compressed = compress(_encode(part))
    return blake3(compressed).digest() + compressed


def digest_of(state: bytes) -> bytes:
    """Return the digest of an encoded row."""
    return state[:DIGEST_BYTES]


def decode_part(state: bytes) -> SnapshotPart | None:
    """Return the row that these bytes hold; None if they are damaged or of another version."""
    compressed = state[DIGEST_BYTES:]
    if blake3(compressed).digest() != digest_of(state):
        return None
    try:
        part = _decode(decompress(compressed, 0))
    except (msgspec.MsgspecError, BrokenLog):
        return None
    return part if part.version in READABLE else None


class SavedPart(NamedTuple):
    """Facts that an owner keeps about a stored part.

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
    """A row of the store, and its contents: None if that is damaged or of another version."""

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


P = ParamSpec("P")
T = TypeVar("T")


def fold(log: EventLogReader) -> Mailbox:
    """Return the mailbox as a fold of its log; requires no ownership.

    A snapshot is used only if the commit at its end is still in the log with the same chain hash.

    Raises: BrokenLog when the start of the log is missing and no snapshot covers it, or its end is missing.
    """
    mailbox, _ = fold_from(log)
    return mailbox


def fold_from(log: EventLogReader) -> tuple[Mailbox, list[SavedPart]]:
    """Return the mailbox as `fold` does, and the parts of the snapshot that was used, oldest first."""
    check_seal(log)
    mailbox, parts = Mailbox(log.mailbox), list[SavedPart]()
    for snapshot in usable_snapshots(log):
        restored = snapshot.restore()
        if restored is not None:
            mailbox, parts = restored, snapshot.parts
            break
    start = mailbox.position
    first = log.first_position()
    if first is not None and first > mailbox.position + 1:
        raise BrokenLog(
            f"The log of mailbox {log.mailbox} starts at position {first}, and no snapshot covers the "
            "records before. Restore the store from a backup.",
            first,
        )
    _evolve_all(mailbox, log.replay_runs(start))
    return mailbox, parts


def fold_at(log: EventLogReader, position: int) -> Mailbox:
    """Return the mailbox as of the record at `position`; at 0 it is empty.

    Folds from the newest snapshot at or before `position`, else from the first record.

    Raises: NotFound when the log does not reach `position`, or retention removed the records before it.
    """
    head = log.head()
    last = head.position if head is not None else 0
    if not 0 <= position <= last:
        raise NotFound(f"The log of mailbox {log.mailbox} ends at position {last}; it has no {position}.")
    restored = (snapshot.restore() for snapshot in usable_snapshots(log, position))
    mailbox = next((each for each in restored if each is not None), Mailbox(log.mailbox))
    first = log.first_position() or 1
    if first > mailbox.position + 1:
        oldest = min((snapshot.position for snapshot in usable_snapshots(log)), default=first)
        raise NotFound(
            f"The history of mailbox {log.mailbox} begins at position {oldest}, after {position}: retention "
            "removed the records before it."
        )
    _evolve_all(mailbox, _through(position, log.replay_runs(mailbox.position)))
    return mailbox


def fold_message(records: Iterable[Record]) -> Message | None:
    """Return a message as a fold of its records, or None if its first record is missing."""
    message: Message | None = None
    for record in records:
        event = record.event
        if message is None and not isinstance(event, MessageSent):
            return None  # retention removed the start of its history
        message = evolve_message(message, event, record.position, record.epoch)  # type: ignore[arg-type]
    return message


def check_seal(log: EventLogReader) -> None:
    """Check that the log still holds the commit that the last owner sealed.

    Raises: BrokenLog when it does not.
    """
    seal = log.read_seal()
    if seal is None or seal.position == 0:
        return
    record = log.at_positions([seal.position]).get(seal.position)
    if record is not None and record.chain == seal.chain:
        return
    first = log.first_position()
    if record is None and first is not None and first > seal.position:
        return  # retention removed it
    raise BrokenLog(
        f"The log of mailbox {log.mailbox} reached position {seal.position} when it was last closed, but "
        "the commit there is missing or altered: the end of the log was cut off or rewritten. Restore the "
        "store from a backup.",
        seal.position,
    )


def refuse_altered_records(query: Callable[P, T]) -> Callable[P, T]:
    """Decorate a query of a log: whatever an altered record breaks, BrokenLog is raised."""

    @wraps(query)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return query(*args, **kwargs)
        except PostroomError:
            raise
        except Exception as error:
            raise BrokenLog(
                "The log has records that can't be read as they were written: at least one was altered. Run "
                "`postroom verify`, which names the first, and restore the store from a backup.",
                0,
            ) from error

    return refusing


def _evolve_all(mailbox: Mailbox, runs: Iterable[tuple[int, Sequence[Event]]]) -> None:
    """Evolve a mailbox by the events after its position, as `EventLogReader.replay_runs` yields them.

    Raises: BrokenLog naming the first event that is missing or can't be decoded or applied.
    """
    try:
        with mailbox.replaying():
            for position, run in runs:
                if position != mailbox.position + 1:
                    raise _gap(mailbox, position)
                if len(run) > 1 and is_batch(run):
                    evolve_batch(mailbox, run)
                else:
                    for event in run:
                        evolve(mailbox, event)
    except PostroomError:
        raise
    except Exception as error:  # an altered event can break `evolve` in any way
        position = mailbox.position
        raise BrokenLog(
            f"The event of mailbox {mailbox.name} at position {position} can't be applied: it or one before "
            "it was altered. Restore the store from a backup.",
            position,
        ) from error


def _through(
    position: int, runs: Iterable[tuple[int, Sequence[Event]]]
) -> Iterator[tuple[int, Sequence[Event]]]:
    """Yield the events up to a position."""
    for first, run in runs:
        if first > position:
            return
        yield first, run[: position - first + 1]


def _gap(mailbox: Mailbox, position: int) -> BrokenLog:
    expected = mailbox.position + 1
    return BrokenLog(
        f"The log of mailbox {mailbox.name} has no event at position {expected}, but one at {position}: "
        "commits were removed. Restore the store from a backup.",
        expected,
    )
