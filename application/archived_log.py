"""The whole past of a mailbox: what retention archived and what its log still holds, read as one log."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple, NoReturn, TypeVar

from postroom.application.ports.event_log import EventLog, Head, LogSize, Seal, StoredSnapshot
from postroom.application.ports.log_archive import LogArchive
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.record import Record, chained

Row = TypeVar("Row", bound=tuple[Any, ...])


class Extent(NamedTuple):
    """Which positions are archived without a gap, both included."""

    first: int
    last: int


class ArchivedEventLog:
    """Read a mailbox's log from the beginning of its archive on; nothing can be written through it.

    Retention may go on meanwhile: what it moves from the log to the archive is read once.
    """

    def __init__(self, log: EventLog, archive: LogArchive) -> None:
        """Take the log and the archive that retention of this very log stored in.

        Raises: BrokenLog when records are missing between them; Unavailable when the archive can't be read or
            is of another log.
        """
        self._log = log
        self._archive = archive
        first = log.first_position()  # before the archive: what leaves the log meanwhile is in it
        extents = [Extent(segment.first, segment.last) for segment in archive.segments(log.mailbox)]
        self._archived = archived_extent(log.mailbox, extents, first)
        check_history(log, archive)

    @property
    def mailbox(self) -> str:
        """Return the name of the mailbox."""
        return self._log.mailbox

    @property
    def durability(self) -> str:
        """Say what an append survives."""
        return self._log.durability

    def read(self, after: int = 0, limit: int | None = None) -> Iterator[Record]:
        """Yield whole records, those of the archive verified; see `EventLog.read`."""
        return islice(self._joined(after, self._archive.read, self._log.read), limit)

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Yield the columns up to `state` of each record; see `EventLog.replay`."""
        return self._joined(after, self._archive.replay, self._log.replay)

    def history(self, stream: bytes) -> list[Record]:
        """Return the records of one stream; see `EventLog.history`."""
        # The log first: what has left it by then is archived.
        kept = self._log.history(stream)
        records = {
            record.position: record for record in (*kept, *self._archive.history(self.mailbox, stream))
        }
        return [records[position] for position in sorted(records)]

    def known(self, streams: Iterable[bytes]) -> set[bytes]:
        """Return which streams have records; see `EventLog.known`."""
        asked = set(streams)
        kept = self._log.known(asked)
        return kept | {stream for stream in asked - kept if self._archive.history(self.mailbox, stream)}

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        """Return the records at these positions; see `EventLog.at_positions`."""
        kept = self._log.at_positions(positions)
        missing = [position for position in positions if position not in kept]
        return kept | self._archive.at_positions(self.mailbox, missing)

    def head(self) -> Head | None:
        """Return where the log ends; see `EventLog.head`."""
        head = self._log.head()
        if head is not None or self._archived is None:
            return head
        last = self._archived.last
        record = self._archive.at_positions(self.mailbox, [last])[last]
        return Head(last, record.at, record.chain, record.epoch)

    def first_position(self) -> int | None:
        """Return the first position archived or, where none is, kept; see `EventLog.first_position`."""
        return self._log.first_position() if self._archived is None else self._archived.first

    def position_before(self, at: int) -> int:
        """Return the last position before log time `at`; see `EventLog.position_before`."""
        kept, first = self._log.position_before(at), self._log.first_position()
        if self._archived is None or (first is not None and kept >= first):
            return kept
        return self._archive.position_before(self.mailbox, at) or self._archived.first - 1

    def position_at_size(self, size: int) -> int:
        """Tell it of the log alone; see `EventLog.position_at_size`."""
        return self._log.position_at_size(size)

    def size(self) -> LogSize:
        """Return how large the log alone is; see `EventLog.size`."""
        return self._log.size()

    def snapshots(self) -> Iterator[StoredSnapshot]:
        """Yield the kept snapshots, newest first."""
        return self._log.snapshots()

    def sealed(self) -> Seal | None:
        """Return where the log ended when its owner last left, or None."""
        return self._log.sealed()

    def append(self, records: Sequence[Record]) -> None:
        """Refuse."""
        self._refuse()

    def truncate(self, through: int, limit: int) -> int:
        """Refuse."""
        self._refuse()

    def give_back(self, limit: int) -> int:
        """Refuse."""
        self._refuse()

    def save_snapshot(self, snapshot: StoredSnapshot) -> None:
        """Refuse."""
        self._refuse()

    def seal(self, seal: Seal) -> None:
        """Refuse."""
        self._refuse()

    def close(self) -> None:
        """Release what the log holds; closing twice is fine."""
        self._log.close()

    def _joined(
        self,
        after: int,
        archived: Callable[[str, int], Iterator[Row]],
        kept: Callable[[int], Iterator[Row]],
    ) -> Iterator[Row]:
        """Yield rows of the archive and then of the log, from the one after `after` on."""
        after = max(after, (self.first_position() or 1) - 1)
        while True:
            reached, gap = after, None
            for row in archived(self.mailbox, after):
                yield row
                after = row[0]
            for row in kept(after):
                if row[0] > after + 1:
                    gap = Extent(after + 1, row[0] - 1)
                    break
                yield row
                after = row[0]
            first = self._log.first_position()
            if gap is None and first is not None and first <= after + 1:
                return
            # Retention moved the next records to the archive meanwhile, or the log is empty.
            if after == reached:
                if gap is not None:
                    raise missing(self.mailbox, gap)
                return

    def _refuse(self) -> NoReturn:
        raise Unavailable(
            f"The log of mailbox {self.mailbox} was opened together with its archive, for reading only."
        )


def archived_extent(mailbox: str, parts: Sequence[Extent], first: int | None) -> Extent | None:
    """Return which positions are archived, if any.

    Arguments:
        parts: what is archived together, in the order of positions.
        first: where the log begins; None when it is empty.

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
    """Tell whether a record is the one at this position with this chain hash, or the one that follows it."""
    if record.position == position:
        return record.chain == chain
    try:
        return len(list(chained([record], chain, position + 1))) == 1
    except BrokenLog:
        return False


def missing(mailbox: str, gap: Extent) -> BrokenLog:
    """Return what is said of positions that neither the archive nor the log holds."""
    return BrokenLog(
        f"The archive of mailbox {mailbox} lacks positions {gap.first} to {gap.last}, and its log does not "
        "hold them either. Restore their files, or move those of earlier positions elsewhere to read from "
        f"{gap.last + 1} on.",
        gap.first,
    )


def another_history(mailbox: str, last: int) -> Unavailable:
    """Return what is said of an archive that is not the past of the log."""
    return Unavailable(
        f"The archive of mailbox {mailbox} ends at position {last} with another history than the log holds; "
        "name the archive folder of this store."
    )


def check_history(log: EventLog, archive: LogArchive) -> None:
    """Check that what is archived is the past of this very log.

    Raises: Unavailable when it is that of another one.
    """
    end, head = archive.last_segment(log.mailbox), log.head()
    if end is None or head is None:
        return
    records = log.at_positions([end.last, end.last + 1])
    record = records.get(end.last) or records.get(end.last + 1)
    # None in a log that reaches further: retention goes on, and it has seen to it itself.
    if head.position < end.last or (record is not None and not continues(end.last, end.chain, record)):
        raise another_history(log.mailbox, end.last)
