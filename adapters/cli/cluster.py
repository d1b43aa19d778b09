"""`postroom proxy` and `runner`: forward calls to the owners of mailboxes, and own them (RFC-049)."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING

from typer import Option

from postroom.adapters.cli.admin import Admin, ClusterSettings, ListenSettings
from postroom.adapters.cli.filters import SectionFlags, takes_section
from postroom.adapters.cli.running import MAILBOX_SETTINGS, Reload, monitoring, running, tls_certificates
from postroom.adapters.cli.serve import cache_ttl_ms, checked_access, principal_quotas
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import Dev, MetricsPort
from postroom.adapters.compose.access import Access, CheckedAccess
from postroom.adapters.compose.control_plane import check_admins, connect_control_plane
from postroom.adapters.compose.proxy import LocalRunner, ServedProxy, serve_proxy
from postroom.adapters.compose.runner import RunnerSettings, StoreHost, open_runner
from postroom.adapters.compose.serve import SurfaceProtection, unrestricted
from postroom.application.text import pluralize
from postroom.domain.names import check_member

if TYPE_CHECKING:
    from postroom.adapters.compose.ingest import Namespace


DEFAULT_LISTEN = "127.0.0.1:7400"


class ProxySettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of `[proxy]`.

    Arguments:
        listen: `host:port` or `unix:path`.
        proxy_id: id of the proxy, which is unique in the cluster.
        runner_id: id of the runner in the same process; None runs no runner.
        mailboxes: mailboxes that this runner always tries to own.
    """

    listen: str = DEFAULT_LISTEN
    proxy_id: str | None = None
    runner_id: str | None = None
    mailboxes: tuple[str, ...] = ()


