"""The HTTP server: a surface of the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import formatdate

import msgspec
from uvicorn.config import Config

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.app import App
from postroom.adapters.http_server.connection import HttpConnection, State
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.mount import Mount, MountedApp
from postroom.adapters.http_server.openapi import make_document
from postroom.adapters.http_server.queries import QueryHandlers, StateHandlers
from postroom.adapters.http_server.requests import Bodies, Site
from postroom.adapters.http_server.routes import Router
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.address import (
    BACKLOG,
    Address,
    SurfaceProtection,
    check_access,
    find_file,
    listen,
    unlink,
    url,
)
from postroom.adapters.sockets.connections import TlsListener
from postroom.application.service import Service, Surface
from postroom.application.telemetry import logger
from postroom.application.threads import background_task, cancel_and_wait
from postroom.domain.errors import InvalidRequest

ABORT_SECONDS = 0.5
MODE_HEADERS = [(b"x-postroom-mode", b"dev")]
"""Headers of every answer of a server with `--dev`."""


def http_surface(
    address: str,
    settings: HttpSettings | None = None,
    protection: SurfaceProtection | None = None,
    mount: Mount | None = None,
) -> Surface:
    """Return a surface that serves HTTP.

    Arguments:
        address: `host:port`, or `unix:path`.
        protection: required for an address beyond loopback.
        mount: an application for browsers, such as the console.

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
        async with _open_app(service, limits, site, mount, is_secure=is_secure) as (app, whole):
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

            def make_connection() -> HttpConnection:
                connected.set()
                return HttpConnection(config, state, limits, whole)

            async with AsyncExitStack() as accepting:
                if tls is None:
                    server = await loop.create_server(make_connection, sock=listener, backlog=BACKLOG)
                    accepting.callback(server.close)
                else:
                    tls_listener = TlsListener(
                        listener,
                        make_connection,
                        tls.context,
                        max_handshakes=limits.max_connections,
                        max_per_address=limits.max_unauthenticated_per_address,
                        timeout=limits.header_timeout_ms / 1_000,
                    )
                    await accepting.enter_async_context(background_task(tls_listener.run()))
                try:
                    headers = MODE_HEADERS if service.is_dev else []
                    async with background_task(_tell_time(state, headers, connected)):
                        yield url("http" if tls is None else "https", target, port)
                finally:
                    await accepting.aclose()
                    await _drain(state, limits.stop_timeout_ms / 1_000)
                    unlink(target, file)

    return serve


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
    service: Service, limits: HttpSettings, site: Site, mount: Mount | None, *, is_secure: bool
) -> AsyncIterator[tuple[App | MountedApp, App | None]]:
    """Yield the application, and the part of it that takes whole requests."""
    bodies = Bodies(limits)
    app = make_app(service, limits, site, bodies)
    if mount is None:
        yield app, app
        return
    async with mount.open(service, is_secure) as mounted:
        others = None if mount.is_alone else app
        yield MountedApp(mount.prefix, mounted, others, site, bodies, service.metrics), others


async def _tell_time(state: State, headers: list[tuple[bytes, bytes]], connected: asyncio.Event) -> None:
    """Keep the `Date` of answers up to date (RFC 9110, 6.6.1).

    Arguments:
        headers: further headers of all answers.
        connected: set when a client connects; without any, nobody asks for the time.
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
    if state.tasks:  # they end by themselves when they notice
        await asyncio.wait(list(state.tasks), timeout=ABORT_SECONDS)
    await cancel_and_wait(*state.tasks)
