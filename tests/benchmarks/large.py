"""What many messages, topics and receivers cost: memory, and the CPU of each operation beside few of them."""

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.messages import NewMessage
from tests.benchmarks.figures import Figures
from tests.benchmarks.long_log import SETTLED_TOPICS, SHARES, build_long_log
from tests.benchmarks.options import Options
from tests.benchmarks.throughput import LIMITS, POLICY

PAYLOAD = b"x" * 200
BATCH = 500
WAITING, BEFORE = 1_000_000, 200_000
"""Messages whose memory is measured, after others that fill the cache of envelopes and the allocator."""
KINDS: dict[str, Callable[[int], dict[str, object]]] = {
    "plain": lambda number: {},
    "keys": lambda number: {"idem_key": f"key-{number}"},
    "sticky": lambda number: {"sticky_key": f"user-{number % 100_000}"},
    "delayed": lambda number: {"deliver_after_ms": 3_600_000 + number % 1_000},
}
BYTES_GOAL = 400
TOPICS, RECEIVERS, FLAT = 9_000, 1_000, 1.25
"""`FLAT`: how many times the CPU of few may be that of many; less counts as noise."""
LIVES = 3_000


def _open(store: str | Path) -> AbstractAsyncContextManager[OwnedMailbox]:
    return open_mailbox(str(store), default_policy=POLICY, limits=LIMITS, durability="relaxed")


async def _send(postroom: OwnedMailbox, topic: str, numbers: range, kind: str = "plain") -> None:
    for start in range(numbers.start, numbers.stop, BATCH):
        batch = [
            NewMessage(topic=topic, payload=PAYLOAD, **KINDS[kind](number))  # type: ignore[arg-type]
            for number in range(start, min(start + BATCH, numbers.stop))
        ]
        for answer in await postroom.send_batch(batch):
            if isinstance(answer, Exception):
                raise answer


# -- memory ---


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * 4_096


async def _bytes_of_a_message(store: str, kind: str) -> float:
    async with _open(store) as postroom:
        await _send(postroom, "bench.backlog", range(BEFORE), kind)
        gc.collect()
        before = _resident()
        await _send(postroom, "bench.backlog", range(BEFORE, BEFORE + WAITING), kind)
        gc.collect()
        return (_resident() - before) / WAITING


def _measure_memory(figures: Figures, folder: Path, _: int) -> None:
    for kind in KINDS:
        store = folder / f"memory-{kind}.db"
        command = [sys.executable, "-m", "tests.benchmarks.large", str(store), kind]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        goal = BYTES_GOAL if kind == "plain" else None
        figures.add(f"large.memory.{kind}", float(output), "bytes", goal)
        store.unlink()


# -- CPU beside few topics, receivers, messages ---


async def _cpu(work: Callable[[], Awaitable[None]]) -> float:
    """Return the CPU seconds that this process uses for work."""
    gc.collect()
    began = process_time()
    await work()
    return process_time() - began


async def _live(postroom: OwnedMailbox, topics: Sequence[str], count: int) -> None:
    """Send, receive and ack messages one by one, of one topic after the other."""
    for number in range(count):
        topic = topics[number % len(topics)]
        await postroom.send_message(NewMessage(topic=topic, payload=PAYLOAD))
        taken = await postroom.receive_messages(topic, max_messages=1)
        await postroom.ack_messages([message.receipt for message in taken])


async def _wait(postroom: OwnedMailbox, topic: str) -> None:
    """Wait for messages of a topic until cancelled."""
    while not await postroom.receive_messages(topic, wait_ms=20_000):
        pass


