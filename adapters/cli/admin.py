"""`postroom admin`, `lease` and `route`, and the settings that admins, runners and proxies share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import SectionFlags, takes_section
from postroom.adapters.cli.output import Id, Time
from postroom.adapters.cli.running import Reload, monitoring, running, tls_certificates
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import MetricsPort, exact_duration, format_duration
from postroom.adapters.compose.brokers import NatsSettings
from postroom.adapters.compose.connect import ClientTls
from postroom.adapters.compose.control_plane import (
    ControlPlaneSettings,
    LeasePolicies,
    LeasePolicy,
    LeaseStreamSettings,
    check_admins,
    connect_control_plane,
    load_policies,
    open_leases,
    open_node_access,
    serve_admin,
)
from postroom.adapters.sockets.connections import ConnectionLimits
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import check_mailbox, describe_choices

if TYPE_CHECKING:
    from postroom.adapters.compose.control_plane import LeaseAdmin, NodeAccess, RunningAdmin
    from postroom.adapters.compose.serve import SurfaceProtection

DEFAULT_ADMIN = "127.0.0.1:8981"


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[cluster]`: how admins, runners and proxies authenticate each other.

    Arguments:
        admin: `host:port` of the admins, with commas between them.
        node_token: secret of 32 characters or more that all processes share; None uses no token.
        tls: call the other processes over TLS; `ca` and `certificate` imply it.
        ca: PEM file of the authorities that sign the other processes' certificates; None takes the system's.
        certificate, key: PEM files of the certificate that this process presents when it calls the others.
        nodes: names in the certificates of admins, proxies and runners, by role; see `NodeNames`.
    """

    admin: str = DEFAULT_ADMIN
    node_token: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    nodes: dict[str, tuple[str, ...]] | None = None

    def validate(self) -> "ClusterSettings":
        """Return the settings; raise InvalidRequest when `admin` is not a valid address."""
        check_admins(self.admin)
        return self

    def access(self) -> "NodeAccess":
        """Return the credentials of this process.

        Raises: InvalidRequest for a token or file that can't be used, MissingExtra without grpcio.
        """
        files = ClientTls(self.ca, self.certificate, self.key)
        return open_node_access(self.node_token, files if self.tls or any(files) else None, self.nodes)


class ListenSettings(ConnectionLimits, frozen=True, kw_only=True):
    """Settings of a server of the cluster; base of `[admin]`, `[runner]` and `[proxy]`.

    Arguments:
        listen: `host:port` or `unix:path` of the gRPC server.
        address: address at which the other processes reach the server; None takes `listen`.
        tls_certificate, tls_key: PEM files; a `host:port` address is then served with TLS.
        tls_client_ca: PEM file of authorities; clients must then have a certificate of one of them.
        behind_proxy: whether a proxy in front terminates TLS, and nobody else reaches the address.
    """

    listen: str | None = None
    address: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    behind_proxy: bool = False

    def protection(self, section: str) -> "SurfaceProtection":
        """Return how the server is protected; raise InvalidRequest for an unusable certificate.

        Arguments:
            section: name of the settings' section, for errors.
        """
        from postroom.adapters.compose.serve import ServerTls, SurfaceProtection, TlsFiles

        tls = None
        if self.tls_certificate is not None and self.tls_key is not None:
            tls = ServerTls(TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca))
        elif self.tls_certificate or self.tls_key or self.tls_client_ca:
            raise InvalidSettings(
                f"[{section}]: TLS needs both tls_certificate and tls_key; set both, or neither."
            )
        for name in ConnectionLimits.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidSettings(
                    f"[{section}]: {name} must be at least 1; it was {getattr(self, name)}."
                )
        return SurfaceProtection(tls, self.behind_proxy, limits=self)


ENDED = ("released", "expired")
LEASE_COLUMNS = (
    "mailbox", "runner", "status", "epoch", "remaining", "renewed", "health",
    "partition", "address", "ttl", "grace", "events", "queries", "bytes",
)  # fmt: skip

Admin = Annotated[
    str | None,
    Option(
        "--admin",
        "--admin-endpoint",
        metavar="HOST:PORT,...",
        help=f"Admins of the cluster; default {DEFAULT_ADMIN}. [cluster.admin]",
    ),
]


async def list_leases(session: Session, admin: Admin = None) -> None:
    """List the leases of the mailboxes of a cluster, ended ones included."""
    async with _connect(session, admin) as control_plane:
        leases = await control_plane.list_leases()
    session.out.records(
        {"leases": leases},
        LEASE_COLUMNS,
        leases,
        lambda each: (
            Id(each.mailbox),
            each.runner,
            each.status,
            each.epoch,
            None if each.status in ENDED else _signed_duration(each.remaining_ms),
            Time(each.renewed_at),
            each.health or None,
            each.partition,
            Id(each.address),
            exact_duration(each.ttl_ms),
            exact_duration(each.grace_ms),
            each.events_stored,
            each.queries_served,
            each.storage_size_bytes,
        ),
        only_wide=LEASE_COLUMNS[7:],
    )


