"""Reading the appends of one log in the stream: by position, by time, and in order (ADR 0147)."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from operator import attrgetter
from threading import Lock
from typing import NamedTuple

from postroom.adapters.jetstream.client import StoredMessage
from postroom.adapters.jetstream.frames import Append, Assembler, Frame, decode_frame
from postroom.adapters.jetstream.store_streams import OpenStreams
from postroom.domain.errors import BrokenLog

MAX_PLACES = 50_000
"""Limit on the positions whose sequences are remembered."""
CACHED_APPENDS, CACHED_BYTES = 64, 16 << 20


class End:
    """The end of a log in the stream.

    Arguments:
        sequence: of the last message of its subject, which may be of an append that was not completed; or 0.
        complete: sequence of the last message of the last append, or 0.
        frame: of that message; None while the log is empty.
        epoch: of the last message.
    """

    __slots__ = ("complete", "epoch", "frame", "sequence")

    def __init__(self, sequence: int, complete: int, frame: Frame | None, epoch: int) -> None:
        self.sequence, self.complete, self.frame, self.epoch = sequence, complete, frame, epoch

    @property
    def position(self) -> int:
        """Return the last position of the log, or 0."""
        return 0 if self.frame is None else self.frame.last

    @property
    def total(self) -> int:
        """Return the estimated size of all commits that were ever appended."""
        return 0 if self.frame is None else self.frame.before + self.frame.size


class LogMessages:
    """The messages of one log, with a cache of the sequences at which positions begin.

    Arguments:
        subject: of the log.
        allow_gaps: read on where messages are missing between others.
    """

    def __init__(self, streams: OpenStreams, subject: str, *, allow_gaps: bool = False) -> None:
        self._streams = streams
        self._log = streams.log
        self.subject = subject
        self.allow_gaps = allow_gaps
        self._lock = Lock()
        self._positions: list[int] = []
        self._sequences: list[int] = []
        self._cache: OrderedDict[int, Append] = OrderedDict()

    def end(self) -> End:
        """Return the end of the log, as the leader of the stream has it."""
        return self._streams.call(self._end)

    def note(self, first: int, begin: int) -> None:
        """Remember at which sequence the append with a first position begins."""
        with self._lock:
            index = bisect_right(self._positions, first)
            if index and self._positions[index - 1] == first:
                self._sequences[index - 1] = max(begin, self._sequences[index - 1])
                return
            self._positions.insert(index, first)
            self._sequences.insert(index, begin)
            if len(self._positions) > MAX_PLACES:
                del self._positions[::2], self._sequences[::2]

    def forget(self) -> None:
        """Forget everything, as the stream may be another one."""
        with self._lock:
            self._positions, self._sequences = [], []
            self._cache.clear()

    def append_of(self, position: int, end: End) -> Append | None:
        """Return the append that holds a position, or None where retention removed it.

        Arguments:
            end: of the log, at or after the position.
        """
        with self._lock:
            cached = self._cache.get(self._place(position))
            if cached is not None and cached.frame.first <= position <= cached.frame.last:
                self._cache.move_to_end(cached.begin)
                return cached
        append = self._streams.call(partial(self._append_of, position, end))
        if append is not None:
            self._remember(append)
        return append

    def append_at_time(self, at: int, end: End) -> Append | None:
        """Return the first append with a commit of log time `at` or later, or None."""
        return self._streams.call(partial(self._first_append, _Search(attrgetter("at"), at), end))

    def append_at_size(self, total: int, end: End) -> Append | None:
        """Return the first append that ends after `total` bytes of commits, or None."""
        search = _Search(lambda frame: frame.before + frame.size, total + 1)
        return self._streams.call(partial(self._first_append, search, end))

    def appends(self, position: int, end: End) -> Iterator[Append]:
        """Yield the appends from the first one that ends at or after a position to the end, each once.

        Between two pages of messages no request, subscription or lock stays open.

        Raises: BrokenLog when messages are missing between others.
        """
        assembler, expected = Assembler(), 0
        sequence = self._streams.call(partial(self._find, position, end))
        while sequence is not None and sequence <= end.complete:
            for message in self._streams.call(partial(self._read, sequence, end)):
                append = assembler.add(message)
                sequence = message.sequence + 1
                if append is None:
                    continue
                if append.frame.first < expected:
                    raise self._repeated(expected, append)
                is_lost = append.frame.first > (expected or position)
                if is_lost:  # on the way, or in the stream
                    append, assembler = self._append_again(expected, position, append, end), Assembler()
                    sequence = append.end + 1
                expected = append.frame.last + 1
                self.note(append.frame.first, append.begin)
                yield append
                if is_lost:
                    break

    def _append_again(self, expected: int, position: int, other: Append, end: End) -> Append:
        """Return the append that holds a position, for a reader that received a later one.

        Arguments:
            expected: the position; 0 for the first append, which may be a later one, after retention.
            position: at which the first append is expected.

        Raises: BrokenLog.
        """
        append = self._streams.call(partial(self._append_of, expected or position, end))
        if append is not None:
            return append
        if not expected or self.allow_gaps:
            return other
        raise self.gap(expected, other)

    def gap(self, position: int, append: Append) -> BrokenLog:
        """Return the error that the append with a position is missing before another one."""
        return BrokenLog(
            f"The log jumps from position {position - 1} to {append.frame.first}: messages of subject "
            f"{self.subject} before sequence {append.begin} are missing. Restore the store from a backup.",
            position,
        )

    def _repeated(self, position: int, append: Append) -> BrokenLog:
        """Return the error that an append begins before a position, at which its predecessor ends."""
        return BrokenLog(
            f"Message {append.begin} of subject {self.subject} holds positions from {append.frame.first} on, "
            f"which earlier messages hold up to {position - 1}; another program published it. Restore the "
            "store from a backup, and let only owners publish to its subjects.",
            append.frame.first,
        )

    def _remember(self, append: Append) -> None:
        self.note(append.frame.first, append.begin)
        with self._lock:
            self._cache[append.begin] = append
            while len(self._cache) > 1 and (
                len(self._cache) > CACHED_APPENDS
                or sum(each.frame.size for each in self._cache.values()) > CACHED_BYTES
            ):
                self._cache.popitem(last=False)

    def _place(self, position: int) -> int:
        """Return the sequence of the last append that is known to begin at or before a position, or 1."""
        index = bisect_right(self._positions, position) - 1
        return self._sequences[index] if index >= 0 else 1

    # -- in the thread of the connection ---

    async def _end(self, deadline: float) -> End:
        last = await self._log.last(self.subject, deadline)
        if last is None:
            return End(0, 0, None, 0)
        frame = decode_frame(last)
        if frame.is_end:
            return End(last.sequence, last.sequence, frame, frame.epoch)
        if not frame.previous:
            return End(last.sequence, 0, None, frame.epoch)
        before = await self._log.at(frame.previous, deadline)
        if before is None or before.subject != self.subject or not decode_frame(before).is_end:
            raise BrokenLog(
                f"The append before message {last.sequence} of subject {self.subject} is missing. Restore "
                "the store from a backup.",
                frame.first,
            )
        return End(last.sequence, before.sequence, decode_frame(before), frame.epoch)

    async def _read(self, sequence: int, end: End, deadline: float) -> list[StoredMessage]:
        return await self._log.read(self.subject, sequence, end.complete, deadline)

    async def _append_of(self, position: int, end: End, deadline: float) -> Append | None:
        begin = await self._find(position, end, deadline)
        append = None if begin is None else await self._append_from(begin, position, end, deadline)
        return append if append is not None and append.frame.first <= position else None

    async def _first_append(self, search: "_Search", end: End, deadline: float) -> Append | None:
        if end.frame is None or search.value(end.frame) < search.target:
            return None
        begin = await self._search(search, 1, end, deadline)
        if begin is None:
            return None
        append = await self._append_from(begin, 0, end, deadline)
        while append is not None and search.value(append.frame) < search.target:
            append = await self._append_from(append.end + 1, 0, end, deadline)
        return append

    async def _append_from(self, sequence: int, position: int, end: End, deadline: float) -> Append | None:
        """Return the first append from a sequence on that ends at or after a position."""
        assembler = Assembler()
        while sequence <= end.complete:
            message = await self._log.find(self.subject, sequence, deadline)
            if message is None:
                break
            append = assembler.add(message)
            if append is not None and append.frame.last >= position:
                return append
            sequence = message.sequence + 1
        return None

    async def _find(self, position: int, end: End, deadline: float) -> int | None:
        """Return the sequence from which on to read the append that holds a position, or the next one."""
        if position > end.position:
            return None
        with self._lock:
            low = self._place(position)
        search = _Search(attrgetter("last"), position, position)
        return await self._search(search, low, end, deadline)

    async def _search(self, search: "_Search", low: int, end: End, deadline: float) -> int | None:
        """Return the sequence of the first message from `low` on that matches a search.

        Its value grows with sequences, so where it may be is guessed from those that were read.
        """
        high, match = end.complete, None
        before, after = 0, search.value(end.frame) if end.frame else 0
        guess = low
        for step in count():
            if low > high:
                return match
            message = await self._log.find(self.subject, guess, deadline)
            frame = None if message is None or message.sequence > high else decode_frame(message)
            if message is None or frame is None:
                high = guess - 1
            elif search.value(frame) < search.target:
                low, before = message.sequence + 1, search.value(frame)
            else:
                match, high, after = message.sequence, guess - 1, search.value(frame)
                if search.position and frame.part == 0 and frame.first <= search.position:
                    return match
            share = (search.target - before) / max(1, after - before) if step % 2 else 0.5
            guess = min(max(low, low + int((high - low) * share)), max(low, high))
        return None


class _Search(NamedTuple):
    """A search for the first message whose value is at least `target`.

    Arguments:
        position: any append that holds it will do; 0 for none.
    """

    value: Callable[[Frame], int]
    target: int
    position: int = 0
