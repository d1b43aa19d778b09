"""A cluster on one machine: RFC-049's success criteria, and what forwarding and more mailboxes change.

Three NATS servers, two admins and three proxies are real processes on loopback, and so are the runners that
serve mailboxes, which belong to the first proxy. The 100 runners of the leases' figures are tasks in four
processes, and belong to the other proxies. Everything shares the machine's cores.
"""

import asyncio
import multiprocessing
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial, reduce
from operator import or_
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from uuid import uuid4

import grpc

from postroom.adapters.compose.connect import connect
from postroom.adapters.grpc.admin_client import ControlPlaneClient, connect_admins
from postroom.adapters.grpc.calls import MAILBOX_KEY, METHODS, ROUTING
from postroom.adapters.grpc.cluster.v1 import cluster_pb2
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.control_plane import LeaseRequest
from postroom.domain.errors import PostroomError
from tests.benchmarks.figures import RUNS, Figures
from tests.benchmarks.load.callers import open_grpc
from tests.benchmarks.load.cluster_processes import GRACE_MS, TTL_MS, ClusterProcesses
from tests.benchmarks.load.leases import LeaseLoad, load_leases
from tests.benchmarks.load.loops import Run, Work, closed_loop

ACQUIRE_GOAL_MS, HEARTBEAT_GOAL_MS, ROUTE_GOAL_MS = 100, 50, 1_000
RELEASE_GOAL_SECONDS, QUERIES_GOAL = 5, 0.1
"""The last in % of queries that fail."""
TOPIC = "bench.cluster"
MAX_WAIT_SECONDS = 60.0


class Size(NamedTuple):
    """How much is measured; times in s.

    Arguments:
        runners, processes: tasks that are runners, and the processes that they are in.
        start: until the processes are ready.
        spread: over which the runners acquire their leases, one after the other.
        heartbeats, interval: of each runner.
        routes, expiries: leases whose routes, or whose expiry, are observed.
        churn: duration of the queries while runners come and go.
        pause: before a runner leaves.
        mailboxes: of those queries.
        rate: queries per second.
        timeout_ms: in which a query must succeed.
        stage: duration of a closed loop.
        callers: of a closed loop.
        scales: numbers of mailboxes, each in a process of its own.
    """

    runners: int = 100
    processes: int = 4
    start: float = 6.0
    spread: float = 4.0
    heartbeats: int = 5
    interval: float = 2.0
    settle: float = 1.0
    routes: int = 60
    expiries: int = 20
    churn: float = 24.0
    pause: float = 3.0
    mailboxes: int = 6
    rate: int = 100
    timeout_ms: int = 10_000
    stage: float = 2.0
    callers: int = 64
    scales: tuple[int, ...] = (1, 2, 4)


def measure_cluster(figures: Figures, folder: Path, size: Size) -> None:
    """Start a cluster, and measure it."""
    with ClusterProcesses(folder) as cluster:
        _measure_leases(figures, cluster, size)
        asyncio.run(_measure_routes(figures, cluster, size))
        asyncio.run(_measure_expiry(figures, cluster, size))
        asyncio.run(_measure_queries(figures, cluster, size))
        asyncio.run(_measure_release(figures, cluster, size))
        asyncio.run(_measure_forwarding(figures, cluster, size))
        asyncio.run(_measure_scale(figures, cluster, size))


# -- leases ---


