"""Throughput of the public handlers of one process."""

import asyncio
import itertools
import random
import sqlite3
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.store import MEMORY
from postroom.application.messages import NewMessage
from postroom.domain.message import Receipt
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.benchmarks.figures import Figures, Stopwatch

PAYLOAD_BYTES = 200
CALLERS = 8
SINGLE_CALLERS = 64
TOPIC = "bench.orders"
POLICY = TopicPolicy(shard_capacity=10_000_000, replay_capacity=10_000_000, visibility_ms=60_000)
LIMITS = MailboxLimits(in_flight_ceiling=10_000_000, max_messages=1_000)
BATCHES = {1: 5_000, 32: 50_000, 100: 100_000, 1_000: 100_000}
"""Batch sizes, and how many messages each is measured with."""
SERIAL_SIZE, SERIAL_COUNT = 100, 40_000
SIZE_BESIDE_BARE, COUNT_BESIDE_BARE = 100, 100_000
BARE_GOAL = 0.25
"""Sends do more than append: they check, hash and chain each message."""
BACKLOGS = 1_000, 1_000_000
BACKLOG_SIZE, BACKLOG_COUNT = 100, 100_000
BACKLOG_GOAL = 1.3
"""Nothing that a call does may depend on how many messages wait (ADR 0001)."""
POLICY_KEYS, POLICY_SIZE, POLICY_COUNT = 2_000, 100, 20_000
POLICIES: dict[str, tuple[float, dict[str, Any]]] = {
    "ordered": (0.8, {"ordered_keys": True}),
    "key_batch": (0.8, {"ordered_keys": True, "key_batch": 10}),
    "fair": (0.8, {"fair_keys": True}),
    "weights": (0.8, {"fair_keys": True, "key_weights": {f"key-{number}": 3 for number in range(100)}}),
    "limit": (0.9, {"max_in_flight": 1_000_000}),
    "rate": (0.9, {"rate": 10_000_000}),
    "shared": (0.9, {"max_in_flight": 1_000_000, "shared_limits": True}),
}
"""Policies of keys and limits, each with its goal: a ratio of a topic without them."""
_stores = itertools.count()

Work = Callable[[OwnedMailbox], Awaitable[dict[str, float]]]


def new_messages(count: int, seed: int = 1) -> list[NewMessage]:
    """Return messages with a random payload of 200 bytes and an idempotency key each."""
    chance = random.Random(seed)
    payload = chance.randbytes(PAYLOAD_BYTES)
    return [NewMessage(topic=TOPIC, payload=payload, idem_key=f"{seed}-{n}") for n in range(count)]


def batches_of(messages: list[NewMessage], size: int) -> Iterator[list[NewMessage]]:
    """Yield the messages in batches."""
    return (messages[start : start + size] for start in range(0, len(messages), size))


async def send_all(
    postroom: OwnedMailbox, messages: list[NewMessage], size: int, callers: int = CALLERS
) -> None:
    """Send messages in batches from several concurrent callers."""
    batches = batches_of(messages, size)

    async def caller() -> None:
        for batch in batches:
            for answer in await postroom.send_batch(batch):
                if isinstance(answer, Exception):
                    raise answer

    await asyncio.gather(*(caller() for _ in range(callers)))


async def receive_all(postroom: OwnedMailbox, count: int, size: int, settle: bool) -> list[Receipt]:
    """Receive `count` messages from concurrent callers, reading each payload; ack them if `settle`."""
    receipts: list[Receipt] = []
    left = count

    async def caller() -> None:
        nonlocal left
        while left > 0:
            wanted = min(size, left)
            left -= wanted  # before the call, so that concurrent callers don't receive more than `count`
            messages = await postroom.receive_messages(
                TOPIC, max_messages=wanted, max_bytes=1 << 30, wait_ms=20
            )
            left += wanted - len(messages)
            for message in messages:
                assert len(message.payload) == PAYLOAD_BYTES
            taken = [message.receipt for message in messages]
            if settle and taken:
                await postroom.ack_messages(taken)
            receipts.extend(taken)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return receipts


async def ack_all(postroom: OwnedMailbox, receipts: list[Receipt], size: int) -> None:
    """Ack deliveries in batches from several concurrent callers."""
    batches = (receipts[start : start + size] for start in range(0, len(receipts), size))

    async def caller() -> None:
        for batch in batches:
            await postroom.ack_messages(batch)

    await asyncio.gather(*(caller() for _ in range(CALLERS)))


