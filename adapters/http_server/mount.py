"""Applications that are mounted below a path of the HTTP server, such as the console."""

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from postroom.adapters.http_server.app import describe, refusal, send_reply
from postroom.adapters.http_server.requests import Bodies, ClientGone, Site
from postroom.adapters.http_server.routes import CLOSE
from postroom.application.service import Service, SurfaceMetrics
from postroom.application.telemetry import logger
from postroom.application.tracing import Span, correlate_task, tracer
from postroom.domain.errors import FrameTooLarge, NotFound, PostroomError

READS = frozenset(("GET", "HEAD", "OPTIONS"))
REFUSAL = "postroom.refusal"
"""Key of the scope with the error for which the application is to show a page."""
PROTECTION = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
)
"""Headers of the answers to requests that don't reach the application, which browsers may show."""
ROUTE = "postroom.route"
"""Key of the scope in which the application states its route, for metrics and logs."""


class Mount(NamedTuple):
    """An application below a path.

    Arguments:
        prefix: the path, such as `/console`, without a slash at its end.
        open: opens the ASGI application of a service, for as long as the context lasts; its second argument
            says whether clients use TLS.
        is_alone: whether to serve nothing else: neither the calls of the HTTP interface nor its state.
        is_for_programs: whether only programs call it, and no web page may; else browsers show it, and send
            its own forms.
    """

    prefix: str
    open: Callable[[Service, bool], AbstractAsyncContextManager[Any]]
    is_alone: bool = False
    is_for_programs: bool = False


class MountedApp:
    """ASGI application that passes requests below a path to one application, and all others to another.

    `Host`, `Origin` and the body of a request are checked here: the mounted application gets whole bodies
    within the bounds, and forms of its own pages only.

    Arguments:
        prefix: the path, without a slash at its end.
        mounted: the application below it.
        others: application for all other paths; None answers them with 404.
        is_for_programs: see `Mount`.
    """

    def __init__(
        self,
        prefix: str,
        mounted: Any,
        others: Any | None,
        site: Site,
        bodies: Bodies,
        metrics: SurfaceMetrics,
        *,
        is_for_programs: bool = False,
    ) -> None:
        self._prefix = prefix
        self._is_for_programs = is_for_programs
        self._mounted = mounted
        self._others = others
        self._site = site
        self._bodies = bodies
        self._metrics = metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        path = scope["path"]
        is_below = path == self._prefix or path.startswith(self._prefix + "/")
        if not is_below and self._others is not None:
            await self._others(scope, receive, send)
            return
        headers = dict(scope["headers"])
        caller = headers.get(b"x-corr-id", b"").decode("latin-1")
        corr_id, started = correlate_task(caller), time.perf_counter()
        exchange = _Exchange(corr_id, send)
        with tracer().serve(scope["method"], "http", None) as span:
            try:
                if self._is_for_programs:
                    self._site.check_api(scope["headers"], headers, scope["scheme"])
                else:
                    self._site.check_host(scope["headers"])
                if not is_below:
                    raise NotFound(f"There is nothing here; the console is at {self._prefix}/.")
                scope = {
                    **scope,
                    "path": path if path != self._prefix else path + "/",
                    "root_path": self._prefix,
                }
                if scope["method"] not in READS:
                    receive = await self._receive_body(scope, headers, receive, exchange)
                    exchange.ends_connection = isinstance(scope.get(REFUSAL), FrameTooLarge)
                await self._mounted(scope, receive, exchange.send)
            except ClientGone:
                return
            except PostroomError as error:
                self._metrics.refused(error)
                exchange.status = error.status
                reply = refusal(error, corr_id)
                reply.headers += PROTECTION
                await send_reply(reply, corr_id, send)
            finally:
                self._bodies.used -= exchange.held
            self._report(scope, exchange.status, time.perf_counter() - started, span)

    async def _receive_body(
        self, scope: Any, headers: dict[bytes, bytes], receive: Any, exchange: "_Exchange"
    ) -> Any:
        """Return the ASGI `receive` of a whole body.

        A refused request has an error in the scope and no body.
        """
        body = b""
        try:
            if not self._is_for_programs:
                self._site.check_form(scope["headers"])
            self._bodies.check(headers)
            body = await self._bodies.read(exchange, receive)
        except PostroomError as error:
            scope[REFUSAL] = error
        pieces = [body]

        async def receive_body() -> dict[str, Any]:
            if pieces:
                return {"type": "http.request", "body": pieces.pop(), "more_body": False}
            message: dict[str, Any] = await receive()  # the message that the connection has ended
            return message

        return receive_body

    def _report(self, scope: Any, status: int, seconds: float, span: Span) -> None:
        route = self._prefix + scope[ROUTE] if ROUTE in scope else "other"
        self._metrics.answered_http(scope["method"], route, status)
        describe(span, scope["method"], route, status)
        logger().info(
            "http.request",
            method=scope["method"],
            route=route,
            status=status,
            ms=round(1_000 * seconds, 1),
        )


class _Exchange:
    def __init__(self, corr_id: str, send: Any) -> None:
        self.held = 0
        self.status = 500
        self.ends_connection = False
        self._corr_id = corr_id.encode()
        self._send = send

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            end = [CLOSE] if self.ends_connection else []
            message = {**message, "headers": [*message["headers"], (b"x-corr-id", self._corr_id), *end]}
        await self._send(message)
