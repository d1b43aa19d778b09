"""Where the owners of a namespace's mailboxes are, as a client of a cluster knows it."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import grpc

from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.grpc.methods import ROUTING
from postroom.adapters.grpc.status import error_of
from postroom.adapters.sockets.peers import check_socket_owner
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable

RESOLVE_SECONDS = 1.0
"""Time for the answer of one proxy; one that is paused or cut off costs this once."""
CONNECT_SECONDS = 0.5
"""Time to connect to an owner; if it takes longer, the call goes through a proxy."""
AVOID_SECONDS = 5.0
"""Time for which an owner that could not be reached is called through a proxy."""
RETRY_MS = 200
UNIX = "unix:"

OpenChannel = Callable[[str], grpc.aio.Channel]


class Target(NamedTuple):
    """A server to call: the owner of a mailbox, or a proxy.

    Arguments:
        where: its address, for errors.
    """

    channel: grpc.aio.Channel
    address: str
    where: str


class OwnerRoutes:
    """Routes to the owners of the mailboxes of a namespace, asked of one proxy, or of the next if it fails.

    Arguments:
        proxies: addresses of proxies, `host:port`.
        open_channel: opens a channel to an address.
    """

    def __init__(self, proxies: Sequence[str], namespace: str, open_channel: OpenChannel) -> None:
        self._proxies = list(proxies)
        self._namespace = namespace
        self._open_channel = open_channel
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._routes: dict[str, pb.Route] = {}
        self._forgotten: set[str] = set()
        self._avoided: dict[str, float] = {}
        """Until when an owner's address is not called directly, by the event loop's clock."""
        self._resolving: asyncio.Task[list[str]] | None = None

    @property
    def where(self) -> str:
        """Return the addresses of the proxies, for errors."""
        return ", ".join(self._proxies)

    async def resolve(self) -> list[str]:
        """Ask a proxy for the routes of the namespace; return the names of its mailboxes that have an owner.

        Raises: Unavailable when no proxy answers; else what a proxy refuses the question with.
        """
        if self._resolving is None or self._resolving.done():
            self._resolving = asyncio.create_task(self._resolve())
        return await asyncio.shield(self._resolving)

    async def find(self, mailbox: str) -> Target:
        """Return the server to call for a mailbox: its owner, or a proxy while the owner can't be reached.

        Raises: Unavailable when no proxy answers either.
        """
        if mailbox not in self._routes or mailbox in self._forgotten:
            try:
                await self.resolve()
            except Unavailable:
                if mailbox not in self._routes:
                    raise
        route = self._routes.get(mailbox)
        owner = None if route is None else await self._connect_owner(route.address)
        return owner or self._target(self._proxies[0])  # which knows whether there is such a mailbox

    def forget(self, mailbox: str) -> None:
        """Ask for the route of a mailbox again before its next call."""
        self._forgotten.add(mailbox)

    def avoid(self, target: Target, mailbox: str) -> None:
        """Call another server for a mailbox than the one that did not answer."""
        self.forget(mailbox)
        if target.address in self._proxies:
            self._rotate(target.address)
        else:
            self._avoided[target.address] = asyncio.get_running_loop().time() + AVOID_SECONDS

    async def close(self) -> None:
        """Close all channels."""
        if self._resolving is not None:
            await cancel_and_wait(self._resolving)
        for channel in self._channels.values():
            await channel.close()

    async def _resolve(self) -> list[str]:
        failure: PostroomError = Unavailable(f"No proxy of {self.where} answers.", RETRY_MS)
        for address in tuple(self._proxies):
            target = self._target(address)
            method = ROUTING["resolve"]
            call = target.channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            request = pb.ResolveRequest(namespace=self._namespace)
            try:
                # Both deadlines: gRPC's is not kept by a process whose threads are starved.
                async with asyncio.timeout(2 * RESOLVE_SECONDS):
                    response = await call(request, timeout=RESOLVE_SECONDS)
            except TimeoutError:
                failure = Unavailable(f"{target.where} did not answer in time.", RETRY_MS)
            except grpc.aio.AioRpcError as error:
                failure = error_of(error, target.where)
                if not isinstance(failure, Unavailable):
                    raise failure from error
            else:
                return self._learn(response)
            self._rotate(address)
        raise Unavailable(str(failure), RETRY_MS)

    def _learn(self, response: pb.ResolveResponse) -> list[str]:
        for route in response.routes:
            current = self._routes.get(route.mailbox_id)
            if current is None or route.position >= current.position:
                self._routes[route.mailbox_id] = route
        self._forgotten.clear()
        return [route.mailbox_id for route in response.routes]

    async def _connect_owner(self, address: str) -> Target | None:
        """Return the owner at an address if it can be reached."""
        now = asyncio.get_running_loop().time()
        if not address or self._avoided.get(address, 0) > now:
            return None
        target = self._target(address)
        if target.channel.get_state(try_to_connect=True) == grpc.ChannelConnectivity.READY:
            return target
        try:
            if address.startswith(UNIX):
                check_socket_owner(address.removeprefix(UNIX))
            async with asyncio.timeout(CONNECT_SECONDS):
                await target.channel.channel_ready()
        except (TimeoutError, InvalidRequest, Unavailable):
            self._avoided[address] = now + AVOID_SECONDS
            self._forgotten |= {name for name, route in self._routes.items() if route.address == address}
            return None
        return target

    def _target(self, address: str) -> Target:
        if address not in self._channels:
            self._channels[address] = self._open_channel(address)
        return Target(self._channels[address], address, f"grpc://{address}")

    def _rotate(self, address: str) -> None:
        """Ask another proxy next."""
        self._proxies.remove(address)
        self._proxies.append(address)
