"""A control plane in memory, whose leases a test sets."""

from collections.abc import Sequence
from typing import NoReturn

import msgspec

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
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.lease.partitions import partition_of
from postroom.domain.lease.routing import Route


class FixedControlPlane:
    """`LeaseAdmin` for proxies; `is_away` makes it unreachable.

    Attributes:
        registrations: addresses of proxies that registered, in order.
        departures: ids of proxies that left.
        push_key: of the proxy that registered last.
    """

    def __init__(self) -> None:
        self.is_away = False
        self.interval_ms = 60_000
        self.registrations: list[str] = []
        self.departures: list[str] = []
        self.push_key = ""
        self.queries = 0
        self._position = 1
        self._routes: dict[str, Route] = {}
        self._mailboxes: set[str] = set()

    @property
    def position(self) -> int:
        """Return the position of the last change."""
        return self._position

    def lease(self, mailbox: str, address: str, *, runner: str = "runner-1", epoch: int = 1) -> Route:
        """Give a mailbox an owner."""
        self._position += 1
        route = Route(
            mailbox, mailbox.partition("@")[2], runner, address, partition_of(mailbox), self._position, epoch
        )
        self._routes[mailbox] = route
        self._mailboxes.add(mailbox)
        return route

    def expire(self, mailbox: str) -> int:
        """Take the owner of a mailbox away; return the position of that."""
        self._position += 1
        del self._routes[mailbox]
        return self._position

    async def register_proxy(
        self, proxy: str, address: str, position: int = 0, push_key: str = ""
    ) -> ProxyRegistration:
        self._check()
        self.registrations.append(address)
        self.push_key = push_key
        table = RoutingSnapshot(self._position, tuple(self._routes.values()))
        return ProxyRegistration(
            interval_ms=self.interval_ms,
            ttl_ms=60_000,
            partitions=(),
            position=self._position,
            table=None if position == self._position else table,
        )

    async def leave(self, *, proxy: str | None = None, runner: str | None = None) -> None:
        self._check()
        self.departures.append(str(proxy))

    async def list_leases(self, mailbox: str | None = None) -> list[LeaseSummary]:
        self._check()
        self.queries += 1
        return [
            LeaseSummary(
                mailbox=name,
                runner="runner-1",
                proxy=name.partition("@")[2],
                address="127.0.0.1:1",
                partition=partition_of(name),
                epoch=1,
                status="active" if name in self._routes else "expired",
                ttl_ms=1,
                grace_ms=1,
                remaining_ms=0,
                acquired_at=0,
                renewed_at=0,
            )
            for name in sorted(self._mailboxes)
            if mailbox in (None, name)
        ]

    async def list_routes(self) -> RoutingSnapshot:
        self._check()
        return RoutingSnapshot(self._position, tuple(self._routes.values()))

    async def list_members(self) -> list[Member]:
        return []

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant:
        _refuse(request)

    async def renew_lease(self, heartbeat: Heartbeat) -> LeaseGrant:
        _refuse(heartbeat)

    async def release_lease(self, mailbox: str, runner: str, epoch: int | None = None) -> None:
        _refuse(mailbox)

    async def register_runner(
        self, runner: str, proxy: str, address: str, mailboxes: Sequence[str] = ()
    ) -> RunnerRegistration:
        _refuse(runner)

    def _check(self) -> None:
        if self.is_away:
            raise Unavailable("No admin answers.", 100)


def _refuse(request: msgspec.Struct | str) -> NoReturn:
    raise InvalidRequest(f"A test sets the leases of this control plane; {request} was not expected.")
