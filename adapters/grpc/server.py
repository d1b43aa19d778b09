"""gRPC servers, with health and reflection; the surface of one mailbox."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from postroom.adapters.grpc.connections import GrpcConnections
from postroom.adapters.grpc.handlers import MailboxHandlers
from postroom.adapters.sockets.address import (
    Address,
    SurfaceProtection,
    check_access,
    find_file,
    remove_stale,
    unlink,
    url,
)
from postroom.adapters.sockets.connections import ConnectionLimits
from postroom.adapters.sockets.tls import LoadedTls, ServerTls
from postroom.application.service import Service, Surface, only
from postroom.application.threads import background_task
from postroom.domain.errors import Unavailable

MAX_REQUEST_BYTES = (1 << 20) + (64 << 10)
"""Maximum size of a request: the default frame (svc-mailbox I-6), and room for fields beside a message."""
STOP_SECONDS = 4
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_concurrent_streams", 1_024),  # streams of a connection; further ones are refused, and retried
    # By default gRPC cancels calls when 1,000 wait, which is not distinct from a cancellation by the client.
    ("grpc.server.max_pending_requests", 1 << 20),
    ("grpc.server.max_pending_requests_hard_limit", 1 << 20),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.so_reuseport", 0),  # refuses a second server on the port, which would get half of the calls
    # Detect a gone or paused client within 15 s, and make its messages ready again.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # no limit
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),  # pings of clients
]


class Handlers(Protocol):
    """Handlers of the methods of some services."""

    @property
    def names(self) -> tuple[str, ...]:
        """Return the full names of the services, such as `postroom.v1.Mailbox`."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a method by its path; None for a method of another service."""

    def watch(self, connections: GrpcConnections) -> None:
        """Take the connections of the server, to note which of them have shown a valid token."""

    def end_waits(self) -> None:
        """End the calls that wait, as the server stops."""

    async def close(self) -> None:
        """Finish what remains when the server has stopped."""


def grpc_surface(
    address: str, protection: SurfaceProtection | None = None, limits: ConnectionLimits | None = None
) -> Surface:
    """Return a surface that serves gRPC, with health and reflection.

    Its context raises Unavailable when the address can't be bound, and InvalidRequest for one beyond loopback
    when the service asks for no tokens. At its end, streams and long polls end; other calls have 4 s to
    finish.

    Arguments:
        address: `host:port`, port 0 for any free one; or `unix:path`.
        protection: required for an address beyond loopback.
        limits: of the connections.

    Raises: InvalidRequest for an address that is malformed or not protected.
    """
    protection = protection or SurfaceProtection()
    target = protection.resolve(address)
    tls = protection.tls_at(target)

    @asynccontextmanager
    async def serve(service: Service) -> AsyncIterator[str]:
        check_access(target, is_dev=service.is_dev)
        handlers = MailboxHandlers(only(service), service.metrics)
        async with serve_handlers(target, [handlers], tls, limits) as where:
            yield where

    return serve


@asynccontextmanager
async def serve_handlers(
    target: Address,
    handlers: Sequence[Handlers],
    tls: ServerTls | None = None,
    limits: ConnectionLimits | None = None,
    *,
    stop_seconds: float = STOP_SECONDS,
) -> AsyncIterator[str]:
    """Serve gRPC methods for as long as the context lasts, with health and reflection.

    Arguments:
        handlers: asked in their order.
        tls: certificate of the server; None serves without TLS.
        limits: of the connections.
        stop_seconds: time for the calls in progress when the context ends.

    Yields: the URL.
    Raises: Unavailable when the address can't be bound.
    """
    limits = limits or ConnectionLimits()
    connections_option = ("grpc.max_allowed_incoming_connections", limits.max_connections)
    server = grpc.aio.server(options=[*OPTIONS, connections_option])
    server.add_generic_rpc_handlers(tuple(handlers))  # type: ignore[arg-type]  # asks for no more than this protocol
    names = [name for each in handlers for name in each.names]
    checks = await _add_health(server, names)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    port = _bind(server, target, tls)
    file = find_file(target)
    connections = GrpcConnections(None if target.is_unix else port, limits)
    for each in handlers:
        each.watch(connections)
    await server.start()
    try:
        async with background_task(connections.run()):
            yield url("grpc" if tls is None else "grpcs", target, port)
    finally:
        await checks.enter_graceful_shutdown()
        for each in handlers:
            each.end_waits()
        await server.stop(stop_seconds)
        for each in handlers:
            await each.close()
        unlink(target, file)


async def _add_health(server: grpc.aio.Server, names: Sequence[str]) -> health.aio.HealthServicer:
    checks = health.aio.HealthServicer()
    add_HealthServicer_to_server(checks, server)
    for name in (*names, health.OVERALL_HEALTH):
        await checks.set(name, HealthCheckResponse.SERVING)
    return checks


def _bind(server: grpc.aio.Server, target: Address, tls: ServerTls | None) -> int:
    """Bind an address; return the port."""
    if target.is_unix:
        remove_stale(target)  # gRPC would also take the path from a running server
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
