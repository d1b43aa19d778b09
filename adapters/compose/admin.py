"""Wiring of an admin: a lease store, the control plane over it, and its gRPC services."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, NamedTuple

from postroom.adapters.compose.leases import open_lease_store, open_lease_tables
from postroom.adapters.compose.tracing import trace_if_used
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.sockets.protection import Protection
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings, LeasePolicies
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.domain.lease.lease import LeasePolicy

if TYPE_CHECKING:  # grpcio and eventsourcing are an extra
    from postroom.adapters.grpc.node_access import NodeAccess
    from postroom.application.cluster.control_plane import ControlPlane
    from postroom.application.ports.lease_store import LeaseStore, LeaseTables

__all__ = [
    "ControlPlaneSettings",
    "LeaseAdmin",
    "LeasePolicies",
    "LeasePolicy",
    "LeaseStores",
    "LeaseStreamSettings",
    "RunningAdmin",
    "load_policies",
    "open_leases",
    "serve_admin",
]


class LeaseStores(NamedTuple):
    """The stores of an admin.

    Arguments:
        leases: the log of leases.
        tables: RFC-049's tables, folded from it; None for leases in memory.
    """

    leases: "LeaseStore"
    tables: "LeaseTables | None" = None


class RunningAdmin(NamedTuple):
    """An admin that serves.

    Arguments:
        url: such as `grpc://127.0.0.1:8981`.
    """

    url: str
    control_plane: "ControlPlane"


def load_policies(default: LeasePolicy, file: str | None) -> LeasePolicies:
    """Return the lease policies of a namespace file; without one, `default` for all namespaces.

    Raises: InvalidRequest for a policy whose durations do not fit each other; see `load_lease_policies`.
    """
    namespaces: Mapping[str, LeasePolicy] = {}
    if file is not None:
        with explain_missing_extra("namespaces"):
            from postroom.adapters.config.leases import load_lease_policies

        namespaces = load_lease_policies(file, default.validate())
    return LeasePolicies(default.validate(), namespaces)


@contextmanager
def open_leases(store: str, stream: LeaseStreamSettings | None = None) -> Iterator[LeaseStores]:
    """Open the stores of an admin for as long as the context lasts; blocks.

    Arguments:
        store: path of a SQLite file, `postgresql://...`, or `memory:`; with a stream, of the tables only.
        stream: keeps the leases.

    Raises: InvalidRequest for an address of another kind, Unavailable when a store can't be used,
        MissingExtra when a package is not installed.
    """
    with ExitStack() as opened:
        if stream is None:
            leases = open_lease_store(store)
        else:
            with explain_missing_extra("nats"):
                from postroom.adapters.jetstream.lease_store import JetStreamLeaseStore

            leases = JetStreamLeaseStore(stream)
        opened.callback(leases.close)
        tables = open_lease_tables(store)
        if tables is not None:
            opened.callback(tables.close)
        yield LeaseStores(leases, tables)


@asynccontextmanager
async def serve_admin(
    stores: LeaseStores,
    listen: str,
    *,
    access: "NodeAccess | None" = None,
    protection: Protection | None = None,
    policies: LeasePolicies | None = None,
    settings: ControlPlaneSettings | None = None,
) -> AsyncIterator[RunningAdmin]:
    """Serve the control plane of a lease store for as long as the context lasts.

    Several admins may serve one store. The stores are not closed at the end.

    Arguments:
        listen: `host:port`, port 0 for any free one; or `unix:path`.
        access: how proxies and runners are authenticated, and proxies are called.
        protection: what an address beyond loopback needs.

    Raises: InvalidRequest for an address that is malformed or not protected, Unavailable when it can't be
        bound or the lease store can't be read, MissingExtra without grpcio.
    """
    with explain_missing_extra("cluster"):
        from postroom.adapters.grpc.admin_service import admin_handlers
        from postroom.adapters.grpc.node_access import NodeAccess
        from postroom.adapters.grpc.route_push import GrpcRoutePush
        from postroom.adapters.grpc.server import serve_handlers
        from postroom.application.cluster.control_plane import ControlPlane
        from postroom.application.cluster.lease_follower import BlockingThreads
    import uuid_utils

    trace_if_used()
    access, protection = access or NodeAccess(), protection or Protection()
    settings = (settings or ControlPlaneSettings()).validate()
    target = protection.resolve(listen)
    tls = protection.tls_at(target)
    access.check_address(target, tls)
    blocking = BlockingThreads("postroom admin", settings.call_ms)
    control_plane = ControlPlane(
        stores.leases, SystemClock(), GrpcRoutePush(access), blocking, policies, settings, stores.tables
    )
    handlers = admin_handlers(control_plane, access, uuid_utils.uuid7)
    async with AsyncExitStack() as opened:
        opened.callback(blocking.close)
        await opened.enter_async_context(control_plane.running())
        url = await opened.enter_async_context(serve_handlers(target, handlers, tls, protection.limits))
        yield RunningAdmin(url, control_plane)
