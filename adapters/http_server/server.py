"""The HTTP server: a surface of the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate

import msgspec
from uvicorn.config import Config

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.app import App
from postroom.adapters.http_server.connection import Connection, State
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.openapi import make_document
from postroom.adapters.http_server.queries import OperatorHandlers, QueryHandlers, StateHandlers
from postroom.adapters.http_server.routes import Router
from postroom.adapters.http_server.settings import HttpSettings
from postroom.adapters.sockets.address import BACKLOG, find_file, listen, resolve, unlink, url
from postroom.application.background import background_task, cancel_and_wait
from postroom.application.service import Service, Surface
from postroom.application.telemetry import logger

ABORT_SECONDS = 0.5
MODE_HEADERS = [(b"x-postroom-mode", b"dev")]
"""Headers of every answer of a server that asks for no tokens."""


def http_surface(address: str, settings: HttpSettings | None = None) -> Surface:
    """Return a surface that serves HTTP.

    Arguments:
        address: `host:port` with a loopback host, or `unix:path`.

    Its context raises Unavailable when the address can't be bound.

    Raises: InvalidRequest for any other address.
    """
    target, limits = resolve(address), settings or HttpSettings()

    @asynccontextmanager
    async def serve(service: Service) -> AsyncIterator[str]:
        listener = listen(target)
        file = find_file(target)
        config = Config(
            make_app(service, limits, any_host=target.is_unix),
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
        state = State()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(config, state, limits), sock=listener, backlog=BACKLOG
        )
        try:
            async with background_task(_tell_time(state, MODE_HEADERS if service.is_dev else [])):
                yield url("http", target, 0 if target.is_unix else listener.getsockname()[1])
        finally:
            server.close()
            await _drain(state, limits.stop_timeout_ms / 1_000)
            unlink(target, file)

    return serve


def make_app(service: Service, limits: HttpSettings, *, any_host: bool = False) -> App:
    """Return the ASGI application of a service."""
    state = StateHandlers(service)
    messages = MessageHandlers(service, limits)
    routes = [
        route._replace(is_public=True) if route.path == "/metrics" and limits.open_metrics else route
        for route in make_routes(messages, QueryHandlers(service), OperatorHandlers(), state)
    ]
    state.contract = msgspec.json.encode(make_document(routes))
    return App(Router(routes), service.open_session, service.metrics, limits, any_host=any_host)


async def _tell_time(state: State, headers: list[tuple[bytes, bytes]]) -> None:
    """Keep the `Date` of answers up to date (RFC 9110, 6.6.1).

    Arguments:
        headers: what all answers have besides.
    """
    while True:
        state.default_headers = [(b"date", formatdate(usegmt=True).encode()), *headers]
        await asyncio.sleep(1)


async def _drain(state: State, seconds: float) -> None:
    """Let the requests in progress end, then abort those that are left."""
    connections = [each for each in state.connections if isinstance(each, Connection)]
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
