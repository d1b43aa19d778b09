"""Ports: the event log of one mailbox (append at an expected position, read in order)."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.event import Event
from postroom.domain.record import Record


class Head(NamedTuple):
    """End of a log: last position, log time (µs), chain hash and epoch of its last commit."""

    position: int
    at: int
    chain: bytes
    epoch: int


class StoredSnapshot(NamedTuple):
    """A row of a saved fold at a position; the chain hash is that of the commit that ends the fold.

    The last row of a part has the position at which that commit ends, the others those before.
    """

    position: int
    chain: bytes
    state: bytes


class Seal(NamedTuple):
    """End of the log when its owner last closed it; a log that ends before it was truncated."""

    position: int
    chain: bytes


class LogSize(NamedTuple):
    """Size of a log in bytes: its commits (an estimate), and the store's size on disk.

    Space freed by truncation counts in `disk` until it is reclaimed.
    """

    commits: int
    disk: int


class CommitReader(Protocol):
    """Reader of the commits of one mailbox's log; calls block and may come from any thread.

    A log adapter has these methods, and inherits those of `EventLogReader` from
    `application.mailbox.records.Records`.
    """

    @property
    def mailbox(self) -> str:
        """Return the name of the mailbox."""

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        """Yield the commits that end after position `after`, in order.

        Arguments:
            envelopes: read them; otherwise, they are empty.

        Raises: BrokenLog when a commit can't be decompressed.
        """

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        """Return the commits that hold these positions, each once and in order; missing ones are left out."""

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        """Return the entries of these streams in the index, in the order of streams and versions."""

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return up to `limit` streams from `first` to `last`, in order, whose first event remains."""

    def head(self) -> Head | None:
        """Return the end of the log, or None while it is empty."""

    def first_position(self) -> int | None:
        """Return the first position of the oldest remaining commit, or None while the log is empty."""

    def position_before(self, at: int) -> int:
        """Return the last position of the last commit written before log time `at` (µs), or 0.

        After truncation, the position before the oldest remaining commit takes the place of 0.
        """

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved rows of snapshots, newest first, each read lazily."""

    def read_seal(self) -> Seal | None:
        """Return the seal that the last owner saved, or None."""

    def size(self) -> LogSize:
        """Return the size of the log, index included."""

    def position_at_size(self, size: int) -> int:
        """Return the end of the commit through which the oldest commits take about `size` bytes, or 0.

        Fast if `size` is a fraction of the log. If the first commit alone is larger, returns its end.
        """

    def close(self) -> None:
        """Release connections and files; closing twice is fine."""


class EventLogReader(CommitReader, Protocol):
    """Reader of the records of one mailbox's log: the events of its commits."""

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield records with their envelopes in the order of positions, starting after position `after`."""

    def replay(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield positions and events without envelopes, which suffice to fold a mailbox."""

    def replay_runs(self, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        """Yield what `replay` does: consecutive events of one type and time, and the first one's position."""

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one message or of the mailbox itself, oldest first."""

    def read_streams(self, streams: Iterable[bytes]) -> Mapping[bytes, Sequence[Record]]:
        """Return the records of streams without envelopes, oldest first; nothing for unknown ones.

        Messages that were sent near to each other are read together.
        """

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return the streams among these whose first event remains."""

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[Event]:
        """Yield the first event of each stream, without envelope, if it remains; in any order."""

    def at_positions(self, positions: Sequence[int], optional: Collection[int] = ()) -> dict[int, Record]:
        """Return the records at these positions, without those that are missing.

        Arguments:
            optional: other positions, whose records may be returned if they were read anyway.
        """


class EventLog(EventLogReader, Protocol):
    """The log of one mailbox, for its owner; every adapter passes `tests/conformance/event_log.py`.

    Writes block and may come from any thread, one at a time.
    """

    @property
    def durability(self) -> str:
        """Return the failure that an append survives: `power-cut`, `process-crash` or `nothing`."""

    def append(self, commits: Sequence[Commit]) -> None:
        """Append commits, all or none; they are durable when this returns.

        The first commit's position implies the expected end of the log: the position before it.

        Raises:
            WrongPosition: the log ends elsewhere.
            Fenced: it ends elsewhere because an owner of a newer epoch wrote to it.
            DuplicateRecord: the index has an entry of the same stream and version; nothing was stored.
            Unavailable: the store failed; whether the commits were stored is unknown.
        """

    def truncate(self, through: int, limit: int) -> int:
        """Remove up to `limit` commits that end at or before `through`, oldest first.

        Returns: the number of positions removed.
        """

    def reclaim_space(self, limit: int) -> int:
        """Return up to about `limit` bytes freed by truncation to the file system; return how many.

        Short enough for appends to wait for it. Space that is not reclaimed is reused for new commits.
        """

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        """Save a row of a snapshot in place of one at the same position; drop those before `keep_from`."""

    def seal(self, seal: Seal) -> None:
        """Save the end of the log, unless the saved seal has a later position."""


class VolatileLog(EventLog, Protocol):
    """The log of one mailbox in memory, without the content of settled messages (svc-mailbox I-9)."""

    @property
    def used_bytes(self) -> int:
        """Return about how much memory events and snapshots take, in bytes."""

    def compact(self, through: int, unsettled: Collection[bytes]) -> int:
        """Forget the events before a snapshot, as far as no unsettled message needs them.

        Of an unsettled message, the send and the latest delivery remain. Of one that settled since the last
        compaction, all remains but its content, so that a repeated ack or send is recognised.

        Arguments:
            through: position of the snapshot; its commit and later ones remain.
            unsettled: streams of the messages that were unsettled there.

        Returns: how many events were forgotten.
        """
