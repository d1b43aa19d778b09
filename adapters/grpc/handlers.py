"""Handlers of `postroom.v1`: they find the mailbox of a call, and turn errors into statuses."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from postroom.adapters.grpc.calls import (
    DETAILS_KEY,
    MAILBOX_KEY,
    METHODS,
    NAMES,
    Method,
    read_metadata,
    read_text,
    status_code,
    status_of,
)
from postroom.adapters.grpc.connections import GrpcConnections
from postroom.adapters.grpc.messages import read_request
from postroom.adapters.grpc.service import Call, Context, MailboxService
from postroom.application.caller import read_bearer
from postroom.application.service import FindService, Service, Session, SurfaceMetrics
from postroom.application.telemetry import logger
from postroom.application.threads import cancel_and_wait
from postroom.application.tracing import Span, context_of, correlate_task, tracer
from postroom.domain.errors import InternalError, NotFound, PostroomError, Unauthenticated, Unavailable

CORR_ID_KEY = "x-corr-id"
"""Metadata with the correlation id of a call, of the caller and in the trailers of the answer."""
ENDED_AT_STOP = ("recv", "recv_stream", "wait_for_result")
"""The methods that wait for messages, and end when their mailbox is served no longer."""
MODE_METADATA = (("x-postroom-mode", "dev"),)
"""Metadata of all answers of a server with `--dev`; a unary call has it in the trailers at no extra cost."""

Metadata = dict[str, str]
Trailers = tuple[tuple[str, str], ...]
Runner = Callable[[Any, Context], Awaitable[Any]]


class _ServedMailbox:
    """A mailbox that is served, and the calls that wait for its messages."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.calls = MailboxService(service)
        self.waiting: set[asyncio.Task[Any]] = set()
        self.watch: asyncio.Task[None] | None = None

    def end_waits(self) -> None:
        """End streams and long polls, with an error that makes their callers reconnect."""
        self.calls.is_stopping = True
        for task in self.waiting:
            task.cancel()


class MailboxHandlers(grpc.GenericRpcHandler):
    """Handlers of all methods by their paths, for one mailbox or for several that come and go.

    The waits for messages of a mailbox end when its service begins to stop.

    Arguments:
        find_service: returns the service of the mailbox that a call names.
        metrics: metrics of calls whose mailbox was not found.
    """

    names = NAMES

    def __init__(self, find_service: FindService, metrics: SurfaceMetrics) -> None:
        self._find_service = find_service
        self._metrics = metrics
        self._handlers = {
            method.path: _method_handler(method, self._run(name, method.request))
            for name, method in METHODS.items()
        }
        self._served: dict[str, _ServedMailbox] = {}
        self._connections = GrpcConnections()

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a path."""
        return self._handlers.get(handler_call_details.method)

    def watch(self, connections: GrpcConnections) -> None:
        """Note connections with a valid token; see `Handlers.watch`."""
        self._connections = connections

    def end_waits(self) -> None:
        """End the streams and long polls of all mailboxes."""
        for served in self._served.values():
            served.end_waits()

    async def close(self) -> None:
        """Wait until the unsettled messages of ended streams are ready again."""
        for served in list(self._served.values()):
            await served.calls.drain()
            if served.watch is not None:
                await cancel_and_wait(served.watch)

    def _find(self, caller: Metadata) -> _ServedMailbox:
        """Return the mailbox that a call names.

        Raises: as `find_service` does.
        """
        name = caller.get(MAILBOX_KEY)
        service = self._find_service(None if name is None else read_text(name))
        served = self._served.get(service.mailbox.name)
        if served is None or served.service is not service:
            served = self._served[service.mailbox.name] = _ServedMailbox(service)
            served.watch = asyncio.create_task(self._forget_when_stopping(served))
        return served

    async def _forget_when_stopping(self, served: _ServedMailbox) -> None:
        await served.service.stopping.wait()
        served.end_waits()
        await served.calls.drain()
        name = served.service.mailbox.name
        if self._served.get(name) is served:
            del self._served[name]

    def _run(self, name: str, kind: type[Message]) -> Runner:
        """Return a handler of encoded requests that checks tokens, and turns errors into statuses."""

        async def run(data: bytes, context: Context) -> Any:
            metadata = context.invocation_metadata() or ()  # each call of the method builds it anew
            caller = read_metadata(metadata)
            corr_id = correlate_task(caller.get(CORR_ID_KEY))
            with tracer().serve(METHODS[name].path[1:], "grpc", context_of(caller)) as span:
                trailers: Trailers = ((CORR_ID_KEY, corr_id),)
                try:
                    served = self._find(caller)
                except PostroomError as error:
                    return await abort(context, error, self._metrics, span, trailers)
                if served.service.is_dev:
                    trailers += MODE_METADATA
                context.set_trailing_metadata(trailers)
                tokens = [str(value) for key, value in metadata if key == "authorization"]
                return await answer(data, context, served, caller, tokens, span, trailers)

        async def answer(
            data: bytes,
            context: Context,
            served: _ServedMailbox,
            caller: Metadata,
            tokens: list[str],
            span: Span,
            trailers: Trailers,
        ) -> Any:
            service = served.service
            task = asyncio.current_task()
            assert task is not None
            if name in ENDED_AT_STOP:
                served.waiting.add(task)
            try:
                if service.is_dev and METHODS[name].is_stream:  # its trailers may come much later
                    await context.send_initial_metadata(MODE_METADATA)
                token = read_bearer(tokens)

                def open_session() -> Awaitable[Session]:
                    return service.open_session(token)

                call = Call(context, caller, await open_session(), open_session)
                self._connections.note(context.peer())
                _check_mailbox(caller, service)
                answer = await served.calls.answer(name, read_request(kind, data), call)
                service.metrics.answered_grpc(name, "OK")
                return answer
            except PostroomError as error:
                failure = error
                if isinstance(error, Unauthenticated):
                    self._connections.forget(context.peer())
            except asyncio.CancelledError:
                if not served.calls.is_stopping:
                    raise
                task.uncancel()
                failure = Unavailable(f"Mailbox {service.mailbox.name} is stopping here; connect again.")
            except Exception:
                logger().exception("grpc.call_failed")
                failure = InternalError(
                    "The call failed because of a defect in Postroom; the server's log has it."
                )
            finally:
                served.waiting.discard(task)
            return await abort(context, failure, service.metrics, span, trailers)

        async def abort(
            context: Context, failure: PostroomError, metrics: SurfaceMetrics, span: Span, trailers: Trailers
        ) -> Any:
            span.fail(failure.code)
            metrics.refused(failure)
            metrics.answered_grpc(name, status_code(failure).name)
            status = status_of(failure)
            details = ((DETAILS_KEY, status.SerializeToString()), *trailers)
            return await context.abort(status_code(failure), status.message, details)

        return run


def _check_mailbox(caller: Metadata, service: Service) -> None:
    """Raise NotFound when a call names another mailbox than the only one of the server."""
    name, own = caller.get(MAILBOX_KEY), service.mailbox.name
    if name is not None and read_text(name) != own:
        raise NotFound(f"The server serves the mailbox {own}, not {read_text(name)}; call another server.")


def _method_handler(method: Method, handler: Runner) -> "grpc.RpcMethodHandler[Any, Any]":
    make = grpc.unary_stream_rpc_method_handler if method.is_stream else grpc.unary_unary_rpc_method_handler
    return make(
        handler,
        request_deserializer=None,  # `read_request` parses requests: its error has a code
        response_serializer=method.response.SerializeToString,
    )
