"""What snapshots cost: loading a mailbox from one, and their share of the CPU."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from statistics import median
from time import process_time

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.mailbox import snapshots
from postroom.application.mailbox.stored_snapshots import usable_snapshots
from postroom.application.messages import NewMessage
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.throughput import LIMITS, POLICY

UNSETTLED, LIVES = 200_000, 100_000
STANDING = 20_000
BATCH = 500
PAYLOAD = b"x" * 200
WAKE_GOAL, SHARE_GOAL = 0.15, 5
"""How many times as long as their sending loading messages may take; per cent."""


def _open(store: str) -> AbstractAsyncContextManager[OwnedMailbox]:
    return open_mailbox(store, default_policy=POLICY, limits=LIMITS, durability="relaxed")


async def _send(postroom: OwnedMailbox, count: int) -> None:
    for _ in range(0, count, BATCH):
        await postroom.send_batch([NewMessage(topic="bench.backlog", payload=PAYLOAD) for _ in range(BATCH)])


async def _live(postroom: OwnedMailbox, count: int) -> None:
    """Send messages with idempotency keys, and settle them."""
    for start in range(0, count, BATCH):
        numbers = range(start, start + BATCH)
        await postroom.send_batch(
            [NewMessage(topic="bench.lives", payload=PAYLOAD, idem_key=f"key-{n}") for n in numbers]
        )
        taken = await postroom.receive_messages("bench.lives", max_messages=BATCH, max_bytes=1 << 30)
        await postroom.ack_messages([message.receipt for message in taken])


def _measure_wake(figures: Figures, folder: Path, _: int) -> None:
    store = str(folder / "wake.db")

    async def main() -> float:
        async with _open(store) as postroom:
            with Stopwatch() as sending:
                await _send(postroom, UNSETTLED)
            return sending.seconds

    sent = asyncio.run(main())
    seconds = []
    with read_mailbox(store) as reader:
        for _ in range(figures.runs):
            with Stopwatch() as waking:
                mailbox = next(usable_snapshots(reader.log)).restore()
            assert mailbox is not None
            assert len(mailbox.messages) == UNSETTLED
            seconds.append(waking.seconds)
            del mailbox
    figures.add("snapshot.wake", median(seconds), "s")
    figures.add("snapshot.wake.of_sending", median(seconds) / sent, "x", WAKE_GOAL)


def _measure_share(figures: Figures, folder: Path, _: int) -> None:
    """Measure the CPU of lives with keys beside waiting messages, with snapshots and without, in turns."""

    async def lives(store: str) -> float:
        async with _open(store) as postroom:
            await _send(postroom, STANDING)
            began = process_time()
            await _live(postroom, LIVES)
            return process_time() - began

    shares, usual = [], snapshots.PART_EVENTS
    for run in range(figures.runs):
        with_snapshots = asyncio.run(lives(str(folder / f"share-{run}-with.db")))
        snapshots.PART_EVENTS = 1 << 60
        without = asyncio.run(lives(str(folder / f"share-{run}-without.db")))
        snapshots.PART_EVENTS = usual
        shares.append(100 * (1 - without / with_snapshots))
    figures.add("snapshot.share", median(shares), "%", SHARE_GOAL)


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "snapshot.wake": _measure_wake,
    "snapshot.share": _measure_share,
}
