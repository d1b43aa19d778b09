"""Registrations of proxies, and the assignment of partitions to them (RFC-049 Proxy Partition Ranges)."""

from typing import Annotated

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.event import Event
from postroom.domain.lease.partitions import NO_PARTITIONS, PARTITIONS, PartitionMap, assign_partitions
from postroom.domain.lease.policy import MAX_LEASE_MS
from postroom.domain.names import check_address, check_member, partitions_stream, proxy_stream


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
    """Return the event that assigns partitions; none if that changes nothing, or another admin knew more.

    The assignment is recorded, since it depends on those before it, whose events may be removed.
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