async def _stages(count: int, size: int, postroom: OwnedMailbox) -> dict[str, float]:
    messages = new_messages(count)
    with Stopwatch() as sending:
        await send_all(postroom, messages, size)
    with Stopwatch() as receiving:
        receipts = await receive_all(postroom, count, size, settle=False)
    with Stopwatch() as acking:
        await ack_all(postroom, receipts, size)
    return {
        "send": count / sending.seconds,
        "receive": count / receiving.seconds,
        "ack": count / acking.seconds,
    }


async def _lives(count: int, size: int, postroom: OwnedMailbox) -> dict[str, float]:
    messages = new_messages(count)
    with Stopwatch() as living:
        await asyncio.gather(
            send_all(postroom, messages, size), receive_all(postroom, count, size, settle=True)
        )
    return {"lives": count / living.seconds}


async def _singles(count: int, postroom: OwnedMailbox) -> dict[str, float]:
    messages = iter(new_messages(count))

    async def caller() -> None:
        for message in messages:
            await postroom.send_message(message)

    with Stopwatch() as sending:
        await asyncio.gather(*(caller() for _ in range(SINGLE_CALLERS)))
    return {"send": count / sending.seconds}


async def _serial_lives(count: int, size: int, postroom: OwnedMailbox) -> dict[str, float]:
    """One caller, which sends a batch, receives it and settles it before it sends the next one."""
    with Stopwatch() as living:
        for batch in batches_of(new_messages(count), size):
            for answer in await postroom.send_batch(batch):
                if isinstance(answer, Exception):
                    raise answer
            taken = await postroom.receive_messages(TOPIC, max_messages=size, max_bytes=1 << 30)
            assert len(taken) == len(batch)
            await postroom.ack_messages([message.receipt for message in taken])
    return {"lives": count / living.seconds}


def bare_appends(path: Path, count: int, size: int) -> float:
    """Return how many payloads a second SQLite itself makes durable: a row and a commit for each batch."""
    payloads = b"".join(message.payload for message in new_messages(size))
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE log (first INTEGER PRIMARY KEY, payloads BLOB NOT NULL)")
        with Stopwatch() as appending:
            for first in range(0, count, size):
                connection.execute("INSERT INTO log VALUES (?, ?)", (first, payloads))
    return count / appending.seconds


def _measured(store: str, folder: Path, work: Work) -> dict[str, float]:
    async def main() -> dict[str, float]:
        path = MEMORY if store == "memory" else str(folder / f"throughput-{next(_stores)}.db")
        async with open_mailbox(path, default_policy=POLICY, limits=LIMITS) as postroom:
            return await work(postroom)

    return asyncio.run(main())


def _report(figures: Figures, store: str, folder: Path, suffix: str, work: Work) -> None:
    runs = [_measured(store, folder, work) for _ in range(figures.runs)]
    for stage in runs[0]:
        figures.add(f"{store}.{stage}.{suffix}", median(run[stage] for run in runs), "messages/s")


def _beside_bare_appends(figures: Figures, folder: Path, _: int) -> None:
    """Send beside SQLite's own appends of the same bytes, in turns: a slow disk slows both."""
    rates, bare = [], []
    for _ in range(figures.runs):
        bare.append(bare_appends(folder / f"bare-{next(_stores)}.db", COUNT_BESIDE_BARE, SIZE_BESIDE_BARE))
        stages = _measured("sqlite", folder, partial(_stages, COUNT_BESIDE_BARE, SIZE_BESIDE_BARE))
        rates.append(stages["send"])
    figures.add("sqlite.bare_append.100", median(bare), "messages/s")
    ratio = median(ours / theirs for ours, theirs in zip(rates, bare, strict=True))
    figures.add("sqlite.send_of_bare_append.100", ratio, "times", BARE_GOAL)


async def _stages_at_backlog(seed: int, postroom: OwnedMailbox) -> dict[str, float]:
    """Return the CPU time in s that each stage takes while others wait, whose number stays the same."""
    costs = dict.fromkeys(("send", "receive", "ack"), 0.0)
    for batch in batches_of(new_messages(BACKLOG_COUNT, seed), 10 * BACKLOG_SIZE):
        times = [time.process_time()]
        await send_all(postroom, batch, BACKLOG_SIZE)
        times.append(time.process_time())
        receipts = await receive_all(postroom, len(batch), BACKLOG_SIZE, settle=False)
        times.append(time.process_time())
        await ack_all(postroom, receipts, BACKLOG_SIZE)
        times.append(time.process_time())
        for stage, (start, end) in zip(costs, itertools.pairwise(times), strict=True):
            costs[stage] += end - start
    return costs


