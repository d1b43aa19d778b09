"""A gRPC channel to the owner of a mailbox, by the routes that a client of a cluster knows."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import grpc

from postroom.adapters.grpc.calls import DETAILS_KEY, MEMBERS_KEY, ROUTING, error_of
from postroom.adapters.grpc.cluster.v1 import cluster_pb2 as pb
from postroom.adapters.sockets.address import check_socket_owner
from postroom.application.cluster.namespace_members import current_generation
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, PostroomError, Unavailable, WrongOwner

RESOLVE_SECONDS = 1.0
"""Time for one proxy to answer; a paused or unreachable proxy costs this time once."""
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
    """Routes to the owners of a namespace's mailboxes; it asks one proxy for them, or the next if that fails.

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

        Raises: Unavailable when no proxy answers; otherwise the error with which a proxy refuses.
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
        return owner or self._target(self._proxies[0])  # the proxy knows whether the mailbox exists

    def forget(self, mailbox: str) -> None:
        """Ask for the route of a mailbox again before its next call."""
        self._forgotten.add(mailbox)

    def avoid(self, target: Target, mailbox: str) -> None:
        """Avoid a server that did not answer in later calls for a mailbox."""
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


ATTEMPT_SECONDS = 5.0
"""Time without an answer, besides the wait of a long poll, after which a server is given up and avoided."""
MOVED_RETRY_MS = 100
MAX_SILENCE = 2
"""Number of missed heartbeats of a stream after which its server is avoided."""
MAX_MOVES = 2
"""Attempts of a call while its mailbox moves; then it is repeated with a pause, by `MailboxClient`."""
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class RoutedChannel:
    """A `CallFactory` that chooses the server for every call.

    A call that was answered with WrongOwner had no effect: the channel refreshes the route and makes the call
    again. Any other failure is raised to `MailboxClient`, which knows whether the call may be repeated; the
    repetition goes to another server.
    """

    def __init__(self, routes: OwnerRoutes, mailbox: str) -> None:
        self._routes = routes
        self._mailbox = mailbox
        self._methods: dict[tuple[str, str], Any] = {}
        """Methods by the address of the server and their paths."""

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with one answer."""

        async def call(request: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
            for _ in range(MAX_MOVES):
                target = await self._routes.find(self._mailbox)
                key = target.address, method
                if (send := self._methods.get(key)) is None:
                    send = target.channel.unary_unary(method, request_serializer, response_deserializer)
                    self._methods[key] = send
                try:
                    async with asyncio.timeout(ATTEMPT_SECONDS + getattr(request, "wait_ms", 0) / 1_000):
                        return await send(request, metadata=self._metadata(metadata))
                except grpc.aio.AioRpcError as error:
                    if not self.has_moved(error, target):
                        raise
                except TimeoutError:
                    self._routes.avoid(target, self._mailbox)
                    raise Unavailable(
                        f"{target.where} did not answer within {ATTEMPT_SECONDS:.0f} s; whether the call "
                        "took effect is unknown.",
                        MOVED_RETRY_MS,
                    ) from None
            raise self.moving()

        return call

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with a stream of answers."""

        def call(request: Any, metadata: tuple[tuple[str, str], ...]) -> _RoutedStream:
            async def start() -> tuple[Target, Any]:
                target = await self._routes.find(self._mailbox)
                send = target.channel.unary_stream(method, request_serializer, response_deserializer)
                return target, send(request, metadata=self._metadata(metadata))

            return _RoutedStream(self, start, MAX_SILENCE * request.heartbeat_ms / 1_000)

        return call

    def has_moved(self, error: grpc.aio.AioRpcError, target: Target) -> bool:
        """Return whether an error says that the mailbox has moved; note what it says about the server."""
        if error_of(error, target.where).code == WrongOwner.code:
            self._routes.forget(self._mailbox)
            return True
        if error.code() in _GONE:
            if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
                self._routes.forget(self._mailbox)  # the server answers, but can't serve the mailbox now
            else:
                self._routes.avoid(target, self._mailbox)
        return False

    def avoid(self, target: Target) -> None:
        """Avoid a silent server in later calls."""
        self._routes.avoid(target, self._mailbox)

    def moving(self) -> Unavailable:
        """Return the error of a call that found no owner."""
        return Unavailable(f"Mailbox {self._mailbox} is changing its owner; repeat the call.", MOVED_RETRY_MS)

    def _metadata(self, metadata: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        generation = current_generation()
        return metadata if generation is None else (*metadata, (MEMBERS_KEY, str(generation)))


class _RoutedStream:
    """A call with a stream of answers that begins when the first one is read.

    Arguments:
        silence: seconds without an answer after which later calls avoid the server.
    """

    def __init__(
        self, channel: RoutedChannel, start: Callable[[], Awaitable[tuple[Target, Any]]], silence: float
    ) -> None:
        self._channel = channel
        self._start = start
        self._silence = silence
        self._started: tuple[Target, Any] | None = None
        self._heard_at = 0.0

    async def read(self) -> Any:
        """Return the next answer, or EOF."""
        if self._started is None:
            self._started = await self._start()
        target, call = self._started
        self._heard_at = asyncio.get_running_loop().time()
        try:
            return await call.read()
        except grpc.aio.AioRpcError as error:
            if self._channel.has_moved(error, target):
                raise self._channel.moving() from error
            raise

    def cancel(self) -> None:
        """End the call."""
        if self._started is not None:
            target, call = self._started
            call.cancel()
            if asyncio.get_running_loop().time() - self._heard_at > self._silence:
                self._channel.avoid(target)
