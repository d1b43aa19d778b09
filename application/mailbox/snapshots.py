"""Snapshots of an open mailbox: taken part by part, and each part in steps between groups of commands."""

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import NamedTuple, TypeVar

import msgspec

from postroom.application.mailbox.stored_snapshots import SavedPart, digest_of, encode_part
from postroom.application.ports.event_log import StoredSnapshot
from postroom.domain.errors import PostroomError
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.snapshot import (
    EVER,
    NEVER,
    VERSION,
    Chunk,
    Head,
    Moment,
    SnapshotPart,
    encode_chunk,
    split_chunks,
)
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic import Topic
from postroom.domain.message import MS, Message

PART_EVENTS = 20_000
"""Events between parts, and so about those that the next owner replays."""
STEP_CHUNKS = 4
"""Chunks that are collected between two groups of commands."""
PART_WEIGHT = 1_000
"""Items as costly to read as one more part."""
ALLOWED_WEIGHT = 64 * PART_WEIGHT
"""Weight of the parts at which older ones are given up, for an empty mailbox."""

Save = Callable[[Iterator[StoredSnapshot], int, int], asyncio.Future[StoredSnapshot]]


class Taken(NamedTuple):
    """A snapshot in the store, at a position where a commit of the log ends.

    Arguments:
        unsettled: streams of the unsettled messages at its position, if a whole snapshot was asked for.
    """

    position: int
    chain: bytes
    unsettled: Collection[bytes]


T = TypeVar("T")
_by_position = attrgetter("position")


CHUNK_ITEMS = 500
"""Messages or keys that are collected without a break; a few tenths of a millisecond's work."""


BLOCK_ITEMS = 100 * CHUNK_ITEMS
"""Messages that are listed at a time until they reach a position; a million take 10 to 20 ms."""


class Collector:
    """Collects the part of a snapshot that a mailbox has changed since the part before.

    The mailbox may change between the steps, and what changes after it was collected is collected again. The
    last step finds nothing that changed, so the part then holds the mailbox as it is at that moment.

    Arguments:
        rewritten: moment; messages and keys that last changed at or before it are collected, too, so that
            earlier parts are not needed any more. `EVER` collects all.
        notes_unsettled: whether to note the streams of all unsettled messages; only with `EVER`. A set of a
            million takes 25 ms of CPU in one step each time it grows, and to free it takes as long.
    """

    def __init__(self, mailbox: Mailbox, rewritten: Moment = NEVER, *, notes_unsettled: bool = False) -> None:
        self._mailbox = mailbox
        self.notes_unsettled = notes_unsettled
        if rewritten == EVER:
            mailbox.changes.take(mailbox.position)
            for topic in mailbox.topics.values():
                topic.window.forget_uncollected()
        self._chunks = self._collect(rewritten)
        self._encoded: list[bytes] = []
        self.items = 0
        self.unsettled: set[bytes] = set()
        """Streams of the messages that it has, if it notes them."""

    def step(self, chunks: int) -> bool:
        """Collect up to `chunks` chunks; return whether nothing is left that changed."""
        for _ in range(chunks):
            chunk = next(self._chunks, None)
            if chunk is None:
                return True
            if chunk.items:
                self.items += chunk.items
                if self.notes_unsettled:
                    self.unsettled.difference_update(chunk.settled)
                    self.unsettled.update([message.stream for message in chunk.messages])
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
            topics = [topic for topic in mailbox.topics.values() if topic.window.has_uncollected]
            keys = [(topic, topic.window.take_uncollected()) for topic in topics]
            if not (sent or changed or settled or keys):
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
    sent = _sent_through(mailbox, position)
    while sent:  # the last entries are removed, as to free all of them at the end would take long
        batch = sent[: -CHUNK_ITEMS - 1 : -1]
        del sent[-CHUNK_ITEMS:]
        yield Chunk([m for m in batch if m.last <= position and messages.get(m.stream) is m])
    for topic in list(mailbox.topics.values()):
        for keys in chain.from_iterable(map(_batches, topic.window.blocks_through(moment.at))):
            yield Chunk(keys={topic.name: _entries(mailbox, topic, keys)})


