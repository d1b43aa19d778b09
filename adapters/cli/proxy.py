"""`postroom proxy`: forward calls to the owners of mailboxes (RFC-049)."""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Annotated

from typer import Option

from postroom.adapters.cli.cluster_settings import DEFAULT_ADMIN, ClusterSettings, ListenSettings
from postroom.adapters.cli.monitoring import MetricsPort, monitoring
from postroom.adapters.cli.runner import RunnerSection, runner_settings, settings_of_mailboxes
from postroom.adapters.cli.running import Reload, running
from postroom.adapters.cli.serve import checked_access, principal_quotas, tls_certificates
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.access import Access, CheckedAccess
from postroom.adapters.compose.cluster import check_admins
from postroom.adapters.compose.proxy import LocalRunner, RunnerSettings, ServedProxy, serve_proxy
from postroom.adapters.compose.serve import Protection, unrestricted
from postroom.domain.names import check_member

DEFAULT_LISTEN = "127.0.0.1:7400"


class ProxySettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of `[proxy]`.

    Arguments:
        listen: `host:port` or `unix:path`.
        proxy_id: id of the proxy, which is unique in the cluster.
        runner_id: id of the runner in the same process; None for none.
        mailboxes: that this runner always tries to own.
    """

    listen: str = DEFAULT_LISTEN
    proxy_id: str | None = None
    runner_id: str | None = None
    mailboxes: tuple[str, ...] = ()


def proxy(
    session: Session,
    admin: Annotated[
        str | None,
        Option(
            "--admin",
            "--admin-endpoint",
            metavar="HOST:PORT,...",
            help=f"Admins of the cluster; default {DEFAULT_ADMIN}. [cluster.admin]",
        ),
    ] = None,
    proxy_id: Annotated[
        str | None, Option("--proxy-id", metavar="ID", help="Name of the proxy, unique in the cluster.")
    ] = None,
    listen: Annotated[
        str | None,
        Option(metavar="ADDRESS", help=f"gRPC address: host:port or unix:path; default {DEFAULT_LISTEN}."),
    ] = None,
    address: Annotated[
        str | None,
        Option(metavar="HOST:PORT", help="Address at which others reach the proxy; default: --listen."),
    ] = None,
    runner_id: Annotated[
        str | None,
        Option("--runner-id", metavar="ID", help="Own mailboxes of --store here, too, as this runner."),
    ] = None,
    mailbox: Annotated[
        list[str] | None,
        Option("--mailbox", metavar="NAME@PROXY", help="Mailbox that the runner owns; repeatable."),
    ] = None,
    dev: Annotated[
        bool, Option("--dev", help="Let every process of this machine use the runner without tokens.")
    ] = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Forward calls to the owners of mailboxes, by the routes that admins report, until interrupted.

    Callers name the mailbox in the metadata postroom-mailbox; their tokens are verified by its owner.
    """
    flags: dict[str, object] = {
        "proxy_id": proxy_id,
        "listen": listen,
        "address": address,
        "runner_id": runner_id,
        "mailboxes": tuple(mailbox) if mailbox else None,
    }
    settings = session.settings.section("proxy", ProxySettings, flags)
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
    session: Session, settings: ProxySettings, protection: Protection, *, dev: bool
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
    protection: Protection,
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


def _reloads(protection: Protection, served: ServedProxy, access: Access) -> list[Reload]:
    reloads = [] if protection.tls is None else [tls_certificates(protection.tls)]
    if served.host is not None:
        reloads.append(settings_of_mailboxes(served.host))
    if isinstance(access, CheckedAccess):
        reloads.append(principal_quotas(access))
    return reloads
