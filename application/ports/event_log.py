"""Ports: the event log of one mailbox (append at an expected position, read in order)."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from postroom.domain.record import Record


class Head(NamedTuple):
    """End of a log: position, log time (µs), chain hash and epoch of its last record."""

    position: int
    at: int
    chain: bytes
    epoch: int


class StoredSnapshot(NamedTuple):
    """A part of a saved fold, up to the record at `position`, whose chain hash is `chain`."""

    position: int
    chain: bytes
    state: bytes


class Seal(NamedTuple):
    """End of the log when its owner last closed it; a log that ends before it was truncated."""

    position: int
    chain: bytes


class LogSize(NamedTuple):
    """Size of a log in bytes: its records (an estimate), and the store's size on disk.

    Space freed by truncation counts in `disk` until it is reclaimed.
    """

    records: int
    disk: int


class EventLogReader(Protocol):
    """Reader of the records of one mailbox; calls block and may come from any thread."""

    @property
    def mailbox(self) -> str:
        """Return the name of the mailbox."""

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records in the order of their positions, starting after position `after`."""

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield only the columns up to `state` of each record, which suffice to fold a mailbox."""

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the whole records of one message or of the mailbox itself, oldest first."""

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return the streams among these that have records."""

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` streams from `first` to `last`, in order, whose first record remains."""

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
        """Yield the first record of each stream, if it remains, as `replay` does and in any order."""

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the whole records at these positions, without those that are missing."""

    def head(self) -> Head | None:
        """Return the end of the log, or None while it is empty."""

    def first_position(self) -> int | None:
        """Return the position of the oldest remaining record, or None while the log is empty."""

    def position_before(self, at: int) -> int:
        """Return the position of the last record written before log time `at` (µs), or 0."""

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved parts of snapshots, newest first, each read lazily."""

    def sealed(self) -> Seal | None:
        """Return the seal that the last owner saved, or None."""

    def size(self) -> LogSize:
        """Return the size of the log, indexes included."""

    def close(self) -> None:
        """Release connections and files; closing twice is fine."""


class EventLog(EventLogReader, Protocol):
    """The records of one mailbox, for its owner; every adapter passes `tests/conformance/event_log.py`.

    Writes block and may come from any thread, one at a time.
    """

    @property
    def durability(self) -> str:
        """Return the failure that an append survives: `power-cut`, `process-crash` or `nothing`."""

    def append(self, records: Sequence[Record]) -> None:
        """Append records, all or none; they are durable when this returns.

        The first record's position implies the expected end of the log: the position before it.

        Raises:
            WrongPosition: the log ends elsewhere.
            Fenced: it ends elsewhere because an owner of a newer epoch wrote to it.
            DuplicateRecord: a stream already has a record of the same version; nothing was stored.
            Unavailable: the store failed; whether the records were stored is unknown.
        """

    def truncate(self, through: int, limit: int) -> int:
        """Remove up to `limit` of the records at or before `through`, oldest first; return how many."""

    def position_at_size(self, size: int) -> int:
        """Return the last position through which the oldest records take about `size` bytes, or 0.

        Fast if `size` is a fraction of the log. If the first record alone is larger, returns its position.
        """

    def reclaim_space(self, limit: int) -> int:
        """Return up to about `limit` bytes freed by truncation to the file system; return how many.

        Short enough for appends to wait for it. Space that is not reclaimed is reused for new records.
        """

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a part of a snapshot in place of one at the same position; drop those before `keep_from`."""

    def seal(self, seal: Seal) -> None:
        """Save the end of the log, unless the saved seal has a later position."""
