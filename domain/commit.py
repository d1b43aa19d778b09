"""Commits: groups of events stored together, by column, and linked by a hash chain (ADR 0066)."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, repeat
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from blake3 import blake3
from msgspec.structs import astuple

from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import BrokenLog
from postroom.domain.names import STREAM_BYTES
from postroom.domain.record import Event

GENESIS = bytes(32)
"""Chain hash before the first commit of a log."""
POSITIONS_PER_MAILBOX = 1 << 40
"""Stores use `mailbox id * POSITIONS_PER_MAILBOX + position` as the key of a commit."""

_encode = msgspec.msgpack.Encoder().encode


class EventColumns(Sequence[Event]):
    """Events of one type and one log time, by column; an event is made when a caller asks for it.

    Arguments:
        type: of the events.
        columns: the values of each field, in the order of the fields, one for each event.
    """

    __slots__ = ("columns", "type")

    def __init__(self, type_: type[Event], columns: Sequence[Sequence[Any]]) -> None:
        self.type = type_
        self.columns = columns

    @classmethod
    def of(cls, events: Sequence[Event]) -> "EventColumns":
        """Return events, at least one and all of one type, by column."""
        return cls(type(events[0]), list(zip(*map(astuple, events), strict=True)))

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        values = [column[index] for column in self.columns]
        return EventColumns(self.type, values) if isinstance(index, slice) else self.type(*values)

    def __iter__(self) -> Iterator[Event]:
        return map(self.type, *self.columns)

    def column(self, field: str) -> Sequence[Any]:
        """Return the values of a field."""
        return self.columns[self.type.__struct_fields__.index(field)]


EventParts = Sequence[Event | EventColumns]
"""Events in their order, some of them by column."""


def each_event(parts: EventParts) -> Iterator[Event]:
    """Yield events one by one."""
    return chain.from_iterable(each if isinstance(each, EventColumns) else (each,) for each in parts)


def by_column(parts: EventParts) -> list[EventColumns]:
    """Return events by column, with consecutive events of one type together."""
    runs: list[list[EventColumns]] = []
    for cls, same in groupby(parts, type):
        some: list[Any] = list(same)
        if cls is not EventColumns:
            some = [EventColumns(cls, list(zip(*map(astuple, some), strict=True)))]
        for each in some:
            if runs and runs[-1][0].type is each.type:
                runs[-1].append(each)
            else:
                runs.append([each])
    return [
        run[0]
        if len(run) == 1
        else EventColumns(
            run[0].type, [list(chain(*each)) for each in zip(*[part.columns for part in run], strict=True)]
        )
        for run in runs
    ]


class IndexEntry(msgspec.Struct, frozen=True, gc=False, order=True):
    """Entry of a log's index: where to find the events of a stream.

    Every event of the mailbox itself has an entry. A message has one, for its `MessageSent`; readers find its
    later events by reading on from there, or backwards from `last`.

    Arguments:
        stream, version: of the event; a log has each pair once.
        position: of the event.
        last: position of the message's last event; None unless that is far from `position`.
    """

    stream: bytes
    version: int
    position: int
    last: int | None = None


class LastEvent(msgspec.Struct, frozen=True, gc=False):
    """Update of a message's entry in the index: its last event is far from its first.

    Arguments:
        position, last: positions of the first and the last event.
    """

    stream: bytes
    position: int
    last: int


class Commit(NamedTuple):
    """Events at the positions `first` to `last`, which were decided together.

    Arguments:
        first, last: positions of its events; the first commit of a log begins at 1, and none are missing.
        epoch: fencing number of the owner that wrote it.
        at: log time of its events in µs, UTC.
        chain: 32-byte BLAKE3 of the previous commit's chain hash and all other fields but `envelopes`, whose
            hashes are in `events`.
        events: the events without envelopes, encoded.
        envelopes: the `PrismEnvelope`s of its `MessageSent` events, encoded; empty if it has none, or if they
            were not read.
        entries, last_events: additions to the log's index, when it is appended; empty when it was read.
    """

    first: int
    last: int
    epoch: int
    at: int
    chain: bytes
    events: bytes
    envelopes: bytes = b""
    entries: Sequence[IndexEntry] = ()
    last_events: Sequence[LastEvent] = ()

    @property
    def event_count(self) -> int:
        """Return the number of its events."""
        return self.last - self.first + 1


def link(previous: bytes, first: int, last: int, epoch: int, at: int, events: bytes) -> bytes:
    """Return the chain hash of a commit, which makes changes to the log evident.

    Arguments:
        previous: chain hash of the previous commit, or `GENESIS`.
        first to events: see `Commit`.
    """
    return blake3(_encode((previous, first, last, epoch, at, events))).digest()


def chained(commits: Iterable[Commit], previous: bytes, expected: int) -> Iterator[Commit]:
    """Yield commits after verifying that positions have no gaps and that every chain hash matches.

    Arguments:
        previous: chain hash of the commit before the first.
        expected: first position of the first commit.

    Raises: BrokenLog naming the first commit that fails verification.
    """
    for commit in commits:
        if commit.first != expected or commit.last < commit.first:
            raise BrokenLog(
                f"The log jumps from position {expected - 1} to {commit.first}: commits were removed or "
                "moved. Restore the store from a backup.",
                expected,
            )
        if link(previous, *commit[:4], commit.events) != commit.chain:
            raise BrokenLog(
                f"The commit of positions {commit.first} to {commit.last} does not match its hash: it or the "
                "one before was altered. Restore the store from a backup.",
                commit.first,
            )
        yield commit
        previous = commit.chain
        expected = commit.last + 1


def verify_chain(commits: Iterable[Commit], previous: bytes, expected: int) -> tuple[int, bytes]:
    """Check commits as `chained` does, and return the last position and its chain hash."""
    last, chain = expected - 1, previous
    for commit in chained(commits, previous, expected):
        last, chain = commit.last, commit.chain
    return last, chain


Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=MAX_INT)]
Ints = Int64 | list[Int64]
OptionalInts = Int64 | None | list[Int64 | None]
Texts = str | list[str]
OptionalTexts = str | None | list[str | None]
OptionalBytes = bytes | None | list[bytes | None]


class Run(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Consecutive events of one type.

    Arguments:
        count: number of events.
        streams: their stream ids, 16 bytes each.
        versions: their numbers in the histories of their aggregates.
        distances: see `Record.distance`.
    """

    event: ClassVar[type[Event]]

    count: int
    streams: bytes
    versions: Ints
    distances: Ints

    @classmethod
    def of(cls, columns: Sequence[Sequence[Any]], distances: Sequence[int]) -> "Run":
        """Return the run of events of this run's type; see `EventColumns`."""
        streams, versions, _, *fields = columns
        count, joined = len(streams), join(streams, STREAM_BYTES)
        return cls(count, joined, *map(column, (versions, distances, *fields)))

    def columns(self) -> Iterator[Iterable[Any]]:
        """Yield the values of each field of the events after `at`.

        Raises: ValueError when a column has another number of values than the run.
        """
        return (expand(each, self.count) for each in astuple(self)[4:])

    def events(self, at: int, envelopes: Iterator[bytes]) -> Iterable[Event]:
        """Return the events.

        Arguments:
            at: their log time, µs.
            envelopes: of the messages, for `SentRun`.

        Raises: ValueError when the run's columns don't fit together.
        """
        return map(self.event, *self.identity(at), *self.columns())

    def stream_ids(self) -> tuple[bytes, ...]:
        """Return the stream ids; raises ValueError unless there are `count`."""
        return split(self.streams, STREAM_BYTES, self.count)

    def envelope_hashes(self) -> Iterable[bytes]:
        """Return the BLAKE3 hash of each event's envelope, empty for events without."""
        return repeat(b"", self.count)

    def identity(self, at: int) -> tuple[Iterable[bytes], Iterable[int], Iterable[int]]:
        """Return the streams, versions and log times of the events; raises as `events`."""
        return self.stream_ids(), expand(self.versions, self.count), repeat(at, self.count)


def column(values: Sequence[Any]) -> Any:
    """Return a column: one value if all are the same; raises TypeError for a list as a value."""
    first = values[0]
    if type(first) is list:
        raise TypeError("a value is a list")
    return first if values.count(first) == len(values) else values


def expand(values: Any, count: int) -> Iterable[Any]:
    """Return the values of a column; raises ValueError unless there are `count`."""
    if type(values) is not list:
        return repeat(values, count)
    if len(values) != count:
        raise ValueError(f"a column has {len(values)} values of {count}")
    return values


def split(joined: bytes, size: int, count: int) -> tuple[bytes, ...]:
    """Return values of `size` bytes each, stored joined; raises ValueError unless there are `count`."""
    if len(joined) != size * count:
        raise ValueError(f"a column has {len(joined)} bytes instead of {count} times {size}")
    return struct.unpack(f"{size}s" * count, joined)


def join(values: Sequence[bytes], size: int) -> bytes:
    """Return values joined; raises ValueError unless each has `size` bytes."""
    if list(map(len, values)).count(size) != len(values):
        raise ValueError(f"a value does not have {size} bytes")
    return b"".join(values)
