"""The index of a log: runs in the store, and the entries after them in memory (ADR 0147).

It is derived from the commits: whatever of it is missing or altered is read from them again.
"""

import struct
import sys
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

import msgspec

from postroom.adapters.jetstream.state import StoreState
from postroom.adapters.jetstream.store_streams import token_of
from postroom.application.mailbox.codec import compress, decode_runs, decompress
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry, LastEvent, expand
from postroom.domain.errors import BrokenLog
from postroom.domain.names import STREAM_BYTES

RUN_ENTRIES, RUN_POSITIONS = 1 << 14, 60_000
"""Number of entries in memory, or of positions, at which they are saved as a run."""
CACHED_RUNS = 8
_ENTRY = struct.Struct(f">{STREAM_BYTES}sIQQ")
_KEY_BYTES = 4
_RAW = b"\0"
"""First byte of entries, which no compressed part begins with."""
_encode = msgspec.msgpack.Encoder().encode


class _Keys(msgspec.Struct, frozen=True, array_like=True):
    """Prefixes of the stream ids of a run, which tell whether it may have a stream.

    Arguments:
        after, through: positions between which its entries were added.
        chain: chain hash of the commit that ends at `through`.
        keys: the last bytes of each stream id, as sorted numbers.
    """

    after: int
    through: int
    chain: bytes
    first: bytes
    last: bytes
    keys: bytes


class Run(NamedTuple):
    """A run of the index; its entries are read only if they may have the stream that is searched for."""

    through: int
    first: bytes
    last: bytes
    keys: "array[int]"

    def may_have(self, stream: bytes) -> bool:
        """Return whether the run may have entries of a stream."""
        if not self.first <= stream <= self.last:
            return False
        key = _key(stream)
        index = bisect_left(self.keys, key)
        return index < len(self.keys) and self.keys[index] == key


class BrokenIndex(Exception):
    """A run of the index is missing or was altered."""


