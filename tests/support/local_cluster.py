"""Owners of mailboxes and a proxy within the test's own process, for clients of a cluster."""

import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from types import TracebackType
from typing import Self

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.grpc.forwarding import LocalMailboxes
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.application.cluster.runner import ServedMailboxes
from postroom.application.service import SurfaceMetrics, unrestricted
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.proxies import Owner, RunningProxy, running_owner, running_proxy, service_of

UNUSED_ADDRESS = "127.0.0.1:1"
"""An address at which nobody listens."""


class LocalCluster:
    """Mailboxes in memory, which move between owners as the test says."""

    def __init__(self) -> None:
        self._control_plane = FixedControlPlane()
        self._opened = AsyncExitStack()
        self._mailboxes: dict[str, OwnedMailbox] = {}
        self._owners: dict[str, Owner] = {}
        self._local = ServedMailboxes()
        self._proxy: RunningProxy | None = None

    async def __aenter__(self) -> Self:
        local = LocalMailboxes(self._local, MailboxHandlers(self._local.find, SurfaceMetrics()))
        self._proxy = await self._opened.enter_async_context(running_proxy(self._control_plane, local=local))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._opened.aclose()

    @property
    def proxy(self) -> str:
        """Return the address of the proxy."""
        assert self._proxy is not None
        return self._proxy.address

    @property
    def forwarded_calls(self) -> float:
        """Return the number of calls that the proxy forwarded."""
        assert self._proxy is not None
        return self._proxy.metric("forwarded", status="OK")

    async def add_owner(self) -> Owner:
        """Start an owner without mailboxes."""
        return await self._opened.enter_async_context(running_owner())

    async def move(self, name: str, owner: Owner, *, epoch: int = 1) -> None:
        """Open a mailbox, or take it from its owner, and give it to one; the proxy learns of it."""
        if name in self._owners:
            self._owners[name].stop_serving(name)
        else:
            self._mailboxes[name] = await self._opened.enter_async_context(open_mailbox("memory:", name))
        owner.serve(self._mailboxes[name])
        self._owners[name] = owner
        assert self._proxy is not None
        self._proxy.proxy.update_route(self._control_plane.lease(name, owner.address, epoch=epoch))

    async def move_to_proxy(self, name: str) -> None:
        """Open a mailbox that only the proxy can reach, since its own process has it."""
        mailbox = await self._opened.enter_async_context(open_mailbox("memory:", name))
        self._local.add(service_of(mailbox, unrestricted))
        assert self._proxy is not None
        self._proxy.proxy.update_route(self._control_plane.lease(name, UNUSED_ADDRESS))

    def take_down(self, name: str) -> None:
        """Leave a mailbox without an owner."""
        self._owners.pop(name).stop_serving(name)
        assert self._proxy is not None
        self._proxy.proxy.remove_route(name, self._control_plane.expire(name))


@contextmanager
def silent_server() -> Iterator[str]:
    """Let connections in and never answer, as a process that is paused does; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        yield f"{host}:{port}"
