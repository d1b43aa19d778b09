"""An admin's view of the log of leases, and the expiry of leases that were not renewed."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from postroom.application.background import background_task, wait_at_most
from postroom.application.cluster.blocking import Blocking
from postroom.application.cluster.control_plane_metrics import ControlPlaneCounts
from postroom.application.cluster.control_plane_settings import ControlPlaneSettings
from postroom.application.leases.lease_table import LeaseTable, RouteRemoval
from postroom.application.leases.leases import PAGE, Leases, LoggedEvent
from postroom.application.monitor import Progress
from postroom.application.ports.lease_store import LeaseStore
from postroom.application.ports.route_push import RouteChange
from postroom.application.telemetry import logger
from postroom.domain.errors import PostroomError
from postroom.domain.lease.lease import ExpireLease, Lease, LeaseAcquired, LeaseExpired, LeaseReleased
from postroom.domain.lease.proxy import ExpireProxy, Proxy
from postroom.domain.lease.routing import Route

AT_ONCE = 8
"""Leases that are let expire at the same time."""
MIN_PAUSE_MS, MAX_PAUSE_MS = 50, 2_000
"""Between two attempts while the lease store can't be used."""


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
        except Exception:
            self.progress.failed()
            raise
        self.progress.succeeded()
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
