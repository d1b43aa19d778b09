"""gRPC server of a mailbox, with health and reflection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from postroom.adapters.grpc.messages import read_request
from postroom.adapters.grpc.methods import METHODS, NAMES, Method
from postroom.adapters.grpc.service import Call, Context, MailboxService
from postroom.adapters.grpc.status import DETAILS_KEY, status_code, status_of
from postroom.adapters.sockets.address import Address, find_file, remove_stale, unlink, url
from postroom.adapters.sockets.protection import Protection, check_access
from postroom.adapters.sockets.tls import LoadedTls, ServerTls
from postroom.application.bearer import read_bearer
from postroom.application.correlation import correlate
from postroom.application.service import Service, Session, Surface
from postroom.application.telemetry import logger
from postroom.application.trace_context import context_of
from postroom.application.tracing import Span, tracer
from postroom.domain.errors import InternalError, PostroomError, Unavailable

MAX_REQUEST_BYTES = (1 << 20) + (64 << 10)
"""Maximum size of a request: the default frame (svc-mailbox I-6), and room for fields beside a message."""
CORR_ID_KEY = "x-corr-id"
"""Metadata with the correlation id of a call, of the caller and in the trailers of the answer."""
STOP_SECONDS = 4
ENDED_AT_STOP = ("recv", "recv_stream")
"""The methods that wait for messages, and end when the server stops."""
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 1_024),  # of one connection; more are refused, to be retried
    # By default gRPC cancels calls when 1,000 wait, which is not distinct from a cancellation by the client.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.so_reuseport", 0),  # a second server on the port is refused, not given half of the calls
    # A client that is gone or paused is noticed within 15 s, and what it received is ready again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # of clients
]

MODE_METADATA = (("x-postroom-mode", "dev"),)
"""Metadata of every answer of a server with `--dev`."""

Handler = Callable[[Any, Call], Awaitable[Any]]
Runner = Callable[[Any, Context], Awaitable[Any]]


def grpc_surface(address: str, protection: Protection | None = None) -> Surface:
    """Return a surface that serves gRPC, with health and reflection.

    Its context raises Unavailable when the address can't be bound, and InvalidRequest for one beyond loopback
    when the service asks for no tokens. At its end, streams and long polls end; other calls have 4 s to
    finish.

    Arguments:
        address: `host:port`, port 0 for any free one; or `unix:path`.
        protection: what an address beyond loopback needs.

    Raises: InvalidRequest for an address that is malformed or not protected.
    """
    protection = protection or Protection()
    target = protection.resolve(address)
    tls = protection.tls_at(target)

    @asynccontextmanager
    async def serve(service: Service) -> AsyncIterator[str]:
        check_access(target, service)
        server = grpc.aio.server(options=OPTIONS)
        calls = MailboxService(service)
        handlers = _Handlers(service, calls)
        server.add_generic_rpc_handlers((handlers,))
        checks = await _add_health(server)
        reflection.enable_server_reflection((*NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        port = _bind(server, target, tls)
        file = find_file(target)
        await server.start()
        try:
            yield url("grpc" if tls is None else "grpcs", target, port)
        finally:
            await checks.enter_graceful_shutdown()
            handlers.end_waits()
            await server.stop(STOP_SECONDS)
            await calls.drain()
            unlink(target, file)

    return serve


async def _add_health(server: grpc.aio.Server) -> health.aio.HealthServicer:
    checks = health.aio.HealthServicer()
    add_HealthServicer_to_server(checks, server)
    for name in (*NAMES, health.OVERALL_HEALTH):
        await checks.set(name, HealthCheckResponse.SERVING)
    return checks


def _bind(server: grpc.aio.Server, target: Address, tls: ServerTls | None) -> int:
    """Bind an address; return the port."""
    if target.is_unix:
        remove_stale(target)  # gRPC would take the path from a server that is alive, too
        _bind_unix(server, target)
        return 0
    host, port = target.target[:2]
    return _add_port(server, target, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", tls)


def _bind_unix(server: grpc.aio.Server, target: Address) -> None:
    """Bind a socket in a folder that only this user may enter, and move it to its path with the mode 0600.

    grpcio shows no credentials of peers, so the permissions of the socket must be right from the beginning.
    """
    path = Path(target.target)
    try:
        with TemporaryDirectory(dir=path.parent, prefix=".") as folder:  # mode 0700
            private = Path(folder) / "s"
            _add_port(server, target, f"unix:{private}")
            private.chmod(0o600)
            private.rename(path)
    except OSError as error:
        raise Unavailable(
            f"{target.text} can't be served by gRPC: {error.strerror}; name another path."
        ) from error


def _add_port(server: grpc.aio.Server, target: Address, at: str, tls: ServerTls | None = None) -> int:
    try:
        return server.add_insecure_port(at) if tls is None else server.add_secure_port(at, _credentials(tls))
    except RuntimeError as error:
        raise Unavailable(f"{target.text} can't be served by gRPC; choose another address.") from error


def _credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return credentials that take the latest certificate for each new connection."""
    taken = tls.loaded

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        nonlocal taken
        if tls.loaded is taken:
            return None
        taken = tls.loaded
        return _configuration(taken)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(taken),
        fetch,  # type: ignore[arg-type]  # None is no change, which the stubs do not know
        tls.asks_clients,
    )


