"""A run: the encoding of consecutive events of one type, column by column (ADR 0066)."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec.structs import astuple

from postroom.domain.arguments import MAX_INT
from postroom.domain.names import STREAM_BYTES
from postroom.domain.record import Event

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