def _entries(mailbox: Mailbox, topic: Topic, keys: Sequence[str]) -> dict[str, ReplayEntry]:
    return topic.window.entries(keys, mailbox.at - topic.policy.replay_window_ms * MS)


def _sent_through(mailbox: Mailbox, position: int) -> list[Message]:
    """Return the messages sent up to a position, newest first; the mailbox has them in order."""
    messages, sent, before = iter(mailbox.messages.values()), list[Message](), -1
    while len(sent) > before and (not sent or sent[-1].position <= position):
        before = len(sent)
        sent.extend(islice(messages, BLOCK_ITEMS))
    del sent[bisect_right(sent, position, key=_by_position) :]
    sent.reverse()
    return sent


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


class Snapshots:
    """Parts of a mailbox's snapshots; a new one holds the changes since the previous one.

    When the parts hold more than twice as much as the mailbox, the data still needed of the oldest ones is
    collected again, and they are given up. They remain in the store until that happens once more, so that
    there are older snapshots if a part is damaged.

    Arguments:
        parts: parts of the snapshot from which the mailbox was loaded, oldest first.

    `is_active` tells whether `advance` has something to do now. Otherwise it has nothing to do before the
    mailbox reaches `next_position`, where the next part is due.
    """

    def __init__(self, parts: Sequence[SavedPart] = ()) -> None:
        self._parts = list(parts)
        self._last_row = self.position
        self._kept_from = 0
        self._collector: Collector | None = None
        self._given_up = 0
        self._size = 0
        self._is_saving = False
        self._is_due = False
        """Whether the next part became due while one was saved."""
        self._asked: list[asyncio.Future[Taken]] = []
        self._is_whole_asked = False
        self._note_work()

    @property
    def position(self) -> int:
        """Return the position of the newest snapshot, or 0."""
        return self._parts[-1].moment.position if self._parts else 0

    def ask(self, *, whole: bool = False) -> "asyncio.Future[Taken]":
        """Ask for a snapshot of the mailbox as of now or later.

        Arguments:
            whole: the snapshot needs no earlier part, and earlier parts are given up.
        """
        answer: asyncio.Future[Taken] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._is_whole_asked |= whole
        self._note_work()
        return answer

    def refuse(self, error: PostroomError) -> None:
        """Answer all that asked for a snapshot with an error."""
        asked, self._asked = self._asked, []
        for answer in asked:
            if not answer.done():
                answer.set_exception(error)
        self._note_work()

    def advance(self, mailbox: Mailbox, chain: bytes, save: Save) -> None:
        """Do a step of the part that is due or was asked for, if any; start to save it when it is complete.

        To be called when the mailbox is at the end of a group of events.

        Arguments:
            chain: chain hash of the last commit.
            save: starts to save rows through a position, and to remove those before another one.
        """
        if not self._is_saving:
            self._is_due = False
            try:
                self._step(mailbox, chain, save)
            finally:
                self._note_work()

    def _step(self, mailbox: Mailbox, chain: bytes, save: Save) -> None:
        if self._collector is None or (self._is_whole_asked and not self._collector.notes_unsettled):
            if not self._asked and mailbox.position - self.position < PART_EVENTS:
                return
            if mailbox.position == self.position and not self._is_whole_asked:
                self._answer(self._take_asked(mailbox, chain))
                return
            self._begin(mailbox)
        assert self._collector is not None, "it has just begun"
        # What changes faster than it is collected is collected in ever larger steps.
        haste = self._collector.items // (2 * self._size + PART_EVENTS)
        if self._collector.step(STEP_CHUNKS << min(haste, 16)):
            self._complete(self._collector, mailbox, chain, save)

    def _note_work(self) -> None:
        has_work = self._collector is not None or bool(self._asked) or self._is_due
        self.is_active = has_work and not self._is_saving
        self.next_position = self.position + PART_EVENTS

    def _begin(self, mailbox: Mailbox) -> None:
        self._size = _size_of(mailbox)
        if not self._parts or self._is_whole_asked:
            self._parts = []
            self._given_up = 0
            self._collector = Collector(mailbox, EVER, notes_unsettled=self._is_whole_asked)
        else:
            self._given_up = _superfluous(self._parts, self._size)
            rewritten = self._parts[self._given_up - 1].moment if self._given_up else NEVER
            self._collector = Collector(mailbox, rewritten)

    def _complete(self, collector: Collector, mailbox: Mailbox, chain: bytes, save: Save) -> None:
        remaining = self._parts[self._given_up :]
        part = collector.finish(
            remaining[0].first if remaining else 0, remaining[-1].digest if remaining else b""
        )
        moment = Moment(mailbox.position, mailbox.at)
        # The positions of its rows are those after the part before, at which no other part can end.
        rows = split_chunks(part.chunks, moment.position - self._last_row)
        first = moment.position - len(rows) + 1
        kept_from = self._kept_from
        if self._given_up or not remaining:
            kept_from = self._parts[0].first if self._parts else first
        asked = self._take_asked(mailbox, chain)
        self._collector, self._is_saving, self._last_row = None, True, moment.position

        def saved(saving: asyncio.Future[StoredSnapshot]) -> None:
            self._is_saving = False
            self._note_work()
            if saving.cancelled():  # the event loop ends
                return
            error = saving.exception()
            if error is None:
                added = SavedPart(moment, collector.items, first, digest_of(saving.result().state))
                self._parts, self._kept_from = [*remaining, added], kept_from
                self._is_due = mailbox.position - moment.position >= PART_EVENTS
            else:
                self._parts = []  # no part holds these changes now, so the next one is whole
            self._note_work()
            self._answer(asked, error)

        save(_stored(part, rows, chain), moment.position, kept_from).add_done_callback(saved)

    def _take_asked(self, mailbox: Mailbox, chain: bytes) -> "_SnapshotRequest":
        unsettled = self._collector.unsettled if self._collector is not None else frozenset()
        asked = _SnapshotRequest(self._asked, Taken(mailbox.position, chain, unsettled))
        self._asked, self._is_whole_asked = [], False
        return asked

    def _answer(self, asked: "_SnapshotRequest", error: BaseException | None = None) -> None:
        for answer in asked.answers:
            if answer.done():
                continue
            if error is None:
                answer.set_result(asked.taken)
            else:
                answer.set_exception(error)