def _measure_leases(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    load = LeaseLoad(
        cluster.admins,
        cluster.proxy_ids[1:],
        time.monotonic() + size.start,
        size.spread,
        size.heartbeats,
        size.interval,
        size.settle,
    )
    shares = [range(each, size.runners, size.processes) for each in range(size.processes)]
    with ProcessPoolExecutor(size.processes, multiprocessing.get_context("spawn")) as processes:
        work = partial(load_leases, load, total=size.runners)
        latencies = reduce(or_, processes.map(work, shares))
    if latencies.failures:
        figures.progress(f"cluster: {dict(Counter(latencies.failures))}")
    for name, values, goal in (
        ("acquire", latencies.acquire, ACQUIRE_GOAL_MS),
        ("heartbeat", latencies.heartbeat, HEARTBEAT_GOAL_MS),
        ("release_request", latencies.release, None),
        (f"acquire_at_once.{size.runners}", latencies.burst, None),
    ):
        _add_latencies(figures, f"cluster.{name}", values, goal)
    figures.add("cluster.lease_requests.failed", len(latencies.failures), "calls", 0)


async def _measure_routes(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Measure the time from the answer to an acquisition until all proxies have the route."""
    delays: list[float] = []
    async with connect_admins(cluster.admins) as admin, AsyncExitStack() as opened:
        resolve = [
            (await opened.enter_async_context(grpc.aio.insecure_channel(each))).unary_unary(
                ROUTING["resolve"].path,
                cluster_pb2.ResolveRequest.SerializeToString,
                cluster_pb2.ResolveResponse.FromString,
            )
            for each in cluster.proxies
        ]
        for number in range(size.routes):
            namespace = f"route-{number}"
            mailbox = f"{namespace}@{cluster.proxy_ids[1 + number % 2]}"
            await _acquire(admin, mailbox)
            since = time.perf_counter()

            async def has_route(
                call: Callable[..., Awaitable[cluster_pb2.ResolveResponse]], name: str
            ) -> bool:
                return bool((await call(cluster_pb2.ResolveRequest(namespace=name))).routes)

            await asyncio.gather(*(_until(partial(has_route, each, namespace)) for each in resolve))
            delays.append(time.perf_counter() - since)
            await admin.release_lease(mailbox, "bench")
    _add_latencies(figures, "cluster.route_to_all_proxies", delays, ROUTE_GOAL_MS)


async def _measure_expiry(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Measure when leases expire whose runners are gone, from the end of their TTL."""
    mailboxes = {f"expiry-{number}@{cluster.proxy_ids[1]}" for number in range(size.expiries)}
    delays: list[float] = []
    async with connect_admins(cluster.admins) as admin:
        granted: dict[str, float] = {}
        for mailbox in sorted(mailboxes):
            await _acquire(admin, mailbox)
            granted[mailbox] = time.monotonic()

        async def have_expired() -> bool:
            expired = {each.mailbox for each in await admin.list_leases() if each.status == "expired"}
            now = time.monotonic() - TTL_MS / 1_000
            delays.extend(now - granted.pop(mailbox) for mailbox in expired & granted.keys())
            return not granted

        await _until(have_expired, pause=0.02)
    # RFC-049 looks for stale leases from time to time, which takes up to a second more.
    figures.add("cluster.expiry.after_ttl.p50", median(delays), "s")
    figures.add("cluster.expiry.after_ttl.max", max(delays), "s", GRACE_MS / 1_000 + 1)


# -- mailboxes ---


async def _measure_queries(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Query mailboxes while their runners come and go, and after one was killed."""
    mailboxes = [f"churn-{number}@{cluster.proxy_ids[0]}" for number in range(size.mailboxes)]
    runners = [
        await asyncio.to_thread(cluster.start_runner, f"churn-{number}", mailboxes[number::3])
        for number in range(3)
    ]
    ended = asyncio.Event()
    moves = 0

    async def churn() -> None:
        nonlocal moves
        while not ended.is_set():
            await asyncio.sleep(size.pause)
            leaving = runners.pop(0)
            await asyncio.to_thread(leaving.process.stop)
            moves += 1
            name = f"churn-{2 + moves}"
            runners.append(await asyncio.to_thread(cluster.start_runner, name, []))

    async with _clients(cluster, mailboxes, size.timeout_ms) as clients, _raw_queries(cluster) as query:
        for client in clients:
            await _until(partial(_succeeds, client.get_backlog))
        churning = asyncio.create_task(churn())
        outcomes: Counter[str] = Counter()
        latencies: list[float] = []

        async def ask(number: int) -> None:
            since = time.perf_counter()
            try:
                await clients[number % len(clients)].get_backlog()
                outcomes["client.ok"] += 1
                latencies.append(time.perf_counter() - since)
            except PostroomError as error:
                outcomes["client.failed"] += 1
                figures.progress(f"cluster: {type(error).__name__}: {error}")

        async def ask_once(number: int) -> None:
            is_ok = await query(random.randrange(len(cluster.proxies)), mailboxes[number % len(mailboxes)])
            outcomes["once.ok" if is_ok else "once.failed"] += 1

        tasks = []
        start = time.perf_counter()
        for number in range(int(size.churn * size.rate)):
            await asyncio.sleep(max(start + number / size.rate - time.perf_counter(), 0))
            tasks += [asyncio.create_task(ask(number)), asyncio.create_task(ask_once(number))]
        ended.set()
        await asyncio.gather(churning, *tasks)
        figures.progress(f"cluster: {moves} runners left and others came; {dict(outcomes)}")
        for name, goal in (("client", QUERIES_GOAL), ("once", None)):
            failed, ok = outcomes[f"{name}.failed"], outcomes[f"{name}.ok"]
            figures.add(f"cluster.churn.{name}.failed", 100 * failed / (failed + ok), "%", goal)
        _add_latencies(figures, "cluster.churn.client", latencies)
        victim = runners[0]
        held = await _held_by(cluster, victim.report["runner"])
        since = time.monotonic()
        victim.process.kill()
        if held:
            chosen = [client for client, name in zip(clients, mailboxes, strict=True) if name in held]
            await asyncio.gather(*(_until(partial(_succeeds, each.get_backlog)) for each in chosen))
            figures.add("cluster.kill.until_queries_succeed", time.monotonic() - since, "s")
    for runner in runners:
        await asyncio.to_thread(runner.process.stop)


async def _measure_release(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Measure how long a runner takes from SIGTERM until its leases are released, and until it has ended."""
    mailboxes = [f"release-{number}@{cluster.proxy_ids[0]}" for number in range(2 * size.mailboxes)]
    runner = await asyncio.to_thread(cluster.start_runner, "release", mailboxes)
    async with connect_admins(cluster.admins) as admin:

        async def count(status: str) -> bool:
            leases = await admin.list_leases()
            return sum(each.mailbox in mailboxes and each.status == status for each in leases) == len(
                mailboxes
            )

        await _until(partial(count, "active"))
        since = time.monotonic()
        stopping = asyncio.create_task(asyncio.to_thread(runner.process.stop))
        await _until(partial(count, "released"), pause=0.01)
        figures.add("cluster.release", time.monotonic() - since, "s", RELEASE_GOAL_SECONDS)
        await stopping
        figures.add("cluster.release.exit", time.monotonic() - since, "s", RELEASE_GOAL_SECONDS)


async def _measure_forwarding(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Measure mixed work directly at the owner and through a proxy, in turns."""
    mailbox = f"forward@{cluster.proxy_ids[0]}"
    runner = await asyncio.to_thread(cluster.start_runner, "forward", [mailbox])
    runs: dict[str, list[Run]] = {}
    async with AsyncExitStack() as opened:
        await _until_served(cluster, mailbox)
        works = {}
        for name, address in (("direct", runner.address), ("proxy", cluster.proxies[1])):
            caller = await opened.enter_async_context(open_grpc(f"grpc://{address}", TOPIC, mailbox))
            works[name] = Work(caller)
            await works[name].prepare(size.callers)
        for _ in range(RUNS):
            for callers in (1, size.callers):
                for name, work in works.items():
                    run = await closed_loop(work.mix, callers, size.stage)
                    if run.refused or run.failures:
                        raise RuntimeError(f"Calls failed: {dict(run.details)}.")
                    runs.setdefault(f"{name}.{callers}", []).append(run)
    for name, repeated in runs.items():
        figures.add(f"cluster.forwarding.{name}", median(run.rate for run in repeated), "calls/s")
        p50 = median(run.percentile_ms(0.5) for run in repeated)
        figures.add(f"cluster.forwarding.{name}.p50", p50, "ms")
    await asyncio.to_thread(runner.process.stop)


async def _measure_scale(figures: Figures, cluster: ClusterProcesses, size: Size) -> None:
    """Measure mixed work directly at the owners of several mailboxes, each with a process of its own."""
    runners = []
    async with AsyncExitStack() as opened:
        works: list[Work] = []
        for total in size.scales:
            while len(works) < total:
                name = f"scale-{len(works)}"
                mailbox = f"{name}@{cluster.proxy_ids[0]}"
                store = f"{cluster.store}.{name}"
                runner = await asyncio.to_thread(cluster.start_runner, name, [mailbox], store=store)
                runners.append(runner)
                await _until_served(cluster, mailbox)
                caller = await opened.enter_async_context(
                    open_grpc(f"grpc://{runner.address}", TOPIC, mailbox)
                )
                works.append(Work(caller))
                await works[-1].prepare(size.callers)
            callers = size.callers // total
            rates = []
            for _ in range(RUNS):
                runs = await asyncio.gather(*(closed_loop(each.mix, callers, size.stage) for each in works))
                rates.append(sum(run.rate for run in runs))
            figures.add(f"cluster.mailboxes.{total}", median(rates), "calls/s")
    for runner in runners:
        await asyncio.to_thread(runner.process.stop)


# -- helpers ---


async def _acquire(admin: ControlPlaneClient, mailbox: str) -> None:
    await admin.acquire_lease(
        LeaseRequest(
            mailbox=mailbox,
            runner="bench",
            proxy=mailbox.partition("@")[2],
            address="127.0.0.1:9",
            acquisition=str(uuid4()),
        )
    )


async def _held_by(cluster: ClusterProcesses, runner: str) -> set[str]:
    async with connect_admins(cluster.admins) as admin:
        return {
            each.mailbox
            for each in await admin.list_leases()
            if each.runner == runner and each.status == "active"
        }


@asynccontextmanager
async def _clients(
    cluster: ClusterProcesses, mailboxes: Sequence[str], timeout_ms: int
) -> AsyncIterator[list[Mailbox]]:
    async with AsyncExitStack() as opened:
        proxies = ",".join(cluster.proxies)
        yield [
            await opened.enter_async_context(connect(f"postroom://{proxies}/{each}", timeout_ms=timeout_ms))
            for each in mailboxes
        ]


@asynccontextmanager
async def _raw_queries(cluster: ClusterProcesses) -> AsyncIterator[Callable[[int, str], Awaitable[bool]]]:
    """Yield a function that asks a proxy once, and tells whether the owner answered."""
    method = METHODS["backlog"]
    async with AsyncExitStack() as opened:
        calls: list[Any] = [
            (await opened.enter_async_context(grpc.aio.insecure_channel(each))).unary_unary(method.path)
            for each in cluster.proxies
        ]

        async def query(proxy: int, mailbox: str) -> bool:
            try:
                await calls[proxy](b"", metadata=((MAILBOX_KEY, mailbox),), timeout=10)
            except grpc.aio.AioRpcError:
                return False
            return True

        yield query


async def _until_served(cluster: ClusterProcesses, mailbox: str) -> None:
    async with _raw_queries(cluster) as query:
        for proxy in range(len(cluster.proxies)):
            await _until(partial(query, proxy, mailbox))


async def _succeeds(call: Callable[[], Awaitable[object]]) -> bool:
    try:
        await call()
    except PostroomError:
        return False
    return True


async def _until(is_true: Callable[[], Awaitable[bool]], pause: float = 0.005) -> None:
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        while not await is_true():
            await asyncio.sleep(pause)


def _add_latencies(figures: Figures, name: str, values: Sequence[float], goal: float | None = None) -> None:
    """Add p50 and p99 in ms; the goal is that of p99."""
    ordered = sorted(values) or [float("nan")]
    for share, limit in ((50, None), (99, goal)):
        value = ordered[min(share * len(ordered) // 100, len(ordered) - 1)]
        figures.add(f"{name}.p{share}", 1_000 * value, "ms", limit)


def _run(figures: Figures, folder: Path, _messages: int) -> None:
    if not figures.is_named("cluster"):  # it has a target of its own
        return
    if os.environ.get("GRPC_ENABLE_FORK_SUPPORT") != "false":
        raise RuntimeError("Run `make bench-cluster`: gRPC's fork handlers may end processes that it starts.")
    measure_cluster(figures, folder / "cluster", Size())


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"cluster.": _run}
