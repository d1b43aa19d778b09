"""Proxies, and owners of mailboxes, that serve within the test's own process."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.grpc.forwarding import ForwardingHandlers, LocalMailboxes
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.owner_channels import OwnerChannels
from postroom.adapters.grpc.proxy_service import proxy_handlers
from postroom.adapters.grpc.server import Handlers, serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.application.cluster.proxy import Proxy
from postroom.application.cluster.runner import ServedMailboxes
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.metrics import Metric
from postroom.application.page import Page
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.application.service import OpenSession, Service, SurfaceMetrics, WriteHealth, unrestricted
from postroom.application.threads import background_task
from postroom.domain.search import FoundMessage
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.waiting import SECONDS, until


def service_of(
    mailbox: OwnedMailbox,
    access: Callable[[OwnedMailbox, Callable[..., Awaitable[Page[FoundMessage]]]], OpenSession],
) -> Service:
    return Service(
        mailbox,
        access(mailbox, mailbox.search_messages),
        asyncio.Event(),
        DeliveryWindows(),
        SurfaceMetrics(),
        WriteHealth(),
    )


class Owner:
    """A process that serves mailboxes in memory.

    Attributes:
        address: `host:port`.
    """

    def __init__(self, address: str, served: ServedMailboxes, stack: AsyncExitStack) -> None:
        self.address = address
        self._served = served
        self._stack = stack
        self._removals: dict[str, Callable[[], None]] = {}

    async def own(self, name: str) -> OwnedMailbox:
        """Open a mailbox, and serve it."""
        mailbox = await self._stack.enter_async_context(open_mailbox("memory:", name))
        self.serve(mailbox)
        return mailbox

    def serve(self, mailbox: OwnedMailbox) -> None:
        """Serve a mailbox."""
        self._removals[mailbox.name] = self._served.add(service_of(mailbox, unrestricted))

    def stop_serving(self, name: str) -> None:
        """Answer calls to a mailbox as a process that does not own it."""
        self._removals.pop(name)()


@asynccontextmanager
async def running_owner(address: str = "127.0.0.1:0") -> AsyncIterator[Owner]:
    """Serve mailboxes at an address."""
    served = ServedMailboxes()
    async with AsyncExitStack() as mailboxes:
        handlers = MailboxHandlers(served.find, SurfaceMetrics())
        async with serve_handlers(resolve(address), [handlers], stop_seconds=0.5) as url:
            yield Owner(url.partition("://")[2], served, mailboxes)


class RunningProxy(NamedTuple):
    """A proxy that serves at an address."""

    address: str
    proxy: Proxy
    forwarding: ForwardingHandlers
    channels: OwnerChannels

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have some labels."""
        samples = [
            sample
            for metric in (*self.proxy.measure(), *self.forwarding.measure())
            if metric.name == f"postroom_proxy_{name}"
            for sample in metric.samples
        ]
        return sum(
            value
            for each, value in samples
            if isinstance(value, int | float) and labels.items() <= each.items()
        )


@asynccontextmanager
async def running_proxy(
    control_plane: LeaseAdmin,
    *,
    access: NodeAccess | None = None,
    local: LocalMailboxes | None = None,
    waits: bool = True,
    connect_seconds: float = SECONDS,
) -> AsyncIterator[RunningProxy]:
    """Serve a proxy.

    Arguments:
        waits: return once it has a routing table.
        connect_seconds: time in which an owner must accept a connection.
    """
    access = access or NodeAccess()
    proxy = Proxy("proxy-1", control_plane, time.monotonic)
    channels = OwnerChannels(access.open_owner_channel, connect_seconds)
    forwarding = ForwardingHandlers(proxy, channels, local)
    handlers: list[Handlers] = [forwarding, *proxy_handlers(proxy, access)]
    async with serve_handlers(resolve("127.0.0.1:0"), handlers, stop_seconds=0.5) as url:
        address = url.partition("://")[2]
        async with background_task(proxy.run(address)):
            if waits:
                await until(lambda: proxy.is_ready)
            yield RunningProxy(address, proxy, forwarding, channels)


async def proxy_metrics() -> list[Metric]:
    """Return the metrics of a proxy in which everything has happened that has a label of its own."""
    control_plane = FixedControlPlane()
    served = ServedMailboxes()
    local = LocalMailboxes(served, MailboxHandlers(served.find, SurfaceMetrics()))
    async with (
        open_mailbox("memory:", "own@one") as mailbox,
        running_owner() as owner,
        running_proxy(control_plane, local=local) as proxy,
    ):
        served.add(service_of(mailbox, unrestricted))
        await owner.own("other@one")
        proxy.proxy.update_route(control_plane.lease("other@one", owner.address))
        for name in ("own@one", "other@one"):
            async with connect_grpc(proxy.address, timeout_ms=60_000, mailbox=name):
                pass
        return [*proxy.proxy.measure(), *proxy.forwarding.measure()]
