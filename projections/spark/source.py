"""Spark readers of the event log: batches of ranges of positions, and streams by offsets."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from postroom.domain.errors import BrokenLog, NotFound
from postroom.projections.incremental import Cursor, find_difference
from postroom.projections.log_checks import heads_at
from postroom.projections.log_reader import POSITIONS_PER_READ, Bucket, LogReader, Range, pack
from postroom.projections.spark.options import WHOLE_LOG, LogSelection, Offset, position_of

__all__ = ["BatchReader", "Part", "RowReader", "StreamReader", "parts_of"]

StreamOffset = dict[str, int | str]
"""By mailbox, the last position that a stream has read, maybe with the chain hash there: `POSITION:CHAIN`."""

PARTS_PER_CORE = 3
"""Number of tasks per core, so that all cores finish at about the same time."""
POSITIONS_PER_PART = 150_000
"""Number of positions in a part if the number of cores is unknown."""
MAX_POSITIONS_PER_PART = 500_000


class RowReader(Protocol):
    """A reader of rows of the log; it is pickled and sent to tasks."""

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of ranges, in the order of positions."""


@dataclass
class Part(InputPartition):
    """Ranges of positions that one task reads; of a large log, maybe one bucket of the messages."""

    ranges: list[Range]
    bucket: Bucket | None = None


