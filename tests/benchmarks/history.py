"""Cost of a long history: fold, open, search, storage and retention."""

import asyncio
import random
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from uuid import UUID

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import NewMessage
from postroom.domain.settings import SettingsChanges
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.options import PRINCIPALS, TOPICS, Database
from tests.benchmarks.search import measure_search, measure_sizes
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import LIMITS, POLICY

BATCH = 500
CHUNK = 50_000
RETENTION_LIVES = 40_000
EVENTS_BEHIND = 200_000
"""Both snapshots that are kept are nearer to the end: an answer about an earlier moment folds all."""
OPEN_GOAL_RATIO = 1.5
DELETE_GOAL_RATIO = 0.5
"""How many times the time in which messages lived the removal of their records may take."""


def generated(start: int, count: int) -> list[NewMessage]:
    """Return messages of 20 topics and 1,000 principals, random but the same for the same numbers."""
    chance = random.Random(start)
    return [
        NewMessage(
            topic=f"bench.t{n % TOPICS}",
            payload=chance.randbytes(200),
            principal=f"user-{chance.randrange(PRINCIPALS)}",
            correlation_id=f"request-{n // 2}",
            attrs={"region": f"r{n % 7}"},
        )
        for n in range(start, start + count)
    ]


async def live(postroom: OwnedMailbox, messages: list[NewMessage]) -> None:
    """Send messages and settle them all."""
    for start in range(0, len(messages), BATCH):
        for answer in await postroom.send_batch(messages[start : start + BATCH]):
            if isinstance(answer, Exception):
                raise answer
    for topic in sorted({message.topic for message in messages}):
        while taken := await postroom.receive_messages(topic, max_messages=BATCH, max_bytes=1 << 30):
            await postroom.ack_messages([message.receipt for message in taken])


def distinct(start: int, count: int) -> list[NewMessage]:
    """Return messages whose payloads and most headers differ, the same for the same numbers."""
    chance = random.Random(start)
    return [
        NewMessage(
            topic=f"bench.t{n % TOPICS}",
            payload=f'{{"order": {n}, "note": "{chance.randbytes(60).hex()}"}}'.encode(),
            principal=f"user-{chance.randrange(PRINCIPALS)}",
            correlation_id=str(UUID(int=chance.getrandbits(128), version=4)),
            attrs={
                "region": f"r{n % 7}",
                "order": f"order-{n:09d}",
                "customer": f"customer-{chance.randrange(10**8)}",
            },
        )
        for n in range(start, start + count)
    ]


def _build(
    store: str,
    messages: int,
    figures: Figures,
    make: Callable[[int, int], list[NewMessage]] = generated,
) -> None:
    async def main() -> None:
        async with open_mailbox(
            store, default_policy=POLICY, limits=LIMITS, durability="relaxed"
        ) as postroom:
            for start in range(0, messages, CHUNK):
                await live(postroom, make(start, min(CHUNK, messages - start)))
                figures.progress(f"history: {min(start + CHUNK, messages):,} of {messages:,} messages lived")

    asyncio.run(main())


def _open_seconds(store: Path, runs: int) -> float:
    async def main() -> float:
        with Stopwatch() as opening:
            async with open_mailbox(str(store), default_policy=POLICY, limits=LIMITS):
                pass
        return opening.seconds

    return median(asyncio.run(main()) for _ in range(runs + 2))


def _measure_history(figures: Figures, folder: Path, messages: int) -> None:
    store = folder / "history.db"
    _build(str(store), messages, figures)
    label = f"{messages // 1_000_000}m" if messages >= 1_000_000 else f"{messages // 1_000}k"
    with read_mailbox(str(store)) as reader:
        events = reader.get_backlog().position
    if figures.wants("sqlite.refold"):
        before_snapshots = max(events - EVENTS_BEHIND, events // 3)
        rates = []
        for _ in range(figures.runs):
            with read_mailbox(str(store)) as reader, Stopwatch() as folding:
                reader.get_backlog(at=before_snapshots)
            rates.append(before_snapshots / folding.seconds)
        figures.add("sqlite.refold", median(rates), "events/s")
    if figures.wants("sqlite.open.empty") or figures.wants(f"sqlite.open.{label}"):
        empty = _open_seconds(folder / "empty.db", figures.runs)
        full = _open_seconds(store, figures.runs)
        figures.add("sqlite.open.empty", empty * 1_000, "ms")
        figures.add(f"sqlite.open.{label}", full * 1_000, "ms", round(empty * 1_000 * OPEN_GOAL_RATIO, 3))
    if figures.wants("sqlite.search"):
        rebuild_projections(str(store), lambda _: None)
        measure_search(figures, "sqlite", str(store), messages // 2)


def _measure_sizes(database: Database) -> Callable[[Figures, Path, int], None]:
    """Return the measurement of a search model of messages that differ."""

    def measure(figures: Figures, folder: Path, messages: int) -> None:
        with postgres_server(folder) if database == "postgres" else nullcontext() as server:
            store = str(folder / "distinct.db") if server is None else server.url()
            if server is not None:
                migrate_store(store)
            _build(store, messages, figures, distinct)
            rebuild_projections(store, lambda _: None, only=("search",))
            measure_sizes(figures, database, store)
            measure_search(figures, database, store, messages, "sizes.search")

    return measure


def _measure_retention(figures: Figures, folder: Path, _: int) -> None:
    store = folder / "retention.db"

    async def main() -> tuple[float, float]:
        async with open_mailbox(str(store), default_policy=POLICY, limits=LIMITS) as postroom:
            messages = generated(0, RETENTION_LIVES)
            with Stopwatch() as living:
                await live(postroom, messages)
            await postroom.set_settings(SettingsChanges(limits={"history_retention_ms": 1}))
            with Stopwatch() as deleting:
                removed = await postroom.retention.enforce_age()
        return deleting.seconds * 100_000 / removed, deleting.seconds / living.seconds

    seconds, ratio = asyncio.run(main())
    figures.add("sqlite.retention.delete100k", seconds, "s")
    figures.add("sqlite.retention.of_lives", ratio, "x", DELETE_GOAL_RATIO)


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "sqlite.retention": _measure_retention,
    "sqlite.sizes": _measure_sizes("sqlite"),
    "postgres.sizes": _measure_sizes("postgres"),
    **dict.fromkeys(
        ("sqlite.refold", "sqlite.open.empty", "sqlite.open.1m", "sqlite.search"), _measure_history
    ),
}
