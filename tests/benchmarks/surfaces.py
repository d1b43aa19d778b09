"""A mailbox in a process of its own, called over HTTP, gRPC and the local socket by another process.

The load is lean (see `load.callers`): raw asyncio for HTTP and the local socket, the C core's client for
gRPC. What our own client achieves is measured beside it. `cpu` is the time of the owner's process per call.
"""

import asyncio
import itertools
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial, reduce
from operator import or_
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.maintenance import migrate_store
from postroom.application.messages import NewMessage
from tests.benchmarks.figures import RUNS, Figures
from tests.benchmarks.load.callers import (
    FULL_TOPIC,
    NO_TOKEN,
    PAYLOAD,
    REFUSALS,
    OpenCaller,
    open_grpc,
    open_http,
    open_local,
    open_own,
)
from tests.benchmarks.load.loops import Act, Run, Work, closed_loop, open_loop
from tests.benchmarks.load.owners import Owner, owned, served
from tests.benchmarks.servers import postgres_server
from tests.benchmarks.throughput import batches_of, new_messages

OPEN_RATE, OPEN_GOAL_MS = 1_000, 20
OVERLOAD = 2
TOPIC, MIXED_TOPIC = "bench.orders", "bench.mixed"
T = TypeVar("T")


class Size(NamedTuple):
    """How much is measured; times in s.

    Arguments:
        stage: duration of a closed loop.
        open: duration of the open loop.
        overload: duration of the load past saturation.
        backlog: messages that the receives find.
        in_flight: messages that are to be settled at the start of mixed work.
        saturating: callers whose rate is that of saturation.
        at_once: most calls in progress in the open loop, as in a pool of connections.
        processes: of the load past saturation.
        start: until they are ready.
    """

    stage: float = 1.0
    open: float = 4
    overload: float = 5
    backlog: int = 20_000
    callers: tuple[int, ...] = (1, 64)
    in_flight: int = 256
    saturating: int = 256
    at_once: int = 256
    processes: int = 2
    start: float = 4.0


class Surface(NamedTuple):
    """A way to call a mailbox.

    Arguments:
        start: runs the owner of a store, with files in a folder.
        goal: mixed calls per second.
    """

    name: str
    start: Callable[[str, Path], AbstractContextManager[Owner]]
    open_caller: OpenCaller
    goal: float | None = None


def _serve(surface: str) -> Callable[[str, Path], AbstractContextManager[Owner]]:
    return lambda store, folder: served(store, folder, surface)


SURFACES = (
    Surface("local", owned, open_local, 8_000),
    Surface("http", _serve("http"), open_http, 6_000),
    Surface("grpc", _serve("grpc"), open_grpc),
)

_folders = itertools.count()


def measure_surface(
    figures: Figures, name: str, surface: Surface, store: str, folder: Path, size: Size
) -> None:
    """Measure a surface over an empty store.

    Arguments:
        name: prefix of the figures.
    """
    folder.mkdir(exist_ok=True)
    with surface.start(store, folder) as owner:
        measurement = _Measurement(figures, name, surface, owner, size)
        _run(measurement.calls())
        if surface.open_caller is open_http:
            _run(measurement.refusals())
        saturation = _run(measurement.saturation())
        _run(measurement.open_loop())
        _run(measurement.overload(OVERLOAD * saturation))


def load_open(
    open_caller: OpenCaller, address: str, rate: float, seconds: float, in_flight: int, start: float
) -> Run:
    """Make mixed calls at a rate, as one process of several.

    Arguments:
        in_flight: messages that are to be settled at the start.
        start: when to begin, by the monotonic clock.
    """

    async def load() -> Run:
        async with open_caller(address, MIXED_TOPIC) as caller:
            work = Work(caller)
            await work.prepare(in_flight)
            await asyncio.sleep(max(start - time.monotonic(), 0))
            return await open_loop(work.mix, rate, seconds)

    return _run(load())


def _run(work: Awaitable[T]) -> T:
    import uvloop

    async def main() -> T:
        return await work

    return uvloop.run(main())


