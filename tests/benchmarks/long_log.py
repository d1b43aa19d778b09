"""Fast construction of a long log: message histories of the engine, copied in bulk.

Some thousand messages live in a store of their own, through the public handlers. Their commits are then
appended again and again, each time at the next positions, under new ids and at later times. The result is
what the engine would have written, but for one thing: the envelopes of copies name the originals' ids.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
import psycopg

from postroom.adapters.compose import OwnedMailbox, is_database, open_mailbox
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.codec import decode_runs
from postroom.application.mailbox.event_columns import AnyRun, SentRun
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import EventLog
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.commit import Commit, IndexEntry, link
from postroom.domain.names import DEFAULT_MAILBOX
from tests.benchmarks.options import ORIGINALS, PRINCIPALS, TOPICS, Interleave
from tests.benchmarks.throughput import LIMITS, POLICY

BATCH, LAG = 200, 3
VISIBILITY_MS = 3_600_000
LATER_MS = 6 * 24 * 3_600_000
NEVER, LATER, HELD, FLAKY, FAILING = (
    f"bench.{name}" for name in ("never_received", "later", "held", "flaky", "failing")
)
SHARES = {NEVER: 20, LATER: 3, HELD: 2, FLAKY: 10, FAILING: 5}
"""Of 1,000 messages, those not received and acked at once, by topic; the name of a topic is its outcome."""
SETTLED_TOPICS = tuple(f"bench.t{n}" for n in range(TOPICS))
REDRIVEN = 5
"""One in so many dead letters is redriven, and then acked."""

_encode = msgspec.msgpack.Encoder().encode

Progress = Callable[[str], None]


class Segment(NamedTuple):
    """Commits that are copied as a whole, of the log times `start` to `end` (µs)."""

    commits: Sequence[Commit]
    start: int
    end: int


class LongLog(msgspec.Struct, frozen=True):
    """Say what was built: how many messages and events, in which order."""

    messages: int
    events: int
    interleave: Interleave


def build_long_log(
    store: str,
    messages: int,
    interleave: Interleave,
    folder: Path,
    progress: Progress,
    *,
    originals: int = ORIGINALS,
) -> LongLog:
    """Fill the mailbox of a new store with the lives of about so many messages.

    Arguments:
        store: path of a SQLite store that does not exist, or URL of a migrated, empty PostgreSQL one.
        folder: for the store of the originals.
        originals: about how many messages live in it.
    """
    copies = max(1, round(messages / originals))
    lived = folder / "originals.db"
    asyncio.run(_create(store))
    boundaries = asyncio.run(_live(lived, messages // copies, interleave))
    with closing(SqliteEventLog(lived, DEFAULT_MAILBOX, create_missing=False)) as log:
        segments = list(_segments(list(log.commits()), boundaries))
    progress(f"{messages // copies:,} messages lived ({_shares()}); now {copies} copies of them")
    _copy(store, segments, copies, progress)
    for file in folder.glob("originals.db*"):
        file.unlink()
    events = sum(commit.event_count for segment in segments for commit in segment.commits)
    return LongLog(messages // copies * copies, events * copies, interleave)


def new_messages(count: int) -> list[NewMessage]:
    """Return messages of all topics from 1,000 principals, the same for the same count."""
    chance = Random(count)
    payload = chance.randbytes(200)
    shared = [topic for topic, share in SHARES.items() for _ in range(share)]
    topics = shared + [SETTLED_TOPICS[n % TOPICS] for n in range(1_000 - len(shared))]
    chance.shuffle(topics)
    return [
        NewMessage(
            topic=topics[n % 1_000],
            payload=payload,
            principal=f"user-{chance.randrange(PRINCIPALS)}",
            correlation_id=f"request-{n // 2}",
            attrs={"region": f"r{n % 7}"},
            deliver_after_ms=LATER_MS if topics[n % 1_000] == LATER else 0,
        )
        for n in range(count)
    ]


async def _create(store: str) -> None:
    async with open_mailbox(store, default_policy=POLICY, limits=LIMITS):
        pass


async def _live(store: Path, count: int, interleave: Interleave) -> list[int]:
    """Let messages live, and return the positions after which the segments begin, and the last."""
    async with open_mailbox(
        str(store), default_policy=POLICY, limits=LIMITS, durability="relaxed"
    ) as postroom:
        boundaries = [postroom.engine.mailbox.position]
        messages = new_messages(count)
        batches = [messages[start : start + BATCH] for start in range(0, count, BATCH)]
        if interleave == "life":
            await _mixed(postroom, batches)
        else:
            for batch in batches:
                await _send(postroom, batch)
            boundaries.append(postroom.engine.mailbox.position)
            taken = await _receive(postroom, count)
            boundaries.append(postroom.engine.mailbox.position)
            while taken:
                await _settle(postroom, taken)
                taken = await _receive(postroom, count)
        await _redrive(postroom)
        return [*boundaries, postroom.engine.mailbox.position]


async def _mixed(postroom: OwnedMailbox, batches: Sequence[list[NewMessage]]) -> None:
    """Receive each batch some batches after it was sent, and settle it when the next one was received."""
    taken: list[ReceivedMessage] = []
    for number, batch in enumerate(batches):
        await _send(postroom, batch)
        if number >= LAG:
            settling, taken = taken, await _receive(postroom, -(-BATCH // TOPICS))
            await _settle(postroom, settling)
    while taken:
        settling, taken = taken, await _receive(postroom, BATCH)
        await _settle(postroom, settling)
        taken = taken or await _receive(postroom, BATCH)  # what was just nacked


async def _send(postroom: OwnedMailbox, batch: list[NewMessage]) -> None:
    for answer in await postroom.send_batch(batch):
        if isinstance(answer, Exception):
            raise answer


async def _receive(postroom: OwnedMailbox, at_most: int) -> list[ReceivedMessage]:
    """Receive up to so many messages of each topic that somebody receives from."""
    taken = await asyncio.gather(
        *(
            postroom.receive_messages(
                topic, max_messages=min(at_most, BATCH), max_bytes=1 << 30, visibility_ms=VISIBILITY_MS
            )
            for topic in (*SETTLED_TOPICS, HELD, FLAKY, FAILING)
            for _ in range(-(-at_most // BATCH))
        )
    )
    return [message for messages in taken for message in messages]


async def _settle(postroom: OwnedMailbox, taken: Sequence[ReceivedMessage]) -> None:
    failed = [
        message.receipt
        for message in taken
        if message.topic == FAILING or (message.topic == FLAKY and message.attempt == 1)
    ]
    settled = [
        message.receipt for message in taken if message.topic != HELD and message.receipt not in set(failed)
    ]
    for start in range(0, len(settled), BATCH):
        await postroom.ack_messages(settled[start : start + BATCH])
    if failed:
        await postroom.nack_messages(failed, reason="rejected by the benchmark", delay_ms=0)


async def _redrive(postroom: OwnedMailbox) -> None:
    """Put some dead letters back, and settle those."""
    dead = (await postroom.list_dead_letters(FAILING, limit=1_000)).items
    chosen = [each.message_id for each in dead[::REDRIVEN]]
    if not chosen:
        return
    await postroom.redrive_dead_letters(FAILING, message_ids=chosen)
    while taken := await postroom.receive_messages(FAILING, max_messages=BATCH, max_bytes=1 << 30):
        await postroom.ack_messages([message.receipt for message in taken])


def _segments(commits: Sequence[Commit], boundaries: Sequence[int]) -> Iterator[Segment]:
    """Yield what lies between the boundaries, each segment ending when the next one starts."""
    for before, last in pairwise(boundaries):
        within = [commit for commit in commits if before < commit.first <= last]
        yield Segment(within, within[0].at, within[-1].at + 1)


def _shares() -> str:
    return ", ".join(f"{share / 10:g} % {topic.partition('.')[2]}" for topic, share in SHARES.items())


def _copy(store: str, segments: Sequence[Segment], copies: int, progress: Progress) -> None:
    """Append so many copies of the segments.

    Time is pressed together: all copies take as long as the originals did, so that none is in the future.
    """
    began, end = segments[0].start, segments[-1].end
    total = sum(commit.event_count for segment in segments for commit in segment.commits) * copies
    with closing(open_store(store).existing_log(DEFAULT_MAILBOX)) as reader:
        head = reader.head()
    assert head is not None
    last, chain = head.position, head.chain
    written = 0
    with closing(_event_log(store)) as log:
        for segment in segments:
            for copy in range(copies):
                late = (segment.start - began) * copies + copy * (segment.end - segment.start)
                copied = []
                for commit in segment.commits:
                    at = began + (commit.at - segment.start + late) // copies
                    moved = _Moved(copy, copies, began, copy * (end - began), at - commit.at)
                    copied.append(moved.commit(commit, last + 1, head.epoch, at, chain))
                    last, chain = copied[-1].last, copied[-1].chain
                log.append(copied)
                done = sum(commit.event_count for commit in copied)
                _tell(progress, written, done, total)
                written += done
    if is_database(store):
        with closing(psycopg.connect(store, autocommit=True)) as connection:
            # As it would be by now, had it taken its time.
            connection.execute("VACUUM (FREEZE, ANALYZE) postroom.log")
            connection.execute("CHECKPOINT")


def _event_log(store: str) -> EventLog:
    if is_database(store):
        return PostgresEventLog(store, DEFAULT_MAILBOX, durability="relaxed")
    return SqliteEventLog(store, DEFAULT_MAILBOX, durability="relaxed")


class _Moved(NamedTuple):
    """How a copy of a commit differs: its number, and what is added to its times (µs)."""

    copy: int
    copies: int
    began: int
    late: int
    shift: int

    def commit(self, commit: Commit, first: int, epoch: int, at: int, previous: bytes) -> Commit:
        """Return the copy."""
        runs = [self._run(run) for run in decode_runs(commit)]
        events = _encode(runs)
        last = first + commit.event_count - 1
        position, entries = first, []
        for run in runs:
            if type(run) is SentRun:
                streams = enumerate(run.stream_ids(), position)
                entries += [IndexEntry(stream, 1, place) for place, stream in streams]
            position += run.count
        chain = link(previous, first, last, epoch, at, events)
        return Commit(first, last, epoch, at, chain, events, commit.envelopes, entries)

    def _run(self, run: AnyRun) -> AnyRun:
        changes: dict[str, Any] = {"streams": b"".join(map(self._stream, run.stream_ids()))}
        for name in ("due", "expires_at"):
            if hasattr(run, name):
                changes[name] = _added(getattr(run, name), self.shift)
        if isinstance(run, SentRun):
            changes["timestamps"] = _added(run.timestamps, self.shift // 1_000)
            ids = run.correlation_ids
            changes["correlation_ids"] = (
                [f"{each}-{self.copy}" for each in ids] if isinstance(ids, list) else ids
            )
        return msgspec.structs.replace(run, **changes)

    def _stream(self, stream: bytes) -> bytes:
        """Return the UUIDv7 of a copy: its time as late as the copy's, and the copy's number after it."""
        began_ms, late_ms = self.began // 1_000, self.late // 1_000
        ms = began_ms + (int.from_bytes(stream[:6], "big") - began_ms + late_ms) // self.copies
        return ms.to_bytes(6, "big") + stream[6:9] + self.copy.to_bytes(3, "big") + stream[12:]


def _added(values: Any, shift: int) -> Any:
    """Return a column of a run with a number added to each value."""
    if isinstance(values, list):
        return [None if value is None else value + shift for value in values]
    return None if values is None else values + shift


def _tell(progress: Progress, before: int, done: int, total: int) -> None:
    """Tell of every fifth of the way."""
    if 5 * (before + done) // total > 5 * before // total:
        progress(f"{before + done:,} of {total:,} events written")
