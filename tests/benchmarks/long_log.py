"""Fast construction of a long log: message histories of the engine, copied in bulk.

Some thousand messages live in a store of their own, through the public handlers. Their records are then
inserted again and again, by one statement a copy, each time at the next positions, under new ids and at later
times. The result is what the engine would have written, but for two things: copies keep the chain hashes of
their originals, so that `postroom verify` refuses such a log, and their envelopes name the originals' ids.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import psycopg

from postroom.adapters.compose import Postroom, is_database, open_mailbox
from postroom.application.messages import NewMessage, ReceivedMessage
from tests.benchmarks.options import Interleave
from tests.benchmarks.throughput import LIMITS, POLICY

"""`life`: sends, receives and acks mixed, a few batches apart; `none`: all sends, all receives, all acks."""

ORIGINALS = 20_000
TOPICS, PRINCIPALS = 20, 1_000
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
POSITIONS = 1 << 40

Progress = Callable[[str], None]


class Segment(NamedTuple):
    """Records that are copied as a whole: positions `first` to `last`, log times `start` to `end` (µs)."""

    first: int
    last: int
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
    with closing(sqlite3.connect(lived)) as connection:
        segments = list(_segments(connection, boundaries))
    progress(f"{messages // copies:,} messages lived ({_shares()}); now {copies} copies of them")
    copy = _copy_in_postgres if is_database(store) else _copy_in_sqlite
    copy(store, lived, segments, copies, progress)
    for file in folder.glob("originals.db*"):
        file.unlink()
    events = sum(segment.last - segment.first + 1 for segment in segments)
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


async def _mixed(postroom: Postroom, batches: Sequence[list[NewMessage]]) -> None:
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


async def _send(postroom: Postroom, batch: list[NewMessage]) -> None:
    for answer in await postroom.send_batch(batch):
        if isinstance(answer, Exception):
            raise answer


async def _receive(postroom: Postroom, at_most: int) -> list[ReceivedMessage]:
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


async def _settle(postroom: Postroom, taken: Sequence[ReceivedMessage]) -> None:
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


async def _redrive(postroom: Postroom) -> None:
    """Put some dead letters back, and settle those."""
    dead = await postroom.list_dead_letters(FAILING, limit=1_000)
    chosen = [each.message_id for each in dead[::REDRIVEN]]
    if not chosen:
        return
    await postroom.redrive_dead_letters(FAILING, message_ids=chosen)
    while taken := await postroom.receive_messages(FAILING, max_messages=BATCH, max_bytes=1 << 30):
        await postroom.ack_messages([message.receipt for message in taken])


def _segments(originals: sqlite3.Connection, boundaries: Sequence[int]) -> Iterator[Segment]:
    """Yield what lies between the boundaries, each segment ending when the next one starts."""
    statement = _sql("segment_of_originals.sql")
    for before, last in pairwise(boundaries):
        start, end = originals.execute(statement, {"first": before + 1, "last": last}).fetchone()
        yield Segment(before + 1, last, start, end + 1)


def _shares() -> str:
    return ", ".join(f"{share / 10:g} % {topic.partition('.')[2]}" for topic, share in SHARES.items())


class _Copying:
    """The values of the statement that inserts a copy of a segment.

    Time is pressed together: all copies take as long as the originals did, so that none is in the future.
    """

    def __init__(self, segments: Sequence[Segment], copies: int, after: int) -> None:
        self._segments = segments
        self._copies = copies
        self._after = after
        self.events = sum(segment.last - segment.first + 1 for segment in segments) * copies

    def values(self) -> Iterator[dict[str, int]]:
        """Yield the values of one copy after the other; `after` is the last position before it."""
        began, end = self._segments[0].start, self._segments[0].end
        after = self._after
        for first, last, start, stop in self._segments:
            for copy in range(self._copies):
                yield {
                    "first": first,
                    "last": last,
                    "shift": after - first + 1,
                    "copies": self._copies,
                    "copy": copy,
                    "began": began,
                    "start": start,
                    "late": (start - began) * self._copies + copy * (stop - start),
                    "began_ms": began // 1_000,
                    "late_ms": copy * (end - began) // 1_000,
                }
                after += last - first + 1


def _copy_in_sqlite(
    store: str, originals: Path, segments: Sequence[Segment], copies: int, progress: Progress
) -> None:
    statement = _sql("copy_lives_sqlite.sql")
    with closing(sqlite3.connect(store, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("PRAGMA cache_size = -262144")
        connection.execute("ATTACH ? AS originals", [str(originals)])
        connection.create_function("copied_stream", 5, _copied_stream, deterministic=True)
        place = int(connection.execute("SELECT max(place) FROM log").fetchone()[0])
        # Both stores have one mailbox, so the places of both begin alike.
        copying = _Copying(segments, copies, place % POSITIONS)
        connection.execute("BEGIN IMMEDIATE")
        written = 0
        for values in copying.values():
            done = connection.execute(statement, values | {"base": place - place % POSITIONS}).rowcount
            _tell(progress, written, done, copying.events)
            written += done
        connection.execute("COMMIT")
        connection.execute("ANALYZE")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _copy_in_postgres(
    store: str, originals: Path, segments: Sequence[Segment], copies: int, progress: Progress
) -> None:
    statement = _sql("copy_lives_postgres.sql")
    with closing(psycopg.connect(store, autocommit=True)) as connection:
        row = connection.execute("SELECT max(place) FROM postroom.log").fetchone()
        assert row is not None
        place = int(row[0])
        base = place - place % POSITIONS
        copying = _Copying(segments, copies, place % POSITIONS)
        connection.execute("CREATE TEMP TABLE original (LIKE postroom.log)")
        with (
            closing(sqlite3.connect(originals)) as reader,
            connection.cursor().copy("COPY original FROM STDIN") as copy,
        ):
            for record in reader.execute(
                "SELECT * FROM log WHERE place % (1 << 40) >= ?", [segments[0].first]
            ):
                copy.write_row((record[0] % POSITIONS, *record[1:]))
        connection.execute("CREATE INDEX ON original (place)")
        connection.execute("ANALYZE original")
        connection.execute(
            "SELECT postroom.make_partitions(%s, %s)",
            [place // POSITIONS, place % POSITIONS + copying.events],
        )
        written = 0
        for values in copying.values():
            done = connection.execute(statement.encode(), values | {"base": base}).rowcount
            _tell(progress, written, done, copying.events)
            written += done
        # As it would be by now, had it taken its time.
        connection.execute("VACUUM (FREEZE, ANALYZE) postroom.log")
        connection.execute("CHECKPOINT")


def _copied_stream(stream: bytes, copy: int, copies: int, began_ms: int, late_ms: int) -> bytes:
    """Return the UUIDv7 of a copy: its time as late as the copy's, and the copy's number in its chance."""
    sent_ms = int.from_bytes(stream[:6], "big")
    ms = began_ms + (sent_ms - began_ms + late_ms) // copies
    return ms.to_bytes(6, "big") + stream[6:9] + copy.to_bytes(3, "big") + stream[12:]


def _tell(progress: Progress, before: int, done: int, total: int) -> None:
    """Tell of every fifth of the way."""
    if 5 * (before + done) // total > 5 * before // total:
        progress(f"{before + done:,} of {total:,} events written")


def _sql(name: str) -> str:
    return (Path(__file__).with_name("sql") / name).read_text("utf-8")
