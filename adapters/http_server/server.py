"""The HTTP server: a surface of the service."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from email.utils import formatdate
from typing import Any

import msgspec
from uvicorn.config import Config

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.app import App
from postroom.adapters.http_server.connection import HttpConnection, State
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.mount import Mount, MountedApp
from postroom.adapters.http_server.openapi import make_document
from postroom.adapters.http_server.problems import refusal_of
from postroom.adapters.http_server.queries import QueryHandlers, StateHandlers
from postroom.adapters.http_server.requests import Bodies, Site, WholeRequests
from postroom.adapters.http_server.routes import Router
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.address import (
    BACKLOG,
    Address,
    SurfaceProtection,
    check_access,
    find_file,
    is_trusted,
    listen,
    unlink,
    url,
)
from postroom.adapters.sockets.connections import END_SECONDS, TlsListener, end_writing
from postroom.adapters.sockets.tls import ServerTls
from postroom.application.service import Service, Surface, SurfaceMetrics
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, cancel_and_wait
from postroom.domain.errors import InvalidRequest

ABORT_SECONDS = 0.5
MODE_HEADERS = [(b"x-postroom-mode", b"dev")]
"""Headers of every answer of a server with `--dev`."""


class NewConnection(asyncio.Protocol):
    """Connection that the server makes an `HttpConnection` or refuses; its client then has 1 s to close it.

    It has no parser, so that clients that connect again and again take little time from others. A connection
    whose client has not shown a valid token makes room for a new one.
    """

    def __init__(
        self, config: Config, state: State, limits: HttpSettings, whole: WholeRequests | None = None
    ) -> None:
        self._config = config
        self._state = state
        self._limits = limits
        self._whole = whole
        self.closed = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse foreign users, and connections above the limit."""
        state, limit = self._state, self._limits.max_connections
        if not is_trusted(transport):
            message = "The socket serves processes of its own user and root only."
            self._refuse(transport, 403, "E_CAP_SCOPE", message)
        elif len(state.connections) >= limit and not state.unauthenticated.make_room():
            message = "The server has its limit of connections; retry shortly."
            self._refuse(transport, 503, "E_UNAVAILABLE", message, 1_000)
        else:
            connection = HttpConnection(self._config, state, self._limits, self._whole)
            transport.set_protocol(connection)
            connection.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._aborting.cancel()
        self._state.refused.discard(self)
        self.closed.set()

    def shutdown(self) -> None:
        """Close the connection."""
        self.transport.close()

    def _refuse(
        self,
        transport: asyncio.Transport,
        status: int,
        code: str,
        message: str,
        retry_after_ms: int | None = None,
    ) -> None:
        logger().info("http.refused", status=status, code=code)
        self.transport = transport
        self._aborting = asyncio.get_running_loop().call_later(END_SECONDS, transport.abort)
        self._state.refused.add(self)
        transport.write(refusal_of(status, code, message, self._state.head, retry_after_ms))
        if len(self._state.refused) > self._limits.max_connections:
            transport.close()
        else:
            end_writing(transport)


def http_surface(
    address: str,
    settings: HttpSettings | None = None,
    protection: SurfaceProtection | None = None,
    *mounts: Mount,
) -> Surface:
    """Return a surface that serves HTTP.

    Arguments:
        address: `host:port`, or `unix:path`.
        protection: required for an address beyond loopback.
        mounts: applications below paths, such as the console.

    Its context raises Unavailable when the address can't be bound, and InvalidRequest for one beyond loopback
    when the service asks for no tokens.

    Raises: InvalidRequest for an address that is malformed or not protected.
    """
    protection, limits = protection or SurfaceProtection(), settings or HttpSettings()
    target = protection.resolve(address)
    tls = protection.tls_at(target)
    _check_settings(target, limits, protection)

    @asynccontextmanager
    async def serve(service: Service) -> AsyncIterator[str]:
        check_access(target, is_dev=service.is_dev)
        site = _make_site(service, protection, target)
        is_secure = tls is not None or protection.behind_proxy
        async with (
            _open_app(service, limits, site, mounts, is_secure=is_secure) as (app, whole),
            _serve_app(app, whole, target, limits, tls, is_dev=service.is_dev) as address_,
        ):
            yield address_

    return serve


@asynccontextmanager
async def serve_mounted(
    address: str,
    settings: HttpSettings,
    prefix: str,
    open_app: AbstractAsyncContextManager[Any],
    metrics: SurfaceMetrics,
) -> AsyncIterator[str]:
    """Serve an application of several mailboxes below a path, and nothing else, while the context lasts.

    Arguments:
        address: `host:port` of this machine.
        open_app: yields the application, which asks for sessions of its own.
        metrics: counts the requests.

    Yields: its URL.
    Raises: InvalidRequest for an address beyond loopback, Unavailable when it can't be bound.
    """
    target, site, bodies = SurfaceProtection().resolve(address), Site(any_host=False), Bodies(settings)
    async with open_app as mounted:
        app = MountedApp(prefix, mounted, None, site, bodies, metrics)
        async with _serve_app(app, None, target, settings, None, is_dev=False) as url_:
            yield url_


