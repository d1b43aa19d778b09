"""Workers: how many jobs that do nothing one process handles, and how long a job waits for its handler.

Postroom is measured on SQLite, and on PostgreSQL beside its peers, on one server and in turns. Jobs are
inserted before the workers start. Latencies count from the call that sends a job, in another process, to its
handler.
"""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple
from urllib.parse import urlsplit

import psycopg

from postroom.adapters.compose import is_database
from tests.benchmarks.figures import RUNS, Figures
from tests.benchmarks.job_queues import OpenQueue, installed_queues, open_postroom, working
from tests.benchmarks.servers import postgres_server

CONCURRENCIES = (16, 64, 256)
NewStore = Callable[[str], str]


class Size(NamedTuple):
    """How much is measured.

    Arguments:
        jobs: inserted before a worker starts.
        seconds: time limit of a run; a worker that has jobs left is measured by those it handled.
        rate, sent: jobs per second, and their number, for latencies.
        wakes: jobs that come one at a time, each to an idle worker.
    """

    jobs: int = 5_000
    seconds: float = 1.5
    rate: float = 500
    sent: int = 2_000
    wakes: int = 30


WAKE_RATE = 5
WARM_UP = 0.1
"""Share of the latencies that is left out: the first, while connections are opened."""
DEADLINE_SECONDS = 30.0
LATENCY_CONCURRENCY = 16


async def throughput(open_queue: OpenQueue, store: str, concurrency: int, size: Size) -> float:
    """Return the jobs per second that one process handles."""
    handled = 0
    started = ended = 0.0
    is_done = asyncio.Event()

    def on_job(_: str) -> None:
        nonlocal handled, started, ended
        ended = time.perf_counter()
        started = started or ended
        handled += 1
        if handled == size.jobs or ended - started > size.seconds:
            is_done.set()

    async with open_queue(store) as queue:
        await queue.insert([str(n) for n in range(size.jobs)])
        if is_database(store):
            await _analyze(store)
        async with working(queue, concurrency, on_job), asyncio.timeout(DEADLINE_SECONDS):
            await is_done.wait()
            rate = handled / (ended - started)
    return rate


async def _analyze(url: str) -> None:
    """Update the planner's statistics, as autovacuum does after a minute.

    Without them procrastinate's workers sort all jobs to fetch one.
    """
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute("ANALYZE")


async def latencies_ms(open_queue: OpenQueue, name: str, store: str, rate: float, count: int) -> list[float]:
    """Return the times from the sends in another process to the handler, ms, in ascending order."""
    seen: list[float] = []
    is_done = asyncio.Event()

    def on_job(payload: str) -> None:
        seen.append((time.monotonic_ns() - int(payload)) / 1e6)
        if len(seen) == count:
            is_done.set()

    async with open_queue(store) as queue, working(queue, LATENCY_CONCURRENCY, on_job):
        sender = multiprocessing.get_context("spawn").Process(target=_send, args=(name, store, rate, count))
        sender.start()
        try:
            async with asyncio.timeout(DEADLINE_SECONDS + count / rate):
                await is_done.wait()
        finally:
            await asyncio.to_thread(sender.join, DEADLINE_SECONDS)
            sender.kill()
    return sorted(seen[int(WARM_UP * count) :])


def _send(name: str, store: str, rate: float, count: int) -> None:
    """Send jobs at a rate, each with the time of its send."""

    async def main() -> None:
        async with installed_queues(lambda _: None)[name](store) as queue:

            async def send() -> None:
                await queue.send(str(time.monotonic_ns()))

            start = time.perf_counter()
            sending: list[asyncio.Task[None]] = []
            for n in range(count):
                await asyncio.sleep(max(start + n / rate - time.perf_counter(), 0))
                sending.append(asyncio.create_task(send()))
            await asyncio.gather(*sending)

    asyncio.run(main())


def measure_throughput(
    figures: Figures, name: str, stores: NewStore, queues: Mapping[str, OpenQueue], size: Size
) -> None:
    """Measure workers in turns, by concurrency.

    Arguments:
        name: prefix of the figures, with a place for the concurrency.
        stores: makes an empty store for a queue.
    """
    for concurrency in CONCURRENCIES:
        if not figures.wants(name.format(concurrency)):
            continue
        rates: dict[str, list[float]] = {queue: [] for queue in queues}
        for _ in range(RUNS):
            for queue, open_queue in queues.items():
                rates[queue].append(asyncio.run(throughput(open_queue, stores(queue), concurrency, size)))
        for queue, values in rates.items():
            figures.add(f"{name.format(concurrency)}.{queue}", median(values), "jobs/s")


def measure_latency(
    figures: Figures, name: str, stores: NewStore, queues: Mapping[str, OpenQueue], size: Size
) -> None:
    """Measure the time from a send in another process to the handler, under load and when idle."""
    for kind, rate, count in (("latency", size.rate, size.sent), ("wake", WAKE_RATE, size.wakes)):
        if not figures.wants(f"{name}.{kind}"):
            continue
        for queue, open_queue in queues.items():
            values = asyncio.run(latencies_ms(open_queue, queue, stores(queue), rate, count))
            for share in (50, 99):
                value = values[min(share * len(values) // 100, len(values) - 1)]
                figures.add(f"{name}.{kind}.{queue}.p{share}", value, "ms")


def _on_sqlite(figures: Figures, folder: Path, _: int) -> None:
    numbers = iter(range(1_000))

    def new_store(_: str) -> str:
        return str(folder / f"workers-{next(numbers)}.db")

    queues = {"postroom": open_postroom}
    measure_throughput(figures, "workers.sqlite.{}", new_store, queues, Size())
    measure_latency(figures, "workers.sqlite", new_store, queues, Size())


def _on_postgres(figures: Figures, folder: Path, _: int) -> None:
    queues = installed_queues(figures.progress)
    with postgres_server(folder) as server:

        @cache
        def migrated(queue: str) -> str:
            url = server.create_database()
            asyncio.run(_migrate(queues[queue], url))
            return urlsplit(url).path[1:]

        def new_store(queue: str) -> str:
            return server.create_database(migrated(queue))

        measure_throughput(figures, "workers.postgres.{}", new_store, queues, Size())
        measure_latency(figures, "workers.postgres", new_store, queues, Size())


async def _migrate(open_queue: OpenQueue, store: str) -> None:
    async with open_queue(store):
        pass


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    "workers.sqlite.": _on_sqlite,
    "workers.postgres.": _on_postgres,
}
