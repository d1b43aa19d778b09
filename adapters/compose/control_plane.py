"""The control plane of a cluster: lease stores, admins, and the access of nodes and commands to them."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.process import trace_if_used
from postroom.adapters.compose.store import DATABASE_SCHEMES, scheme_of
from postroom.adapters.jetstream.settings import LeaseStreamSettings
from postroom.adapters.sockets.address import Address, SurfaceProtection
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings, LeasePolicies
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.application.ports.lease_store import LeaseStore, LeaseTables
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.lease import LeasePolicy
from postroom.domain.names import check_address

if TYPE_CHECKING:  # grpcio and eventsourcing are extras
    from postroom.adapters.grpc.admin_client import ControlPlaneClient
    from postroom.adapters.grpc.node_access import NodeAccess
    from postroom.adapters.sqlite.database import Durability
    from postroom.application.cluster.control_plane import ControlPlane

__all__ = [
    "ControlPlaneSettings",
    "LeaseAdmin",
    "LeasePolicies",
    "LeasePolicy",
    "LeaseStores",
    "LeaseStreamSettings",
    "NodeAccess",
    "RunningAdmin",
    "advertised_address",
    "check_admins",
    "connect_control_plane",
    "load_policies",
    "open_lease_store",
    "open_lease_tables",
    "open_leases",
    "open_node_access",
    "serve_admin",
]


def open_lease_store(address: str, *, durability: "Durability" = "full") -> LeaseStore:
    """Open a lease store.

    Arguments:
        address: path of a SQLite file, `postgresql://...`, or `memory:`. A store on JetStream has settings of
            its own; see `postroom.adapters.jetstream`.
        durability: of a SQLite file; `full` survives power cuts, `relaxed` only process crashes.

    Raises: InvalidRequest for an address of another kind, Unavailable when the store can't be used,
        MissingExtra when a package is not installed.
    """
    check_path("The lease store", address)
    scheme = scheme_of(address)
    with explain_missing_extra("cluster"):  # eventsourcing is slow to import
        if scheme == "memory":
            from postroom.adapters.memory.lease_store import MemoryLeaseStore

            return MemoryLeaseStore()
        if scheme in DATABASE_SCHEMES:
            from postroom.adapters.postgres.lease_store import PostgresLeaseStore

            return PostgresLeaseStore(address)
        _check_file(scheme)
        from postroom.adapters.sqlite.lease_store import SqliteLeaseStore

        return SqliteLeaseStore(address, durability=durability)


def open_lease_tables(address: str) -> LeaseTables | None:
    """Open RFC-049's tables in a lease store, or in a SQLite file beside a store on JetStream.

    Arguments:
        address: path of a SQLite file, `postgresql://...`, or `memory:`.

    Returns: None for a store in memory, which has no tables.
    Raises: as `open_lease_store`.
    """
    check_path("The store of lease tables", address)
    scheme = scheme_of(address)
    if scheme == "memory":
        return None
    with explain_missing_extra("cluster"):
        if scheme in DATABASE_SCHEMES:
            from postroom.adapters.postgres.lease_store import PostgresLeaseTables

            return PostgresLeaseTables(address)
        _check_file(scheme)
        from postroom.adapters.sqlite.lease_store import SqliteLeaseTables

        return SqliteLeaseTables(address)


def _check_file(scheme: str) -> None:
    if scheme:
        raise InvalidRequest(
            f"The lease store begins with {scheme}://; a lease store is a file, memory: or "
            "postgresql://user@host/database. A store on JetStream has a setting of its own."
        )


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
            from postroom.adapters.config.namespaces import load_lease_policies

        namespaces = load_lease_policies(file, default.validate())
    return LeasePolicies(default.validate(), namespaces)


@contextmanager
def open_leases(store: str, stream: LeaseStreamSettings | None = None) -> Iterator[LeaseStores]:
    """Open the stores of an admin for as long as the context lasts; blocks.

    Arguments:
        store: path of a SQLite file, `postgresql://...`, or `memory:`; with a stream, it has only the tables.
        stream: settings of the JetStream stream that keeps the leases; None keeps them in `store`.

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
    protection: SurfaceProtection | None = None,
    policies: LeasePolicies | None = None,
    settings: ControlPlaneSettings | None = None,
) -> AsyncIterator[RunningAdmin]:
    """Serve the control plane of a lease store for as long as the context lasts.

    Several admins may serve one store. The stores are not closed at the end.

    Arguments:
        listen: `host:port`, port 0 for any free one; or `unix:path`.
        access: credentials to authenticate proxies and runners, and to call proxies.
        protection: required for an address beyond loopback.

    Raises: InvalidRequest for an address that is malformed or not protected, Unavailable when it can't be
        bound or the lease store can't be read, MissingExtra without grpcio.
    """
    with explain_missing_extra("cluster"):
        from postroom.adapters.grpc.admin_service import admin_handlers
        from postroom.adapters.grpc.node_access import NodeAccess
        from postroom.adapters.grpc.proxy_service import GrpcRoutePush
        from postroom.adapters.grpc.server import serve_handlers
        from postroom.application.cluster.control_plane import ControlPlane
        from postroom.application.cluster.lease_follower import BlockingThreads
    import uuid_utils

    trace_if_used()
    access, protection = access or NodeAccess(), protection or SurfaceProtection()
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


WILDCARDS = ("0.0.0.0", "::")


@explain_missing_extra("cluster")
def open_node_access(
    token: str | None, tls: ClientTls | None, nodes: Mapping[str, Sequence[str]] | None = None
) -> "NodeAccess":
    """Return the credentials of a process of a cluster; see `NodeAccess`."""
    from postroom.adapters.grpc.node_access import NodeAccess, NodeNames

    try:
        names = None if nodes is None else msgspec.convert(nodes, NodeNames, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"[cluster] nodes: {error}; they are lists of names by role.") from None
    return NodeAccess(token, None if tls is None else tls.check(), names)


@explain_missing_extra("cluster")
def connect_control_plane(
    admins: Sequence[str], access: "NodeAccess | None" = None
) -> AbstractAsyncContextManager["ControlPlaneClient"]:
    """Use the control plane behind the addresses of admins; see `connect_admins`."""
    from postroom.adapters.grpc.admin_client import connect_admins

    return connect_admins(admins, access)


def check_admins(text: str) -> list[str]:
    """Return the addresses in a comma-separated list of admins, or raise InvalidRequest."""
    return [check_address("An address of admins", each.strip()) for each in text.split(",")]


def advertised_address(url: str, target: Address, address: str | None) -> str:
    """Return the address at which other processes of a cluster reach this one.

    Arguments:
        url: URL at which it serves.
        target: address at which it was asked to listen.
        address: address in the settings; None takes the one at which it serves.

    Raises: InvalidRequest when the settings name no address and it listens at all addresses of the machine.
    """
    if address is not None:
        return check_address("address", address)
    if target.is_unix:
        return target.text
    if target.target[0] in WILDCARDS:
        raise InvalidRequest(
            f"{target.text} is all addresses of this machine; set address to the host:port at which other "
            "processes of the cluster reach it."
        )
    return check_address("address", url.partition("://")[2])
