"""The log reader port over a store and its Parquet log archive, read as one log."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from postroom.adapters.parquet.log_archive import ParquetLogArchive, Part, scan
from postroom.application.mailbox.archived_log import (
    Extent,
    another_history,
    archived_extent,
    continues,
    missing,
)
from postroom.domain.record import POSITIONS_PER_MAILBOX, Record
from postroom.projections.log_columns import DEAD_LETTERED, arrow_schema, columns_to_read, complete
from postroom.projections.log_conditions import Bucket, Compare, Condition, IsIn, IsNull, Not, StartsWith
from postroom.projections.log_extent import LogExtent, Range, split
from postroom.projections.ports.log_reader import POSITIONS_PER_READ, LogReader

ROWS_PER_BATCH = 20_000
_DERIVED_FROM = {"place": ("position",), "dead_letter_state": ("type", "state")}


@dataclass(frozen=True)
class ArchivedLogReader:
    """A reader of archived records from files and the others from the store, each once; see `LogReader`.

    Retention may run during a read.
    """

    live: LogReader
    folder: str

    @contextmanager
    def connected(self) -> "Iterator[ArchivedLogReader]":
        """Keep connections to the store open; see `LogReader.connected`."""
        with self.live.connected() as live:
            yield ArchivedLogReader(live, self.folder)

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of the mailboxes; see `LogReader.mailboxes`."""
        return self.live.mailboxes()

    def heads(self) -> dict[str, int]:
        """Return the last positions; see `LogReader.heads`."""
        heads, archive = self.live.heads(), ParquetLogArchive(self.folder)
        for name in self.live.mailboxes():
            if name not in heads and (files := archive.files(name)):
                heads[name] = max(file.last for file in files)
        return heads

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        """Return extents of mailbox logs, which begin with the archive; see `LogReader.extents`.

        Raises: BrokenLog when positions are missing between archive and store, Unavailable when the archive
            can't be read or belongs to another store.
        """
        # The store first: records that retention removes after this are in the archive.
        stored = {extent.name: extent for extent in self.live.extents()}
        combined = [
            self._combined_extent(id_, name, stored.get(name)) for name, id_ in self.live.mailboxes().items()
        ]
        extents = []
        for extent in filter(None, combined):
            last = extent.last if through is None else min(extent.last, through.get(extent.name, 0))
            if last == extent.last:
                extents.append(extent)
            elif last >= extent.first:
                extents.append(replace(extent, last=last, at=self._at(extent, last)))
        return extents

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield records; see `LogReader.read`.

        Raises: BrokenLog when positions are missing.
        """
        archive = ParquetLogArchive(self.folder)
        for extent, first, last in split(ranges, POSITIONS_PER_READ):
            for part in archive.parts(extent.name, first, last):
                yield from self._read_stored(Range(extent, first, part.first - 1), columns, where)
                yield from _read_part(part, extent, columns, where)
                first = part.last + 1
            yield from self._read_stored(Range(extent, first, last), columns, where)

    def _combined_extent(self, id_: int, name: str, stored: LogExtent | None) -> LogExtent | None:
        """Return the extent of archive and store together, or None if both are empty."""
        archive = ParquetLogArchive(self.folder)
        extents = [Extent(part.first, part.last) for part in archive.files(name)]
        archived = archived_extent(name, extents, None if stored is None else stored.first)
        if archived is None:
            return stored
        if stored is None:
            extent = LogExtent(id_, name, archived.first, archived.last, 0)
            return replace(extent, at=self._at(extent, extent.last))
        self._check_history(archive, stored)
        return replace(stored, first=min(archived.first, stored.first))

    def _check_history(self, archive: ParquetLogArchive, stored: LogExtent) -> None:
        end = archive.last_segment(stored.name)
        if end is None:
            return
        columns = ("position", *Record._fields[1:])
        batches = self.live.read([Range(stored, end.last, end.last + 1)], columns)
        rows = [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]
        # If the store extends further but returns no rows, retention removed them, after checking the chain.
        if stored.last < end.last or (rows and not continues(end.last, end.chain, Record(*rows[0]))):
            raise another_history(stored.name, end.last)

    def _at(self, extent: LogExtent, position: int) -> int:
        """Return the log time of a record."""
        for batch in self.read([Range(extent, position, position)], ["at"]):
            for at in batch["at"].to_pylist():
                return int(at)
        raise missing(extent.name, Extent(position, position))

    def _read_stored(
        self, range_: Range, columns: Sequence[str], where: Sequence[Condition]
    ) -> Iterator[pa.RecordBatch]:
        """Yield records of the store, or of the archive if retention removed them during the read."""
        extent, first, last = range_
        if first > last:
            return
        batches = self.live.read([range_], tuple(dict.fromkeys(("place", *columns))), where)
        first_batch = next((batch for batch in batches if batch.num_rows), None)
        # The read's snapshot is fixed by now; records removed before it are in the archive.
        stored = self.live.extents({extent.name: POSITIONS_PER_MAILBOX - 1})
        start = min(stored[0].first if stored else last + 1, last + 1)
        if start > first:
            if first_batch is not None:
                start = min(start, first_batch["place"][0].as_py() - extent.place(0))
            parts = ParquetLogArchive(self.folder).parts(extent.name, first, start - 1)
            if sum(part.last - part.first + 1 for part in parts) < start - first:
                raise missing(extent.name, Extent(first, start - 1))
            for part in parts:
                yield from _read_part(part, extent, columns, where)
        if first_batch is not None:
            for batch in chain([first_batch], batches):
                yield batch.select(list(columns))


def _read_part(
    part: Part, extent: LogExtent, columns: Sequence[str], where: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    stored = columns_to_read(columns)
    needed = list(dict.fromkeys(source for name in stored for source in _DERIVED_FROM.get(name, (name,))))
    conditions = reduce(and_, map(to_arrow, where)) if where else None
    for batch in scan(part, needed, conditions, ROWS_PER_BATCH):
        if batch.num_rows:
            arrays = [_stored(batch, extent, name) for name in stored]
            yield complete(pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(stored)), extent, columns)


def _stored(batch: pa.RecordBatch, extent: LogExtent, name: str) -> pa.Array:
    """Return a column as a database stores it."""
    if name == "place":
        return pc.add(batch["position"], extent.place(0))
    if name == "dead_letter_state":
        return pc.if_else(pc.starts_with(batch["type"], DEAD_LETTERED), batch["state"], None)
    return batch[name].cast(arrow_schema([name]).field(0).type)


def to_arrow(condition: Condition) -> pc.Expression:
    """Return a condition as an Arrow expression."""
    field = pc.field(condition.column)
    match condition:
        case IsIn(_, values):
            return field.is_valid() & field.isin(list(values))  # Arrow's isin is false for null, not null
        case StartsWith(_, prefix):
            return pc.starts_with(field, prefix)
        case Compare(_, "<", value):
            return field < value
        case Compare(_, "<=", value):
            return field <= value
        case Compare(_, ">", value):
            return field > value
        case Compare(_, ">=", value):
            return field >= value
        case IsNull():
            return field.is_null()
        case Not(IsNull()):
            return field.is_valid()
        case Not(inner):
            return field.is_valid() & ~to_arrow(inner)
        case Bucket(_, low, high):
            last = pc.binary_slice(field.cast("binary"), 15, 16)
            within = last >= bytes([low])
            return within & (last < bytes([high])) if high < 256 else within
