"""Ordered keys, fan-out and limits: Postroom on PostgreSQL beside its peers, in one run, on one server.

A key is pgmq's FIFO group, and a subscription a queue that is bound to a routing key. Consumers check the
order of each key, and jobs count how many run at once: a rate alone would not show that either was broken.
"""

import asyncio
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

from postroom.adapters.compose import OwnedMailbox
from postroom.application.messages import NewMessage
from postroom.application.workers.worker import Worker
from postroom.domain.subscription import SubscriptionFilter
from tests.benchmarks.figures import Figures, Stopwatch
from tests.benchmarks.peers import (
    BATCH,
    PAYLOAD_BYTES,
    VISIBILITY_S,
    install_pgmq,
    is_installed,
    open_postroom,
)
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import CALLERS, POLICY, TOPIC

MESSAGES, KEYS, FEW_KEYS = 20_000, 1_000, 8
SUBSCRIPTIONS = 5
DEATH_VISIBILITY_S = 2
LIMIT, JOBS, JOB_SECONDS = 4, 200, 0.02
PROCESSES = 2
DEADLINE_SECONDS = 60.0
LIVES_SECONDS = 20.0
"""Time limit of a run, whose rate counts the messages that were handled until then."""
FILLER = "x" * (PAYLOAD_BYTES - 40)


class Delivery(NamedTuple):
    """A message in flight: its number in the order of the sends, and what settles it."""

    number: int
    handle: Any

    @property
    def key(self) -> str:
        return _key(self.number)