async def release(
    session: Session,
    mailbox: Annotated[str, Argument(metavar="NAME@PROXY", help="Mailbox whose lease to release.")],
    force: Annotated[
        bool,
        Option(
            "--force", help="Release it although its runner renews it; that runner stops serving the mailbox."
        ),
    ] = False,
    admin: Admin = None,
) -> None:
    """Release the lease of a mailbox, so that another runner may acquire it at once.

    Without --force, only a lease in its grace period is released: its runner did not renew it in time.
    """
    name = check_mailbox(mailbox)
    async with _connect(session, admin) as control_plane:
        leases = {each.mailbox: each for each in await control_plane.list_leases()}
        lease = leases.get(name)
        if lease is None:
            raise NotFound(f"Mailbox {name} has no lease; {describe_choices(name, leases)}")
        if lease.status in ENDED:
            raise NotFound(f"The lease of {name} has ended already: it was {lease.status}.")
        if lease.status == "active" and not force:
            raise InvalidRequest(
                f"Runner {lease.runner} has the lease of {name} and renews it; stop it, or use --force."
            )
        await control_plane.release_lease(name, lease.runner, lease.epoch)
    session.out.result(
        {"mailbox": name, "runner": lease.runner, "epoch": lease.epoch},
        f"Released the lease of {name} of runner {lease.runner}.",
    )


async def list_routes(session: Session, admin: Admin = None) -> None:
    """List the routes to the runners of mailboxes."""
    async with _connect(session, admin) as control_plane:
        table = await control_plane.list_routes()
    session.out.records(
        msgspec.to_builtins(table),
        ("mailbox", "proxy", "runner", "address", "partition", "epoch", "position"),
        table.routes,
        lambda each: (
            Id(each.mailbox),
            each.proxy,
            each.runner,
            Id(each.address),
            each.partition,
            each.epoch,
            each.position,
        ),
        only_wide=("position",),
    )


@asynccontextmanager
async def open_control_plane(session: Session) -> AsyncIterator["LeaseAdmin | None"]:
    """Connect to the control plane that `[cluster]` names; yield None without that section."""
    if not session.settings.sections.get("cluster"):
        yield None
        return
    async with _connect(session, None) as control_plane:
        yield control_plane


@asynccontextmanager
async def _connect(session: Session, admin: str | None) -> AsyncIterator["LeaseAdmin"]:
    """Connect to the admins that the option names, or else the settings."""
    settings = session.settings.section("cluster", ClusterSettings, {"admin": admin})
    async with connect_control_plane(check_admins(settings.admin), settings.access()) as control_plane:
        yield control_plane


def _signed_duration(ms: int) -> str:
    return f"-{format_duration(-ms)}" if ms < 0 else format_duration(ms)


DEFAULT_STORE = "admin.db"
_POLICY = ("ttl_ms", "heartbeat_interval_ms", "grace_period_ms")


class AdminSettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of `[admin]`.

    Arguments:
        listen: `host:port` or `unix:path`.
        standalone: keep leases in a SQLite file, for the admins of one machine.
        jetstream: URLs of NATS servers that keep the leases, with commas between them; access as in `[nats]`.
        store: SQLite file or `postgresql://` URL of the leases; with `jetstream`, SQLite file of the tables
            `mailbox_leases` and `mailbox_routes`.
        stream: name of the JetStream stream.
        replicas: copies of that stream; None is 3 in a cluster of servers, and 1 on a single one.
        monitoring: URLs of the NATS servers' monitoring; the admin checks there that they sync every write.
        assume_sync_always: the operator states that these servers sync every write.
        namespaces: YAML file whose namespaces have a section `lease`.
        ttl_ms: how long a lease lasts without a heartbeat, in namespaces without a TTL of their own.
        heartbeat_interval_ms: interval at which runners renew leases.
        grace_period_ms: time after the end of a lease before another runner gets it.
        member_ttl_ms: time after which a proxy or runner that is silent counts as gone.
    """

    listen: str = DEFAULT_ADMIN
    standalone: bool = False
    jetstream: str | None = None
    store: str | None = None
    stream: str = "POSTROOM_LEASES"
    replicas: int | None = None
    monitoring: str | None = None
    assume_sync_always: bool = False
    namespaces: str | None = None
    ttl_ms: int = 300_000
    heartbeat_interval_ms: int = 60_000
    grace_period_ms: int = 60_000
    member_ttl_ms: int = 15_000

    def policies(self) -> LeasePolicies:
        """Return the lease policies; raise InvalidRequest when one is invalid."""
        default = LeasePolicy(**{name: getattr(self, name) for name in _POLICY})
        return load_policies(default, self.namespaces)

    def check_store(self) -> str:
        """Return the store.

        Raises: InvalidSettings unless the settings name exactly one place for the leases.
        """
        store = self.store or DEFAULT_STORE
        is_database = store.startswith(("postgresql://", "postgres://"))
        if self.standalone + (self.jetstream is not None) + (is_database and self.jetstream is None) != 1:
            raise InvalidSettings(
                "[admin] must say where leases are stored: --standalone for the SQLite file --store, "
                "--jetstream URL,... for NATS servers, or --store postgresql://... for a database; set one."
            )
        if is_database and self.jetstream is not None:
            raise InvalidSettings(
                "[admin]: with jetstream, store is the SQLite file of the tables; name one."
            )
        return store


@takes_section(
    "admin",
    AdminSettings,
    standalone=Option("--standalone", help="Keep leases in the SQLite file --store, without replication."),
    jetstream=Option(metavar="URL,...", help="Keep leases in JetStream of these NATS servers."),
    store=Option(
        "--store",
        "--storage-path",
        metavar="PATH",
        help=f"SQLite file, or postgresql:// URL; default {DEFAULT_STORE}.",
    ),
    listen=Option(metavar="ADDRESS", help="gRPC address."),
    namespaces=Option(metavar="FILE", help="Namespace file (YAML) with lease policies."),
    monitoring=Option(metavar="URL,...", help="Monitoring of all NATS servers, such as http://host:8222."),
)
def admin(session: Session, options: SectionFlags[AdminSettings], metrics_port: MetricsPort = None) -> None:
    """Serve the control plane of a cluster, which grants the leases of mailboxes, until interrupted.

    Several admins may serve one PostgreSQL database or JetStream. A settings file is named before the
    command: postroom --config postroom.toml admin.
    """
    asyncio.run(_serve(session, options, metrics_port))


async def _serve(session: Session, options: SectionFlags[AdminSettings], metrics_port: int | None) -> None:
    settings = options.read(session.settings)
    stop = asyncio.Event()
    protection = settings.protection("admin")
    access = session.settings.section("cluster", ClusterSettings).access()
    # Check everything that may be refused first, so that a command that can't run creates no store.
    target = protection.resolve(settings.listen)
    access.check_address(target, protection.tls_at(target))
    policies = settings.policies()
    opening = open_leases(settings.check_store(), _stream(session, settings))
    stores = await asyncio.to_thread(opening.__enter__)
    try:
        async with serve_admin(
            stores,
            settings.listen,
            access=access,
            protection=protection,
            policies=policies,
            settings=ControlPlaneSettings(member_ttl_ms=settings.member_ttl_ms),
        ) as served:
            reloads = [_lease_policies(served, options)]
            if protection.tls is not None:
                reloads.append(tls_certificates(protection.tls))
            with monitoring(session, metrics_port, served.control_plane.monitor):
                async with running(session, stop.set, reloads):
                    _report(session, served)
                    await stop.wait()
            session.out.note("Stopping.")
    finally:
        await asyncio.to_thread(opening.__exit__, None, None, None)


def _stream(session: Session, settings: AdminSettings) -> LeaseStreamSettings | None:
    """Return the settings of the stream of leases; None without JetStream."""
    if settings.jetstream is None:
        return None
    monitoring_urls = tuple(each.strip() for each in (settings.monitoring or "").split(",") if each.strip())
    return LeaseStreamSettings(
        nats=session.settings.section("nats", NatsSettings, {"url": settings.jetstream}),
        stream=settings.stream,
        replicas=settings.replicas,
        monitoring=monitoring_urls,
        assume_sync_always=settings.assume_sync_always,
    )


def _report(session: Session, served: "RunningAdmin") -> None:
    number = served.control_plane.lease_count
    session.out.result(
        {"address": served.url, "leases": number}, f"Admin at {served.url}, {pluralize(number, 'lease')}."
    )
    session.out.flush()


def _lease_policies(served: "RunningAdmin", options: SectionFlags[AdminSettings]) -> Reload:
    """Return the reload of the lease policies; new ones apply to later acquisitions."""

    async def apply(settings: Settings) -> None:
        section = options.read(settings)
        served.control_plane.set_policies(await asyncio.to_thread(section.policies))

    names = [name for each in _POLICY for name in (each, each.removesuffix("_ms"))]
    return Reload("lease policies", apply, tuple(f"admin.{name}" for name in ("namespaces", *names)))
