"""Routes to the runners of mailboxes, and the proxies that keep them (RFC-049 Routing Coordination)."""

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import MAX_LEASE_MS, Lease
from postroom.domain.lease.partitions import NO_PARTITIONS, PARTITIONS, PartitionMap, assign_partitions
from postroom.domain.names import check_address, check_member, partitions_stream, proxy_stream
from postroom.domain.record import Event


class Route(msgspec.Struct, frozen=True):
    """Where the owner of a mailbox is.

    Arguments:
        address: gRPC address of the runner, `host:port` or `unix:/path`.
        position: position in the log of leases of the event that made the route; newer routes have greater
            ones.
        epoch: of the lease.
    """

    mailbox: str
    proxy: str
    runner: str
    address: str
    partition: int
    position: int
    epoch: int


class RoutingTable:
    """The routes of all mailboxes, whose updates may arrive late, repeatedly and in any order.

    Attributes:
        position: position in the log of leases up to which the table is complete; 0 until it is complete for
            the first time. An update alone does not raise it, since an earlier one may have been lost.
    """

    def __init__(self) -> None:
        self.position = 0
        self._routes: dict[str, Route] = {}
        self._removals: dict[str, int] = {}

    def update(self, route: Route) -> bool:
        """Add a route or replace an older one; return whether the table changed.

        A newer position of the same lease, such as a renewal's, changes nothing.
        """
        if route.position <= max(self.position, self._removals.get(route.mailbox, 0)):
            return False
        current = self._routes.get(route.mailbox)
        if current is not None and (
            route.position <= current.position
            or msgspec.structs.replace(current, position=route.position) == route
        ):
            return False
        self._routes[route.mailbox] = route
        return True

    def remove(self, mailbox: str, position: int) -> bool:
        """Remove the route of a mailbox unless it is newer than `position`; return whether there was one."""
        current = self._routes.get(mailbox)
        if current is not None and current.position > position:
            return False
        if position > self.position:  # an update from before the removal may still arrive
            self._removals[mailbox] = max(position, self._removals.get(mailbox, 0))
        return self._routes.pop(mailbox, None) is not None

    def replace_all(self, position: int, routes: Iterable[Route]) -> bool:
        """Replace the whole table with the one at `position`, except for newer updates and removals.

        Returns: whether it was replaced; a table older than the current one is ignored.
        """
        if position < self.position:
            return False
        newer = {mailbox: route for mailbox, route in self._routes.items() if route.position > position}
        self._removals = {mailbox: at for mailbox, at in self._removals.items() if at > position}
        self._routes = {
            route.mailbox: route for route in routes if route.mailbox not in self._removals
        } | newer
        self.position = position
        return True

    def find_unconfirmed(self) -> dict[str, int]:
        """Return, by mailbox, the positions of updates and removals after the table's position."""
        updates = {name: route.position for name, route in self._routes.items()}
        return {name: at for name, at in (self._removals | updates).items() if at > self.position}

    def discard(self, changes: Mapping[str, int], last: int) -> int:
        """Discard changes that are later than the end of the log, and expect the whole table again.

        Arguments:
            changes: positions by mailbox.
            last: position of the end of the log after these changes had been made.

        Returns: the number of changes that were discarded.
        """
        unknown = {name: at for name, at in changes.items() if at > last}
        for name, at in unknown.items():
            if name in self._routes and self._routes[name].position == at:
                del self._routes[name]
            if self._removals.get(name) == at:
                del self._removals[name]
        if unknown:
            self.position = 0
        return len(unknown)

    def complete(self, position: int) -> None:
        """Note that the table contains all changes up to `position`, as in a fold of the log in order."""
        if position > self.position:
            self.position = position
            self._removals = {mailbox: at for mailbox, at in self._removals.items() if at > position}

    def get(self, mailbox: str) -> Route | None:
        """Return the route of a mailbox, or None."""
        return self._routes.get(mailbox)

    def routes(self, namespace: str | None = None) -> list[Route]:
        """Return the routes by mailbox, of all namespaces or of one."""
        routes = sorted(self._routes.values(), key=lambda route: route.mailbox)
        if namespace is None:
            return routes
        return [route for route in routes if route.mailbox.partition("@")[0] == namespace]


def route_of(lease: Lease, position: int) -> Route:
    """Return the route to the holder of a lease that has an event at `position` of the log."""
    return Route(
        lease.mailbox, lease.proxy, lease.runner, lease.address, lease.partition, position, lease.epoch
    )


class ProxyEvent(Event, frozen=True, gc=False):
    """Base class of the events of a registration; each contains all that a fold needs.

    Arguments:
        address: gRPC address of the proxy, `host:port` or `unix:/path`.
        ttl_ms: time without a renewal after which it counts as gone.
        joined_at: when it was registered, µs since 1970 UTC.
    """

    proxy: str
    address: str
    ttl_ms: int
    joined_at: int


class ProxyRegistered(ProxyEvent, frozen=True, gc=False):
    """A proxy joined the cluster, or has another address."""


class ProxyRenewed(ProxyEvent, frozen=True, gc=False):
    """A proxy told that it is alive."""


class ProxyLeft(ProxyEvent, frozen=True, gc=False):
    """A proxy shut down."""


class ProxyExpired(ProxyEvent, frozen=True, gc=False):
    """A proxy did not renew its registration."""


ProxyChange = ProxyRegistered | ProxyRenewed | ProxyLeft | ProxyExpired


