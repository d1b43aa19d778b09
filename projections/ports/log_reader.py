"""Port: a columnar reader of the event log of a store."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import pyarrow as pa

from postroom.domain.commit import Commit
from postroom.projections.log_conditions import Condition
from postroom.projections.log_extent import LogBounds, LogExtent, Range

POSITIONS_PER_READ = 50_000
"""Maximum number of positions in one read transaction, which bounds its duration."""


class LogReader(Protocol):
    """A columnar reader of the event log of one store.

    A reader is pickled and sent to the tasks of a `Runner`, so no connection stays open between calls, except
    those of a reader that `connected` gives. All methods raise NotFound when the store does not exist, and
    Unavailable when it can't be read.
    """

    def connected(self) -> AbstractContextManager["LogReader"]:
        """Return a reader for many small reads, in this process, while the context lasts.

        Where connecting is slow, it keeps a connection open between reads, which then holds no transaction,
        snapshot or lock. One that was lost in between is replaced.
        """

    def mailboxes(self) -> dict[str, int]:
        """Return the ids of all mailboxes by name, in the order of ids."""

    def heads(self) -> dict[str, int]:
        """Return the last position of every mailbox log by mailbox name, without empty logs."""

    def bounds(self) -> dict[str, LogBounds]:
        """Return the recorded bounds of all mailbox logs, by mailbox name."""

    def extents(self, through: Mapping[str, int] | None = None) -> list[LogExtent]:
        """Return the extent of every mailbox log in the order of ids, without empty logs.

        Arguments:
            through: last position to read, by mailbox; other mailboxes are left out. None for the end of
                every log.
        """

    def read(
        self, ranges: Iterable[Range], columns: Sequence[str], where: Sequence[Condition] = ()
    ) -> Iterator[pa.RecordBatch]:
        """Yield the records of ranges in the order of positions.

        Each read transaction covers at most `POSITIONS_PER_READ` positions and ends before the next begins.

        Arguments:
            columns: the columns of `COLUMNS` to read; others are neither read nor transferred.
            where: conditions on `EVENT_COLUMNS`; records must meet all of them.

        Raises: BrokenLog when a commit can't be decoded, or is missing between others; a reader that allows
            gaps leaves missing ones out.
        """

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        """Yield the commits that overlap a range, in order, in one read transaction.

        Arguments:
            envelopes: read them; otherwise, they are empty.

        Raises: BrokenLog when a commit can't be decompressed.
        """
