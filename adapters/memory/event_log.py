"""The event log port in memory: nothing is written to a disk (svc-mailbox I-9)."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from threading import Lock

from msgspec.structs import replace

from postroom.application.mailbox.codec import stream_ids
from postroom.application.mailbox.records import Records
from postroom.application.ports.event_log import EventLog, Head, LogSize, Seal, StoredSnapshot
from postroom.domain.commit import Commit, IndexEntry
from postroom.domain.errors import DuplicateRecord, Fenced, WrongPosition

COMMIT_BYTES = 500
"""Estimated size of a commit besides its events and envelopes."""
ENTRY_BYTES = 200
"""Estimated size of an entry of the index."""
_first, _last, _at = attrgetter("first"), attrgetter("last"), attrgetter("at")


class MemoryEventLog(Records, EventLog):
    """The commits of a mailbox in a list."""

    durability = "nothing"

    def __init__(self, mailbox: str) -> None:
        self.mailbox = mailbox
        self._commits: list[Commit] = []
        self._index: defaultdict[bytes, list[IndexEntry]] = defaultdict(list)
        self._snapshots: list[StoredSnapshot] = []
        self._seal: Seal | None = None
        self._removed = 0
        self._lock = Lock()

    def append(self, commits: Sequence[Commit]) -> None:
        if not commits:
            return
        with self._lock:
            end = self._commits[-1].last if self._commits else self._removed
            if commits[0].first != end + 1:
                epoch = self._commits[-1].epoch if self._commits else 0
                if epoch > commits[0].epoch:
                    raise Fenced(self.mailbox, commits[0].epoch, epoch)
                raise WrongPosition(self.mailbox, commits[0].first - 1, end)
            entries = [entry for commit in commits for entry in commit.entries]
            self._refuse_duplicates(entries)
            self._commits += (commit._replace(entries=(), last_events=()) for commit in commits)
            for entry in entries:
                insort(self._index[entry.stream], entry)
            for commit in commits:
                for event in commit.last_events:
                    its = self._index[event.stream]
                    self._index[event.stream] = [replace(each, last=event.last) for each in its]

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        while True:
            with self._lock:
                start = bisect_right(self._commits, after, key=_last)
                commits = self._commits[start : start + 100]
            if not commits:
                return
            yield from commits if envelopes else map(_without_envelopes, commits)
            after = commits[-1].last

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        with self._lock:
            by_index = {}
            for position in positions:
                index = bisect_left(self._commits, position, key=_last)
                if index < len(self._commits) and self._commits[index].first <= position:
                    by_index[index] = self._commits[index]
        commits = [by_index[index] for index in sorted(by_index)]
        return commits if envelopes else list(map(_without_envelopes, commits))

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        with self._lock:
            return [entry for stream in sorted(set(streams)) for entry in self._index.get(stream, ())]

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        with self._lock:
            between = [s for s, each in self._index.items() if first <= s <= last and each[0].version == 1]
        return sorted(between)[:limit]

    def head(self) -> Head | None:
        with self._lock:
            if not self._commits:
                return None
            last = self._commits[-1]
            return Head(last.last, last.at, last.chain, last.epoch)

    def first_position(self) -> int | None:
        with self._lock:
            return self._commits[0].first if self._commits else None

    def position_before(self, at: int) -> int:
        with self._lock:
            index = bisect_left(self._commits, at, key=_at)
            return self._commits[index - 1].last if index else self._removed

    def position_at_size(self, size: int) -> int:
        with self._lock:
            through = self._removed
            for index, commit in enumerate(self._commits):
                size -= size_of(commit)
                if size < 0 and index:
                    return through
                through = commit.last
                if size < 0:
                    return through
            return through

    def truncate(self, through: int, limit: int) -> int:
        with self._lock:
            count = min(bisect_right(self._commits, through, key=_last), limit)
            removed = self._commits[:count]
            for commit in removed:
                self._drop_entries(commit)
            del self._commits[:count]
            if removed:
                self._removed = removed[-1].last
            return sum(commit.event_count for commit in removed)

    def size(self) -> LogSize:
        with self._lock:
            size = sum(map(size_of, self._commits)) + ENTRY_BYTES * len(self._index)
        return LogSize(size, size)

    def reclaim_space(self, limit: int) -> int:
        """Return 0: removed commits are freed at once."""
        return 0

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        with self._lock:
            rest = [e for e in self._snapshots if e.position >= keep_from and e.position != snapshot.position]
            self._snapshots = sorted([snapshot, *rest], key=attrgetter("position"), reverse=True)

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        with self._lock:
            return iter(list(self._snapshots))

    def seal(self, seal: Seal) -> None:
        with self._lock:
            if self._seal is None or seal.position > self._seal.position:
                self._seal = seal

    def read_seal(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        return self._seal

    def close(self) -> None:
        """Do nothing: the commits are freed with the last reference to the log."""

    def _drop_entries(self, commit: Commit) -> None:
        for stream in set(stream_ids(commit)):
            entries = [each for each in self._index.get(stream, ()) if each.position > commit.last]
            if entries:
                self._index[stream] = entries
            else:
                self._index.pop(stream, None)

    def _refuse_duplicates(self, entries: Sequence[IndexEntry]) -> None:
        versions = {(entry.stream, entry.version) for entry in entries}
        if len(versions) < len(entries) or any(
            stored.version == entry.version
            for entry in entries
            if entry.stream in self._index
            for stored in self._index[entry.stream]
        ):
            raise DuplicateRecord(
                f"The log of mailbox {self.mailbox} already has an event with the same stream and "
                "version; nothing was appended."
            )


def _without_envelopes(commit: Commit) -> Commit:
    return commit._replace(envelopes=b"")


def size_of(commit: Commit) -> int:
    """Return the estimated size of a commit in memory, bytes."""
    return COMMIT_BYTES + len(commit.events) + len(commit.envelopes)