class _Measurement:
    def __init__(self, figures: Figures, name: str, surface: Surface, owner: Owner, size: Size) -> None:
        self._figures = figures
        self._name = name
        self._surface = surface
        self._owner = owner
        self._size = size

    async def calls(self) -> None:
        """Measure sends, receives, acks and mixed work by few callers and by many."""
        async with self._surface.open_caller(self._owner.address, TOPIC) as caller:
            work = Work(caller)
            for callers in self._size.callers:
                await self._closed("send", work.send, callers)
            for callers in self._size.callers:
                await self._fill()
                await self._closed("recv32", work.receive, callers)
            for callers in self._size.callers:
                await self._closed("ack", work.ack, callers)
        async with self._surface.open_caller(self._owner.address, MIXED_TOPIC) as caller:
            work = Work(caller)
            await work.prepare(self._size.in_flight)
            for callers in self._size.callers:
                await self._closed("mixed", work.mix, callers)
        async with open_own(self._owner.own_address, f"{MIXED_TOPIC}.own") as own:
            work = Work(own)
            await work.prepare(self._size.in_flight)
            await self._closed("own_client", work.mix, self._size.callers[-1])

    async def refusals(self) -> None:
        """Measure what requests that are refused cost, beside a send."""
        async with connect(self._owner.own_address) as mailbox:
            await mailbox.set_topic_policy(FULL_TOPIC, {"shards": 1, "shard_capacity": 1})
            await mailbox.send_batch([NewMessage(FULL_TOPIC, PAYLOAD)] * 2)
        costs: dict[str, list[float]] = {kind: [] for kind in ("send", *REFUSALS)}
        for _ in range(RUNS):
            for kind, cost in costs.items():
                token = NO_TOKEN if kind == "token" else None
                async with open_http(self._owner.address, TOPIC, token) as caller:
                    act = Work(caller).send if kind == "send" else partial(caller.be_refused, kind)
                    loop = partial(closed_loop, act, self._size.callers[-1], self._size.stage)
                    cost.append((await self._observe(loop))[1])
        send = median(costs.pop("send"))
        for kind, cost in costs.items():
            self._figures.add(f"{self._name}.refusal.{kind}.cpu", median(cost), "us")
            self._figures.add(f"{self._name}.refusal.{kind}.of_send", 100 * median(cost) / send, "%")

    async def saturation(self) -> float:
        """Measure the rate of mixed calls that more callers do not raise."""
        rates = []
        async with self._surface.open_caller(self._owner.address, MIXED_TOPIC) as caller:
            work = Work(caller)
            await work.prepare(self._size.in_flight)
            for _ in range(RUNS):
                run, _cpu = await self._observe(
                    partial(closed_loop, work.mix, self._size.saturating, self._size.stage)
                )
                rates.append(run.rate)
        self._figures.add(f"{self._name}.saturation", median(rates), "calls/s", self._surface.goal)
        return median(rates)

    async def open_loop(self) -> None:
        """Measure latencies while calls come at a moderate rate."""
        async with self._surface.open_caller(self._owner.address, MIXED_TOPIC) as caller:
            work = Work(caller)
            await work.prepare(self._size.in_flight)
            run = await open_loop(work.mix, OPEN_RATE, self._size.open, at_once=self._size.at_once)
        p95 = {kind: run.percentile_ms(0.95, kind) for kind in ("send", "receive", "ack")}
        prefix = f"{self._name}.open{OPEN_RATE}"
        self._figures.add(f"{prefix}.enqueue_dequeue.p95", p95["send"] + p95["receive"], "ms", OPEN_GOAL_MS)
        for kind, value in p95.items():
            self._figures.add(f"{prefix}.{kind}.p95", value, "ms")
        if run.details:
            self._figures.progress(f"{prefix}: {dict(run.details)}")
        self._figures.add(f"{prefix}.refused", run.refused, "calls", 0)
        self._figures.add(f"{prefix}.failures", run.failures.total(), "calls", 0)

    async def overload(self, rate: float) -> None:
        """Measure what happens when calls come at a higher rate than can be served."""
        size, owner = self._size, self._owner
        memory = [owner.memory_mib()]
        load = partial(
            load_open,
            self._surface.open_caller,
            owner.address,
            rate / size.processes,
            size.overload,
            size.in_flight,
        )
        with ProcessPoolExecutor(size.processes, multiprocessing.get_context("spawn")) as processes:
            start = time.monotonic() + size.start
            loop = asyncio.get_running_loop()
            runs = [loop.run_in_executor(processes, load, start) for _ in range(size.processes)]
            for share in (0.5, 1.0):
                await asyncio.sleep(max(start + share * size.overload - time.monotonic(), 0))
                memory.append(owner.memory_mib())
            run = reduce(or_, await asyncio.gather(*runs))
        prefix = f"{self._name}.overload"
        add = self._figures.add
        self._figures.progress(
            f"{prefix}: {run.offered:,.0f} of {rate:,.0f} calls/s offered by a load that used "
            f"{run.load_seconds / run.seconds:.2f} cores; {run.refused:,} refused (429 or 503), "
            f"other failures: {dict(run.failures) or 'none'}; {dict(run.details)}"
        )
        add(f"{prefix}.offered", run.offered, "calls/s")
        add(f"{prefix}.times_saturation", OVERLOAD * run.offered / rate, "x")
        add(f"{prefix}.served", run.rate, "calls/s")
        add(f"{prefix}.p95", run.percentile_ms(0.95), "ms")
        add(f"{prefix}.refused", 100 * run.refused / (run.calls + run.refused), "%")
        add(f"{prefix}.timeouts", run.failures.pop("TimeoutError", 0), "calls", 0)
        add(f"{prefix}.failures", run.failures.total(), "calls", 0)
        for moment, mib in zip(("start", "middle", "end"), memory, strict=True):
            add(f"{prefix}.memory.{moment}", mib, "MiB")

    async def _fill(self) -> None:
        """Send what the receives are to find."""
        async with connect(self._owner.own_address) as mailbox:
            for batch in batches_of(new_messages(self._size.backlog, next(_folders)), 1_000):
                for answer in await mailbox.send_batch(batch):
                    if isinstance(answer, Exception):
                        raise answer

    async def _closed(self, kind: str, act: Act, callers: int) -> None:
        run, cpu_us = await self._observe(partial(closed_loop, act, callers, self._size.stage))
        name = f"{self._name}.{kind}.{callers}"
        self._figures.add(name, run.rate, "calls/s")
        for share in (50, 95, 99):
            self._figures.add(f"{name}.p{share}", run.percentile_ms(share / 100), "ms")
        self._figures.add(f"{name}.cpu", cpu_us, "us")

    async def _observe(self, loop: Callable[[], Awaitable[Run]]) -> tuple[Run, float]:
        """Return a run that nothing was refused in, and the owner's CPU time per call (µs)."""
        before = self._owner.cpu_seconds()
        run = await loop()
        if run.refused or run.failures:
            raise RuntimeError(f"{run.refused} calls were refused, and others failed: {dict(run.failures)}.")
        cpu = self._owner.cpu_seconds() - before
        self._figures.progress(
            f"{self._name}: cores used by the owner {cpu / run.seconds:.2f}, "
            f"by the load {run.load_seconds / run.seconds:.2f}"
        )
        return run, 1e6 * cpu / max(run.calls, 1)


def _on_sqlite(surface: Surface, figures: Figures, folder: Path, _: int) -> None:
    folder = folder / f"surface-{next(_folders)}"
    store = str(folder / "store.db")
    measure_surface(figures, f"surfaces.{surface.name}", surface, store, folder, Size())


def _on_postgres(surface: Surface, figures: Figures, folder: Path, _: int) -> None:
    name = f"surfaces.postgres.{surface.name}"
    if not figures.is_named("surfaces.postgres"):
        return
    with postgres_server(folder) as server:
        store = server.create_database()
        migrate_store(store)
        measure_surface(figures, name, surface, store, folder / f"surface-{next(_folders)}", Size())


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {
    **{f"surfaces.{each.name}.": partial(_on_sqlite, each) for each in SURFACES},
    **{f"surfaces.postgres.{each.name}.": partial(_on_postgres, each) for each in SURFACES},
}
