"""Wiring of a proxy."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from postroom.adapters.compose.cluster import advertised_address
from postroom.adapters.sockets.protection import Protection
from postroom.application.background import background_task
from postroom.application.cluster.proxy import Proxy
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Metric
from postroom.application.monitor import Monitor

if TYPE_CHECKING:  # grpcio is an extra
    from postroom.adapters.grpc.forwarding import LocalMailboxes
    from postroom.adapters.grpc.node_access import NodeAccess

ROUTING_TABLE = "routing_table"


class ServedProxy(NamedTuple):
    """A proxy that is served.

    Arguments:
        url: at which it is served.
        address: at which admins and other processes reach it.
        proxy: its routing table.
    """

    url: str
    address: str
    proxy: Proxy
    monitor: Monitor


@asynccontextmanager
async def serve_proxy(
    proxy_id: str,
    admins: Sequence[str],
    listen: str,
    *,
    access: "NodeAccess",
    protection: Protection,
    address: str | None = None,
    local: "LocalMailboxes | None" = None,
) -> AsyncIterator[ServedProxy]:
    """Serve a proxy for as long as the context lasts; at the end, calls in progress have 4 s to finish.

    Arguments:
        admins: addresses of admins.
        listen: `host:port` or `unix:path`.
        access: credentials of this process.
        protection: what an address beyond loopback needs.
        address: at which other processes reach it; None takes `listen`.
        local: mailboxes of this process; None for none.

    Raises: InvalidRequest for an address that is malformed or not protected, Unavailable when it can't be
        bound, MissingExtra without grpcio.
    """
    with explain_missing_extra("cluster"):
        from postroom.adapters.grpc.admin_client import connect_admins
        from postroom.adapters.grpc.forwarding import ForwardingHandlers
        from postroom.adapters.grpc.owner_channels import OwnerChannels
        from postroom.adapters.grpc.proxy_service import proxy_handlers
        from postroom.adapters.grpc.server import Handlers, serve_handlers
    target = protection.resolve(listen)
    tls = protection.tls_at(target)
    access.check_address(target, tls)
    async with connect_admins(admins, access) as control_plane:
        proxy = Proxy(proxy_id, control_plane, time.monotonic)
        channels = OwnerChannels(lambda owner: access.open_channel(owner, is_shared=False))
        forwarding = ForwardingHandlers(proxy, channels, local)
        handlers: list[Handlers] = [forwarding, *proxy_handlers(proxy, access)]

        async def collect() -> list[Metric]:
            return [*proxy.measure(), *forwarding.measure()]

        async def find_missing() -> list[str]:
            return [] if proxy.is_ready else [ROUTING_TABLE]

        async with serve_handlers(target, handlers, tls) as url:
            reached_at = advertised_address(url, target, address)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(proxy.leave)  # before the calls in progress end
                await stack.enter_async_context(background_task(proxy.run(reached_at)))
                await stack.enter_async_context(background_task(channels.run(proxy.addresses)))
                yield ServedProxy(url, reached_at, proxy, Monitor(collect, find_missing))
