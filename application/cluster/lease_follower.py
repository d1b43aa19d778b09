"""An admin's view of the log of leases: terms, statistics, and the expiry of leases that were not renewed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Protocol, TypeVar, get_args

from postroom.application.cluster.control_plane_metrics import ControlPlaneCounts, ControlPlaneSettings
from postroom.application.leases.lease_table import LeaseTable, RouteRemoval
from postroom.application.leases.leases import PAGE, Leases, LoggedEvent
from postroom.application.metrics import Progress
from postroom.application.ports.control_plane import Health, Heartbeat, LeaseState, LeaseSummary, RouteChange
from postroom.application.ports.lease_store import LeaseStore
from postroom.application.telemetry import logger
from postroom.application.threads import DaemonExecutor, background_task, wait_at_most
from postroom.domain.arguments import check_choice, check_int
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.lease.lease import ExpireLease, Lease, LeaseAcquired, LeaseExpired, LeaseReleased
from postroom.domain.lease.routing import ExpireProxy, Proxy, Route

THREADS = 16

T = TypeVar("T")


class Blocking(Protocol):
    """Runner of functions that block."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]:
        """Return the result of a function; raise Unavailable when it takes too long."""


class BlockingThreads:
    """`Blocking` in daemon threads, since a function that hangs must not keep the process from ending.

    Arguments:
        timeout_ms: time for a function, including the wait for a thread; a late one goes on, but its result
            is lost.
    """

    def __init__(self, name: str, timeout_ms: int) -> None:
        self._executor = DaemonExecutor(THREADS, name)
        self._seconds = timeout_ms / 1_000

    async def __call__(self, work: Callable[[], T], /) -> T:
        """Return the result of a function."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._seconds):
                return await loop.run_in_executor(self._executor, copy_context().run, work)
        except TimeoutError:
            raise Unavailable(
                f"The lease store did not answer within {self._seconds:g} s; whether the request took effect "
                "is unknown. Repeat it."
            ) from None

    def close(self) -> None:
        """End the threads that do not hang."""
        self._executor.shutdown(wait=False)


WAIT_MS = 1_000
"""How long an admin waits for the lease store to tell it of an event, at most."""
AT_ONCE = 8
"""Maximum number of leases that are expired at the same time."""
MIN_PAUSE_MS, MAX_PAUSE_MS = 50, 2_000
"""Pause between two attempts while the lease store can't be used."""