def _configuration(loaded: LoadedTls) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], loaded.client_ca)


class _Handlers(grpc.GenericRpcHandler):
    """Handlers of all methods by their paths, which turn errors into statuses."""

    def __init__(self, service: Service, calls: MailboxService) -> None:
        self._service = service
        self._metrics = service.metrics
        self._handlers = {
            method.path: _method_handler(method, self._run(name, method.request, getattr(calls, name)))
            for name, method in METHODS.items()
        }
        self._waiting: set[asyncio.Task[Any]] = set()
        self._calls = calls

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a path."""
        return self._handlers.get(handler_call_details.method)

    def end_waits(self) -> None:
        """End streams and long polls, with an error that tells their callers to connect again."""
        self._calls.is_stopping = True
        for task in self._waiting:
            task.cancel()

    def _run(self, name: str, kind: type[Message], handler: Handler) -> Runner:
        """Return a handler of encoded requests that checks tokens, and turns errors into statuses."""

        async def run(data: bytes, context: Context) -> Any:
            caller = {key: value for key, value in context.invocation_metadata() or () if type(value) is str}
            with (
                correlate(caller.get(CORR_ID_KEY)) as corr_id,
                tracer().serve(METHODS[name].path[1:], "grpc", context_of(caller)) as span,
            ):
                context.set_trailing_metadata(((CORR_ID_KEY, corr_id),))
                return await answer(data, context, corr_id, span)

        async def answer(data: bytes, context: Context, corr_id: str, span: Span) -> Any:
            task = asyncio.current_task()
            assert task is not None
            if name in ENDED_AT_STOP:
                self._waiting.add(task)
            try:
                if self._service.is_dev:
                    await context.send_initial_metadata(MODE_METADATA)
                token = read_bearer(_authorization(context))

                def open_session() -> Awaitable[Session]:
                    return self._service.open_session(token)

                call = Call(context, await open_session(), open_session)
                answer = await handler(read_request(kind, data), call)
                self._metrics.answered_grpc(name, "OK")
                return answer
            except PostroomError as error:
                failure = error
            except asyncio.CancelledError:
                if not self._calls.is_stopping:
                    raise
                task.uncancel()
                failure = Unavailable("The server is stopping; connect again.")
            except Exception:
                logger().exception("grpc.call_failed")
                failure = InternalError(
                    "The call failed because of a defect in Postroom; the server's log has it."
                )
            finally:
                self._waiting.discard(task)
            span.fail(failure.code)
            self._metrics.refused(failure)
            self._metrics.answered_grpc(name, status_code(failure).name)
            status = status_of(failure)
            details = ((DETAILS_KEY, status.SerializeToString()), (CORR_ID_KEY, corr_id))
            return await context.abort(status_code(failure), status.message, details)

        return run


def _authorization(context: Context) -> list[str]:
    metadata = context.invocation_metadata() or ()
    return [str(value) for key, value in metadata if key == "authorization"]


def _method_handler(method: Method, handler: Runner) -> "grpc.RpcMethodHandler[Any, Any]":
    make = grpc.unary_stream_rpc_method_handler if method.is_stream else grpc.unary_unary_rpc_method_handler
    return make(
        handler,
        request_deserializer=None,  # `read_request` does it, whose error has a code
        response_serializer=method.response.SerializeToString,
    )
