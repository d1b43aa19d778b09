"""Log extents: the part of each mailbox log that is read, the same for all read models."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from postroom.domain.commit import POSITIONS_PER_MAILBOX


class LogExtent(msgspec.Struct, frozen=True):
    """The part of one mailbox log that is read.

    Arguments:
        id, name: of the mailbox.
        first, last: positions, both included; retention may have removed those before `first`.
        at: log time (µs) of the record at `last`, which the read models use as the present time.
        chain: chain hash, in hex, of the commit with the record at `last`; empty if unknown.
    """

    id: int
    name: str
    first: int
    last: int
    at: int
    chain: str = ""

    def place(self, position: int) -> int:
        """Return the place of a position: the key of its record in the store."""
        return self.id * POSITIONS_PER_MAILBOX + position

    @property
    def events(self) -> int:
        """Return the number of positions, including those whose records retention removed."""
        return self.last - self.first + 1


class LogBounds(NamedTuple):
    """What a store has recorded of the ends of a mailbox log.

    Arguments:
        removed: last position that retention removed, or 0.
        sealed: last position when an owner last closed the log, or 0.
    """

    removed: int
    sealed: int


class Range(NamedTuple):
    """Positions `first` to `last` of one mailbox, both included."""

    extent: LogExtent
    first: int
    last: int

    @property
    def size(self) -> int:
        """Return the number of positions."""
        return self.last - self.first + 1


def split(ranges: Iterable[Range], positions: int) -> Iterator[Range]:
    """Split ranges into ranges of at most `positions` positions."""
    for extent, start, end in ranges:
        for first in range(start, end + 1, positions):
            yield Range(extent, first, min(first + positions - 1, end))


def pack(ranges: Iterable[Range], positions: int) -> list[list[Range]]:
    """Return the ranges in groups of `positions` positions; large ranges are split, small ones share one."""
    groups: list[list[Range]] = []
    room = 0
    for extent, first, end in ranges:
        while first <= end:
            if room == 0:
                groups.append([])
                room = positions
            last = min(first + room - 1, end)
            groups[-1].append(Range(extent, first, last))
            room -= last - first + 1
            first = last + 1
    return groups
