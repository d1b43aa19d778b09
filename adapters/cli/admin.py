"""`postroom admin`: serve the control plane of a cluster (RFC-049)."""

import asyncio
from typing import TYPE_CHECKING

from typer import Option

from postroom.adapters.cli.filters import SectionFlags, takes_section
from postroom.adapters.cli.lease import DEFAULT_ADMIN, ClusterSettings, ListenSettings
from postroom.adapters.cli.running import Reload, monitoring, running
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import MetricsPort
from postroom.adapters.compose.brokers import NatsSettings
from postroom.adapters.compose.control_plane import (
    ControlPlaneSettings,
    LeasePolicies,
    LeasePolicy,
    LeaseStreamSettings,
    load_policies,
    open_leases,
    serve_admin,
)
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.control_plane import RunningAdmin


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
        replicas: of that stream; None is 3 in a cluster of servers, and 1 on a single one.
        monitoring: URLs of the NATS servers' monitoring; the admin checks there that they sync every write.
        assume_sync_always: the operator's statement that they do.
        namespaces: YAML file whose namespaces have a section `lease`.
        ttl_ms, heartbeat_interval_ms, grace_period_ms: of the leases of other namespaces.
        member_ttl_ms: after which a proxy or runner that is silent counts as gone.
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

        Raises: InvalidSettings unless the settings say where leases are stored, once.
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
    # All that may be refused is checked first, so that no store is created for a command that can't run.
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
                from postroom.adapters.cli.serve import tls_certificates

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
    """Return the reload of the lease policies, which apply to acquisitions from then on."""

    async def apply(settings: Settings) -> None:
        section = options.read(settings)
        served.control_plane.set_policies(await asyncio.to_thread(section.policies))

    names = [name for each in _POLICY for name in (each, each.removesuffix("_ms"))]
    return Reload("lease policies", apply, tuple(f"admin.{name}" for name in ("namespaces", *names)))
