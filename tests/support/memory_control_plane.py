"""A control plane in memory: the decisions of leases without admins."""

import asyncio
from collections.abc import Sequence

from postroom.adapters.system.clock import SystemClock
from postroom.application.ports.control_plane import (
    Heartbeat,
    LeaseGrant,
    LeaseRequest,
    LeaseSummary,
    Member,
    ProxyRegistration,
    RoutingSnapshot,
    RunnerRegistration,
)
from postroom.domain.errors import PostroomError, Unavailable
from postroom.domain.lease.lease import (
    AcquireLease,
    Lease,
    LeaseCommand,
    LeasePolicy,
    ReleaseLease,
    RenewLease,
    decide,
    evolve,
)
from postroom.domain.lease.observation import LeaseObservations

POLICY = LeasePolicy(ttl_ms=2_000, heartbeat_interval_ms=200, grace_period_ms=500)


class MemoryControlPlane:
    """`LeaseAdmin` in this process.

    Attributes:
        is_away: no request gets an answer.
        loses_answers: requests take effect, and their answers get lost.
        offers: mailboxes to offer to every runner.
        heartbeats: those that were answered.
    """

    def __init__(self, policy: LeasePolicy = POLICY) -> None:
        self.policy = policy.validate()
        self.is_away = False
        self.loses_answers = False
        self.offers: list[str] = []
        self.heartbeats: list[Heartbeat] = []
        self.registered: dict[str, tuple[str, ...]] = {}
        self.leases: dict[str, Lease] = {}
        self._observations = LeaseObservations()
        self._clock = SystemClock()

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        return await self._grant(
            AcquireLease(
                request.mailbox,
                request.runner,
                request.proxy,
                request.address,
                request.acquisition,
                request.log_epoch,
                self.policy.ttl_ms,
                self.policy.grace_period_ms,
            )
        )

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        grant = await self._grant(RenewLease(heartbeat.mailbox, heartbeat.runner, heartbeat.epoch))
        self.heartbeats.append(heartbeat)
        return grant

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        await self._answer()
        self._execute(ReleaseLease(mailbox, runner, epoch))

    async def register_runner(
        self, runner: str, proxy: str, address: str, mailboxes: Sequence[str] = ()
    ) -> RunnerRegistration:
        await self._answer()
        self.registered[runner] = tuple(mailboxes)
        return RunnerRegistration(interval_ms=100, ttl_ms=1_000, offers=tuple(self.offers))

    async def leave(self, *, proxy: str | None = None, runner: str | None = None) -> None:
        await self._answer()
        self.registered.pop(runner or "", None)

    async def register_proxy(
        self, proxy: str, address: str, position: int = 0, push_key: str = ""
    ) -> ProxyRegistration:
        return ProxyRegistration(interval_ms=100, ttl_ms=1_000, partitions=(), position=0)

    async def list_leases(self, mailbox: str | None = None) -> list[LeaseSummary]:
        return []

    async def list_routes(self) -> RoutingSnapshot:
        return RoutingSnapshot(0, ())

    async def list_members(self) -> list[Member]:
        return []

    def owner(self, mailbox: str) -> str | None:
        """Return the runner that has a lease."""
        lease = self.leases.get(mailbox)
        return lease.runner if lease is not None and lease.is_held else None

    async def _answer(self) -> None:
        await asyncio.sleep(0)
        if self.is_away:
            raise Unavailable("No admin answers.")

    async def _grant(self, command: LeaseCommand) -> LeaseGrant:
        await self._answer()
        lease = self._execute(command)
        if self.loses_answers:
            raise Unavailable("The answer was lost.")
        return LeaseGrant(
            epoch=lease.epoch,
            ttl_ms=lease.ttl_ms,
            heartbeat_interval_ms=self.policy.heartbeat_interval_ms,
            expires_at=self._clock.wall() + lease.ttl_ms * 1_000,
        )

    def _execute(self, command: LeaseCommand) -> Lease:
        lease = self.leases.get(command.mailbox)
        is_expired = lease is not None and self._observations.is_expired(lease, self._clock.uptime())
        for event in decide(command, lease, self._clock.wall(), is_expired=is_expired):
            lease = self.leases[command.mailbox] = evolve(lease, event)
            self._observations.observe(lease.mailbox, lease.version, self._clock.uptime())
        if lease is None:
            raise PostroomError("There is no lease.")
        return lease