def _at_backlogs(figures: Figures, folder: Path, _: int) -> None:
    """Measure the calls at a small and a large backlog, in turns, by CPU time: other load changes it less."""

    async def main() -> list[Counter[str]]:
        async with AsyncExitStack() as stack:
            mailboxes = []
            for each in BACKLOGS:
                path = str(folder / f"backlog-{each}.db")
                opened = open_mailbox(path, default_policy=POLICY, limits=LIMITS)
                mailboxes.append(await stack.enter_async_context(opened))
                await send_all(mailboxes[-1], new_messages(each, seed=0), BACKLOG_SIZE)
            costs: list[Counter[str]] = [Counter(), Counter()]
            for run in range(1, figures.runs + 1):
                for mailbox, cost in zip(mailboxes, costs, strict=True):
                    cost.update(await _stages_at_backlog(run, mailbox))
            return costs

    messages = figures.runs * BACKLOG_COUNT
    few, many = asyncio.run(main())
    for stage in few:
        figures.add(f"sqlite.backlog.{stage}.1k", few[stage] / messages * 1e6, "us of CPU")
        figures.add(f"sqlite.backlog.{stage}.1m", many[stage] / messages * 1e6, "us of CPU")
        ratio = many[stage] / few[stage]
        figures.add(f"sqlite.backlog.{stage}.1m_of_1k", ratio, "times as much", BACKLOG_GOAL)


def _with_policies(figures: Figures, folder: Path, _: int) -> None:
    """Receive and ack what waits in a topic with each policy and in one without, in turns, by CPU time."""
    keys = [f"key-{number % POLICY_KEYS}" for number in range(POLICY_COUNT)]
    messages = [NewMessage(topic=TOPIC, payload=bytes(PAYLOAD_BYTES), sticky_key=key) for key in keys]

    async def rate(policy: dict[str, Any]) -> float:
        settings = msgspec.structs.replace(POLICY, **policy)
        path = str(folder / f"policies-{next(_stores)}.db")
        async with open_mailbox(path, default_policy=settings, limits=LIMITS) as mailbox:
            await send_all(mailbox, messages, POLICY_SIZE)
            start = time.process_time()
            await receive_all(mailbox, POLICY_COUNT, POLICY_SIZE, settle=True)
            return POLICY_COUNT / (time.process_time() - start)

    asyncio.run(rate({}))  # the first run also imports modules
    ratios: dict[str, list[float]] = {name: [] for name in POLICIES}
    for _run in range(figures.runs):
        without = asyncio.run(rate({}))
        for name, (_goal, policy) in POLICIES.items():
            ratios[name].append(asyncio.run(rate(policy)) / without)
    for name, (goal, _policy) in POLICIES.items():
        figures.add(f"sqlite.policies.{name}", median(ratios[name]), "times", goal)


def _of_store(store: str, sizes: dict[int, int], figures: Figures, folder: Path, _: int) -> None:
    for size, count in sizes.items():
        if any(figures.wants(f"{store}.{stage}.{size}") for stage in ("send", "receive", "ack")):
            _report(figures, store, folder, str(size), partial(_stages, count, size))
        if figures.wants(f"{store}.lives.{size}"):
            _report(figures, store, folder, str(size), partial(_lives, count, size))
    if figures.wants(f"{store}.lives.{SERIAL_SIZE}.serial"):
        work = partial(_serial_lives, SERIAL_COUNT, SERIAL_SIZE)
        _report(figures, store, folder, f"{SERIAL_SIZE}.serial", work)
    if figures.wants(f"{store}.send.single{SINGLE_CALLERS}"):
        _report(figures, store, folder, f"single{SINGLE_CALLERS}", partial(_singles, 20_000))


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    **dict.fromkeys(
        ("sqlite.send.", "sqlite.receive.", "sqlite.ack.", "sqlite.lives."),
        partial(_of_store, "sqlite", BATCHES),
    ),
    **dict.fromkeys(("sqlite.bare_append.", "sqlite.send_of_bare_append."), _beside_bare_appends),
    "sqlite.backlog.": _at_backlogs,
    "sqlite.policies.": _with_policies,
    "memory.": partial(_of_store, "memory", {100: BATCHES[100]}),
}
