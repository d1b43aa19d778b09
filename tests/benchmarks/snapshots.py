"""Cost of snapshots: pauses of the event loop, waking from one, and opening after a crash."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.mailbox import snapshots
from postroom.application.mailbox.fold import fold_from
from postroom.application.mailbox.stored_snapshots import usable_snapshots
from postroom.application.messages import NewMessage
from tests.benchmarks.figures import RUNS, Figures, Stopwatch
from tests.benchmarks.throughput import LIMITS, POLICY

MESSAGES, KEYS = 200_000, 500_000
BATCH = 500
PAUSE_GOAL_MS, WAKE_GOAL_S, CRASH_GOAL_S, SHARE_GOAL = 20, 0.5, 1, 5
TICK_SECONDS = 0.001


class _Pauses:
    """Longest time between two turns of the event loop while the block runs."""

    async def __aenter__(self) -> "_Pauses":
        self.longest = 0.0
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _watch(self) -> None:
        last = perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = perf_counter()
            self.longest = max(self.longest, now - last - TICK_SECONDS)
            last = now


def _open(store: str) -> AbstractAsyncContextManager[Postroom]:
    return open_mailbox(store, default_policy=POLICY, limits=LIMITS, durability="relaxed")


async def _fill(postroom: Postroom, messages: int, keys: int) -> None:
    """Let a mailbox have so many unsettled messages, and so many keys of messages that were settled."""
    for start in range(0, keys, BATCH):
        await postroom.send_batch(
            [
                NewMessage(topic="bench.keyed", payload=b"x" * 200, idem_key=f"key-{n}")
                for n in range(start, start + BATCH)
            ]
        )
        taken = await postroom.receive_messages("bench.keyed", max_messages=BATCH, max_bytes=1 << 30)
        await postroom.ack_messages([message.receipt for message in taken])
    for _ in range(0, messages, BATCH):
        await postroom.send_batch(
            [NewMessage(topic="bench.backlog", payload=b"x" * 200) for _ in range(BATCH)]
        )


def _measure_pause(figures: Figures, folder: Path, _: int) -> None:
    async def main() -> tuple[float, float, float]:
        async with _open(str(folder / "pause.db")) as postroom:
            engine = postroom.engine
            await _fill(postroom, MESSAGES, KEYS)
            async with _Pauses() as idle:
                await asyncio.sleep(0.5)
            wholes = []
            for _ in range(RUNS):
                await postroom.send_message(NewMessage(topic="bench.backlog", payload=b"x"))
                async with _Pauses() as pauses:
                    await engine.take_snapshot(whole=True)
                wholes.append(pauses.longest)
            parts = []
            for _ in range(RUNS):
                await _fill(postroom, 5_000, 5_000)
                async with _Pauses() as pauses:
                    await engine.take_snapshot()
                parts.append(pauses.longest)
            return median(wholes), median(parts), idle.longest

    whole, part, idle = asyncio.run(main())
    figures.add("snapshot.pause.idle", idle * 1_000, "ms")
    figures.add("snapshot.pause", whole * 1_000, "ms", PAUSE_GOAL_MS)
    figures.add("snapshot.pause.part", part * 1_000, "ms", PAUSE_GOAL_MS)


def _measure_wake(figures: Figures, folder: Path, _: int) -> None:
    store = str(folder / "wake.db")

    async def main() -> None:
        async with open_mailbox(
            store, default_policy=POLICY, limits=LIMITS, durability="relaxed"
        ) as postroom:
            await _fill(postroom, MESSAGES, 0)

    asyncio.run(main())
    with read_mailbox(store) as reader:
        seconds = []
        for _ in range(RUNS):
            with Stopwatch() as waking:
                restored = next(usable_snapshots(reader.log)).restore(LIMITS, POLICY)
            assert restored is not None
            assert len(restored.messages) == MESSAGES
            seconds.append(waking.seconds)
    figures.add("snapshot.wake.200k", median(seconds), "s", WAKE_GOAL_S)


def _measure_crash(figures: Figures, folder: Path, _: int) -> None:
    store = str(folder / "crash.db")
    seconds = []
    for _ in range(RUNS):
        owner = subprocess.run([sys.executable, "-m", __name__, store], check=False)
        assert owner.returncode == -signal.SIGKILL, "the owner ends itself"
        with read_mailbox(store) as reader, Stopwatch() as opening:
            mailbox, parts = fold_from(reader.log, LIMITS, POLICY)
        figures.progress(f"{mailbox.position - parts[-1].moment.position:,} events replayed")
        seconds.append(opening.seconds)
    figures.add("open.crash.200k", median(seconds), "s", CRASH_GOAL_S)


def _measure_share(figures: Figures, folder: Path, _: int) -> None:
    """Measure the CPU of lives with keys, with snapshots and without."""

    async def lives(name: str) -> float:
        async with _open(str(folder / name)) as postroom:
            await _fill(postroom, 20_000, 20_000)
            began = process_time()
            await _fill(postroom, 0, 100_000)
            return process_time() - began

    taken, usual = [], snapshots.PART_EVENTS
    for run in range(RUNS):
        with_snapshots = asyncio.run(lives(f"with-{run}.db"))
        snapshots.PART_EVENTS = 1 << 60
        without = asyncio.run(lives(f"without-{run}.db"))
        snapshots.PART_EVENTS = usual
        taken.append(100 * (1 - without / with_snapshots))
    figures.add("snapshot.share", median(taken), "%", SHARE_GOAL)


def _crash(store: str) -> None:
    """Own a mailbox, change it, and kill this process."""

    async def main() -> None:
        async with open_mailbox(
            store, default_policy=POLICY, limits=LIMITS, durability="relaxed"
        ) as postroom:
            if not postroom.engine.mailbox.messages:
                await _fill(postroom, MESSAGES, 0)
            await _fill(postroom, 0, 10_000)
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(main())


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "snapshot.pause": _measure_pause,
    "snapshot.wake": _measure_wake,
    "snapshot.share": _measure_share,
    "open.crash": _measure_crash,
}

if __name__ == "__main__":
    _crash(sys.argv[1])
