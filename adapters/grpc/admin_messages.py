"""Messages of the control plane as values of the application, and back."""

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.application.ports.control_plane import (
    LeaseSummary,
    Member,
    PartitionRange,
    ProxyRegistration,
    RoutingSnapshot,
    RunnerRegistration,
)
from postroom.domain.lease.routing import Route


def write_route(route: Route) -> pb.Route:
    """Return a route as a message."""
    return pb.Route(
        mailbox_id=route.mailbox,
        proxy_id=route.proxy,
        runner_id=route.runner,
        address=route.address,
        partition=route.partition,
        position=route.position,
        epoch=route.epoch,
    )


def read_route(message: pb.Route) -> Route:
    """Return the route of a message."""
    return Route(
        mailbox=message.mailbox_id,
        proxy=message.proxy_id,
        runner=message.runner_id,
        address=message.address,
        partition=message.partition,
        position=message.position,
        epoch=message.epoch,
    )


def write_table(table: RoutingSnapshot) -> pb.RoutingTable:
    """Return a routing table as a message."""
    return pb.RoutingTable(position=table.position, routes=map(write_route, table.routes))


def read_table(message: pb.RoutingTable) -> RoutingSnapshot:
    """Return the routing table of a message."""
    return RoutingSnapshot(message.position, tuple(map(read_route, message.routes)))


def write_proxy_registration(registration: ProxyRegistration) -> pb.RegisterProxyResponse:
    """Return the answer to the registration of a proxy."""
    return pb.RegisterProxyResponse(
        interval_ms=registration.interval_ms,
        ttl_ms=registration.ttl_ms,
        partitions=_write_ranges(registration.partitions),
        position=registration.position,
        table=None if registration.table is None else write_table(registration.table),
    )


def read_proxy_registration(message: pb.RegisterProxyResponse) -> ProxyRegistration:
    """Return the registration of a proxy."""
    return ProxyRegistration(
        interval_ms=message.interval_ms,
        ttl_ms=message.ttl_ms,
        partitions=_read_ranges(message.partitions),
        position=message.position,
        table=read_table(message.table) if message.HasField("table") else None,
    )


def read_runner_registration(message: pb.RegisterRunnerResponse) -> RunnerRegistration:
    """Return the registration of a runner."""
    return RunnerRegistration(
        interval_ms=message.interval_ms, ttl_ms=message.ttl_ms, offers=tuple(message.offers)
    )


def write_lease(lease: LeaseSummary) -> pb.Lease:
    """Return a lease as a message."""
    return pb.Lease(
        mailbox_id=lease.mailbox,
        runner_id=lease.runner,
        proxy_id=lease.proxy,
        address=lease.address,
        partition=lease.partition,
        epoch=lease.epoch,
        status=lease.status,
        ttl_ms=lease.ttl_ms,
        grace_period_ms=lease.grace_ms,
        remaining_ms=lease.remaining_ms,
        acquired_us=lease.acquired_at,
        renewed_us=lease.renewed_at,
        events_stored=lease.events_stored,
        queries_served=lease.queries_served,
        storage_size_bytes=lease.storage_size_bytes,
        health=lease.health,
    )


def read_lease(message: pb.Lease) -> LeaseSummary:
    """Return the lease of a message."""
    return LeaseSummary(
        mailbox=message.mailbox_id,
        runner=message.runner_id,
        proxy=message.proxy_id,
        address=message.address,
        partition=message.partition,
        epoch=message.epoch,
        status=message.status,  # type: ignore[arg-type]  # an admin of a later version may have more values
        ttl_ms=message.ttl_ms,
        grace_ms=message.grace_period_ms,
        remaining_ms=message.remaining_ms,
        acquired_at=message.acquired_us,
        renewed_at=message.renewed_us,
        events_stored=message.events_stored,
        queries_served=message.queries_served,
        storage_size_bytes=message.storage_size_bytes,
        health=message.health,
    )


def write_member(member: Member) -> pb.Member:
    """Return a proxy or runner as a message; the age is -1 if it did not register with this admin."""
    return pb.Member(
        id=member.id,
        kind=member.kind,
        proxy_id=member.proxy,
        address=member.address,
        partitions=_write_ranges(member.partitions),
        seen_ms=-1 if member.seen_ms is None else member.seen_ms,
    )


def read_member(message: pb.Member) -> Member:
    """Return the proxy or runner of a message."""
    return Member(
        id=message.id,
        kind=message.kind,  # type: ignore[arg-type]  # an admin of a later version may have more values
        proxy=message.proxy_id,
        address=message.address,
        partitions=_read_ranges(message.partitions),
        seen_ms=None if message.seen_ms < 0 else message.seen_ms,
    )


def read_time(time: Timestamp) -> int:
    """Return a time in µs since 1970 UTC."""
    return time.ToMicroseconds()


def write_time(time_us: int) -> Timestamp:
    """Return a time in µs since 1970 UTC as a message."""
    time = Timestamp()
    time.FromMicroseconds(time_us)
    return time


def _write_ranges(ranges: Iterable[PartitionRange]) -> Iterable[pb.PartitionRange]:
    return [pb.PartitionRange(first=each.first, last=each.last) for each in ranges]


def _read_ranges(messages: Iterable[pb.PartitionRange]) -> tuple[PartitionRange, ...]:
    return tuple(PartitionRange(each.first, each.last) for each in messages)
