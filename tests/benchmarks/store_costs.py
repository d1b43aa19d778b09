"""What a mailbox's past costs: bytes on disk, opening after a crash, and pauses for snapshots."""

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from statistics import median

import msgspec
import psycopg

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.maintenance import migrate_store
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.history import CHUNK, generated, live
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import LIMITS, POLICY, TOPIC, batches_of, new_messages

LIVES = 50_000
UNSETTLED, WAITING, KEYS = 200_000, 1_000_000, 500_000
BATCH, SMALL_BATCH = 1_000, 10
EVENTS_WITH_A_SNAPSHOT = 120_000
"""Some parts of a snapshot are saved in the course of them."""
TICK_SECONDS = 0.001
BYTES_GOAL, OPEN_GOAL, PAUSE_GOAL_MS = 500, 0.25, 20


@asynccontextmanager
async def _opened(store: str) -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox(store, default_policy=POLICY, limits=LIMITS, durability="relaxed") as postroom:
        yield postroom


async def _send(postroom: OwnedMailbox, count: int, *, with_keys: bool) -> None:
    messages = new_messages(count)
    if not with_keys:
        messages = [msgspec.structs.replace(message, idem_key=None) for message in messages]
    for batch in batches_of(messages, BATCH):
        for answer in await postroom.send_batch(batch):
            if isinstance(answer, Exception):
                raise answer


async def _settle(postroom: OwnedMailbox, count: int) -> None:
    for _ in range(count // BATCH):
        taken = await postroom.receive_messages(TOPIC, max_messages=BATCH, max_bytes=1 << 30)
        await postroom.ack_messages([message.receipt for message in taken])


def _live(store: str) -> None:
    async def main() -> None:
        async with _opened(store) as postroom:
            for start in range(0, LIVES, CHUNK):
                await live(postroom, generated(start, min(CHUNK, LIVES - start)))

    asyncio.run(main())


def _measure_bytes_in_sqlite(figures: Figures, folder: Path, _: int) -> None:
    store = folder / "bytes.db"
    _live(str(store))
    size = sum(path.stat().st_size for path in (store, Path(f"{store}-wal")) if path.exists())
    figures.add("sqlite.bytes.life", size / LIVES, "bytes", BYTES_GOAL)


def _measure_bytes_in_postgres(figures: Figures, folder: Path, _: int) -> None:
    with postgres_server(folder) as server:
        store = server.create_database()
        migrate_store(store)

        def size() -> int:
            with psycopg.connect(store, autocommit=True) as connection:
                row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
                assert row is not None
                return int(row[0])

        empty = size()
        _live(store)
        figures.add("postgres.bytes.life", (size() - empty) / LIVES, "bytes", BYTES_GOAL)


def crash(store: str) -> None:
    """Send `UNSETTLED` messages, print the seconds it took, and end this process as a crash does."""

    async def main() -> None:
        async with _opened(store) as postroom:
            with Stopwatch() as sending:
                await _send(postroom, UNSETTLED, with_keys=False)
            print(sending.seconds, flush=True)
            os._exit(0)

    asyncio.run(main())


def _measure_opening_after_a_crash(figures: Figures, folder: Path, _: int) -> None:
    home = folder / "crash"
    home.mkdir()
    command = [sys.executable, "-m", "tests.benchmarks.store_costs", str(home / "store.db")]
    sent = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = []
    for run in range(figures.runs):
        # Opening folds what the snapshots lack and saves another one: each run has a copy.
        copy = folder / f"crash-{run}"
        shutil.copytree(home, copy, ignore=shutil.ignore_patterns("*-socket-*"))

        async def main(store: Path) -> float:
            with Stopwatch() as opening:
                async with _opened(str(store)):
                    return opening.elapsed()

        seconds.append(asyncio.run(main(copy / "store.db")))
        shutil.rmtree(copy)
    figures.add("sqlite.open.crash", median(seconds) * 1_000, "ms")
    figures.add("sqlite.open.crash.of_sending", median(seconds) / sent, "x", OPEN_GOAL)


async def _longest_pause(is_over: asyncio.Event) -> tuple[float, float]:
    """Return the longest time in seconds for which the loop ran nothing else, and the most CPU in one."""
    longest, most = 0.0, 0.0
    while not is_over.is_set():
        before, cpu = time.perf_counter(), time.thread_time()
        await asyncio.sleep(TICK_SECONDS)
        longest = max(longest, time.perf_counter() - before - TICK_SECONDS)
        most = max(most, time.thread_time() - cpu)
    return longest, most


def _as_served() -> AbstractContextManager[None]:
    """Return the state of the garbage collector in `postroom serve`; older code left it as it was."""
    try:
        from postroom.application.threads import exempt_heap
    except ModuleNotFoundError:
        return nullcontext()
    return exempt_heap()


def _measure_pause(figures: Figures, folder: Path, _: int) -> None:
    """Measure the loop's longest pause while few messages live beside many, and while the mailbox closes."""
    home = folder / "pause"
    home.mkdir()

    async def build() -> None:
        async with _opened(str(home / "store.db")) as postroom:
            await _send(postroom, KEYS, with_keys=True)
            await _send(postroom, WAITING - KEYS, with_keys=False)

    async def main(store: Path, exemption: ExitStack) -> tuple[float, float]:
        is_over = asyncio.Event()
        async with _opened(str(store)) as postroom:
            exemption.enter_context(_as_served())
            looking = asyncio.create_task(_longest_pause(is_over))
            messages = new_messages(EVENTS_WITH_A_SNAPSHOT // 3, seed=2)
            for batch in batches_of(messages, SMALL_BATCH):
                await postroom.send_batch(batch)
                taken = await postroom.receive_messages(TOPIC, max_messages=SMALL_BATCH)
                await postroom.ack_messages([message.receipt for message in taken])
        is_over.set()
        return await looking

    asyncio.run(build())
    pauses = []
    for run in range(figures.runs):
        copy = folder / f"pause-{run}"
        shutil.copytree(home, copy)
        with ExitStack() as exemption:
            pauses.append(asyncio.run(main(copy / "store.db", exemption)))
        shutil.rmtree(copy)
    longest, most = map(median, zip(*pauses, strict=True))
    figures.add("snapshot.pause", longest * 1_000, "ms", PAUSE_GOAL_MS)
    # Without what other processes and threads took.
    figures.add("snapshot.pause.cpu", most * 1_000, "ms", PAUSE_GOAL_MS)


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "sqlite.bytes.life": _measure_bytes_in_sqlite,
    "postgres.bytes.life": _measure_bytes_in_postgres,
    "sqlite.open.crash": _measure_opening_after_a_crash,
    "snapshot.pause": _measure_pause,
}

if __name__ == "__main__":
    crash(sys.argv[1])
