"""Collecting the changes of a mailbox in steps, between which it may change."""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.snapshot import VERSION, Chunk, Head, SnapshotPart, encode_chunk
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import MS, Message

T = TypeVar("T")
_by_position = attrgetter("position")

CHUNK_ITEMS = 500
"""Messages or keys that are collected without a break; a few tenths of a millisecond's work."""


class Moment(NamedTuple):
    """A position of a log, and the log time (µs) of its record."""

    position: int
    at: int


NEVER = Moment(0, -1)
EVER = Moment(1 << 63, 1 << 63)


class Collector:
    """Collects the part of a snapshot that a mailbox has changed since the part before.

    The mailbox may change between the steps, and what changes after it was collected is collected again. The
    last step finds nothing that changed, so the part then holds the mailbox as it is at that moment.

    Arguments:
        rewritten: what last changed at or before this moment is collected, too, so that the parts before are
            not needed any more. `EVER` collects all.
    """

    def __init__(self, mailbox: Mailbox, rewritten: Moment = NEVER) -> None:
        self._mailbox = mailbox
        self.is_whole = rewritten == EVER
        if self.is_whole:
            mailbox.changes.take(mailbox.position)
            for topic in mailbox.topics.values():
                topic.window.take_uncollected()
        self._chunks = self._collect(rewritten)
        self._encoded: list[bytes] = []
        self.items = 0

    def step(self, chunks: int) -> bool:
        """Collect up to `chunks` chunks; return whether nothing is left that changed."""
        for _ in range(chunks):
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            if chunk.items:
                self.items += chunk.items
                self._encoded.append(encode_chunk(chunk))
        return False

    def finish(self, since: int, previous: bytes) -> SnapshotPart:
        """Return the part; to be called when `step` has just returned True, before the mailbox changes.

        Arguments:
            since: position of the first row that this one needs; 0 if it needs none.
            previous: digest of the row before.
        """
        return SnapshotPart(VERSION, since, previous, Head.of(self._mailbox), self._encoded)

    def _collect(self, rewritten: Moment) -> Iterator[Chunk]:
        mailbox, messages = self._mailbox, self._mailbox.messages
        yield from chunks_through(mailbox, rewritten)
        while True:
            sent = _sent_after(mailbox, mailbox.changes.through)
            changed, settled = mailbox.changes.take(mailbox.position)
            keys = [(topic, topic.window.take_uncollected()) for topic in mailbox.topics.values()]
            if not (sent or changed or settled or any(each for _, each in keys)):
                return
            for batch in _batches(settled):
                yield Chunk(settled=list(batch))
            for batch in _batches(changed + sent):
                yield Chunk([messages[stream] for stream in batch if stream in messages])
            for topic, names in keys:
                for some in _batches(names):
                    yield Chunk(keys={topic.name: _entries(mailbox, topic, some)})


def chunks_through(mailbox: Mailbox, moment: Moment) -> Iterator[Chunk]:
    """Yield the messages and keys of a mailbox that last changed at or before a moment, in order."""
    messages, position = mailbox.messages, moment.position
    batches = _sent_through(mailbox, position)
    while batches:
        batch = batches.popleft()  # to free all of them at the end would take as long as to collect them
        yield Chunk([m for m in batch if m.last <= position and messages.get(m.stream) is m])
    for topic in list(mailbox.topics.values()):
        for keys in chain.from_iterable(map(_batches, topic.window.blocks_through(moment.at))):
            yield Chunk(keys={topic.name: _entries(mailbox, topic, keys)})


def _entries(mailbox: Mailbox, topic: Topic, keys: Sequence[str]) -> dict[str, ReplayEntry]:
    return topic.window.entries(keys, mailbox.at - topic.policy.replay_window_ms * MS)


def _sent_through(mailbox: Mailbox, position: int) -> deque[list[Message]]:
    """Return the messages sent up to a position, in batches; the mailbox has them in that order."""
    messages = iter(mailbox.messages.values())
    batches: deque[list[Message]] = deque()
    while position and (batch := list(islice(messages, CHUNK_ITEMS))):
        batches.append(batch[: bisect_right(batch, position, key=_by_position)])
        if batch[-1].position > position:
            break
    return batches


def _sent_after(mailbox: Mailbox, position: int) -> list[bytes]:
    """Return the streams of the messages sent after a position; the mailbox has them in that order."""
    sent: list[Message] = []
    for message in reversed(mailbox.messages.values()):
        if message.position <= position:
            break
        sent.append(message)
    return [message.stream for message in reversed(sent)]


def _batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[start : start + CHUNK_ITEMS] for start in range(0, len(items), CHUNK_ITEMS))