class KeyQueue(Protocol):
    """A queue of messages with keys; calls come from several tasks at once."""

    async def send(self, numbers: Sequence[int]) -> None:
        """Send messages, each with the key of its number, and return when they are durable."""

    async def receive(self, visibility_s: int) -> list[Delivery]:
        """Receive up to `BATCH` messages."""

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Settle messages."""


class _Postroom:
    def __init__(self, mailbox: OwnedMailbox, keys: int = KEYS) -> None:
        self._mailbox = mailbox
        self._keys = keys

    async def send(self, numbers: Sequence[int]) -> None:
        batch = [
            NewMessage(topic=TOPIC, payload=_payload(number).encode(), sticky_key=_key(number, self._keys))
            for number in numbers
        ]
        for answer in await self._mailbox.send_batch(batch):
            if isinstance(answer, Exception):
                raise answer

    async def receive(self, visibility_s: int) -> list[Delivery]:
        messages = await self._mailbox.receive_messages(
            TOPIC, max_messages=BATCH, max_bytes=1 << 30, visibility_ms=1_000 * visibility_s, wait_ms=20
        )
        return [Delivery(_number(each.payload), each.receipt) for each in messages]

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        await self._mailbox.ack_messages([each.handle for each in deliveries])


class _Pgmq:
    def __init__(self, pool: Any, read: str, keys: int) -> None:
        self._pool = pool
        self._keys = keys
        self._read = f"SELECT msg_id, message FROM pgmq.{read}($1::text, $2::int, $3::int)"

    async def send(self, numbers: Sequence[int]) -> None:
        await self._pool.fetch(
            "SELECT pgmq.send_batch($1::text, $2::text[]::jsonb[], $3::text[]::jsonb[])",
            "bench",
            [_payload(number) for number in numbers],
            [json.dumps({"x-pgmq-group": _key(number, self._keys)}) for number in numbers],
        )

    async def receive(self, visibility_s: int) -> list[Delivery]:
        rows = await self._pool.fetch(self._read, "bench", visibility_s, BATCH)
        if not rows:
            await asyncio.sleep(0.02)
        return [Delivery(_number(row[1]), row[0]) for row in rows]

    async def settle(self, deliveries: Sequence[Delivery]) -> None:
        ids = [each.handle for each in deliveries]
        await self._pool.fetch("SELECT pgmq.delete($1::text, $2::bigint[])", "bench", ids)


def _batches(count: int) -> Iterator[Sequence[int]]:
    return (range(start, start + BATCH) for start in range(0, count, BATCH))


def _key(number: int, keys: int = KEYS) -> str:
    return f"key-{number % keys}"


def _payload(number: int) -> str:
    return json.dumps({"number": number, "filler": FILLER})


def _number(payload: bytes | str) -> int:
    number: int = json.loads(payload)["number"]
    return number


@asynccontextmanager
async def open_queue(system: str, url: str, keys: int = KEYS) -> AsyncIterator[KeyQueue]:
    if system.startswith("postgres"):
        batch = BATCH if system == "postgres.key_batch" else 1
        is_ordered = system != "postgres.plain"
        async with open_postroom(url, ordered_keys=is_ordered, key_batch=batch) as mailbox:
            yield _Postroom(mailbox, keys)
    else:
        async with install_pgmq(url) as pool:
            await pool.execute("SELECT pgmq.create('bench'); SELECT pgmq.create_fifo_index('bench')")
            yield _Pgmq(pool, system.removeprefix("pgmq."), keys)


SYSTEMS = ("postgres.plain", "postgres.ordered", "pgmq.read", "pgmq.read_grouped", "pgmq.read_grouped_rr")
SYSTEMS_OF_FEW_KEYS = ("postgres.plain", "postgres.ordered", "postgres.key_batch", "pgmq.read_grouped")


async def _rate_of_lives(queue: KeyQueue) -> float:
    """Return the lives a second of messages that were all sent before; each key must be handled in order."""
    batches = _batches(MESSAGES)
    handled = 0
    deadline = time.perf_counter() + LIVES_SECONDS

    async def send() -> None:
        for batch in batches:
            await queue.send(batch)

    async def handle() -> None:
        nonlocal handled
        while handled < MESSAGES and time.perf_counter() < deadline:
            deliveries = await queue.receive(VISIBILITY_S)
            if deliveries:
                await queue.settle(deliveries)
            handled += len(deliveries)

    with Stopwatch() as living:
        await asyncio.gather(*(send() for _ in range(CALLERS)), *(handle() for _ in range(CALLERS)))
    return handled / living.seconds


async def die(queue: KeyQueue) -> tuple[int, int, float]:
    """Have a consumer die while it holds messages, and others go on.

    Returns: how many messages of its keys the others got before its visibility ended, how many were handled
        out of the order of their key, and the seconds until all were settled.
    """
    numbers = range(3 * KEYS)
    for batch in _batches(len(numbers)):
        await queue.send(batch)
    held = await queue.receive(DEATH_VISIBILITY_S)  # never settled, as its consumer is gone
    keys = {each.key for each in held}
    newest: dict[str, int] = defaultdict(lambda: -1)
    done: set[int] = set()
    overtakes = disorder = 0
    with Stopwatch() as watch:
        while len(done) < len(numbers) and watch.elapsed() < DEADLINE_SECONDS:
            deliveries = await queue.receive(VISIBILITY_S)
            for each in deliveries:
                overtakes += each.key in keys and watch.elapsed() < DEATH_VISIBILITY_S / 2
                disorder += each.number < newest[each.key]
                newest[each.key] = max(newest[each.key], each.number)
                done.add(each.number)
            if deliveries:
                await queue.settle(deliveries)
    if len(done) < len(numbers):
        raise TimeoutError(f"{len(numbers) - len(done)} messages were not delivered again.")
    return overtakes, disorder, watch.seconds


async def _fan_out(system: str, url: str, subscriptions: int) -> float:
    """Return the messages a second that are sent, each with a copy for every subscription."""
    batches = _batches(MESSAGES)

    async def send_all(send: Callable[[Sequence[int]], Any]) -> float:
        async def caller() -> None:
            for batch in batches:
                await send(batch)

        with Stopwatch() as sending:
            await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return MESSAGES / sending.seconds

    if system == "postgres":
        async with open_postroom(url, subscriptions_only=True) as mailbox:
            for number in range(subscriptions):
                await mailbox.set_subscription(f"copy-{number}", SubscriptionFilter((TOPIC,)))
                await mailbox.set_topic_policy(f"copy-{number}", POLICY)
            return await send_all(_Postroom(mailbox).send)
    async with install_pgmq(url) as pool:
        for number in range(subscriptions):
            await pool.execute(f"SELECT pgmq.create('copy_{number}')")
            await pool.execute(f"SELECT pgmq.bind_topic('{TOPIC}', 'copy_{number}')")

        async def send(numbers: Sequence[int]) -> None:
            await pool.fetch(
                "SELECT * FROM pgmq.send_batch_topic($1::text, $2::text[]::jsonb[])",
                TOPIC,
                [_payload(number) for number in numbers],
            )

        return await send_all(send)


def _work(system: str, url: str, ready: Any, running: Any, most: Any, handled: Any) -> None:
    """Handle jobs in a process until it is killed, and note how many run in all processes at once."""

    async def job(*_: Any) -> None:
        with running.get_lock():
            running.value += 1
            most.value = max(most.value, running.value)
        await asyncio.sleep(JOB_SECONDS)
        with running.get_lock():
            running.value -= 1
            handled.value += 1

    asyncio.run(_LIMITED[system](url, job, ready))


async def _limited_postroom(url: str, job: Any, ready: Any) -> None:
    from postroom.adapters.compose.connect import connect

    worker = Worker()

    @worker.consumer("bench", concurrency=2 * LIMIT)
    async def handle(payload: bytes) -> None:
        await job(payload)

    async with connect(url) as mailbox:  # with the settings of the store
        ready.set()
        await worker.run(mailbox)


async def _limited_pgqueuer(url: str, job: Any, ready: Any) -> None:
    import asyncpg
    from pgqueuer import PgQueuer
    from pgqueuer.db import AsyncpgPoolDriver

    async with asyncpg.create_pool(url, min_size=CALLERS, max_size=CALLERS) as pool:
        manager = PgQueuer(AsyncpgPoolDriver(pool))
        manager.entrypoint("bench", concurrency_limit=LIMIT)(job)
        ready.set()
        await manager.qm.run(batch_size=2 * LIMIT, max_concurrent_tasks=4 * LIMIT)


async def _limited_awa(url: str, job: Any, ready: Any) -> None:
    import awa

    from tests.benchmarks.job_queues import AwaJob

    client = awa.AsyncClient(url, max_connections=CALLERS)
    client.task(AwaJob, queue="bench")(job)
    await client.start([("bench", LIMIT)])
    ready.set()
    await asyncio.sleep(DEADLINE_SECONDS)


_LIMITED = {"postgres": _limited_postroom, "pgqueuer": _limited_pgqueuer, "awa": _limited_awa}


async def _insert(system: str, url: str) -> None:
    from tests.benchmarks.job_queues import installed_queues

    if system == "postgres":
        async with open_postroom(url, max_in_flight=LIMIT) as mailbox:
            await mailbox.send_batch([NewMessage(topic="bench", payload=b"x")] * JOBS)
        return
    async with installed_queues(lambda _: None)[system](url) as queue:
        await queue.insert(["x"] * JOBS)


def _limit(system: str, url: str) -> tuple[float, int]:
    """Return the jobs a second of two processes under one limit, and the most that ran at once."""
    asyncio.run(_insert(system, url))
    context = multiprocessing.get_context("spawn")
    running, most, handled = (context.Value("i", 0) for _ in range(3))
    ready = [context.Event() for _ in range(PROCESSES)]
    processes = [
        context.Process(target=_work, args=(system, url, each, running, most, handled)) for each in ready
    ]
    try:
        for process, each in zip(processes, ready, strict=True):
            process.start()
            each.wait(DEADLINE_SECONDS)
        with Stopwatch() as working:
            before = handled.value
            while handled.value < JOBS and working.elapsed() < DEADLINE_SECONDS:
                time.sleep(0.005)
            jobs, highest = handled.value - before, most.value
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join(DEADLINE_SECONDS)
    return jobs / working.seconds, highest


def _measure(figures: Figures, folder: Path, _: int) -> None:
    has_pgmq = is_installed(figures, "pgmq", "asyncpg")
    systems = [each for each in SYSTEMS if has_pgmq or not each.startswith("pgmq")]
    with postgres_server(folder) as server:
        _measure_order(figures, systems, server.create_database)
        _measure_fan_out(figures, ("postgres", "pgmq") if has_pgmq else ("postgres",), server.create_database)
        _measure_limits(figures, server.create_database)


def _measure_order(figures: Figures, systems: Sequence[str], new_store: Callable[[], str]) -> None:
    async def lives(system: str, keys: int) -> float:
        async with open_queue(system, new_store(), keys) as queue:
            return await _rate_of_lives(queue)

    async def death(system: str) -> tuple[int, int, float]:
        async with open_queue(system, new_store()) as queue:
            return await die(queue)

    has_pgmq = any(each.startswith("pgmq") for each in systems)
    few = [each for each in SYSTEMS_OF_FEW_KEYS if has_pgmq or not each.startswith("pgmq")]
    for name, some, keys in (("keys.lives", systems, KEYS), ("keys.few", few, FEW_KEYS)):
        rates: dict[str, list[float]] = defaultdict(list)
        for _ in range(figures.runs if figures.wants(name) else 0):
            for system in some:
                rates[system].append(asyncio.run(lives(system, keys)))
        for system, values in rates.items():
            figures.add(f"{name}.{system}", median(values), "messages/s")
    for system in systems if figures.wants("keys.death") else ():
        overtakes, disorder, seconds = asyncio.run(death(system))
        figures.add(f"keys.death.{system}.overtakes", overtakes, "messages")
        figures.add(f"keys.death.{system}.disorder", disorder, "messages")
        figures.add(f"keys.death.{system}.settled", seconds, "s")


def _measure_fan_out(figures: Figures, systems: Sequence[str], new_store: Callable[[], str]) -> None:
    rates: dict[str, list[float]] = defaultdict(list)
    for _ in range(figures.runs if figures.wants("keys.fan_out") else 0):
        for system in systems:
            for count in (1, SUBSCRIPTIONS):
                rate = asyncio.run(_fan_out(system, new_store(), count))
                rates[f"{system}.{count}"].append(rate)
    for name, values in rates.items():
        figures.add(f"keys.fan_out.{name}", median(values), "messages/s")


def _measure_limits(figures: Figures, new_store: Callable[[], str]) -> None:
    for system in _LIMITED if figures.wants("keys.limit") else ():
        packages = () if system == "postgres" else (system,)
        if is_installed(figures, *packages):
            rate, most = _limit(system, new_store())
            figures.add(f"keys.limit.{system}.jobs", rate, "jobs/s")
            figures.add(f"keys.limit.{system}.most", most, "jobs")


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"keys.": _measure}
