"""Ports of the owner of a mailbox: commands, event log, archive and clock."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from postroom.application.messages import MessageDelivery
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.commands import Command, Receive
from postroom.domain.record import Event, Record


class Accepted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Answer to `Send`: the message's stream id, and whether the send was a duplicate (svc-mailbox I-2)."""

    message: bytes
    duplicate: bool


Answer = Accepted | list[MessageDelivery] | int | Rejected
"""Answer to a command: to `Send`, to `Receive`, the number of events for any other, or a refusal."""


class MailboxOwner(Protocol):
    """Owner of a mailbox, as the command handlers use it."""

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""

    async def submit(self, commands: Sequence[Command]) -> Sequence[Answer]:
        """Decide commands in order and return their answers when their events are durable.

        Returns: an answer for each command; `Rejected` for a refused one.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; without any, wait up to `wait_ms` for one.

        Arguments:
            is_stream: return unsettled messages when the connection of the receiver's process ends.

        Raises: Rejected, Unavailable.
        """

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id under which the message of this stream id was sent."""


class Hints(Protocol):
    """Best-effort wake-ups of a relay: they may be lost or spurious."""

    async def wait(self) -> None:
        """Return at the next hint, or at once if there was one since the last call."""

    def watch(self) -> bool:
        """Return whether a hint of the next record is certain to come; if not, ask for one.

        A hint also comes when it becomes certain, for what was recorded before. The next hint ends the watch.
        """

    async def close(self) -> None:
        """Stop listening; closing twice is fine."""


class Head(NamedTuple):
    """End of a log: last position, log time (µs), chain hash and epoch of its last commit."""

    position: int
    at: int
    chain: bytes
    epoch: int


class StoredSnapshot(NamedTuple):
    """A row of a saved fold at a position; the chain hash belongs to the commit that ends the fold.

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

    A log adapter has these methods, and inherits `EventLogReader`'s from
    `application.mailbox.records.Records`.
    """

    mailbox: str
    """The name of the mailbox."""

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

    def read_streams(
        self, streams: Iterable[bytes], positions: int | None = None
    ) -> Mapping[bytes, Sequence[Record]]:
        """Return the records of streams without envelopes, oldest first; nothing for unknown ones.

        Messages that were sent near to each other are read together.

        Arguments:
            positions: number that is read, at most, to find later events, which are then incomplete; None for
                no limit.
        """

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return the streams among these whose first event remains."""

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[Event]:
        """Yield the first event of each stream, without envelope, if it remains; in any order."""

    def at_positions(
        self, positions: Iterable[int], optional: Collection[int] = (), *, envelopes: bool = True
    ) -> dict[int, Record]:
        """Return the records at these positions, without those that are missing.

        Arguments:
            optional: other positions, whose records may be returned if they were read anyway.
            envelopes: read them; otherwise, they may be empty.
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

        An unsettled message keeps its send and its latest delivery. A message that settled since the last
        compaction keeps all but its content, so that a repeated ack or send is recognised.

        Arguments:
            through: position of the snapshot; its commit and later ones remain.
            unsettled: streams of the messages that were unsettled there.

        Returns: how many events were forgotten.
        """


class Segment(NamedTuple):
    """A copy of the commits of all positions from `first` to `last`, in the archive.

    Arguments:
        before: chain hash of the commit before `first`; None if that was removed without being archived.
        chain: chain hash of the commit that ends at `last`.
    """

    mailbox: str
    first: int
    last: int
    before: bytes | None
    chain: bytes


class LogArchive(Protocol):
    """Segments of mailboxes; every adapter passes `tests/conformance/log_archive.py`.

    Retention removes commits from the log once they are in a segment; until then, both have them.

    Calls block, may come from any thread and from several processes at once, and raise Unavailable when the
    archive can't be used.
    """

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        """Store consecutive commits with their envelopes; they are durable when this returns.

        Storing the same commits again, or some of them together with others, is fine.

        Arguments:
            before: chain hash of the commit before the first; None when unknown.

        Raises: BrokenLog when a commit can't be decoded; nothing was stored.
        """

    def mailboxes(self) -> list[str]:
        """Return the sorted names of the mailboxes with archived commits."""

    def segments(self, mailbox: str) -> list[Segment]:
        """Return the segments of a mailbox in the order of positions; they may overlap."""

    def last_segment(self, mailbox: str) -> Segment | None:
        """Return the segment that reaches the highest position, or None when nothing is archived."""

    def commits(self, mailbox: str, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        """Yield the commits that end after position `after`, in order, each once.

        Positions have gaps where commits were removed without being archived.

        Arguments:
            envelopes: read them; otherwise, they are empty.

        Raises: BrokenLog when a commit is missing or was altered since it was archived.
        """

    def commits_of(self, mailbox: str, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        """Return the commits that hold these positions, each once and in order, not verified."""

    def index_of(self, mailbox: str, streams: Iterable[bytes]) -> list[IndexEntry]:
        """Return the entries of these streams in the index, in the order of streams and versions."""

    def position_before(self, mailbox: str, at: int) -> int:
        """Return the last position of the last commit written before log time `at` (µs), or 0."""

    def verify(self, segment: Segment) -> None:
        """Check that the columns of a segment, which other tools read, equal its commits, envelopes included.

        Raises: BrokenLog naming the first position at which they differ.
        """

    def check_files(self, mailbox: str) -> None:
        """Check that the files of a mailbox are those that were written, by their hashes.

        Raises: BrokenLog naming one that is missing or has changed.
        """

    def compact(self, mailbox: str, progress: Callable[[int], None] = lambda _: None) -> int:
        """Merge small neighbouring segments, and replace those that earlier releases wrote in other formats.

        Readers may be at work.

        Arguments:
            progress: called with the position after each merge.

        Returns: the number of segments that were merged into others.
        Raises: BrokenLog when a commit was altered since it was archived; its segment remains.
        """

    def update_manifest(self, mailbox: str) -> None:
        """List files that are not listed yet, for `check_files`, and remove those merged some time ago."""

    def size(self, segment: Segment) -> int:
        """Return the size of a segment in bytes."""


class Clock(Protocol):
    """The clocks of a machine, in microseconds."""

    def wall(self) -> int:
        """Return the wall clock, µs since 1970 UTC; for telemetry only (svc-mailbox C-11)."""

    def uptime(self) -> int:
        """Return µs of a monotonic clock that all processes share until a reboot (svc-mailbox I-17)."""

    def boot(self) -> str:
        """Return the id of the machine boot that `uptime` counts from."""
