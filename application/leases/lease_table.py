"""The table of leases, routes, proxies and partitions that an admin folds from the log of leases."""

from collections.abc import Callable, Sequence

import msgspec

from postroom.application.leases.leases import LoggedEvent
from postroom.domain.lease.lease import (
    Lease,
    LeaseAcquired,
    LeaseExpired,
    LeaseReleased,
    LeaseRenewed,
)
from postroom.domain.lease.lease import evolve as evolve_lease
from postroom.domain.lease.observation import LeaseObservations, Observations
from postroom.domain.lease.partitions import NO_PARTITIONS, PartitionMap, assign_partitions
from postroom.domain.lease.routing import (
    AssignPartitions,
    PartitionsAssigned,
    Proxy,
    ProxyRegistered,
    ProxyRenewed,
    Route,
    RoutingTable,
    route_of,
)
from postroom.domain.lease.routing import evolve as evolve_proxy


class RouteRemoval(msgspec.Struct, frozen=True):
    """The route of a mailbox ended at `position` of the log of leases."""

    mailbox: str
    position: int


class LeaseTable:
    """The fold of the log of leases: equal at all admins at equal positions.

    `apply` is called by one thread at a time; the other methods may be called by any.

    Arguments:
        uptime: the uptime in µs; see `Clock.uptime`.

    Attributes:
        position: of the last event that was applied; 0 before the first.
        routes: the routing table.
        partitions: the proxy of each partition.
    """

    def __init__(self, uptime: Callable[[], int]) -> None:
        self._uptime = uptime
        self._leases: dict[str, Lease] = {}
        self._proxies: dict[str, Proxy] = {}
        self._lease_observations = LeaseObservations()
        self._proxy_observations = Observations()
        self.position = 0
        self.routes = RoutingTable()
        self.partitions: PartitionMap = NO_PARTITIONS

    def apply(self, events: Sequence[LoggedEvent]) -> list[Route | RouteRemoval]:
        """Apply events that were read from the log just now; return what changed in the routing table.

        Events up to `position`, which were applied before, are skipped.
        """
        now = self._uptime()
        changes: list[Route | RouteRemoval] = []
        for each in events:
            if each.position <= self.position:
                continue
            event = each.event
            if isinstance(event, LeaseAcquired | LeaseRenewed):
                lease = self._put_lease(evolve_lease(None, event), now)
                route = route_of(lease, each.position)
                if self.routes.update(route):
                    self.routes.complete(each.position)
                    changes.append(route)
            elif isinstance(event, LeaseReleased | LeaseExpired):
                lease = self._put_lease(evolve_lease(None, event), now)
                if self.routes.remove(lease.mailbox, each.position):
                    changes.append(RouteRemoval(lease.mailbox, each.position))
                self.routes.complete(each.position)
            elif isinstance(event, PartitionsAssigned):
                self.partitions = PartitionMap(event.owners)
            else:
                proxy = evolve_proxy(None, event)
                self._proxies[proxy.proxy] = proxy
                if isinstance(event, ProxyRegistered | ProxyRenewed):
                    self._proxy_observations.observe(proxy.proxy, proxy.version, now)
                else:
                    self._proxy_observations.forget(proxy.proxy)
            self.position = each.position
        return changes

    def lease(self, mailbox: str) -> Lease | None:
        """Return the lease of a mailbox, held or not, or None before its first acquisition."""
        return self._leases.get(mailbox)

    def leases(self) -> list[Lease]:
        """Return the leases by mailbox, held or not."""
        return sorted(self._leases.copy().values(), key=lambda lease: lease.mailbox)

    def is_expired(self, lease: Lease) -> bool:
        """Return whether no event newer than `lease` was seen for its TTL and grace period."""
        return self._lease_observations.is_expired(lease, self._uptime())

    def remaining_ms(self, lease: Lease) -> int:
        """Return the ms until the end of the lease's TTL; negative in its grace period."""
        return self._lease_observations.remaining_ms(lease, self._uptime())

    def expires_in_ms(self, mailbox: str) -> int | None:
        """Return the ms, rounded up, until a lease must be expired unless it is renewed.

        Returns: None if it is not held, or must be expired now.
        """
        lease = self._leases.get(mailbox)
        if lease is None or not lease.is_held or self.is_expired(lease):
            return None
        return self.remaining_ms(lease) + 1 + lease.grace_ms

    def next_expiry_ms(self) -> int | None:
        """Return the ms until the next lease must be expired if none is renewed; None if none is held."""
        remaining = map(self.expires_in_ms, self._leases.copy())
        return min((each for each in remaining if each is not None), default=None)

    def expired_leases(self) -> list[Lease]:
        """Return the leases that must be expired."""
        now = self._uptime()
        leases = self._leases.copy().values()
        return [lease for lease in leases if self._lease_observations.is_expired(lease, now)]

    def proxies(self) -> list[Proxy]:
        """Return the proxies that are alive, by id."""
        proxies = self._proxies.copy().values()
        return sorted((proxy for proxy in proxies if proxy.is_live), key=lambda proxy: proxy.proxy)

    def expired_proxies(self) -> list[Proxy]:
        """Return the proxies that must be expired: those without a newer event for their TTL."""
        now, seen = self._uptime(), self._proxy_observations
        return [
            proxy
            for proxy in self.proxies()
            if seen.is_unchanged(proxy.proxy, proxy.version, proxy.ttl_ms, now)
        ]

    def assignment(self) -> AssignPartitions | None:
        """Return the command that assigns partitions to the live proxies; None if they have them."""
        proxies = tuple(proxy.proxy for proxy in self.proxies())
        if assign_partitions(self.partitions, proxies) == self.partitions:
            return None
        return AssignPartitions(proxies, self.position)

    def _put_lease(self, lease: Lease, now: int) -> Lease:
        self._leases[lease.mailbox] = lease
        if lease.is_held:
            self._lease_observations.observe(lease.mailbox, lease.version, now)
        else:
            self._lease_observations.forget(lease.mailbox)
        return lease
