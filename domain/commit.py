"""Commits: groups of events that are stored together, linked by a hash chain (ADR 0066)."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import msgspec
from blake3 import blake3
from msgspec.structs import astuple

from postroom.domain.errors import BrokenLog
from postroom.domain.record import Event

GENESIS = bytes(32)
"""Chain hash before the first commit of a log."""
POSITIONS_PER_MAILBOX = 1 << 40
"""Stores use `mailbox id * POSITIONS_PER_MAILBOX + position` as the key of a commit."""

_encode = msgspec.msgpack.Encoder().encode


class EventColumns(Sequence[Event]):
    """Events of one type and one log time by column, which make an event when a caller asks for it.

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

    Every event of the mailbox itself has an entry. A message has one, for its `MessageSent`; its later events
    are found from there on, or backwards from `last`.

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