class LogIndex:
    """The index of one log; the log gives it the commits that it lacks.

    Arguments:
        state: where the runs are.
    """

    def __init__(self, state: StoreState, mailbox: str) -> None:
        self._state = state
        self._name = token_of(mailbox)
        self._runs: list[Run] = []
        self._bodies: OrderedDict[int, bytes] = OrderedDict()
        self._tail: dict[bytes, list[IndexEntry]] = {}
        self._count = 0
        self._since = 0
        self.through = 0
        """Position through which the log is indexed."""

    def load(self, removed: int) -> bytes:
        """Find the runs of a log from which retention removed the commits through `removed`.

        Returns: chain hash of the commit that ends at `through`; empty if there is no run after `removed`.
        """
        self.reset(removed)
        chain = b""
        for number in self._state.blobs(f"keys.{self._name}"):
            content = self._state.read_blob(f"keys.{self._name}", number)
            if content is None:
                continue
            run = msgspec.msgpack.decode(content, type=_Keys)
            if run.after <= self.through < run.through:  # others are within a later one
                self._runs.append(Run(run.through, run.first, run.last, _numbers(run.keys)))
                self.through, chain = run.through, run.chain
        self._since = self.through
        return chain

    def reset(self, removed: int) -> None:
        """Forget everything: the commits after `removed` are to be added again."""
        self._runs, self._tail, self._count = [], {}, 0
        self._bodies.clear()
        self._since = self.through = removed

    def add(self, last: int, entries: Iterable[IndexEntry], updates: Iterable[LastEvent]) -> None:
        """Add what a commit adds to the index; it ends at position `last`."""
        for entry in entries:
            self._put(entry)
        for update in updates:
            self._put(IndexEntry(update.stream, 1, update.position, update.last))
        self.through = last

    def find(self, streams: Iterable[bytes], removed: int) -> list[IndexEntry]:
        """Return the entries of streams after position `removed`, in the order of streams and versions.

        Raises: BrokenIndex.
        """
        matches: list[IndexEntry] = []
        for stream in sorted(set(streams)):
            versions: dict[int, IndexEntry] = {}
            if len(stream) == STREAM_BYTES:
                for run in self._runs:
                    if run.may_have(stream):
                        versions |= {each.version: each for each in self._entries(run, stream, stream)}
            versions |= {each.version: each for each in self._tail.get(stream, ())}
            matches += [versions[each] for each in sorted(versions) if versions[each].position > removed]
        return matches

    def has(self, entry: IndexEntry, removed: int) -> bool:
        """Return whether there is an entry of the same stream and version; raises BrokenIndex."""
        return any(each.version == entry.version for each in self.find([entry.stream], removed))

    def between(self, first: bytes, last: bytes, limit: int, removed: int) -> list[bytes]:
        """Return up to `limit` streams from `first` to `last` whose first event is after `removed`, in order.

        Raises: BrokenIndex.
        """
        streams = {
            stream
            for stream, entries in self._tail.items()
            if first <= stream <= last and any(_is_first(each, removed) for each in entries)
        }
        for run in self._runs:
            if run.first <= last and first <= run.last:
                matches = (e.stream for e in self._entries(run, first, last) if _is_first(e, removed))
                streams.update(islice(matches, limit))
        return sorted(streams)[:limit]

    def save(self, chain: bytes) -> None:
        """Save the entries in memory as a run, if there are many.

        Arguments:
            chain: hash of the commit that ends at `through`.
        """
        if self._count < RUN_ENTRIES and (not self._count or self.through - self._since < RUN_POSITIONS):
            return
        entries = sorted(_pack(each) for some in self._tail.values() for each in some)
        streams = [each[:STREAM_BYTES] for each in entries]
        keys = array("I", sorted({_key(stream) for stream in streams}))
        stored = _Keys(
            self._since, self.through, chain, streams[0], streams[-1], _numbers(keys.tobytes()).tobytes()
        )
        # The keys come last: without them the run does not count.
        self._state.save_blob(f"index.{self._name}", self.through, compress(_RAW + b"".join(entries)))
        self._state.save_blob(f"keys.{self._name}", self.through, _encode(stored))
        self._runs.append(Run(self.through, streams[0], streams[-1], keys))
        self._tail, self._count, self._since = {}, 0, self.through

    def drop(self, removed: int) -> None:
        """Remove the runs that have no entry after position `removed`."""
        self._runs = [run for run in self._runs if run.through > removed]
        for kind in ("keys", "index"):
            self._state.drop_blobs(f"{kind}.{self._name}", removed + 1)

    def discard_runs(self) -> None:
        """Remove all runs from the store, as one is broken."""
        for kind in ("keys", "index"):
            self._state.drop_blobs(f"{kind}.{self._name}", POSITIONS_PER_MAILBOX)

    def _put(self, entry: IndexEntry) -> None:
        entries = self._tail.setdefault(entry.stream, [])
        if not entries or entries[-1].version < entry.version:
            entries.append(entry)
            self._count += 1
        elif any(each.version == entry.version for each in entries):
            entries[:] = [entry if each.version == entry.version else each for each in entries]
        else:
            insort(entries, entry)
            self._count += 1

    def _entries(self, run: Run, first: bytes, last: bytes) -> Iterator[IndexEntry]:
        """Yield the entries of streams from `first` to `last` in a run."""
        body = self._body(run)
        count = len(body) // _ENTRY.size
        start = bisect_left(
            range(count), first, key=lambda i: body[i * _ENTRY.size : i * _ENTRY.size + STREAM_BYTES]
        )
        for number in range(start, count):
            stream, version, position, latest = _ENTRY.unpack_from(body, number * _ENTRY.size)
            if stream > last:
                return
            yield IndexEntry(stream, version, position, latest or None)

    def _body(self, run: Run) -> bytes:
        if run.through in self._bodies:
            self._bodies.move_to_end(run.through)
            return self._bodies[run.through]
        content = self._state.read_blob(f"index.{self._name}", run.through)
        if content is None:
            raise BrokenIndex
        try:
            body = self._bodies[run.through] = decompress(content, run.through)[len(_RAW) :]
        except BrokenLog as error:
            raise BrokenIndex from error
        if len(self._bodies) > CACHED_RUNS:
            self._bodies.popitem(last=False)
        return body


def entries_of(commit: Commit) -> list[IndexEntry]:
    """Return the entries of a commit that was read; none if its events can't be decoded."""
    entries: list[IndexEntry] = []
    position = commit.first
    with suppress(BrokenLog, ValueError):
        for run in decode_runs(commit):
            columns = run.stream_ids(), expand(run.versions, run.count), expand(run.distances, run.count)
            entries += [
                IndexEntry(stream, version, at)
                for at, (stream, version, distance) in enumerate(zip(*columns, strict=False), position)
                if not distance
            ]
            position += run.count
    return entries


def _is_first(entry: IndexEntry, removed: int) -> bool:
    return entry.version == 1 and entry.position > removed


def _pack(entry: IndexEntry) -> bytes:
    return _ENTRY.pack(entry.stream, entry.version, entry.position, entry.last or 0)


def _numbers(keys: bytes) -> "array[int]":
    """Return stored keys as numbers; the stored ones are little-endian."""
    numbers = array("I", keys)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _key(stream: bytes) -> int:
    return int.from_bytes(stream[-_KEY_BYTES:], "big")