class _SnapshotRequest(NamedTuple):
    """Callers who asked for a snapshot, and their results if it is saved."""

    answers: list["asyncio.Future[Taken]"]
    taken: Taken


def _stored(part: SnapshotPart, rows: Sequence[list[bytes]], chain: bytes) -> Iterator[StoredSnapshot]:
    """Yield the rows of a part with these chunks, each linked to the one before."""
    since, previous = part.since or part.position - len(rows) + 1, part.previous
    for rows_after, chunks in zip(range(len(rows) - 1, -1, -1), rows, strict=True):
        row = msgspec.structs.replace(
            part, since=since, previous=previous, chunks=chunks, rows_after=rows_after
        )
        stored = StoredSnapshot(row.position, chain, encode_part(row))
        previous = digest_of(stored.state)
        yield stored


def _size_of(mailbox: Mailbox) -> int:
    return len(mailbox.messages) + sum(len(topic.window) for topic in mailbox.topics.values())


def _superfluous(parts: Sequence[SavedPart], size: int) -> int:
    """Return how many of the oldest parts to give up, for a mailbox of `size` messages and keys.

    Few at a time, as the next part takes the data still needed of them; but more than one, so that they
    become fewer.
    """
    weight = sum(part.items + PART_WEIGHT for part in parts)
    if weight <= 2 * size + ALLOWED_WEIGHT:
        return 0
    items = 0
    for count, part in enumerate(parts):
        items += part.items
        if weight <= (3 * size + ALLOWED_WEIGHT) // 2 or (count > 1 and items > 2 * PART_EVENTS):
            return count
        weight -= part.items + PART_WEIGHT
    return len(parts)
