"""Ports: a columnar reader of the log with its extents and conditions, and decoding of payloads."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit
from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope


@dataclass(frozen=True)
class IsIn:
    """Condition: the column has one of these values; there is at least one."""

    column: str
    values: tuple[int | str, ...]


@dataclass(frozen=True)
class Bucket:
    """Condition: the last byte of a 16-byte id (practically random) is at least `low` and below `high`."""

    column: str
    low: int
    high: int


Condition = IsIn | Bucket


def may_match(where: Iterable[Condition], event: str | None) -> bool:
    """Return whether events of a type can meet conditions.

    Arguments:
        event: name of the type; None if it differs from event to event.
    """
    types = [each.values for each in where if isinstance(each, IsIn) and each.column == "event"]
    return event is None or all(event in values for values in types)


def to_arrow(condition: Condition) -> pc.Expression:
    """Return a condition as an Arrow expression."""
    field = pc.field(condition.column)
    match condition:
        case IsIn(_, values):
            return field.isin(list(values))
        case Bucket(_, low, high):
            last = pc.binary_slice(field.cast("binary"), 15, 16)
            within = last >= bytes([low])
            return within & (last < bytes([high])) if high < 256 else within


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
    """Ends of a mailbox log as recorded in the store.

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


POSITIONS_PER_READ = 50_000
"""Maximum number of positions in one read transaction, which bounds its duration."""


class LogReader(Protocol):
    """A columnar reader of the event log of one store.

    A reader is pickled and sent to tasks of a `TaskRunner`, so no connection stays open between calls, except
    in a reader that `connected` gives. All methods raise NotFound when the store does not exist, and
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
            columns: the columns of `COLUMNS` to read; others are not read or transferred.
            where: conditions on `EVENT_COLUMNS`, or `SENT_COLUMNS` where these are; records must meet all.

        Raises: BrokenLog when a commit can't be decoded, or is missing between others; a reader that allows
            gaps leaves missing ones out.
        """

    def divide(self, range_: Range) -> list[tuple[Range, bool]]:
        """Return the parts of a range, in order, and whether `read` has `SENT_COLUMNS` for each."""
        return [(range_, False)]

    def commits(self, range_: Range, *, envelopes: bool = True) -> Generator[Commit, None, None]:
        """Yield the commits that overlap a range, in order, in one read transaction.

        Arguments:
            envelopes: read them; otherwise, they are empty.

        Raises: BrokenLog when a commit can't be decompressed.
        """


class PayloadDecoder(Protocol):
    """A decoder of payloads; it is pickled and sent to the tasks of a `TaskRunner`."""

    def decode(self, mailbox: str, envelope: PrismEnvelope) -> DecodedPayload:
        """Decode one payload; problems are returned, not raised.

        Arguments:
            mailbox: name of the mailbox that has the message.
        """