class LeaseFollower:
    """The fold of the log of leases, and the tasks that keep it current.

    Arguments:
        table: changed by this object only.
        on_changes: called with changes of routes, in the order of the log.
        project: brings RFC-049's tables up to date; None for none.
    """

    def __init__(
        self,
        store: LeaseStore,
        leases: Leases,
        table: LeaseTable,
        settings: ControlPlaneSettings,
        blocking: Blocking,
        on_changes: Callable[[Sequence[RouteChange]], None],
        counts: ControlPlaneCounts,
        project: Callable[[], object] | None = None,
    ) -> None:
        self._store = store
        self._leases = leases
        self._table = table
        self._settings = settings
        self._blocking = blocking
        self._on_changes = on_changes
        self._counts = counts
        self._project = project
        self._reading = asyncio.Lock()
        self._hint = asyncio.Event()
        self._is_complete = False
        self.released: set[str] = set()
        """Mailboxes whose last lease was released, not expired."""
        self.progress = Progress()

    def hint(self) -> None:
        """Read the log soon, as this admin wrote to it."""
        self._hint.set()

    async def read(self) -> None:
        """Apply all events of the log that were not read yet.

        Raises: Unavailable when the lease store can't be read, BrokenLog for an event that is malformed.
        """
        async with self._reading:
            while True:
                events = await self._blocking(partial(self._leases.read_events, self._table.position, PAGE))
                self._apply(events)
                if len(events) < PAGE:
                    self._is_complete = True
                    return

    async def assign_partitions(self) -> None:
        """Assign the partitions to the proxies that are alive, and read the assignment."""
        command = self._table.assignment()
        if command is not None:
            await self._blocking(lambda: self._leases.assign_partitions(command))
            await self.read()

    async def expire(self) -> None:
        """Let leases and registrations expire that were not renewed in time."""
        leases = self._table.expired_leases()
        for first in range(0, len(leases), AT_ONCE):
            await asyncio.gather(*map(self._expire_lease, leases[first : first + AT_ONCE]))
        for proxy in self._table.expired_proxies():
            await self._expire_proxy(proxy)
        await self.assign_partitions()

    async def run(self) -> None:
        """Follow the log and expire leases that were not renewed; retry while the store is down."""
        async with (
            background_task(self._repeat("lease.expiry_failed", self._expire_and_wait)),
            background_task(self._repeat("lease.cleanup_failed", self._wait_and_clean_up)),
            background_task(self._repeat("lease.projection_failed", self._project_and_wait)),
        ):
            await self._repeat("lease.read_failed", self._read_and_wait)

    async def _read_and_wait(self) -> None:
        self._hint.clear()
        try:
            await self.read()
            self.progress.succeeded()
            milliseconds = min(WAIT_MS, self._settings.call_ms // 2)
            await self._blocking(partial(self._store.wait, self._table.position, milliseconds))
        except Exception:
            self.progress.failed()
            raise
        await wait_at_most(self._settings.poll_ms / 1_000, self._hint.wait())

    async def _expire_and_wait(self) -> None:
        await self.expire()
        await asyncio.sleep(self._settings.expiry_ms / 1_000)

    async def _wait_and_clean_up(self) -> None:
        await asyncio.sleep(self._settings.cleanup_ms / 1_000)
        await self._blocking(self._store.remove_old_events)

    async def _project_and_wait(self) -> None:
        if self._project is not None:
            await self._blocking(self._project)
        await asyncio.sleep(self._settings.projection_ms / 1_000)

    async def _expire_lease(self, lease: Lease) -> None:
        command = ExpireLease(lease.mailbox, lease.version)
        after = await self._blocking(lambda: self._leases.expire(command))
        if after is not None and not after.is_held:  # it was not renewed while this admin was paused
            logger().warning("lease.expired", mailbox=lease.mailbox, runner=lease.runner, epoch=lease.epoch)
        self.hint()

    async def _expire_proxy(self, proxy: Proxy) -> None:
        command = ExpireProxy(proxy.proxy, proxy.version)
        after = await self._blocking(lambda: self._leases.expire_proxy(command))
        if after is not None and not after.is_live:
            logger().warning("proxy.expired", proxy=proxy.proxy, address=proxy.address)
        await self.read()

    async def _repeat(self, event: str, work: Callable[[], Awaitable[None]]) -> None:
        """Do some work until cancelled, with growing pauses while it fails.

        Arguments:
            event: logged for the first of successive failures.
        """
        failures = 0
        while True:
            try:
                await work()
                failures = 0
                continue
            except PostroomError as error:
                if not failures:
                    logger().error(event, error=str(error))
            except Exception:  # a defect must not end the loop
                if not failures:
                    logger().exception(event)
            await asyncio.sleep(min(MAX_PAUSE_MS, MIN_PAUSE_MS << min(failures, 10)) / 1_000)
            failures += 1

    def _apply(self, events: Sequence[LoggedEvent]) -> None:
        for each in events:
            match each.event:
                case LeaseReleased(mailbox=mailbox):
                    self.released.add(mailbox)
                case LeaseAcquired(mailbox=mailbox):
                    self.released.discard(mailbox)
                case LeaseExpired(mailbox=mailbox):
                    self.released.discard(mailbox)
                    self._counts.expiries += self._is_complete
        changes = self._table.apply(events)
        if changes:
            self._on_changes([_route_change(each) for each in changes])


def _route_change(change: Route | RouteRemoval) -> RouteChange:
    route = change if isinstance(change, Route) else None
    return RouteChange(change.mailbox, change.position, route)


class LeaseStatistics:
    """The last heartbeat of each mailbox that this admin received; another admin has others."""

    def __init__(self) -> None:
        self._heartbeats: dict[str, Heartbeat] = {}

    @staticmethod
    def check(heartbeat: Heartbeat) -> None:
        """Raise InvalidRequest for statistics that are malformed."""
        for name in ("events_stored", "queries_served", "storage_size_bytes"):
            check_int(name, getattr(heartbeat, name))
        check_choice("status", heartbeat.status, get_args(Health))

    def add(self, heartbeat: Heartbeat) -> None:
        """Keep the statistics of a lease that was renewed."""
        self._heartbeats[heartbeat.mailbox] = heartbeat

    def summarize(self, lease: Lease, status: LeaseState, remaining_ms: int) -> LeaseSummary:
        """Return a lease with the statistics of its runner."""
        heartbeat = self._heartbeats.get(lease.mailbox)
        if heartbeat is None or heartbeat.runner != lease.runner:
            heartbeat = Heartbeat(mailbox=lease.mailbox, runner="", proxy="")
        return LeaseSummary(
            mailbox=lease.mailbox,
            runner=lease.runner,
            proxy=lease.proxy,
            address=lease.address,
            partition=lease.partition,
            epoch=lease.epoch,
            status=status,
            ttl_ms=lease.ttl_ms,
            grace_ms=lease.grace_ms,
            remaining_ms=remaining_ms,
            acquired_at=lease.acquired_at,
            renewed_at=lease.renewed_at,
            events_stored=heartbeat.events_stored,
            queries_served=heartbeat.queries_served,
            storage_size_bytes=heartbeat.storage_size_bytes,
            health=heartbeat.status if heartbeat.runner else "",
        )