@takes_section(
    "proxy",
    ProxySettings,
    proxy_id=Option("--proxy-id", metavar="ID", help="Name of the proxy, unique in the cluster."),
    listen=Option(metavar="ADDRESS", help="gRPC address: host:port or unix:path."),
    address=Option(metavar="HOST:PORT", help="Address at which others reach the proxy; default: --listen."),
    runner_id=Option("--runner-id", metavar="ID", help="Own mailboxes of --store here, too, as this runner."),
    mailboxes=Option("--mailbox", metavar="NAME@PROXY", help="Mailbox that the runner owns; repeatable."),
)
def proxy(
    session: Session,
    options: SectionFlags[ProxySettings],
    admin: Admin = None,
    dev: Dev = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Forward calls to the owners of mailboxes, by the routes that admins report, until interrupted.

    Callers name the mailbox in the metadata postroom-mailbox; their tokens are verified by its owner. With
    --dev, the runner takes calls without tokens.
    """
    settings = options.read(session.settings)
    if settings.proxy_id is None:
        raise InvalidSettings("[proxy] needs a proxy_id; set it, or pass --proxy-id ID.")
    check_member("proxy_id", settings.proxy_id)
    if settings.runner_id is None and (settings.mailboxes or dev):
        raise InvalidSettings("[proxy]: mailboxes and --dev are for its own runner; set runner_id, too.")
    protection = settings.protection("proxy")
    opening: AbstractAsyncContextManager[Access] = nullcontext(unrestricted)
    own = None
    if settings.runner_id is not None:
        own = _runner_settings(session, settings, protection, dev=dev)
        opening = opening if dev else checked_access(session)
    asyncio.run(_serve(session, settings, protection, admin, own, opening, metrics_port))


def _runner_settings(
    session: Session, settings: ProxySettings, protection: SurfaceProtection, *, dev: bool
) -> RunnerSettings:
    """Return the settings of the runner in the same process."""
    flags: dict[str, object] = {
        "runner_id": settings.runner_id,
        "proxy_id": settings.proxy_id,
        "mailboxes": settings.mailboxes or None,
    }
    section = session.settings.section("runner", RunnerSection, flags)
    return runner_settings(session, section, protection, dev=dev)


async def _serve(
    session: Session,
    settings: ProxySettings,
    protection: SurfaceProtection,
    admin: str | None,
    own: RunnerSettings | None,
    opening: AbstractAsyncContextManager[Access],
    metrics_port: int | None,
) -> None:
    stop = asyncio.Event()
    proxy_id = settings.proxy_id or ""
    cluster = session.settings.section("cluster", ClusterSettings, {"admin": admin})
    async with (
        opening as access,
        serve_proxy(
            proxy_id,
            check_admins(cluster.admin),
            settings.listen,
            access=cluster.access(),
            protection=protection,
            address=settings.address,
            runner=None if own is None else LocalRunner(session.writable_store(), own, access),
        ) as served,
    ):
        with monitoring(session, metrics_port, served.monitor):
            async with running(session, stop.set, _reloads(protection, served, access)):
                session.out.result(
                    {"proxy": proxy_id, "address": served.address, "url": served.url},
                    f"Proxy {proxy_id} at {served.url}.",
                )
                session.out.flush()
                await stop.wait()
        session.out.note("Stopping.")


def _reloads(protection: SurfaceProtection, served: ServedProxy, access: Access) -> list[Reload]:
    reloads = [] if protection.tls is None else [tls_certificates(protection.tls)]
    if served.host is not None:
        reloads.append(settings_of_mailboxes(served.host))
    if isinstance(access, CheckedAccess):
        reloads.append(principal_quotas(access))
    return reloads


RUNNER_LISTEN = "127.0.0.1:8983"


class RunnerSection(ListenSettings, frozen=True, kw_only=True):
    """Settings of `[runner]`.

    Arguments:
        listen: `host:port` or `unix:path` of the gRPC server.
        runner_id: name of the runner, unique in the cluster.
        proxy_id: the proxy that it belongs to.
        mailboxes: mailboxes that it always tries to own; it also owns mailboxes that the control plane
            offers.
        namespaces: YAML file of the namespaces that are ingested into its mailboxes.
    """

    listen: str = RUNNER_LISTEN
    runner_id: str | None = None
    proxy_id: str | None = None
    mailboxes: tuple[str, ...] = ()
    namespaces: str | None = None


@takes_section(
    "runner",
    RunnerSection,
    runner_id=Option("--runner-id", metavar="ID", help="Name of the runner, unique in the cluster."),
    proxy_id=Option("--proxy-id", metavar="ID", help="Proxy that the runner belongs to."),
    mailboxes=Option(
        "--mailbox", metavar="NAME@PROXY", help="Mailbox to own whenever its lease is free; repeatable."
    ),
    listen=Option(metavar="ADDRESS", help="gRPC address."),
    address=Option(metavar="HOST:PORT", help="Address at which others reach the runner; default: --listen."),
    namespaces=Option(metavar="FILE", help="Namespace file (YAML) to ingest by."),
)
def runner(
    session: Session,
    options: SectionFlags[RunnerSection],
    admin: Admin = None,
    dev: Dev = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Own and serve mailboxes by leases of the control plane, until interrupted.

    Every runner of a mailbox needs the same store. On SIGTERM, the runner finishes calls in progress and
    releases its leases within 5 s.
    """
    section = options.read(session.settings)
    protection = section.protection("runner")
    settings = runner_settings(session, section, protection, dev=dev)
    opening: AbstractAsyncContextManager[Access] = (
        nullcontext(unrestricted) if dev else checked_access(session)
    )
    reloads = [tls_certificates(protection.tls)] if protection.tls is not None else []
    cluster = session.settings.section("cluster", ClusterSettings, {"admin": admin})
    asyncio.run(_run(session, cluster, settings, opening, reloads, metrics_port))


def runner_settings(
    session: Session, section: RunnerSection, protection: SurfaceProtection, *, dev: bool
) -> RunnerSettings:
    """Return the settings of the runner; raise InvalidRequest for an invalid one."""
    if section.runner_id is None or section.proxy_id is None:
        raise InvalidSettings(
            "A runner needs a name of its own, and that of its proxy; set --runner-id and --proxy-id, or "
            "runner_id and proxy_id of [runner]."
        )
    named = section.mailboxes or ((session.settings.mailbox,) if session.settings.mailbox else ())
    return RunnerSettings(
        runner=section.runner_id,
        proxy=section.proxy_id,
        mailboxes=named,
        listen=section.listen,
        address=section.address,
        owner=session.owner_settings(),
        protection=protection,
        namespaces=_namespaces(section.namespaces),
        cap_cache_ttl_ms=None if dev else cache_ttl_ms(session),
    ).check()


def _namespaces(file: str | None) -> "dict[str, Namespace]":
    """Return the namespaces of a file by their mailboxes."""
    if file is None:
        return {}
    from postroom.adapters.compose.ingest import load_namespaces

    return {each.mailbox: each for each in load_namespaces(file)}


async def _run(
    session: Session,
    cluster: ClusterSettings,
    settings: RunnerSettings,
    opening: AbstractAsyncContextManager[Access],
    reloads: list[Reload],
    metrics_port: int | None,
) -> None:
    store = session.writable_store()
    async with (
        opening as access,
        connect_control_plane(check_admins(cluster.admin), cluster.access()) as control_plane,
        open_runner(store, settings, access, control_plane) as opened,
    ):
        number = pluralize(len(settings.mailboxes), "mailbox", "mailboxes")
        reloads = [settings_of_mailboxes(opened.host), *reloads]
        if isinstance(access, CheckedAccess):
            reloads.append(principal_quotas(access))
        with monitoring(session, metrics_port, opened.monitor()):
            async with running(session, opened.runner.stop, reloads):
                session.out.result(
                    {"runner": settings.runner, "address": opened.url, "mailboxes": list(settings.mailboxes)},
                    f"Runner {settings.runner} of {session.shown_store} at {opened.url}, {number}.",
                )
                session.out.flush()
                await opened.runner.run()


def settings_of_mailboxes(host: StoreHost) -> Reload:
    """Return the reload of the settings of all mailboxes; settings removed from the file stay as they are."""

    async def apply(settings: Settings) -> None:
        await host.reload(settings.mailbox_settings())

    return Reload("mailbox settings", apply, MAILBOX_SETTINGS)
