"""Forwarding of `postroom.v1` calls to the owners of mailboxes, as bytes (RFC-049 Query Forwarding)."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.message import Message

from postroom.adapters.grpc.calls import (
    FORWARDED_KEY,
    MAILBOX_KEY,
    METHODS,
    NAMES,
    read_metadata,
    read_text,
    status_code,
)
from postroom.adapters.grpc.connections import GrpcConnections
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.grpc.owner_channels import (
    Context,
    ForwardedCall,
    Metadata,
    OwnerChannels,
    OwnerUnreachable,
    abort_alike,
    forwarded_metadata,
    is_outdated,
    refuse,
    within,
)
from postroom.application.cluster.proxy import Proxy
from postroom.application.cluster.runner import ServedMailboxes
from postroom.application.metrics import Metric, counter, gauge
from postroom.application.telemetry import logger
from postroom.domain.errors import InternalError, PostroomError, Saturated, Unavailable, WrongOwner
from postroom.domain.lease.routing import Route

PREFIX = "/postroom.v1."
MAX_CALLS = 16_384
"""Calls in progress; a stream or long poll is one."""
MAX_REQUEST_BYTES = 256 << 20
"""Size of the requests of all calls in progress."""
ENDED_AT_STOP = ("recv", "recv_stream", "wait_for_result")
"""The methods that wait for messages, and end when the proxy stops."""
OTHER = "other"
"""Label of methods that only a newer owner has."""

Handler = Callable[[bytes, Context], Awaitable[Any]]
Send = Callable[[ForwardedCall, Route], Awaitable[bytes | None]]


class LocalMailboxes(NamedTuple):
    """Mailboxes that this process owns.

    Arguments:
        names: names of the mailboxes that it owns at the moment.
        handlers: handlers of the calls to them, which take encoded requests.
    """

    names: ServedMailboxes
    handlers: MailboxHandlers


class ForwardingHandlers(grpc.GenericRpcHandler):
    """Handlers of all calls of `postroom.v1`; requests, answers, metadata and statuses pass unchanged.

    If the called process is no longer the owner, or the call could not be sent, the proxy asks an admin for
    the owner, and sends the call once more. A call that another proxy forwarded is not forwarded again.

    Arguments:
        proxy: the routes.
        channels: the connections to owners.
        local: mailboxes of this process; None if it owns none.
    """

    names = NAMES

    def __init__(self, proxy: Proxy, channels: OwnerChannels, local: LocalMailboxes | None = None) -> None:
        self._proxy = proxy
        self._channels = channels
        self._local = local
        self._names = {method.path: name for name, method in METHODS.items()}
        self._waiting: set[asyncio.Task[Any]] = set()
        self._connections = GrpcConnections()
        self._is_stopping = False
        self._calls_in_progress = 0
        self._request_bytes = 0
        self._forwarded: Counter[tuple[str, str]] = Counter()
        self._answered: Counter[str] = Counter()
        self._retries = 0

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a method by its path; None for a method of another service."""
        path = handler_call_details.method
        if not path.startswith(PREFIX):
            return None
        name = self._names.get(path, OTHER)
        # On the wire, a single answer is a stream of one, so this also serves a method that only the owner
        # knows.
        is_stream = name == OTHER or METHODS[name].is_stream
        local = None if self._local is None else self._local.handlers.service(handler_call_details)
        make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
        send: Send = self._send_stream if is_stream else self._send_unary
        return make(
            self._run(name, path, send, _function(local)),
            request_deserializer=None,
            response_serializer=_encode,
        )

    def watch(self, connections: GrpcConnections) -> None:
        """Note connections with a valid token; see `Handlers.watch`.

        The owner verifies the token, so it counts as valid while the owner has not refused it.
        """
        self._connections = connections
        if self._local is not None:
            self._local.handlers.watch(connections)

    def end_waits(self) -> None:
        """End streams and long polls, with an error that makes their callers reconnect."""
        self._is_stopping = True
        for task in self._waiting:
            task.cancel()

    async def close(self) -> None:
        """Close the connections to owners."""
        await self._channels.close()

    def measure(self) -> list[Metric]:
        """Return the metrics of calls."""
        return [
            Metric(
                "postroom_proxy_forwarded",
                "counter",
                "Calls that were forwarded, or refused by this proxy, by method and status.",
                [
                    ({"method": method, "status": status}, number)
                    for (method, status), number in sorted(self._forwarded.items())
                ],
            ),
            Metric(
                "postroom_proxy_answered",
                "counter",
                "Calls to mailboxes of this process, by method.",
                [({"method": method}, number) for method, number in sorted(self._answered.items())],
            ),
            counter("postroom_proxy_retries", "Calls that were sent again, to another owner.", self._retries),
            gauge("postroom_proxy_calls_in_progress", "Calls in progress.", self._calls_in_progress),
            gauge("postroom_proxy_owner_connections", "Connections to owners.", self._channels.count),
        ]

    def _run(self, name: str, path: str, send: Send, answer_here: Handler | None) -> Handler:
        """Return the handler of a method, which turns errors of this proxy into statuses.

        Arguments:
            answer_here: handler of the method for mailboxes of this process; None if it owns none.
        """

        async def run(data: bytes, context: Context) -> Any:
            pairs: Metadata = context.invocation_metadata() or ()  # type: ignore[assignment]  # no values in the stubs
            caller = read_metadata(pairs)
            with self._end_at_stop(name) as task:
                try:
                    with self._admit(len(data)):
                        mailbox = self._mailbox_of(caller)
                        if answer_here is not None and self._is_local(mailbox):
                            self._answered[name] += 1
                            return await answer_here(data, context)
                        if FORWARDED_KEY in caller:
                            raise WrongOwner(mailbox)
                        metadata = forwarded_metadata(pairs, mailbox)
                        self._connections.note(context.peer())
                        call = ForwardedCall(name, path, data, context, mailbox, metadata)
                        answer = await self._forward(call, send)
                        self._forwarded[name, "OK"] += 1
                        return answer
                except grpc.aio.AioRpcError as error:
                    self._forwarded[name, error.code().name] += 1
                    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                        self._connections.forget(context.peer())
                    return await abort_alike(context, error)
                except grpc.aio.AbortError:  # a mailbox of this process, which counts it
                    raise
                except PostroomError as error:
                    failure = error
                except asyncio.CancelledError:
                    if not self._is_stopping:
                        raise
                    task.uncancel()
                    failure = Unavailable("The proxy is stopping; connect again.")
                except Exception:
                    logger().exception("grpc.call_failed")
                    failure = InternalError(
                        "The call failed because of a defect in Postroom; the proxy's log has it."
                    )
            self._forwarded[name, status_code(failure).name] += 1
            self._connections.forget(context.peer())
            return await refuse(context, failure, caller)

        return run

    @contextmanager
    def _end_at_stop(self, name: str) -> Iterator["asyncio.Task[Any]"]:
        """Cancel a call when the proxy stops, if it waits for messages."""
        task = asyncio.current_task()
        assert task is not None
        if name in ENDED_AT_STOP:
            self._waiting.add(task)
        try:
            yield task
        finally:
            self._waiting.discard(task)

    @contextmanager
    def _admit(self, size: int) -> Iterator[None]:
        """Count a call; raise Saturated when too many are in progress."""
        if self._calls_in_progress >= MAX_CALLS or self._request_bytes + size > MAX_REQUEST_BYTES:
            raise Saturated(
                f"{self._calls_in_progress} calls through this proxy are in progress; retry.", 1_000
            )
        self._calls_in_progress += 1
        self._request_bytes += size
        try:
            yield
        finally:
            self._calls_in_progress -= 1
            self._request_bytes -= size

    def _mailbox_of(self, caller: dict[str, str]) -> str:
        name = caller.get(MAILBOX_KEY)
        return self._proxy.only_mailbox() if name is None else read_text(name)

    def _is_local(self, mailbox: str) -> bool:
        return self._local is not None and mailbox in self._local.names

    async def _forward(self, call: ForwardedCall, send: Send) -> bytes | None:
        """Send a call to the owner of its mailbox, and once more if the mailbox has another owner by then.

        Raises: AioRpcError for a status that the caller gets unchanged, or a PostroomError.
        """
        route = await self._proxy.find_route(call.mailbox)
        try:
            return await send(call, route)
        except (OwnerUnreachable, grpc.aio.AioRpcError) as error:
            failure = error
        if is_outdated(failure):
            self._proxy.request_refresh()
        if not call.may_repeat(failure):
            raise call.explain(route, failure)
        newer = await self._proxy.find_newer_route(route)
        if (newer.address, newer.epoch) == (route.address, route.epoch):
            raise call.explain(route, failure)
        self._retries += 1
        try:
            return await send(call, newer)
        except (OwnerUnreachable, grpc.aio.AioRpcError) as error:
            raise call.explain(newer, error) from None

    async def _send_unary(self, call: ForwardedCall, route: Route) -> bytes:
        with self._channels.use(route.address) as connection:
            await connection.wait_until_ready()
            sent = connection.unary(call.path)(call.data, **call.options)
            answer: bytes = await within(sent)
            await call.begin_answer(await sent.initial_metadata())
            call.end_answer(await sent.trailing_metadata())
            return answer

    async def _send_stream(self, call: ForwardedCall, route: Route) -> None:
        with self._channels.use(route.address) as connection:
            await connection.wait_until_ready()
            sent = connection.stream(call.path)(call.data, **call.options)
            try:
                await call.begin_answer(await within(sent.initial_metadata()))
                while (item := await within(sent.read())) is not grpc.aio.EOF:
                    await call.write(item)
                call.end_answer(await sent.trailing_metadata())
            finally:
                sent.cancel()


def _function(handler: "grpc.RpcMethodHandler[Any, Any] | None") -> Handler | None:
    """Return the function of a gRPC handler, or None without a handler."""
    if handler is None:
        return None
    return cast("Handler", handler.unary_stream if handler.response_streaming else handler.unary_unary)


def _encode(answer: Message | bytes) -> bytes:
    """Return an owner's answer unchanged, and encode an answer of a mailbox of this process."""
    return answer if isinstance(answer, bytes) else answer.SerializeToString()
