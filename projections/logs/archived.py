"""The event log of a store whose beginning is archived as Parquet, as one log."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from postroom.adapters.parquet.log_archive import ParquetLogArchive, Part, scan
from postroom.application.archived_log import Extent, another_history, archived_extent, continues, missing
from postroom.domain.record import Record
from postroom.projections.cut import PLACES, MailboxCut, Range, split
from postroom.projections.logs import Log
from postroom.projections.logs.columns import DEATH, arrow_schema, columns_to_read, complete
from postroom.projections.logs.conditions import Condition, to_arrow
from postroom.projections.logs.reading import POSITIONS_PER_READ, ROWS_PER_BATCH

_MADE_OF = {"place": ("position",), "death_state": ("type", "state")}


@dataclass(frozen=True)
class ArchivedLog:
    """Read what is archived from its files and the rest from the store, each record once; see `Log`.

    Retention may go on meanwhile.
    """

    live: Log
    folder: str

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of the mailboxes; see `Log.mailboxes`."""
        return self.live.mailboxes()

    def heads(self) -> dict[str, int]:
        """Return the last positions; see `Log.heads`."""
        heads, archive = self.live.heads(), ParquetLogArchive(self.folder)
        for name in self.live.mailboxes():
            if name not in heads and (files := archive.files(name)):
                heads[name] = max(file.last for file in files)
        return heads

    def cuts(self, through: Mapping[str, int] | None = None) -> list[MailboxCut]:
        """Return extents of mailbox logs, which begin where the archive does; see `Log.cuts`.

        Raises: BrokenLog when positions are missing between archive and store, Unavailable when the archive
            can't be read or is of another store.
        """
        kept = {cut.name: cut for cut in self.live.cuts()}  # before the archive: what leaves it then is there
        wholes = [self._whole(id_, name, kept.get(name)) for name, id_ in self.live.mailboxes().items()]
        cuts = []
        for cut in filter(None, wholes):
            last = cut.last if through is None else min(cut.last, through.get(cut.name, 0))
            if last == cut.last:
                cuts.append(cut)
            elif last >= cut.first:
                cuts.append(replace(cut, last=last, at=self._at(cut, last)))
        return cuts

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield records; see `Log.read`.

        Raises: BrokenLog when positions are missing.
        """
        archive = ParquetLogArchive(self.folder)
        for cut, first, last in split(ranges, POSITIONS_PER_READ):
            for part in archive.parts(cut.name, first, last):
                yield from self._read_kept(Range(cut, first, part.first - 1), columns, where)
                yield from _read_part(part, cut, columns, where)
                first = part.last + 1
            yield from self._read_kept(Range(cut, first, last), columns, where)

    def _whole(self, id_: int, name: str, kept: MailboxCut | None) -> MailboxCut | None:
        """Return how far archive and store reach together, if there is anything."""
        archive = ParquetLogArchive(self.folder)
        extents = [Extent(part.first, part.last) for part in archive.files(name)]
        extent = archived_extent(name, extents, None if kept is None else kept.first)
        if extent is None:
            return kept
        if kept is None:
            cut = MailboxCut(id_, name, extent.first, extent.last, 0)
            return replace(cut, at=self._at(cut, extent.last))
        self._check_history(archive, kept)
        return replace(kept, first=min(extent.first, kept.first))

    def _check_history(self, archive: ParquetLogArchive, kept: MailboxCut) -> None:
        end = archive.last_segment(kept.name)
        if end is None:
            return
        columns = ("position", *Record._fields[1:])
        batches = self.live.read([Range(kept, end.last, end.last + 1)], columns)
        rows = [row for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]
        # None in a store that reaches further: retention goes on, and it has seen to it itself.
        if kept.last < end.last or (rows and not continues(end.last, end.chain, Record(*rows[0]))):
            raise another_history(kept.name, end.last)

    def _at(self, cut: MailboxCut, position: int) -> int:
        """Return the log time of a record."""
        for batch in self.read([Range(cut, position, position)], ["at"]):
            for at in batch["at"].to_pylist():
                return int(at)
        raise missing(cut.name, Extent(position, position))

    def _read_kept(
        self, range_: Range, columns: Sequence[str], where: Sequence[Condition]
    ) -> Iterator[pa.RecordBatch]:
        """Yield records of the store, and of the archive what left the store since it was looked at."""
        cut, first, last = range_
        if first > last:
            return
        batches = self.live.read([range_], tuple(dict.fromkeys(("place", *columns))), where)
        begun = next((batch for batch in batches if batch.num_rows), None)
        # Which records this read sees is decided by now; those that were gone before are archived.
        kept = self.live.cuts({cut.name: PLACES - 1})
        moved = min(kept[0].first if kept else last + 1, last + 1)
        if moved > first:
            if begun is not None:
                moved = min(moved, begun["place"][0].as_py() - cut.place(0))
            parts = ParquetLogArchive(self.folder).parts(cut.name, first, moved - 1)
            if sum(part.last - part.first + 1 for part in parts) < moved - first:
                raise missing(cut.name, Extent(first, moved - 1))
            for part in parts:
                yield from _read_part(part, cut, columns, where)
        if begun is not None:
            for batch in chain([begun], batches):
                yield batch.select(list(columns))


def _read_part(
    part: Part, cut: MailboxCut, columns: Sequence[str], where: Sequence[Condition]
) -> Iterator[pa.RecordBatch]:
    stored = columns_to_read(columns)
    needed = list(dict.fromkeys(made for name in stored for made in _MADE_OF.get(name, (name,))))
    conditions = reduce(and_, map(to_arrow, where)) if where else None
    for batch in scan(part, needed, conditions, ROWS_PER_BATCH):
        if batch.num_rows:
            arrays = [_stored(batch, cut, name) for name in stored]
            yield complete(pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(stored)), cut, columns)


def _stored(batch: pa.RecordBatch, cut: MailboxCut, name: str) -> pa.Array:
    """Return a column as a database has it."""
    if name == "place":
        return pc.add(batch["position"], cut.place(0))
    if name == "death_state":
        return pc.if_else(pc.starts_with(batch["type"], DEATH), batch["state"], None)
    return batch[name].cast(arrow_schema([name]).field(0).type)
