"""A gRPC channel to the owner of a mailbox, wherever it is: directly, or through a proxy."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from postroom.adapters.grpc.metadata import MEMBERS_KEY
from postroom.adapters.grpc.owner_routes import OwnerRoutes, Target
from postroom.adapters.grpc.status import DETAILS_KEY, error_of
from postroom.application.cluster.namespace_members import current_generation
from postroom.domain.errors import Unavailable, WrongOwner

ATTEMPT_SECONDS = 5.0
"""Time without an answer after which an attempt is given up, and its server avoided, besides long polls."""
MOVED_RETRY_MS = 100
MAX_SILENCE = 2
"""Heartbeats of a stream without which its server is avoided."""
MAX_MOVES = 2
"""Attempts of a call while its mailbox moves; then it is repeated with a pause, by `MailboxClient`."""
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class RoutedChannel:
    """What `GrpcTransport` uses of a channel, with a choice of the server for every call.

    A call that was answered with WrongOwner took no effect: its route is refreshed, and it is made again. A
    call that failed otherwise is left to `MailboxClient`, which knows whether it may be repeated; the
    repetition goes elsewhere.
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
        """Return whether an error says that the mailbox is elsewhere; note what it says of the server."""
        if error_of(error, target.where).code == WrongOwner.code:
            self._routes.forget(self._mailbox)
            return True
        if error.code() in _GONE:
            if any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
                self._routes.forget(self._mailbox)  # the server is there, but can't serve the mailbox now
            else:
                self._routes.avoid(target, self._mailbox)
        return False

    def avoid(self, target: Target) -> None:
        """Call another server than one that is silent."""
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
        silence: seconds without an answer after which a server that is left is avoided.
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
