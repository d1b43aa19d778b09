"""The control plane of an admin: leases, routes, and the members of the cluster (RFC-049)."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from postroom.application.cluster.control_plane_metrics import (
    ControlPlaneCounts,
    ControlPlaneSettings,
    LeasePolicies,
    control_plane_metrics,
)
from postroom.application.cluster.lease_follower import Blocking, LeaseFollower, LeaseStatistics
from postroom.application.cluster.proxy import RegisteredProxies
from postroom.application.cluster.runner import RegisteredRunner, Runners
from postroom.application.leases.lease_table import LeaseTable
from postroom.application.leases.leases import LeaseProjection, Leases
from postroom.application.metrics import Metric, Monitor
from postroom.application.ports.control_plane import (
    Heartbeat,
    LeaseGrant,
    LeaseRequest,
    LeaseState,
    LeaseSummary,
    Member,
    PartitionRange,
    ProxyRegistration,
    RoutePush,
    RoutingSnapshot,
    RunnerRegistration,
    check_push_key,
)
from postroom.application.ports.event_log import Clock
from postroom.application.ports.lease_store import LeaseStore, LeaseTables
from postroom.application.threads import background_task
from postroom.domain.arguments import check_int, check_items
from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost, Saturated, Unavailable
from postroom.domain.lease.lease import AcquireLease, Lease, ReleaseLease, RenewLease
from postroom.domain.lease.partitions import partition_of
from postroom.domain.lease.routing import LeaveProxy, Proxy, RegisterProxy
from postroom.domain.message import MS
from postroom.domain.names import check_address, check_mailbox, check_member

MAX_PROXIES = 1_000
MAX_MAILBOXES = 10_000
"""Maximum number of mailboxes that a runner may name as leased by it."""

MIN_INTERVAL_MS = 100
"""Shortest interval at which runners register."""

T = TypeVar("T")


class ControlPlane:
    """`LeaseAdmin` over a lease store, which several admins may share.

    Admins do not talk to each other: all decisions depend on the log of the store. Each admin folds the log,
    lets a lease expire when it has seen no newer version for the TTL and grace period, and pushes changes of
    routes to the proxies that registered with it.

    Arguments:
        blocking: runs functions that block, in threads.
        tables: RFC-049's tables, which are kept current; None for none.
    """

    def __init__(
        self,
        store: LeaseStore,
        clock: Clock,
        push: RoutePush,
        blocking: Blocking,
        policies: LeasePolicies | None = None,
        settings: ControlPlaneSettings | None = None,
        tables: LeaseTables | None = None,
    ) -> None:
        self._settings = settings = settings or ControlPlaneSettings()
        self._clock = clock
        self._blocking = blocking
        self._policies = policies or LeasePolicies()
        self._table = LeaseTable(clock.uptime)
        self._leases = Leases(store.recorder, clock.wall, self._table.is_expired)
        self._counts = ControlPlaneCounts()
        self._statistics = LeaseStatistics()
        self._runners = Runners(settings.member_ttl_ms, 3 * settings.member_interval_ms)
        self._proxies = RegisteredProxies(push, self._counts.pushes, settings.member_ttl_ms, clock.uptime)
        projection = None if tables is None else LeaseProjection(self._leases, tables, clock.wall)
        self._follower = LeaseFollower(
            store,
            self._leases,
            self._table,
            settings,
            blocking,
            self._proxies.add_changes,
            self._counts,
            None if projection is None else projection.update,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the log of leases, and follow it for as long as the context lasts.

        Raises: Unavailable when the lease store can't be read.
        """
        await self._follower.read()
        async with background_task(self._follower.run()):
            try:
                yield
            finally:
                await self._proxies.close()

    @property
    def lease_count(self) -> int:
        """Return the number of leases that are held."""
        return sum(each.is_held for each in self._table.leases())

    @property
    def monitor(self) -> Monitor:
        """Return the metrics, and whether the log of leases was read to its end and is being followed."""

        async def collect() -> list[Metric]:
            states = Counter[str](self._state(each) for each in self._table.leases())
            now = self._clock.uptime()
            members = {
                "proxy": len(self._table.proxies()),
                "runner": len(self._runners.alive(now)),
            }
            return list(control_plane_metrics(self._counts, states, members, self._table.position))

        async def find_missing() -> list[str]:
            return [] if self._follower.progress.is_made else ["lease_store"]

        return Monitor(collect, find_missing)

    async def catch_up(self) -> None:
        """Read the log of leases to its end, as `running` does all the time.

        Raises: Unavailable when the lease store can't be read.
        """
        await self._follower.read()

    async def expire(self) -> None:
        """Let leases and registrations expire that were not renewed in time, as `running` does all the time.

        Raises: Unavailable when the lease store can't be used.
        """
        await self._follower.expire()

    def set_policies(self, policies: LeasePolicies) -> None:
        """Set the lease policies for acquisitions from now on."""
        self._policies = policies

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        """Acquire the lease of a mailbox (RFC-049 Lease Acquisition).

        Raises:
            InvalidRequest: an argument is malformed, or the partition belongs to another mailbox.
            LeaseHeld: another runner has the lease; `remaining_ms` is the time until it expires, by the
                renewals that this admin has read.
            LeaseLost: the acquisition was granted before, and its lease has ended.
        """
        mailbox = check_mailbox(request.mailbox)
        partition = partition_of(mailbox)
        if request.partition not in (None, partition):
            raise InvalidRequest(
                f"Mailbox {mailbox} is in partition {partition}, not {str(request.partition)[:20]}; a "
                "partition is crc32(mailbox_id) mod 256."
            )
        policy = self._policies.get(mailbox, request.ttl_ms)
        command = AcquireLease(
            mailbox,
            request.runner,
            request.proxy,
            request.address,
            request.acquisition,
            request.log_epoch,
            policy.ttl_ms,
            policy.grace_period_ms,
        )
        try:
            lease = await self._change(lambda: self._leases.acquire(command))
        except LeaseHeld as error:
            error.remaining_ms = self._table.expires_in_ms(mailbox)
            raise
        self._counts.acquisitions += 1
        return self._grant(lease)

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        """Renew a lease, and keep the statistics of its runner (RFC-049 Heartbeat Processing).

        Raises: LeaseLost when the runner does not have the lease, or has it with another epoch.
        """
        check_member("The proxy id", heartbeat.proxy)
        self._statistics.check(heartbeat)
        command = RenewLease(heartbeat.mailbox, heartbeat.runner, heartbeat.epoch)
        lease = await self._change(lambda: self._leases.renew(command))
        self._counts.renewals += 1
        self._statistics.add(heartbeat)
        return self._grant(lease)

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        """Release a lease, unless it has ended (RFC-049 Shutdown: Release Lease).

        Raises: LeaseLost when another runner has it, or the same one with another epoch.
        """
        command = ReleaseLease(mailbox, runner, epoch)
        await self._change(lambda: self._leases.release(command))
        self._counts.releases += 1

    async def register_proxy(
        self, proxy: str, address: str, position: int = 0, push_key: str = ""
    ) -> ProxyRegistration:
        """Register a proxy, or note that it is alive.

        Raises: Unavailable while a proxy of this id is alive at another address.
        """
        check_member("The proxy id", proxy)
        check_int("position", position)
        check_address("The address of the proxy", address)
        check_push_key(push_key)
        proxies = self._table.proxies()
        if len(proxies) >= MAX_PROXIES and all(each.proxy != proxy for each in proxies):
            raise Saturated(
                f"The cluster has the maximum of {MAX_PROXIES:,} proxies.", self._settings.member_ttl_ms
            )
        for each in proxies:
            if each.proxy == proxy and each.address != address:
                raise Unavailable(
                    f"Proxy {proxy} is registered at {each.address}; stop that process, or use another id. "
                    f"If it ended without leaving, it counts as gone after {each.ttl_ms / 1_000:g} s.",
                    self._settings.member_interval_ms,
                )
        command = RegisterProxy(proxy, address, self._settings.member_ttl_ms)
        await self._blocking(lambda: self._leases.register_proxy(command))
        await self._follower.read()
        await self._follower.assign_partitions()
        queue = await self._proxies.register(proxy, address, push_key)
        await self._proxies.forget_silent()
        table = None
        if position < self._table.routes.position:
            table = self._snapshot()
            queue.table_sent(table.position)
        return ProxyRegistration(
            interval_ms=self._settings.member_interval_ms,
            ttl_ms=self._settings.member_ttl_ms,
            partitions=self._partitions(proxy),
            position=self._table.routes.position,
            table=table,
        )

    async def register_runner(
        self, runner: str, proxy: str, address: str, mailboxes: Sequence[str] = ()
    ) -> RunnerRegistration:
        """Register a runner, or note that it is alive; offer it mailboxes without a lease.

        Raises: Saturated when too many runners are registered.
        """
        names = check_items("mailboxes", mailboxes)
        if len(names) > MAX_MAILBOXES:
            raise InvalidRequest(
                f"A runner has at most {MAX_MAILBOXES:,} mailboxes; it named {len(names):,}."
            )
        now = self._clock.uptime()
        member = RegisteredRunner(
            check_member("The runner id", runner),
            check_member("The proxy id", proxy),
            check_address("The address of the runner", address),
            frozenset(map(check_mailbox, names)),
            now,
        )
        interval_ms = self._settings.member_interval_ms
        if not self._runners.register(member):
            raise Saturated("The admin has too many runners; add another admin.", interval_ms)
        offers = self._runners.offer(runner, self._find_orphans(), now)
        if (expiry_ms := self._table.next_expiry_ms()) is not None:  # its mailbox is offered then
            interval_ms = min(interval_ms, max(expiry_ms, MIN_INTERVAL_MS))
        return RunnerRegistration(
            interval_ms=interval_ms, ttl_ms=self._settings.member_ttl_ms, offers=tuple(offers)
        )

    async def leave(self, *, proxy: str | None = None, runner: str | None = None) -> None:
        """End the registration of a proxy, or of a runner, that shuts down."""
        if runner is not None:
            self._runners.leave(check_member("The runner id", runner))
        if proxy is not None:
            command = LeaveProxy(proxy)
            await self._blocking(lambda: self._leases.leave_proxy(command))
            await self._proxies.forget(proxy)
            await self._follower.read()
            await self._follower.assign_partitions()

    async def list_leases(self, mailbox: str | None = None) -> list[LeaseSummary]:
        """Return the leases by mailbox, including ended ones; the last known ones if the store is down."""
        if mailbox is not None:
            check_mailbox(mailbox)
        await self._refresh()
        if mailbox is None:
            leases = self._table.leases()
        else:
            lease = self._table.lease(mailbox)
            leases = [] if lease is None else [lease]
        return [
            self._statistics.summarize(
                each, self._state(each), self._table.remaining_ms(each) if each.is_held else 0
            )
            for each in leases
        ]

    async def list_routes(self) -> RoutingSnapshot:
        """Return the routing table, by mailbox; the last known one if the store is down."""
        await self._refresh()
        return self._snapshot()

    async def list_members(self) -> list[Member]:
        """Return the proxies and runners that are alive, by kind and id."""
        await self._refresh()
        now = self._clock.uptime()
        runners = [
            Member(
                id=each.runner,
                kind="runner",
                proxy=each.proxy,
                address=each.address,
                seen_ms=(now - each.seen_at) // MS,
            )
            for each in self._runners.alive(now)
        ]
        return [*(self._member(each, now) for each in self._table.proxies()), *runners]

    async def _refresh(self) -> None:
        """Read what other admins wrote."""
        with suppress(Unavailable):
            await self._follower.read()

    async def _change(self, work: Callable[[], T]) -> T:
        """Change a lease, count a refusal, and read the log soon."""
        try:
            return await self._blocking(work)
        except (LeaseHeld, LeaseLost) as error:
            self._counts.refusals[error.code] += 1
            raise
        finally:
            self._follower.hint()

    def _grant(self, lease: Lease) -> LeaseGrant:
        policy = self._policies.get(lease.mailbox, lease.ttl_ms)
        return LeaseGrant(
            epoch=lease.epoch,
            ttl_ms=lease.ttl_ms,
            heartbeat_interval_ms=policy.heartbeat_interval_ms,
            expires_at=lease.renewed_at + lease.ttl_ms * MS,
        )

    def _state(self, lease: Lease) -> LeaseState:
        if lease.is_held:
            return "active" if self._table.remaining_ms(lease) > 0 else "expiring"
        return "released" if lease.mailbox in self._follower.released else "expired"

    def _snapshot(self) -> RoutingSnapshot:
        return RoutingSnapshot(self._table.routes.position, tuple(self._table.routes.routes()))

    def _partitions(self, proxy: str) -> tuple[PartitionRange, ...]:
        return tuple(PartitionRange(*each) for each in self._table.partitions.ranges(proxy))

    def _find_orphans(self) -> dict[str, str | None]:
        """Return the mailboxes without a lease, with the proxy that each belongs to.

        A mailbox belongs to the proxy in its name while that is alive, else to the proxy of its partition.
        """
        alive = {each.proxy for each in self._table.proxies()}
        orphans: dict[str, str | None] = {}
        for lease in self._table.leases():
            if not lease.is_held or self._table.is_expired(lease):
                home = lease.mailbox.rpartition("@")[2]
                orphans[lease.mailbox] = (
                    home if home in alive else self._table.partitions.owner(lease.partition)
                )
        return orphans

    def _member(self, proxy: Proxy, now: int) -> Member:
        seen_at = self._proxies.seen_at(proxy.proxy)
        return Member(
            id=proxy.proxy,
            kind="proxy",
            proxy=proxy.proxy,
            address=proxy.address,
            partitions=self._partitions(proxy.proxy),
            seen_ms=None if seen_at is None else (now - seen_at) // MS,
        )
