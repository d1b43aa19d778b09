"""Owners and a proxy of a cluster within the test's own process."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.grpc.methods import ROUTING
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.node_handlers import NodeCall, NodeHandlers
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.sockets.address import resolve
from postroom.application.cluster.served_mailboxes import ServedMailboxes
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.service import Service, unrestricted
from postroom.application.surface_metrics import SurfaceMetrics
from postroom.application.write_health import WriteHealth
from postroom.domain.errors import NotFound
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage


async def _no_search(filter_: EventFilter) -> SearchPage:
    raise NotFound("There are no read models.")


class LocalCluster:
    """Mailboxes in memory that servers of this process own, and a proxy that knows their routes.

    Attributes:
        routes: address of the owner by mailbox, as the proxy knows it.
        proxy: address of the proxy.
    """

    def __init__(self) -> None:
        self.routes: dict[str, str] = {}
        self.proxy = ""
        self.questions = 0
        self.at_proxy = ServedMailboxes()
        self._position = 0
        self._opened = AsyncExitStack()
        self._mailboxes: dict[str, Postroom] = {}
        self._ends: dict[str, Callable[[], None]] = {}

    async def __aenter__(self) -> Self:
        routing = NodeHandlers({"resolve": self._resolve}, ROUTING, NodeAccess(None), public=["resolve"])
        self.proxy = await self._serve([routing, MailboxHandlers(self.at_proxy.find, SurfaceMetrics())])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    async def add_server(self) -> tuple[str, ServedMailboxes]:
        """Start a server without mailboxes; return its address, and what it serves."""
        served = ServedMailboxes()
        return await self._serve([MailboxHandlers(served.find, SurfaceMetrics())]), served

    async def own(self, name: str, address: str, served: ServedMailboxes, *, is_known: bool = True) -> None:
        """Move a mailbox to a server.

        Arguments:
            is_known: whether the proxy learns of it.
        """
        if name not in self._mailboxes:
            self._mailboxes[name] = await self._opened.enter_async_context(open_mailbox("memory:", name))
        else:
            self._ends.pop(name)()
        mailbox = self._mailboxes[name]
        service = Service(
            mailbox,
            unrestricted(mailbox, _no_search),
            TopicPolicy(),
            asyncio.Event(),
            DeliveryWindows(),
            SurfaceMetrics(),
            WriteHealth(),
        )
        self._ends[name] = served.add(service)
        if is_known:
            self.routes[name] = address

    async def _serve(self, handlers: list[NodeHandlers | MailboxHandlers]) -> str:
        url = await self._opened.enter_async_context(
            serve_handlers(resolve("127.0.0.1:0"), handlers, stop_seconds=0.1)
        )
        return url.removeprefix("grpc://")

    async def _resolve(self, request: pb.ResolveRequest, call: NodeCall) -> pb.ResolveResponse:
        self.questions += 1
        self._position += 1
        response = pb.ResolveResponse(position=self._position)
        for name, address in self.routes.items():
            if name.partition("@")[0] == request.namespace:
                response.routes.add(mailbox_id=name, address=address, position=self._position)
        return response


@contextmanager
def silent_server() -> Iterator[str]:
    """Let connections in and never answer, as a process that is paused does; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"


def unused_address() -> str:
    """Return an address at which nobody listens."""
    return "127.0.0.1:1"
