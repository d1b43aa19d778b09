"""Cost of a long history: fold, open, search, storage and retention."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.mailbox.fold import fold
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.policy import MailboxLimits
from tests.benchmarks.figures import RUNS, Figures, Stopwatch
from tests.benchmarks.search import measure_search
from tests.benchmarks.throughput import LIMITS, POLICY

BATCH = 500
CHUNK = 50_000
TOPICS = 20
PRINCIPALS = 1_000
RETENTION_LIVES = 40_000
EVENTS_PER_LIFE = 3
REFOLD_GOAL, BYTES_GOAL, DELETE_GOAL_S, OPEN_GOAL_RATIO = 300_000, 500, 1, 1.5


class _WithoutSnapshots:
    """An event log that has to be folded from its first record."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def snapshots(self) -> Iterator[Any]:
        """Yield none."""
        return iter(())


def generated(start: int, count: int) -> list[NewMessage]:
    """Return messages of 20 topics from 1,000 principals, the same for the same numbers."""
    chance = random.Random(start)
    payload = chance.randbytes(200)
    return [
        NewMessage(
            topic=f"bench.t{n % TOPICS}",
            payload=payload,
            principal=f"user-{chance.randrange(PRINCIPALS)}",
            correlation_id=f"request-{n // 2}",
            attrs={"region": f"r{n % 7}"},
        )
        for n in range(start, start + count)
    ]


async def live(postroom: Postroom, messages: list[NewMessage]) -> None:
    """Send messages and settle them all."""
    for start in range(0, len(messages), BATCH):
        for answer in await postroom.send_batch(messages[start : start + BATCH]):
            if isinstance(answer, Exception):
                raise answer
    for topic in sorted({message.topic for message in messages}):
        while taken := await postroom.receive_messages(topic, max_messages=BATCH, max_bytes=1 << 30):
            await postroom.ack_messages([message.receipt for message in taken])


def _build(store: Path, messages: int, figures: Figures) -> None:
    async def main() -> None:
        async with open_mailbox(
            str(store), default_policy=POLICY, limits=LIMITS, durability="relaxed"
        ) as postroom:
            for start in range(0, messages, CHUNK):
                await live(postroom, generated(start, min(CHUNK, messages - start)))
                figures.progress(f"history: {min(start + CHUNK, messages):,} of {messages:,} messages lived")

    asyncio.run(main())


def _open_seconds(store: Path) -> float:
    async def main() -> float:
        with Stopwatch() as opening:
            async with open_mailbox(str(store), default_policy=POLICY, limits=LIMITS):
                pass
        return opening.seconds

    return median(asyncio.run(main()) for _ in range(RUNS + 2))


def _measure_history(figures: Figures, folder: Path, messages: int) -> None:
    store = folder / "history.db"
    _build(store, messages, figures)
    label = f"{messages // 1_000_000}m" if messages >= 1_000_000 else f"{messages // 1_000}k"
    with read_mailbox(str(store)) as reader:
        events = reader.get_backlog().position
    size = sum(
        os.path.getsize(f"{store}{suffix}") for suffix in ("", "-wal") if os.path.exists(f"{store}{suffix}")
    )
    figures.add("sqlite.bytes_per_event", size / events, "bytes", BYTES_GOAL)
    figures.add("sqlite.bytes_per_message", size / messages, "bytes")
    if figures.wants("sqlite.refold"):
        with read_mailbox(str(store)) as reader, Stopwatch() as folding:
            fold(_WithoutSnapshots(reader.log), LIMITS, POLICY)
        figures.add("sqlite.refold", events / folding.seconds, "events/s", REFOLD_GOAL)
    if figures.wants("sqlite.open"):
        empty = _open_seconds(folder / "empty.db")
        full = _open_seconds(store)
        figures.add("sqlite.open.empty", empty * 1_000, "ms")
        figures.add(f"sqlite.open.{label}", full * 1_000, "ms", round(empty * 1_000 * OPEN_GOAL_RATIO, 3))
    if figures.wants("sqlite.search"):
        rebuild_projections(str(store), lambda _: None)
        measure_search(figures, "sqlite", str(store), messages // 2)


def _measure_retention(figures: Figures, folder: Path, _: int) -> None:
    store = folder / "retention.db"

    async def main() -> float:
        async with open_mailbox(str(store), default_policy=POLICY, limits=LIMITS) as postroom:
            await live(postroom, generated(0, RETENTION_LIVES))
        short = MailboxLimits(history_retention_ms=1)
        async with open_mailbox(str(store), default_policy=POLICY, limits=short) as postroom:
            with Stopwatch() as deleting:
                removed = await postroom.retention.enforce_age()
        return deleting.seconds * 100_000 / removed

    figures.add("sqlite.retention.delete100k", asyncio.run(main()), "s", DELETE_GOAL_S)


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "sqlite.retention": _measure_retention,
    **dict.fromkeys(("sqlite.refold", "sqlite.open", "sqlite.search", "sqlite.bytes"), _measure_history),
}
