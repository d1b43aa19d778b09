"""The log reader port over a store and its Parquet log archive, read as one log."""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from msgspec.structs import replace

from postroom.adapters.parquet.archive_folder import FileGone
from postroom.adapters.parquet.log_archive import TRIES, ParquetLogArchive
from postroom.adapters.parquet.segment_checks import check_continues, segment_of
from postroom.adapters.parquet.segment_files import FORMAT, Part, read_columns, read_commits
from postroom.application.mailbox.archived_log import (
    Extent,
    another_history,
    archived_extent,
    continues,
    missing,
)
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.domain.errors import NotFound
from postroom.projections.commit_columns import read_ranges
from postroom.projections.log_reader import (
    POSITIONS_PER_READ,
    Condition,
    LogBounds,
    LogExtent,
    LogReader,
    Range,
    split,
)

T = TypeVar("T")


@dataclass(frozen=True)
class ArchivedLogReader(LogReader):
    """A reader of archived records from files and of all others from the store, each once; see `LogReader`.

    Retention, and the building and compaction of segments, may run during a read.

    Arguments:
        verify: whether to check the bytes of files, and to decode columns from their commits, which hashes
            protect.
    """

    live: LogReader
    folder: str
    allow_gaps: bool = False
    verify: bool = False

    @contextmanager
    def connected(self) -> "Iterator[ArchivedLogReader]":
        with self.live.connected() as live:
            yield dataclasses.replace(self, live=live)

    def mailboxes(self) -> dict[str, int]:
        return self.live.mailboxes()

    def heads(self) -> dict[str, int]:
        heads, archive = self.live.heads(), ParquetLogArchive(self.folder)
        for name in self.live.mailboxes():
            if name not in heads and (files := archive.files(name)):
                heads[name] = max(file.last for file in files)
        return heads

    def bounds(self) -> dict[str, LogBounds]:
        return self.live.bounds()

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        """Return extents of mailbox logs, which begin with the archive; see `LogReader.extents`.

        Raises: BrokenLog when positions are missing between archive and store, Unavailable when the archive
            can't be read or belongs to another store, NotFound when its folder does not exist, but retention
            removed records from the store.
        """
        if not self.allow_gaps and "://" not in self.folder and not Path(self.folder).is_dir():
            self._check_nothing_is_archived()
        # Read the store first: records that retention removes later are in the archive.
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
                extents.append(self._ending(extent, last))
        return extents

    def _check_nothing_is_archived(self) -> None:
        for name, bounds in self.live.bounds().items():
            if bounds.removed:
                raise NotFound(
                    f"There is no archive at {self.folder}, but retention removed the log of {name} through "
                    f"position {bounds.removed}, which would be left out. Name the folder of the archive; a "
                    "relative one is relative to the working directory. Pass --archive '' to read without it."
                )

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield records; see `LogReader.read`.

        Raises: BrokenLog when positions are missing.
        """
        # The position of the last record shows where to go on when files were merged.
        names = list(dict.fromkeys((*columns, "position")))
        for range_ in split(ranges, POSITIONS_PER_READ):
            pieces = self._pieces(
                range_,
                partial(self._archived_columns, extent=range_.extent, columns=names, where=where),
                partial(self._stored_columns, columns=names, where=where),
                lambda batch: int(batch["position"][-1].as_py()),
            )
            for batch in pieces:
                yield batch if len(names) == len(columns) else batch.select(columns)

    def divide(self, range_: Range) -> list[tuple[Range, bool]]:
        """Return the parts of a range that segments of this format have, and the others."""
        extent, first, last = range_
        parts = [] if self.verify else ParquetLogArchive(self.folder).parts(extent.name, first, last)
        result = []
        for part in (each for each in parts if each.format == FORMAT):
            if first < part.first:
                result.append((Range(extent, first, part.first - 1), False))
            result.append((Range(extent, part.first, part.last), True))
            first = part.last + 1
        return result if first > last else [*result, (Range(extent, first, last), False)]

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        """Yield the commits that overlap a range; see `LogReader.commits`.

        Raises: BrokenLog when positions are missing.
        """
        yield from self._pieces(
            range_,
            lambda part: read_commits(part, envelopes=envelopes),
            lambda stored: self._stored(stored, envelopes=envelopes),
            lambda commit: commit.last,
        )

    def _pieces(
        self,
        range_: Range,
        archived: Callable[[Part], Iterable[T]],
        stored: Callable[[Range], Iterable[T]],
        last_of: Callable[[T], int],
    ) -> Iterator[T]:
        """Yield the commits or batches of a range, from the files if they contain it.

        Arguments:
            archived, stored: functions that read positions from a file, and from the store.
            last_of: returns the last position of something that was read.
        """
        extent, first, last = range_
        archive = ParquetLogArchive(self.folder)
        tries = TRIES
        while first <= last:
            try:
                for part in archive.parts(extent.name, first, last):
                    for each in chain(stored(Range(extent, first, part.first - 1)), archived(part)):
                        yield each
                        first, tries = last_of(each) + 1, TRIES
                    first = part.last + 1
                for each in stored(Range(extent, first, last)):
                    yield each
                    first = last_of(each) + 1
                return
            except FileGone:  # compaction has merged it
                tries -= 1
                if not tries:
                    raise

    def _archived_columns(
        self, part: Part, extent: LogExtent, columns: Sequence[str], where: Sequence[Condition]
    ) -> Iterator[pa.RecordBatch]:
        if self.verify:
            ParquetLogArchive(self.folder).check_file(extent.name, part)
        if self.verify or part.format < FORMAT:
            select = partial(_part_commits, part, envelopes="envelope" in columns)
            return read_ranges(select, [Range(extent, part.first, part.last)], columns, where)
        segment_of(extent.name, part)
        return read_columns(part, extent, columns, where)

    def _stored_columns(
        self, range_: Range, columns: Sequence[str], where: Sequence[Condition]
    ) -> Iterator[pa.RecordBatch]:
        select = partial(self._stored, envelopes="envelope" in columns)
        return read_ranges(select, [range_], columns, where, allow_gaps=self.allow_gaps)

    def _combined_extent(self, id_: int, name: str, stored: LogExtent | None) -> LogExtent | None:
        """Return the extent of archive and store together, or None if both are empty."""
        archive = ParquetLogArchive(self.folder)
        files = archive.segment_files(name)
        extents = [Extent(file.first, file.last) for file, _ in files]
        archived = archived_extent(name, extents, None if stored is None else stored.first)
        for (_, previous), (file, segment) in pairwise(files):
            check_continues(segment, previous, file)
        if archived is None:
            return stored
        if stored is None:
            return self._ending(LogExtent(id_, name, archived.first, archived.last, 0), archived.last)
        self._check_history(archive, stored)
        return replace(stored, first=min(archived.first, stored.first))

    def _check_history(self, archive: ParquetLogArchive, stored: LogExtent) -> None:
        end = archive.last_segment(stored.name)
        if end is None:
            return
        held = list(self.live.commits(Range(stored, end.last, end.last + 1), envelopes=False))
        if stored.last < end.last:  # the archive may have been extended in between
            stored = next((each for each in self.live.extents() if each.name == stored.name), stored)
        # If the store extends further but lacks the commits, retention removed them after checking the chain.
        if stored.last < end.last or (held and not continues(end.last, end.chain, held[0])):
            raise another_history(stored.name, end.last)

    def _ending(self, extent: LogExtent, last: int) -> LogExtent:
        """Return an extent that ends at a position, with the log time and chain hash of its commit."""
        for commit in self.commits(Range(extent, last, last), envelopes=False):
            return replace(extent, last=last, at=commit.at, chain=commit.chain.hex())
        raise missing(extent.name, Extent(last, last))

    def _stored(self, range_: Range, *, envelopes: bool) -> Generator[Commit, None, None]:
        """Yield commits of the store, or of the archive if retention removed them during the read."""
        extent, first, last = range_
        if first > last:
            return
        commits = self.live.commits(range_, envelopes=envelopes)
        head = next(commits, None)
        # The read's snapshot is fixed by now; commits removed before it are in the archive.
        start = last + 1
        if head is not None:
            start = head.first
        elif stored := self.live.extents({extent.name: POSITIONS_PER_MAILBOX - 1}):
            start = min(start, stored[0].first)
        if start > first:
            parts = ParquetLogArchive(self.folder).parts(extent.name, first, start - 1)
            if sum(part.last - part.first + 1 for part in parts) < start - first:
                raise missing(extent.name, Extent(first, start - 1))
            for part in parts:
                yield from read_commits(part, envelopes=envelopes)
        if head is not None:
            yield from chain([head], commits)


def _part_commits(part: Part, range_: Range, *, envelopes: bool) -> Generator[Commit, None, None]:
    yield from read_commits(part._replace(first=range_.first, last=range_.last), envelopes=envelopes)