def parts_of(ranges: Sequence[Range], cores: int | None, partitions: int | None = None) -> list[Part]:
    """Divide ranges among tasks: large ranges are split, small ones share a task.

    Arguments:
        cores: number of cores of the cluster, if known.
        partitions: number of tasks, if set.
    """
    positions = sum(each.size for each in ranges)
    size = POSITIONS_PER_PART
    if partitions is not None:
        size = -(-positions // partitions)
    elif cores is not None:
        size = min(-(-positions // (cores * PARTS_PER_CORE)), MAX_POSITIONS_PER_PART)
    return [Part(group) for group in pack(ranges, max(POSITIONS_PER_READ, size))]


@dataclass
class BatchReader(DataSourceReader):
    """A reader of ranges of a log.

    Spark's filters are not pushed down: Spark 4.3 reuses the reader of one scan for all scans of a frame,
    table or view, so a filter of one would also apply to the others (ADR 0080).
    """

    rows: RowReader
    parts: list[Part]

    def partitions(self) -> Sequence[Part]:
        """Return the part of each task; Spark requires at least one partition."""
        return self.parts or [Part([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        return self.rows.read(partition.ranges)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of a log as it grows; an offset is the last position read of each mailbox.

    With the position it has the chain hash of the commit there, as `POSITION:CHAIN`, so that a log that was
    replaced is noticed; the offsets of users and of earlier releases are positions only.

    Two offsets define a batch, so a repeated read returns the same rows. A limited batch ends at the same log
    time in all mailboxes. `as_of` is the log time of the mailbox's last record in the batch.
    """

    def __init__(
        self,
        log: LogReader,
        rows: RowReader,
        start: Offset,
        max_rows: int | None = None,
        *,
        selection: LogSelection = WHOLE_LOG,
        cores: int | None = None,
    ) -> None:
        """Take the log and the reader of its rows.

        Arguments:
            start: last position already read, by mailbox.
            max_rows: maximum number of events in a batch, at least one per mailbox; None for no limit.
            selection: the mailboxes to read, and where to start in their logs.
            cores: number of cores of the cluster, if known.
        """
        self._log = log
        self._rows = rows
        self._start = start
        self._max_rows = max_rows
        self._selection = selection
        self._cores = cores
        self._target: Offset | None = None
        self._heads: Offset | None = None

    def initialOffset(self) -> StreamOffset:  # noqa: N802  # Spark's name
        """Return the offset at which a stream without a checkpoint begins."""
        return {**self._start}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the limit on the records of a batch."""
        return ReadAllAvailable() if self._max_rows is None else ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Use the current end of the logs as the end of the stream."""
        self._target = self._current_heads()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802  # Spark's name
        """Return the end of the logs at the last poll."""
        return self._heads

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:  # noqa: N802  # Spark's name
        """Return the end of the next batch; a mailbox without new records keeps its position.

        Raises: BrokenLog when a log was replaced, or ends before a position that was already read.
        """
        before = _positions(start)
        ends = {name: end for name, end in self._latest(before, limit).items() if end != before.get(name)}
        self._check(start)
        chains = {extent.name: extent.chain for extent in self._log.extents(ends)} if ends else {}
        return start | {name: f"{end}:{chains[name]}" for name, end in ends.items()}

    def _check(self, offset: StreamOffset) -> None:
        """Check that the logs have the commits of an offset whose chain hashes are known."""
        cursors = {name: _cursor(name, value) for name, value in offset.items() if isinstance(value, str)}
        if not cursors:
            return
        heads = heads_at(self._log, _positions(offset))
        for name, cursor in cursors.items():
            difference = find_difference(cursor, heads.get(name))
            if difference is not None:
                raise BrokenLog(
                    f"Position {cursor.position} of mailbox {name} was read before, but {difference}: it was "
                    "replaced or cut. Restore the store, or start with a new checkpoint.",
                    cursor.position,
                )

    def _latest(self, start: Offset, limit: ReadLimit) -> Offset:
        """Return the positions of the end of the next batch."""
        self._heads = self._current_heads() if self._target is None else self._target
        behind = {name: head for name, head in self._heads.items() if head != start.get(name)}
        for name, head in behind.items():
            if head < start.get(name, 0) and self._target is None:
                raise BrokenLog(
                    f"The log of mailbox {name} ends at position {head}, but position {start[name]} was read "
                    "before: its end is missing. Restore the store, or start with a new checkpoint.",
                    head + 1,
                )
        starts = start | self._starts({name: head for name, head in behind.items() if name not in start})
        pending = {name: head - starts[name] for name, head in behind.items() if head > starts[name]}
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else sum(pending.values())
        shares = _shares(pending, max_rows)
        ends = {name: starts[name] + max(1, shares[name]) for name in pending}
        ends = self._until_one_time(ends, starts, pending)
        return start | {name: end for name, end in ends.items() if end > starts[name]}

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[Part]:
        """Return the part of each task in the batch between two offsets.

        Raises: NotFound when retention removed some of its records, BrokenLog when a log was replaced.
        """
        self._check(end)
        return self._partitions(_positions(start), _positions(end))

    def _partitions(self, start: Offset, end: Offset) -> Sequence[Part]:
        new_ends = {name: last for name, last in end.items() if last > start.get(name, 0)}
        extents = {extent.name: extent for extent in self._log.extents(new_ends)}
        ranges = []
        for name, last in new_ends.items():
            extent = extents.get(name)
            first = start[name] + 1 if name in start else extent.first if extent is not None else 1
            if extent is None or extent.first > first or extent.last < last:
                raise NotFound(
                    f"Retention removed some of positions {first} to {last} of mailbox {name} before they "
                    "were read. Read with the archive, or rebuild and follow with a new checkpoint."
                )
            ranges.append(Range(extent, first, last))
        return parts_of(ranges, self._cores)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        return self._rows.read(partition.ranges)

    def _starts(self, heads: Offset) -> Offset:
        """Return the position before the first selected one of each log."""
        if not heads:
            return {}
        ranges = self._selection.ranges(self._log, self._log.extents(heads))
        return heads | {
            extent.name: first - 1 for extent, first, _ in ranges
        }  # logs without a range are skipped

    def _current_heads(self) -> Offset:
        heads = self._log.heads()
        return {name: head for name, head in heads.items() if self._selection.includes(name)}

    def _until_one_time(self, ends: Offset, starts: Offset, pending: Offset) -> Offset:
        """Lower the ends to the log time up to which all mailboxes are read.

        Otherwise, events of a mailbox with a backlog would arrive after later events of other mailboxes, and
        a watermark would drop them.
        """
        extents = {extent.name: extent for extent in self._log.extents(starts | ends)}
        times = [extents[name].at for name, end in ends.items() if end < starts[name] + pending[name]]
        if not times or len(pending) == 1:
            return ends
        after = min(times) + 1
        return {
            name: max(starts[name], min(end, position_of(self._log, extents[name], after) - 1))
            for name, end in ends.items()
        }


def _positions(offset: StreamOffset) -> Offset:
    return {name: _cursor(name, value).position for name, value in offset.items()}


def _cursor(name: str, value: int | str) -> Cursor:
    position, _, chain = str(value).partition(":")
    return Cursor(int(position), 0, chain, name)


def _shares(pending: Mapping[str, int], limit: int) -> Offset:
    """Divide a limit evenly among mailboxes; unused parts of a share go to the others."""
    shares: Offset = {}
    for number, name in enumerate(sorted(pending, key=pending.__getitem__)):
        shares[name] = min(pending[name], limit // (len(pending) - number))
        limit -= shares[name]
    return shares
