"""`postroom proxy`: forward calls to the owners of mailboxes."""

import asyncio
from typing import Annotated

from typer import Option

from postroom.adapters.cli.cluster_settings import DEFAULT_ADMIN, ClusterSettings, ListenSettings
from postroom.adapters.cli.monitoring import MetricsPort, monitoring
from postroom.adapters.cli.running import running
from postroom.adapters.cli.serve import tls_certificates
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.cluster import check_admins
from postroom.adapters.compose.proxy import serve_proxy
from postroom.domain.names import check_member

DEFAULT_LISTEN = "127.0.0.1:7400"


class ProxySettings(ListenSettings, frozen=True, kw_only=True):
    """Settings of `[proxy]`.

    Arguments:
        listen: `host:port` or `unix:path`.
        proxy_id: id of the proxy, which is unique in the cluster.
    """

    listen: str = DEFAULT_LISTEN
    proxy_id: str | None = None


async def proxy(
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
        str | None, Option(metavar="ID", help="Id of the proxy, unique in the cluster.")
    ] = None,
    listen: Annotated[
        str | None,
        Option(metavar="ADDRESS", help=f"gRPC address: host:port or unix:path; default {DEFAULT_LISTEN}."),
    ] = None,
    address: Annotated[
        str | None,
        Option(metavar="ADDRESS", help="Address at which admins and other proxies reach it."),
    ] = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Forward calls to the owners of mailboxes, by the routes that admins report, until interrupted.

    Callers name the mailbox in the metadata postroom-mailbox; their tokens are verified by its owner.
    """
    flags = {"proxy_id": proxy_id, "listen": listen, "address": address}
    settings = session.settings.section("proxy", ProxySettings, flags)
    if settings.proxy_id is None:
        raise InvalidSettings("[proxy] needs a proxy_id; set it, or pass --proxy-id ID.")
    proxy_id = check_member("proxy_id", settings.proxy_id)
    protection = settings.protection("proxy")
    cluster = session.settings.section("cluster", ClusterSettings, {"admin": admin})
    reloads = [] if protection.tls is None else [tls_certificates(protection.tls)]
    stop = asyncio.Event()
    async with serve_proxy(
        proxy_id,
        check_admins(cluster.admin),
        settings.listen,
        access=cluster.access(),
        protection=protection,
        address=settings.address,
    ) as served:
        with monitoring(session, metrics_port, served.monitor):
            async with running(session, stop.set, reloads):
                session.out.result(
                    {"proxy": proxy_id, "address": served.address, "url": served.url},
                    f"Proxy {proxy_id} at {served.url}.",
                )
                session.out.flush()
                await stop.wait()
            session.out.note("Stopping.")
