"""Archive and log of a mailbox, read as one log."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from postroom.application.mailbox.records import Records
from postroom.application.ports.event_log import (
    EventLogReader,
    Head,
    LogArchive,
    LogSize,
    Seal,
    StoredSnapshot,
)
from postroom.domain.commit import Commit, IndexEntry, chained
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.message import MessageDeadLettered
from postroom.domain.record import Event, Record


class Extent(NamedTuple):
    """Range of positions, inclusive, without gaps."""

    first: int
    last: int


class ArchivedEventLog(Records):
    """A mailbox's log, including its archive.

    Retention may run concurrently; commits that it moves from the log to the archive are read exactly once.
    """

    def __init__(self, log: EventLogReader, archive: LogArchive) -> None:
        """Initialise with a log and its archive.

        Raises: BrokenLog when commits are missing between them; Unavailable when the archive can't be read or
            belongs to another log.
        """
        self.mailbox = log.mailbox
        self._log = log
        self._archive = archive
        # Before the archive, as retention may move commits there in between.
        first = log.first_position()
        extents = [Extent(each.first, each.last) for each in archive.segments(log.mailbox)]
        self._archived = archived_extent(log.mailbox, extents, first)
        check_history(log, archive)

    def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
        after = max(after, (self.first_position() or 1) - 1)
        while True:
            reached, gap = after, None
            for commit in self._archive.commits(self.mailbox, after, envelopes=envelopes):
                yield commit
                after = commit.last
            for commit in self._log.commits(after, envelopes=envelopes):
                if commit.first > after + 1:
                    gap = Extent(after + 1, commit.first - 1)
                    break
                yield commit
                after = commit.last
            first = self._log.first_position()
            if gap is None and first is not None and first <= after + 1:
                return
            # The log is empty, or retention has moved the next commits to the archive.
            if after == reached:
                if gap is not None:
                    raise missing(self.mailbox, gap)
                return

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        rest = set(positions)
        # The log first, as retention may move commits to the archive in between.
        from_log = self._log.commits_of(rest, envelopes=envelopes)
        firsts = [commit.first for commit in from_log]
        for position in sorted(rest):
            index = bisect_right(firsts, position)
            if index and position <= from_log[index - 1].last:
                rest.remove(position)
        return self._archive.commits_of(self.mailbox, rest, envelopes=envelopes) + from_log

    def index_of(self, streams: Iterable[bytes]) -> list[IndexEntry]:
        rest = set(streams)
        from_log = self._log.index_of(rest)
        archived = self._archive.index_of(self.mailbox, rest)
        return sorted({entry.position: entry for entry in (*archived, *from_log)}.values())

    def _is_at_rest(self, sent: Record, latest: Event) -> bool:
        # When retention removes a message, its entry goes, and the archive has none of later segments. By
        # then, a dead letter has been settled, so that events follow it.
        if isinstance(latest, MessageDeadLettered):
            first = self._log.first_position()
            return first is not None and sent.position >= first
        return super()._is_at_rest(sent, latest)

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return the streams of a range, without those that only the archive has."""
        return self._log.streams_between(first, last, limit)

    def size(self) -> LogSize:
        return self._log.size()

    def position_at_size(self, size: int) -> int:
        return self._log.position_at_size(size)

    def head(self) -> Head | None:
        head = self._log.head()
        if head is not None or self._archived is None:
            return head
        (commit,) = self._archive.commits_of(self.mailbox, [self._archived.last], envelopes=False)
        return Head(commit.last, commit.at, commit.chain, commit.epoch)

    def first_position(self) -> int | None:
        return self._log.first_position() if self._archived is None else self._archived.first

    def position_before(self, at: int) -> int:
        position, first = self._log.position_before(at), self._log.first_position()
        if self._archived is None or (first is not None and position >= first):
            return position
        return self._archive.position_before(self.mailbox, at) or self._archived.first - 1

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        return self._log.snapshots()

    def read_seal(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        return self._log.read_seal()

    def close(self) -> None:
        """Close the log; idempotent."""
        self._log.close()


def archived_extent(mailbox: str, parts: Sequence[Extent], first: int | None) -> Extent | None:
    """Return the range of archived positions, or None when there are none.

    Arguments:
        parts: the ranges of the segments, in the order of positions.
        first: first position of the log; None when it is empty.

    Raises: BrokenLog when positions are missing among them or between them and the log.
    """
    if not parts:
        return None
    start, end = parts[0]
    for part in parts:
        if part.first > end + 1:
            raise missing(mailbox, Extent(end + 1, part.first - 1))
        end = max(end, part.last)
    if first is not None and first > end + 1:
        raise missing(mailbox, Extent(end + 1, first - 1))
    return Extent(start, end)


def continues(position: int, chain: bytes, commit: Commit) -> bool:
    """Return whether a commit ends here with this chain hash, or directly follows the commit that does."""
    if commit.last == position:
        return commit.chain == chain
    try:
        return len(list(chained([commit], chain, position + 1))) == 1
    except BrokenLog:
        return False


def missing(mailbox: str, gap: Extent) -> BrokenLog:
    """Return the error for positions that are missing in the archive and in the log."""
    return BrokenLog(
        f"The archive of mailbox {mailbox} lacks positions {gap.first} to {gap.last}, and its log does not "
        "hold them either. Restore their files, or move those of earlier positions elsewhere to read from "
        f"{gap.last + 1} on.",
        gap.first,
    )


def another_history(mailbox: str, last: int) -> Unavailable:
    """Return the error for an archive of another log."""
    return Unavailable(
        f"The archive of mailbox {mailbox} ends at position {last} with another history than the log holds. "
        "Name the archive folder of this store. If the store was restored from an older backup, or lost its "
        f"last records in a power failure, move the files that end at {last}, and the manifest.json beside "
        "them, elsewhere."
    )


def check_history(log: EventLogReader, archive: LogArchive) -> None:
    """Check that the archive belongs to the log.

    Raises: Unavailable when it does not.
    """
    end, head = archive.last_segment(log.mailbox), log.head()
    if end is None or head is None:
        return
    held = log.commits_of([end.last, end.last + 1], envelopes=False)
    # If a log that reaches further lacks the commits, retention removed them after the same check.
    if head.position < end.last or (held and not continues(end.last, end.chain, held[0])):
        raise another_history(log.mailbox, end.last)