@asynccontextmanager
async def _serve_app(
    app: Any,
    whole: App | None,
    target: Address,
    limits: HttpSettings,
    tls: ServerTls | None,
    *,
    is_dev: bool,
) -> AsyncIterator[str]:
    """Listen for requests to an application while the context lasts; see `http_surface`.

    Arguments:
        whole: part of the application that takes whole requests.
    """
    listener = listen(target)
    file = find_file(target)
    config = Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=limits.idle_timeout_ms / 1_000,  # type: ignore[arg-type]  # seconds
    )
    config.load()
    state = State(limits)
    loop = asyncio.get_running_loop()
    port = 0 if target.is_unix else listener.getsockname()[1]
    connected = asyncio.Event()

    def connect() -> NewConnection:
        connected.set()
        return NewConnection(config, state, limits, whole)

    async with AsyncExitStack() as accepting:
        if tls is None:
            server = await loop.create_server(connect, sock=listener, backlog=BACKLOG)
            accepting.callback(server.close)
        else:
            tls_listener = TlsListener(
                listener,
                connect,
                tls.context,
                max_handshakes=limits.max_connections,
                max_per_address=limits.max_unauthenticated_per_address,
                timeout=limits.header_timeout_ms / 1_000,
            )
            await accepting.enter_async_context(background_task(tls_listener.run()))
        try:
            headers = MODE_HEADERS if is_dev else []
            async with background_task(_tell_time(state, headers, connected)):
                yield url("http" if tls is None else "https", target, port)
        finally:
            await accepting.aclose()
            await _drain(state, limits.stop_timeout_ms / 1_000)
            unlink(target, file)


def _check_settings(target: Address, limits: HttpSettings, protection: SurfaceProtection) -> None:
    if target.is_local:
        return
    if limits.open_metrics:
        raise InvalidRequest(
            f"open_metrics is for addresses of this machine, and {target.text} is reached from others; leave "
            "it out, and give the collector a token."
        )
    if not protection.allowed_hosts:
        raise InvalidRequest(
            f"{target.text} needs allowed_hosts: the names by which clients reach the server, or `*` for any."
        )


def make_app(
    service: Service, limits: HttpSettings, site: Site | None = None, bodies: Bodies | None = None
) -> App:
    """Return the ASGI application of a service.

    Arguments:
        site: the names of the server; loopback names by default.
    """
    state = StateHandlers(service)
    messages = MessageHandlers(service, limits)
    routes = [
        route._replace(is_public=True) if route.path == "/metrics" and limits.open_metrics else route
        for route in make_routes(messages, QueryHandlers(service), state)
    ]
    state.contract = msgspec.json.encode(make_document(routes))
    return App(
        Router(routes),
        service.open_session,
        service.metrics,
        bodies or Bodies(limits),
        site or Site(any_host=False),
    )


def _make_site(service: Service, protection: SurfaceProtection, target: Address) -> Site:
    site = Site(any_host=target.is_unix)
    if not service.is_dev:
        site.allow(protection.allowed_hosts)
    return site


@asynccontextmanager
async def _open_app(
    service: Service, limits: HttpSettings, site: Site, mounts: Sequence[Mount], *, is_secure: bool
) -> AsyncIterator[tuple[Any, App | None]]:
    """Yield the application, and the part of it that takes whole requests."""
    bodies = Bodies(limits)
    whole = None if any(each.is_alone for each in mounts) else make_app(service, limits, site, bodies)
    app: Any = whole
    async with AsyncExitStack() as opened:
        for each in mounts:
            mounted = await opened.enter_async_context(each.open(service, is_secure))
            app = MountedApp(
                each.prefix,
                mounted,
                app,
                site,
                bodies,
                service.metrics,
                is_for_programs=each.is_for_programs,
            )
        yield app, whole


async def _tell_time(state: State, headers: list[tuple[bytes, bytes]], connected: asyncio.Event) -> None:
    """Keep the `Date` of answers up to date (RFC 9110, 6.6.1).

    Arguments:
        headers: further headers of all answers.
        connected: set when a client connects; without clients, nobody needs the time.
    """
    while True:
        state.set_fields([(b"date", formatdate(usegmt=True).encode()), *headers])
        if state.connections:
            await asyncio.sleep(1)
        else:
            connected.clear()
            await connected.wait()


async def _drain(state: State, seconds: float) -> None:
    """Let the requests in progress end, then abort those that are left."""
    connections = [each for each in state.connections if isinstance(each, HttpConnection)]
    connections += state.refused
    for connection in connections:
        connection.shutdown()
    ends = [asyncio.create_task(connection.closed.wait()) for connection in connections]
    if ends:
        _, late = await asyncio.wait(ends, timeout=seconds)
        if late:
            logger().warning("http.requests_aborted", connections=len(late))
        await cancel_and_wait(*late)
    for connection in connections:
        connection.transport.abort()
    if state.tasks:  # tasks end when they notice the abort
        await asyncio.wait(list(state.tasks), timeout=ABORT_SECONDS)
    await cancel_and_wait(*state.tasks)
