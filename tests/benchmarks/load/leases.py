"""Runners of a cluster as tasks, which acquire, renew and release leases at real admins."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple
from uuid import uuid4

from postroom.adapters.grpc.admin_client import connect_admins
from postroom.application.ports.control_plane import Heartbeat, LeaseAdmin, LeaseRequest


class LeaseLoad(NamedTuple):
    """What each runner does, and when; times in s.

    Arguments:
        proxies: ids of the proxies that runners belong to.
        start: when the first runner acquires, by the monotonic clock.
        spread: over which the first acquisitions are spread.
        heartbeats: number of heartbeats.
        interval: between the heartbeats of a runner.
        settle: pause before each stage that all runners begin at once.
    """

    admins: Sequence[str]
    proxies: Sequence[str]
    start: float
    spread: float
    heartbeats: int
    interval: float
    settle: float


class Latencies(NamedTuple):
    """Latencies in s, and failures by their text."""

    acquire: list[float]
    heartbeat: list[float]
    release: list[float]
    burst: list[float]
    failures: list[str]

    def __or__(self, other: "Latencies") -> "Latencies":
        """Return the latencies of both."""
        return Latencies(
            self.acquire + other.acquire,
            self.heartbeat + other.heartbeat,
            self.release + other.release,
            self.burst + other.burst,
            self.failures + other.failures,
        )


def mailbox_of(number: int, proxies: Sequence[str]) -> str:
    """Return the mailbox of a runner."""
    return f"bench-{number}@{proxies[number % len(proxies)]}"


def load_leases(load: LeaseLoad, numbers: Sequence[int], total: int) -> Latencies:
    """Run some of the runners in this process, each with a connection of its own.

    Arguments:
        numbers: of the runners of this process.
        total: runners of all processes.
    """
    return asyncio.run(_load(load, numbers, total))


async def _load(load: LeaseLoad, numbers: Sequence[int], total: int) -> Latencies:
    latencies = Latencies([], [], [], [], [])
    async with AsyncExitStack() as opened:
        runners = []
        for number in numbers:
            # Half of the runners prefer each admin.
            admins = [*load.admins[number % len(load.admins) :], *load.admins[: number % len(load.admins)]]
            admin = await opened.enter_async_context(connect_admins(admins))
            runners.append(_Runner(admin, number, load, latencies))
        for runner in runners:
            await runner.connect()
        await asyncio.gather(*(each.run(total) for each in runners))
    return latencies


class _Runner:
    def __init__(self, admin: LeaseAdmin, number: int, load: LeaseLoad, latencies: Latencies) -> None:
        self._admin = admin
        self._number = number
        self._load = load
        self._latencies = latencies
        self._runner = f"runner-{number}"
        self._proxy = load.proxies[number % len(load.proxies)]
        self._mailbox = mailbox_of(number, load.proxies)
        self._epoch = 0

    async def connect(self) -> None:
        """Open the connection, which is not measured."""
        await self._admin.register_runner(self._runner, self._proxy, self._address)

    async def run(self, total: int) -> None:
        load, latencies = self._load, self._latencies
        share = self._number / total
        await _sleep_until(load.start + share * load.spread)
        await self._measure(latencies.acquire, self._acquire)
        begin = load.start + load.spread + load.settle
        for beat in range(load.heartbeats):
            await _sleep_until(begin + (beat + share) * load.interval)
            await self._measure(latencies.heartbeat, self._renew)
        begin += load.heartbeats * load.interval + load.settle
        await _sleep_until(begin + share * load.spread)
        await self._measure(latencies.release, self._release)
        await _sleep_until(begin + load.spread + load.settle)
        await self._measure(latencies.burst, self._acquire)
        await self._release()
        await self._admin.leave(runner=self._runner)

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{20_000 + self._number}"

    async def _acquire(self) -> None:
        request = LeaseRequest(
            mailbox=self._mailbox,
            runner=self._runner,
            proxy=self._proxy,
            address=self._address,
            acquisition=str(uuid4()),
        )
        self._epoch = (await self._admin.acquire_lease(request)).epoch

    async def _renew(self) -> None:
        heartbeat = Heartbeat(
            mailbox=self._mailbox, runner=self._runner, proxy=self._proxy, epoch=self._epoch
        )
        await self._admin.renew_lease(heartbeat)

    async def _release(self) -> None:
        await self._admin.release_lease(self._mailbox, self._runner, self._epoch)

    async def _measure(self, latencies: list[float], act: Callable[[], Awaitable[None]]) -> None:
        since = time.perf_counter()
        try:
            await act()
        except Exception as error:
            self._latencies.failures.append(f"{type(error).__name__}: {error}"[:150])
        else:
            latencies.append(time.perf_counter() - since)


async def _sleep_until(moment: float) -> None:
    await asyncio.sleep(max(moment - time.monotonic(), 0))