class Proxy(msgspec.Struct, frozen=True):
    """State of a registration; see `ProxyEvent`.

    Arguments:
        is_live: whether it is registered; otherwise it left or has expired.
        version: number of its last event.
    """

    proxy: str
    address: str
    ttl_ms: int
    is_live: bool
    version: int
    joined_at: int


class RegisterProxy(msgspec.Struct, frozen=True):
    """Command of a proxy that joins or is alive."""

    proxy: str
    address: str
    ttl_ms: int


class LeaveProxy(msgspec.Struct, frozen=True):
    """Command of a proxy that shuts down."""

    proxy: str


class ExpireProxy(msgspec.Struct, frozen=True):
    """Command of an admin that saw no newer event than `version` for the TTL."""

    proxy: str
    version: int


ProxyCommand = RegisterProxy | LeaveProxy | ExpireProxy


def decide(command: ProxyCommand, proxy: Proxy | None, now: int) -> list[ProxyChange]:
    """Return the events that a command causes; none if it changes nothing.

    Arguments:
        proxy: current state; None before the first registration.
        now: µs since 1970 UTC.

    Raises: InvalidRequest for a malformed argument.
    """
    check_member("The proxy id", command.proxy)
    match command:
        case RegisterProxy():
            check_address("The address of the proxy", command.address)
            check_int("ttl_ms", command.ttl_ms, 1, MAX_LEASE_MS)
            return [_register(command, proxy, now)]
        case LeaveProxy():
            return [_next(ProxyLeft, proxy, now)] if proxy is not None and proxy.is_live else []
        case ExpireProxy():
            check_int("version", command.version)
            if proxy is None or not proxy.is_live or proxy.version != command.version:
                return []
            return [_next(ProxyExpired, proxy, now)]


def evolve(proxy: Proxy | None, event: ProxyChange) -> Proxy:
    """Return the registration after one more event; a fold may start at any event."""
    is_live = isinstance(event, ProxyRegistered | ProxyRenewed)
    return Proxy(event.proxy, event.address, event.ttl_ms, is_live, event.version, event.joined_at)


def check_event(event: "ProxyChange | PartitionsAssigned") -> None:
    """Check an event that was read from a store.

    Raises: InvalidRequest for one that can't have been decided.
    """
    if isinstance(event, PartitionsAssigned):
        stream = partitions_stream()
        for owner in {*event.owners} - {""}:
            check_member("The proxy id", owner)
        check_int("position", event.position)
    else:
        stream = proxy_stream(check_member("The proxy id", event.proxy))
        check_address("The address of the proxy", event.address)
        check_int("ttl_ms", event.ttl_ms, 1, MAX_LEASE_MS)
        check_int("joined_at", event.joined_at)
    if event.stream != stream:
        raise InvalidRequest("The event is not of the aggregate that it names.")
    check_int("version", event.version, 1)
    check_int("at", event.at)


class PartitionsAssigned(Event, frozen=True, gc=False):
    """Partitions were assigned to the proxies that were alive at `position` of the log.

    Arguments:
        owners: ids of proxies by partition.
    """

    owners: Annotated[tuple[str, ...], msgspec.Meta(min_length=PARTITIONS, max_length=PARTITIONS)]
    position: int


class PartitionAssignment(msgspec.Struct, frozen=True):
    """State of the one assignment; see `PartitionsAssigned`."""

    partitions: PartitionMap
    position: int
    version: int


class AssignPartitions(msgspec.Struct, frozen=True):
    """Command of an admin that has folded the log up to `position`, where `proxies` are alive."""

    proxies: tuple[str, ...]
    position: int


def decide_assignment(
    command: AssignPartitions, assignment: PartitionAssignment | None, now: int
) -> list[PartitionsAssigned]:
    """Return the event that assigns partitions; none if nothing changes, or another admin had read more.

    The assignment is recorded because it depends on earlier assignments, whose events may be removed.
    """
    previous = NO_PARTITIONS if assignment is None else assignment.partitions
    partitions = assign_partitions(previous, command.proxies)
    if partitions == previous or (assignment is not None and command.position <= assignment.position):
        return []
    version = 1 if assignment is None else assignment.version + 1
    return [PartitionsAssigned(partitions_stream(), version, now, partitions.owners, command.position)]


def evolve_assignment(
    assignment: PartitionAssignment | None, event: PartitionsAssigned
) -> PartitionAssignment:
    """Return the assignment after one more event; a fold may start at any event."""
    return PartitionAssignment(PartitionMap(event.owners), event.position, event.version)


def _register(command: RegisterProxy, proxy: Proxy | None, now: int) -> ProxyChange:
    is_known = proxy is not None and proxy.is_live and proxy.address == command.address
    cls = ProxyRenewed if is_known else ProxyRegistered
    joined_at = proxy.joined_at if proxy is not None and is_known else now
    version = 1 if proxy is None else proxy.version + 1
    return cls(
        proxy_stream(command.proxy), version, now, command.proxy, command.address, command.ttl_ms, joined_at
    )


def _next(cls: type[ProxyLeft | ProxyExpired], proxy: Proxy, now: int) -> ProxyLeft | ProxyExpired:
    stream = proxy_stream(proxy.proxy)
    return cls(stream, proxy.version + 1, now, proxy.proxy, proxy.address, proxy.ttl_ms, proxy.joined_at)