def _measure_topics(figures: Figures, folder: Path, _: int) -> None:
    """Measure lives beside no other topics, and beside many with a message and a receiver each, in turns."""

    async def main() -> tuple[list[float], list[float]]:
        one, many = list[float](), list[float]()
        names = [f"bench.t{number}" for number in range(TOPICS)]
        async with _open(folder / "one.db") as few, _open(folder / "many.db") as large:
            for name in names:
                await large.send_message(NewMessage(topic=name, payload=PAYLOAD, deliver_after_ms=3_600_000))
            waiting = [asyncio.create_task(_wait(large, name)) for name in names]
            while len(list(large.engine.long_polls)) < TOPICS:
                await asyncio.sleep(0.01)
            await _live(large, ["bench.lives"], LIVES // 10)
            for _ in range(figures.runs):
                one.append(await _cpu(lambda: _live(few, ["bench.lives"], LIVES)))
                many.append(await _cpu(lambda: _live(large, ["bench.lives"], LIVES)))
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return one, many

    one, many = asyncio.run(main())
    figures.add("large.topics.life", 1e6 * median(many) / LIVES, "us")
    figures.add("large.topics.life.of_one", _ratio(many, one), "x", FLAT)


async def _wait_for(postroom: OwnedMailbox, receivers: int, messages: int) -> None:
    """Have receivers wait, send them a message each in one call, and ack all; until so many are acked."""

    async def receive() -> None:
        taken = await postroom.receive_messages("bench.waited", max_messages=1, wait_ms=60_000)
        await postroom.ack_messages([message.receipt for message in taken])

    for _ in range(messages // receivers):
        waiting = [asyncio.create_task(receive()) for _ in range(receivers)]
        while postroom.engine.long_polls.count("bench.waited") < receivers:
            await asyncio.sleep(0)
        await _send(postroom, "bench.waited", range(receivers))
        await asyncio.gather(*waiting)


async def _consume(postroom: OwnedMailbox, consumers: int, messages: int) -> None:
    """Have consumers receive and ack one message after the other."""
    left = messages

    async def consumer() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            taken = await postroom.receive_messages("bench.consumed", max_messages=1, wait_ms=60_000)
            await postroom.ack_messages([message.receipt for message in taken])

    await _send(postroom, "bench.consumed", range(messages))
    await asyncio.gather(*(consumer() for _ in range(consumers)))


def _measure_receivers(figures: Figures, folder: Path, _: int) -> None:
    """Measure the CPU of a message with 64 receivers and with many, in turns."""
    works = {"waiters": _wait_for, "consumers": _consume}

    async def main(name: str) -> tuple[list[float], list[float]]:
        few, many = list[float](), list[float]()
        work = works[name]
        async with _open(folder / f"{name}.db") as postroom:
            for receivers in (64, RECEIVERS):
                await work(postroom, receivers, RECEIVERS)
            for _ in range(figures.runs):
                few.append(await _cpu(lambda: work(postroom, 64, 64 * 60)) / (64 * 60))
                many.append(await _cpu(lambda: work(postroom, RECEIVERS, 4 * RECEIVERS)) / (4 * RECEIVERS))
        return few, many

    for name in works:
        few, many = asyncio.run(main(name))
        figures.add(f"large.{name}.message", 1e6 * median(many), "us")
        figures.add(f"large.{name}.of_64", _ratio(many, few), "x", FLAT)


def _ratio(many: Sequence[float], few: Sequence[float]) -> float:
    return median(a / b for a, b in zip(many, few, strict=True))


# -- a store of many messages ---


OPERATIONS: dict[str, tuple[int, Callable[[OwnedMailbox], Awaitable[object]]]] = {
    "life": (300, lambda postroom: _live(postroom, ["bench.lives"], 1)),
    "batch": (20, lambda postroom: _batch(postroom)),
    "nack": (100, lambda postroom: _nack(postroom)),
    "backlog": (20, lambda postroom: postroom.get_backlog()),
    "settings": (20, lambda postroom: postroom.get_settings()),
    "message": (50, lambda postroom: _get(postroom)),
}
"""Operations by name, and how often each is measured."""


async def _repeat(
    operation: Callable[[OwnedMailbox], Awaitable[object]], postroom: OwnedMailbox, times: int
) -> None:
    for _ in range(times):
        await operation(postroom)


async def _batch(postroom: OwnedMailbox) -> None:
    await _send(postroom, "bench.batch", range(100))
    taken = await postroom.receive_messages("bench.batch", max_messages=100, max_bytes=1 << 30)
    await postroom.ack_messages([message.receipt for message in taken])


async def _nack(postroom: OwnedMailbox) -> None:
    await postroom.send_message(NewMessage(topic="bench.nacked", payload=PAYLOAD))
    (taken,) = await postroom.receive_messages("bench.nacked", max_messages=1)
    await postroom.nack_messages([taken.receipt], reason="busy", delay_ms=0)
    (taken,) = await postroom.receive_messages("bench.nacked", max_messages=1)
    await postroom.ack_messages([taken.receipt])


async def _get(postroom: OwnedMailbox) -> None:
    answer = await postroom.send_message(NewMessage(topic="bench.lives", payload=PAYLOAD))
    await postroom.get_message(answer.message_id)


def _measure_store(figures: Figures, folder: Path, messages: int) -> None:
    """Measure each operation in a store of `messages` settled messages and in an empty one, in turns."""
    build_long_log(str(folder / "long.db"), messages, "life", folder, figures.progress)

    async def main() -> dict[str, tuple[list[float], list[float]]]:
        costs: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in OPERATIONS}
        async with _open(folder / "empty.db") as few, _open(folder / "long.db") as many:
            for topic in (*SETTLED_TOPICS, *SHARES):  # a backlog lists the topics of both
                await _send(few, topic, range(1))
            for _ in range(figures.runs):
                for name, (times, operation) in OPERATIONS.items():
                    for postroom, cost in zip((few, many), costs[name], strict=True):
                        cost.append(await _cpu(partial(_repeat, operation, postroom, times)))
        return costs

    for name, (few, many) in asyncio.run(main()).items():
        figures.add(f"large.store.{name}", 1e6 * median(many) / OPERATIONS[name][0], "us")
        figures.add(f"large.store.{name}.of_empty", _ratio(many, few), "x", FLAT)


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return the measurements."""
    return {
        "large.memory": _measure_memory,
        "large.topics": _measure_topics,
        "large.receivers": _measure_receivers,
        "large.store": _measure_store,
    }


if __name__ == "__main__":
    print(asyncio.run(_bytes_of_a_message(*sys.argv[1:])))
