"""The event log port over a stream of JetStream (ADR 0147)."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import TypeVar

from postroom.adapters.jetstream.client import SubjectChanged
from postroom.adapters.jetstream.frames import StoredCommit, encode_append
from postroom.adapters.jetstream.log_index import BrokenIndex, LogIndex, entries_of
from postroom.adapters.jetstream.log_search import End, LogMessages
from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import WRITE_SECONDS, StoreStreams, token_of
from postroom.application.mailbox.records import Records
from postroom.application.mailbox.segments import ends_with
from postroom.application.ports.event_log import EventLog, Head, LogSize, Seal, StoredSnapshot
from postroom.application.telemetry import logger
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import (
    BrokenLog,
    DuplicateRecord,
    Fenced,
    NotFound,
    Unavailable,
    WrongPosition,
)

T = TypeVar("T")

TRIES = 5
"""Attempts to append after parts of an append that was not completed."""


class JetStreamEventLog(Records, EventLog):
    """The commits of a mailbox as messages of one subject, each appended after the last one it knows.

    Nothing in this process is needed to be correct: where messages are and what the index has is remembered,
    and found again when it is forgotten.
    """

    def __init__(
        self,
        streams: StoreStreams,
        mailbox: str,
        *,
        durable: bool = True,
        create_missing: bool = True,
        allow_gaps: bool = False,
        restoration: str = "",
    ) -> None:
        """Open the log of `mailbox`.

        Arguments:
            durable: check whether the servers sync every write, now and while the log is open.
            create_missing: create the streams and the mailbox if they are missing; otherwise they must exist,
                and the log is read-only.
            allow_gaps: read on where commits are missing between others.
            restoration: token of the restore that writes the log; see `StoreState`.

        Raises: NotFound when the store or the mailbox is missing, InvalidRequest when the servers could lose
            acknowledged commits, Unavailable when they can't be used.
        """
        self.mailbox = mailbox
        self._shared = streams
        self._may_write = create_missing
        self._is_closed = False
        self._streams = streams.open(create=create_missing)
        try:
            self._state = StoreState(self._streams, restoration)
            self._is_durable = create_missing and durable
            if self._is_durable:
                self._streams.watch_sync()
            if create_missing:
                self._state.add_mailbox(mailbox)
            elif mailbox not in self._state.mailboxes():
                where = streams.settings.where
                raise NotFound(f"The store {where} has no mailbox {mailbox}; send a message to create it.")
        except BaseException:
            streams.close()
            raise
        subject = f"{streams.settings.stream}.{token_of(mailbox)}"
        self._messages = LogMessages(self._streams, subject, allow_gaps=allow_gaps)
        self._index = LogIndex(self._state, mailbox)
        self._is_indexed = False
        self._end: End | None = None
        self._removed: int | None = None
        self._purged = 0
        self._lock = RLock()

    @property
    def message_bytes(self) -> int:
        """Return the size of the largest message that the servers take."""
        return self._streams.log.max_bytes

    @property
    def durability(self) -> str:
        return "power-cut" if self._is_durable and self._streams.sync.is_synced else "process-crash"

    def append(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        self._check_writer()
        with self._lock:
            try:
                end = self._end or self._messages.end()
                self._check_end(end, commits[0])
                self._refuse_duplicates(commits)
                self._end = self._publish(commits, end)
            except BaseException:
                self._end = self._removed = None  # unknown; the next append reads it again
                raise
            for commit in commits:
                self._index.add(commit.last, commit.entries, commit.last_events)
            self._save_index(commits[-1].chain)

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        for stored in self.stored(after):
            yield stored.commit(envelopes=envelopes)

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        removed, end = self._removed_through(), self._end or self._messages.end()
        commits: list[Commit] = []
        for position in sorted(set(positions)):
            if position <= removed or (commits and position <= commits[-1].last):
                continue
            if position > end.position:
                break
            append = self._messages.append_of(position, end)
            commits += [
                stored.commit(envelopes=envelopes)
                for stored in (append.commits if append is not None else ())
                if stored.first <= position <= stored.last
            ]
        return commits

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        ids = list(streams)
        return self._from_index(lambda removed: self._index.find(ids, removed)) if ids else []

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        return self._from_index(lambda removed: self._index.between(first, last, limit, removed))

    def head(self) -> Head | None:
        end = self._messages.end()
        if end.frame is None or end.position <= self._removed_through():
            return None
        return end.frame.head

    def first_position(self) -> int | None:
        removed, end = self._removed_through(), self._messages.end()
        if end.position <= removed:
            return None
        append = self._messages.append_of(removed + 1, end)
        if append is None:  # retention has removed it meanwhile
            return next((stored.first for stored in self.stored(0)), None)
        return next(stored.first for stored in append.commits if stored.last > removed)

    def position_before(self, at: int) -> int:
        end = self._messages.end()
        append = self._messages.append_at_time(at, end)
        if append is None:
            return end.position
        earlier = [stored.last for stored in append.commits if stored.at < at]
        return max(earlier[-1] if earlier else append.frame.first - 1, self._removed_through())

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved rows of snapshots; see `CommitReader.snapshots`."""
        return self._state.snapshots(self.mailbox)

    def read_seal(self) -> Seal | None:
        state = self._state.log_state(self.mailbox)
        return Seal(state.sealed, state.chain) if state.sealed else None

    def size(self) -> LogSize:
        """Return the size of the log; see `CommitReader.size`. `disk` is that of a replica of all logs."""
        size = self._messages.end().total - self._state.log_state(self.mailbox).removed_bytes
        infos = [self._streams.call(stream.info) for stream in (self._streams.log, self._streams.state)]
        return LogSize(size, max(size, sum(info["state"]["bytes"] for info in infos)))

    def position_at_size(self, size: int) -> int:
        state, end = self._state.log_state(self.mailbox), self._messages.end()
        if end.position <= state.removed:
            return state.removed
        total = state.removed_bytes + size
        append = self._messages.append_at_size(total, end)
        if append is None:
            return end.position
        through, before = append.frame.first - 1, append.frame.before
        for stored in append.commits:
            before += stored.size
            if before > total and through > state.removed:
                break
            if stored.last > state.removed:
                through = stored.last
            if before > total:
                break
        return through

    # -- changes besides appends ---

    def truncate(self, through: int, limit: int) -> int:
        self._check_writer()
        state = self._state.log_state(self.mailbox)
        removed, size, count = state.removed, state.removed_bytes, 0
        for stored in self.stored(removed):
            if stored.last > through or count == limit:
                break
            removed, size, count = stored.last, size + stored.size, count + 1
        if count:
            self._state.remove_through(self.mailbox, removed, size)
            self._removed = removed
        if count < limit and removed > self._purged:
            self._purge(removed)
        return removed - state.removed

    def reclaim_space(self, limit: int) -> int:
        """Return 0: the servers give back the space of removed messages by themselves."""
        return 0

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        self._check_writer()
        self._state.save_snapshot(self.mailbox, snapshot)
        if keep_from:
            self._state.drop_snapshots(self.mailbox, keep_from)

    def seal(self, seal: Seal) -> None:
        self._check_writer()
        self._state.seal(self.mailbox, seal)

    def close(self) -> None:
        """Release the connection; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._shared.close()

    # -- appending ---

    def _publish(self, commits: Sequence[Commit], end: End) -> End:
        """Append commits after the end of the log, and return the new end."""
        log, subject = self._streams.log, self._messages.subject
        for _ in range(TRIES):
            parts, frame = encode_append(subject, commits, end.complete, end.total, log.max_bytes)
            try:
                work = partial(log.append, subject, parts, end.sequence)
                sequence = self._streams.call(work, WRITE_SECONDS)
            except SubjectChanged:
                end = self._messages.end()
                if end.epoch > commits[0].epoch:
                    raise Fenced(self.mailbox, commits[0].epoch, end.epoch) from None
                self._check_end(end, commits[0])  # else it is a part of an append that was not completed
                continue
            if len(parts) == 1:
                self._messages.note(frame.first, sequence)
            return End(sequence, sequence, frame, frame.epoch)
        raise Unavailable(f"Others append to mailbox {self.mailbox} all the time; retry shortly.")

    def _check_end(self, end: End, first: Commit) -> None:
        # A log that was restored without the commits that retention had removed begins after them.
        last = end.position if end.frame is not None else self._removed_through()
        if last == first.first - 1:
            return
        self._messages.forget()
        if end.epoch > first.epoch:
            raise Fenced(self.mailbox, first.epoch, end.epoch)
        raise WrongPosition(self.mailbox, first.first - 1, end.position)

    def _refuse_duplicates(self, commits: Sequence[Commit]) -> None:
        entries = [entry for commit in commits for entry in commit.entries]
        versions = {(entry.stream, entry.version) for entry in entries}
        if len(versions) < len(entries) or self._from_index(
            lambda removed: any(self._index.has(entry, removed) for entry in entries)
        ):
            raise DuplicateRecord(
                f"The log of mailbox {self.mailbox} already has an event with the same stream and version; "
                "nothing was appended."
            )

    def _check_writer(self) -> None:
        if not self._may_write:
            raise Unavailable(f"The store {self._shared.settings.where} was opened read-only.")

    # -- reading ---

    def removed(self) -> int:
        """Return the last position that retention removed, or 0."""
        return self._removed_through()

    def _removed_through(self) -> int:
        """Return the last position that retention removed, which the owner knows."""
        if self._removed is None or not self._may_write:
            self._removed = self._state.log_state(self.mailbox).removed
        return self._removed

    def stored(self, after: int) -> Iterator[StoredCommit]:
        """Yield the commits that end after a position, to the end of the log, also if it grows meanwhile.

        Raises: BrokenLog when one is missing.
        """
        while True:
            after = max(after, self._removed_through())
            end = self._messages.end()
            if end.position <= after:
                return
            try:
                for append in self._messages.appends(after + 1, end):
                    if append.frame.first > after + 1 and not self._messages.allow_gaps:
                        raise self._messages.gap(after + 1, append)
                    for stored in append.commits:
                        if stored.last > after:
                            yield stored
                    after = max(after, append.frame.last)
            except BrokenLog:
                self._removed = None
                if self._removed_through() <= after:  # else retention removed it meanwhile
                    raise

    def _from_index(self, find: Callable[[int], T]) -> T:
        """Return the result of a search in the index; which gets the last position that was removed."""
        with self._lock:
            removed = self._removed_through()
            if not self._is_indexed:
                self._load_index(removed)
            self._extend_index()
            try:
                return find(removed)
            except BrokenIndex:
                logger().warning("store.index_broken", mailbox=self.mailbox)
                if self._may_write:
                    self._index.discard_runs()
                self._index.reset(removed)
                self._extend_index()
                return find(removed)

    def _load_index(self, removed: int) -> None:
        chain = self._index.load(removed)
        if chain and not ends_with(self, self._index.through, chain):  # it is of another log
            self._index.reset(removed)
        self._is_indexed = True

    def _extend_index(self) -> None:
        """Add the commits that the index lacks."""
        if self._end is not None and self._index.through >= self._end.position:
            return
        for stored in self.stored(self._index.through):
            entries = entries_of(stored.commit(envelopes=False))
            self._index.add(stored.last, entries, stored.last_events)
            if self._may_write:
                self._save_index(stored.chain)

    def _save_index(self, chain: bytes) -> None:
        try:
            self._index.save(chain)
        except Unavailable as error:  # it remains in memory, and is saved later
            logger().warning("store.index_unsaved", mailbox=self.mailbox, error=str(error))

    def _purge(self, removed: int) -> None:
        """Remove the messages of removed commits, but not the last one: appends name its sequence."""
        end = self._messages.end()
        append = self._messages.append_of(min(removed + 1, end.position), end)
        if append is not None:
            log, subject = self._streams.log, self._messages.subject
            self._streams.call(partial(log.purge, subject, append.begin), WRITE_SECONDS)
        self._index.drop(removed)
        self._purged = removed
