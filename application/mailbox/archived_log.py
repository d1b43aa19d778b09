"""Archive and log of a mailbox, read as one log."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from postroom.application.ports.event_log import EventLogReader, Head, LogSize, Seal, StoredSnapshot
from postroom.application.ports.log_archive import LogArchive
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.record import CHAIN, Record, chained

Row = TypeVar("Row", bound=tuple[Any, ...])


class Extent(NamedTuple):
    """Range of positions, inclusive, without gaps."""

    first: int
    last: int


class ArchivedEventLog:
    """A mailbox's log, including its archive.

    Retention may run concurrently; records that it moves from the log to the archive are read exactly once.
    """

    def __init__(self, log: EventLogReader, archive: LogArchive) -> None:
        """Initialise with a log and its archive.

        Raises: BrokenLog when records are missing between them; Unavailable when the archive can't be read or
            belongs to another log.
        """
        self._log = log
        self._archive = archive
        # Before the archive, as retention may move records there in between.
        first = log.first_position()
        extents = [Extent(segment.first, segment.last) for segment in archive.segments(log.mailbox)]
        self._archived = archived_extent(log.mailbox, extents, first)
        check_history(log, archive)

    @property
    def mailbox(self) -> str:
        """Return the name of the mailbox."""
        return self._log.mailbox

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records; archived records are verified; see `EventLogReader.read`."""
        return islice(self._joined(after, self._archive.read, self._log.read), limit)

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLogReader.replay`."""
        return self._joined(after, self._archive.replay, self._log.replay)

    def read_stream(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLogReader.read_stream`."""
        # The log first, as retention may move records to the archive in between.
        in_log = self._log.read_stream(stream)
        archived = self._archive.read_stream(self.mailbox, stream)
        records = {record.position: record for record in (*in_log, *archived)}
        return [records[position] for position in sorted(records)]

    def existing_streams(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLogReader.existing_streams`."""
        candidates = set(streams)
        in_log = self._log.existing_streams(candidates)
        rest = candidates - in_log
        return in_log | {stream for stream in rest if self._archive.read_stream(self.mailbox, stream)}

    def streams_between(self, first: bytes, last: bytes, limit: int) -> list[bytes]:
        """Return the streams of a range, without those that only the archive has."""
        return self._log.streams_between(first, last, limit)

    def replay_first(self, streams: Iterable[bytes]) -> Iterator[tuple[Any, ...]]:
        """Yield the first records of streams; see `EventLogReader.replay_first`."""
        records = (self.read_stream(stream) for stream in streams)
        return (first[:CHAIN] for first, *_ in filter(None, records) if first.version == 1)

    def size(self) -> LogSize:
        """Return the size of the log without its archive; see `EventLogReader.size`."""
        return self._log.size()

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLogReader.at_positions`."""
        in_log = self._log.at_positions(positions)
        missing = [position for position in positions if position not in in_log]
        return in_log | self._archive.at_positions(self.mailbox, missing)

    def head(self) -> Head | None:
        """Return the end of the log; see `EventLogReader.head`."""
        head = self._log.head()
        if head is not None or self._archived is None:
            return head
        last = self._archived.last
        record = self._archive.at_positions(self.mailbox, [last])[last]
        return Head(last, record.at, record.chain, record.epoch)

    def first_position(self) -> int | None:
        """Return the first position of archive or log; see `EventLogReader.first_position`."""
        return self._log.first_position() if self._archived is None else self._archived.first

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; see `EventLogReader.position_before`."""
        position, first = self._log.position_before(at), self._log.first_position()
        if self._archived is None or (first is not None and position >= first):
            return position
        return self._archive.position_before(self.mailbox, at) or self._archived.first - 1

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the saved snapshots, newest first."""
        return self._log.snapshots()

    def sealed(self) -> Seal | None:
        """Return the seal of the last owner, or None."""
        return self._log.sealed()

    def close(self) -> None:
        """Close the log; idempotent."""
        self._log.close()

    def _joined(
        self,
        after: int,
        from_archive: Callable[[str, int], Iterator[Row]],
        from_log: Callable[[int], Iterator[Row]],
    ) -> Iterator[Row]:
        """Yield rows of the archive and then of the log, starting after position `after`."""
        after = max(after, (self.first_position() or 1) - 1)
        while True:
            reached, gap = after, None
            for row in from_archive(self.mailbox, after):
                yield row
                after = row[0]
            for row in from_log(after):
                if row[0] > after + 1:
                    gap = Extent(after + 1, row[0] - 1)
                    break
                yield row
                after = row[0]
            first = self._log.first_position()
            if gap is None and first is not None and first <= after + 1:
                return
            # The log is empty, or retention has moved the next records to the archive.
            if after == reached:
                if gap is not None:
                    raise missing(self.mailbox, gap)
                return


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


def continues(position: int, chain: bytes, record: Record) -> bool:
    """Return whether a record has this position and chain hash, or directly follows the record that has."""
    if record.position == position:
        return record.chain == chain
    try:
        return len(list(chained([record], chain, position + 1))) == 1
    except BrokenLog:
        return False


def missing(mailbox: str, gap: Extent) -> BrokenLog:
    """Return the error for positions that neither the archive nor the log holds."""
    return BrokenLog(
        f"The archive of mailbox {mailbox} lacks positions {gap.first} to {gap.last}, and its log does not "
        "hold them either. Restore their files, or move those of earlier positions elsewhere to read from "
        f"{gap.last + 1} on.",
        gap.first,
    )


def another_history(mailbox: str, last: int) -> Unavailable:
    """Return the error for an archive of another log."""
    return Unavailable(
        f"The archive of mailbox {mailbox} ends at position {last} with another history than the log holds; "
        "name the archive folder of this store."
    )


def check_history(log: EventLogReader, archive: LogArchive) -> None:
    """Check that the archive belongs to the log.

    Raises: Unavailable when it does not.
    """
    end, head = archive.last_segment(log.mailbox), log.head()
    if end is None or head is None:
        return
    records = log.at_positions([end.last, end.last + 1])
    record = records.get(end.last) or records.get(end.last + 1)
    # If a log that reaches further lacks the record, retention removed it after the same check.
    if head.position < end.last or (record is not None and not continues(end.last, end.chain, record)):
        raise another_history(log.mailbox, end.last)
