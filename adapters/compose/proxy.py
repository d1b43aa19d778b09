"""Wiring of a proxy, with or without a runner in the same process."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from postroom.adapters.compose.control_plane import advertised_address
from postroom.adapters.compose.runner import Access, RunnerSettings, StoreHost
from postroom.adapters.compose.serve import unrestricted
from postroom.adapters.sockets.address import SurfaceProtection, check_access
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.leased_mailbox import RunnerIdentity
from postroom.application.cluster.proxy import Proxy
from postroom.application.cluster.runner import Runner
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Metric, Monitor
from postroom.application.service import SurfaceMetrics
from postroom.application.threads import background_task

if TYPE_CHECKING:  # grpcio is an extra
    from postroom.adapters.grpc.node_access import NodeAccess

__all__ = ["LocalRunner", "RunnerSettings", "ServedProxy", "serve_proxy"]

ROUTING_TABLE = "routing_table"


class LocalRunner(NamedTuple):
    """A runner in the process of a proxy, whose mailboxes are served at the address of the proxy.

    Arguments:
        store: of its mailboxes.
        settings: of the runner; it ignores the addresses and certificates of a server, as the proxy serves.
        access: decides what the bearer of a token may do.
    """

    store: str
    settings: RunnerSettings
    access: Access


class ServedProxy(NamedTuple):
    """A proxy that is served.

    Arguments:
        url: URL at which it is served.
        address: address at which admins and other processes reach it.
        proxy: its routing table.
        host: the mailboxes of its own runner; None without one.
    """

    url: str
    address: str
    proxy: Proxy
    monitor: Monitor
    host: StoreHost | None


@asynccontextmanager
async def serve_proxy(
    proxy_id: str,
    admins: Sequence[str],
    listen: str,
    *,
    access: "NodeAccess",
    protection: SurfaceProtection,
    address: str | None = None,
    runner: LocalRunner | None = None,
) -> AsyncIterator[ServedProxy]:
    """Serve a proxy for as long as the context lasts; at the end, calls in progress have 4 s to finish.

    Arguments:
        admins: addresses of admins.
        listen: `host:port` or `unix:path`.
        access: credentials of this process.
        protection: required for an address beyond loopback.
        address: address at which other processes reach it; None takes `listen`.
        runner: a runner in this process; None runs no runner.

    Raises: InvalidRequest for an address that is malformed or not protected, Unavailable when it can't be
        bound, MissingExtra without grpcio.
    """
    with explain_missing_extra("cluster"):
        from postroom.adapters.grpc.admin_client import connect_admins
        from postroom.adapters.grpc.forwarding import ForwardingHandlers, LocalMailboxes
        from postroom.adapters.grpc.handlers import MailboxHandlers
        from postroom.adapters.grpc.owner_channels import OwnerChannels
        from postroom.adapters.grpc.proxy_service import proxy_handlers
        from postroom.adapters.grpc.server import Handlers, serve_handlers
    target = protection.resolve(listen)
    tls = protection.tls_at(target)
    access.check_address(target, tls)
    host, local = None, None
    if runner is not None:
        check_access(target, is_dev=runner.access is unrestricted)
        host = StoreHost(runner.store, runner.settings, runner.access)
        local = LocalMailboxes(host.served, MailboxHandlers(host.served.find, SurfaceMetrics()))
    async with connect_admins(admins, access) as control_plane, AsyncExitStack() as stack:
        proxy = Proxy(proxy_id, control_plane, time.monotonic)
        channels = OwnerChannels(access.open_owner_channel)
        forwarding = ForwardingHandlers(proxy, channels, local)
        handlers: list[Handlers] = [forwarding, *proxy_handlers(proxy, access)]
        url = await stack.enter_async_context(serve_handlers(target, handlers, tls, protection.limits))
        reached_at = advertised_address(url, target, address)
        stack.push_async_callback(proxy.leave)  # leave before the calls in progress end
        await stack.enter_async_context(background_task(proxy.run(reached_at)))
        await stack.enter_async_context(background_task(channels.run(proxy.addresses)))
        owner = None
        if runner is not None and host is not None:
            identity = RunnerIdentity(runner.settings.runner, proxy_id, reached_at)
            owner = Runner(identity, runner.settings.mailboxes, control_plane, host, SystemClock())
            await stack.enter_async_context(_running(owner))

        async def collect() -> list[Metric]:
            own = [] if owner is None or host is None else [*owner.collect(), *await host.collect()]
            return [*proxy.measure(), *forwarding.measure(), *own]

        async def find_missing() -> list[str]:
            missing = [] if proxy.is_ready else [ROUTING_TABLE]
            return missing if owner is None else missing + owner.find_missing()

        yield ServedProxy(url, reached_at, proxy, Monitor(collect, find_missing), host)


@asynccontextmanager
async def _running(runner: Runner) -> AsyncIterator[None]:
    """Own mailboxes for as long as the context lasts, and release them at its end."""
    task = asyncio.create_task(runner.run())
    try:
        yield
    finally:
        runner.stop()
        await task
