"""The ASGI application: it checks requests, calls their handlers, and answers errors as problem documents."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from postroom.adapters.http_server.connection import HttpConnection
from postroom.adapters.http_server.problems import (
    TYPE,
    MethodNotAllowed,
    UnsupportedMediaType,
    problem,
    retry_after,
)
from postroom.adapters.http_server.requests import Bodies, ClientGone, Headers, Site, decode, parse_query
from postroom.adapters.http_server.routes import CLOSE, Call, HttpRoute, Reply, Router
from postroom.application.caller import read_bearer
from postroom.application.cloudevents import new_message, read_message
from postroom.application.remote_errors import retry_after_ms
from postroom.application.service import OpenSession, SurfaceMetrics
from postroom.application.telemetry import logger
from postroom.application.tracing import (
    MAX_CORR_ID_CHARS,
    NO_TRACER,
    Span,
    TraceContext,
    correlate_task,
    is_corr_id,
    read_context,
    tracer,
)
from postroom.domain.errors import (
    FrameTooLarge,
    InternalError,
    InvalidRequest,
    PostroomError,
    Unauthenticated,
)

STREAM: Final = "application/x-ndjson"
CHUNK_BYTES: Final = 64 << 10
"""Size of the pieces in which answers are written (svc-mailbox I-6)."""
UNTRACED: Final = frozenset((b"/healthz", b"/readyz", b"/metrics"))
"""Paths that monitoring polls, for which no spans are recorded."""


class Exchange(Protocol):
    """A request, and the way in which its body is read and its answer is sent.

    Attributes:
        raw_path, query: path and query of the request's target, as they were sent.
        headers: headers, with names in lower case.
        connection: the `HttpConnection`.
        held: bytes of the body that count to the budget of all bodies.
        response_complete: whether the whole answer was sent, or is left to the ASGI server.
    """

    method: str
    raw_path: bytes
    query: bytes
    headers: Headers
    scheme: str
    connection: Any
    held: int
    response_complete: bool

    async def read(self, bodies: Bodies) -> bytes:
        """Return the body, and hold it; raises as `Bodies.read`."""

    async def send(self, reply: Reply, corr_id: str) -> None:
        """Send the answer."""


class AsgiExchange:
    """An exchange by the messages of ASGI: of any request, as it comes."""

    response_complete = True

    def __init__(self, scope: Any, receive: Any, send: Any) -> None:
        self.method: str = scope["method"]
        self.raw_path: bytes = scope["raw_path"]
        self.query: bytes = scope["query_string"]
        self.headers: Headers = scope["headers"]
        self.scheme: str = scope["scheme"]
        self.connection: Any = scope["state"]["connection"]
        self.held = 0
        self._receive = receive
        self._send = send

    async def read(self, bodies: Bodies) -> bytes:
        """Return the body; see `Exchange.read`."""
        return await bodies.read(self, self._receive)

    async def send(self, reply: Reply, corr_id: str) -> None:
        """Send the answer."""
        await send_reply(reply, corr_id, self._send)


class WholeRequest(msgspec.Struct):
    """An exchange of a request that came in one piece, whose answer is written as one.

    ASGI would make a dozen objects and four coroutines for each request. While the request is answered, this
    object is the `cycle` of the connection, and has the attributes that uvicorn's protocol uses.
    """

    message_event: ClassVar[asyncio.Event] = asyncio.Event()  # the body is complete, so nothing waits for it

    connection: Any
    raw_path: bytes
    headers: Headers
    body: bytes
    keep_alive: bool
    scheme: str
    method: str = "POST"
    query: bytes = b""
    held: int = 0
    more_body: bool = False
    disconnected: bool = False
    response_complete: bool = False

    async def read(self, bodies: Bodies) -> bytes:
        """Return the body; see `Exchange.read`."""
        body, self.body = self.body, b""  # else the connection keeps it until its next request
        bodies.take(self, len(body))
        return body

    async def send(self, reply: Reply, corr_id: str) -> None:
        """Send the answer, and begin with the next request of the connection."""
        connection, body = self.connection, reply.body
        assert isinstance(body, bytes), "the answer of a call that takes whole requests is a stream"
        fields = b"".join([b"%b: %b\r\n" % field for field in reply.headers]) if reply.headers else b""
        end = b"\r\n"
        if CLOSE in reply.headers:
            self.keep_alive = False
        elif not self.keep_alive:
            end = b"connection: close\r\n\r\n"
        rest = b"%b%bcontent-type: %b\r\nx-corr-id: %b\r\n%bcontent-length: %d\r\n%b%b" % (
            STATUS_LINE[reply.status],
            connection.server_state.head,
            reply.content_type,
            corr_id.encode(),
            fields,
            len(body),
            end,
            body,
        )
        flow, transport = connection.flow, connection.transport
        while True:
            if flow.write_paused and not self.disconnected:
                await flow.drain()
            if self.disconnected:
                return
            if len(rest) <= CHUNK_BYTES:
                transport.write_now(rest)
                break
            transport.write(rest[:CHUNK_BYTES])
            rest = rest[CHUNK_BYTES:]
        self.response_complete = True
        if not self.keep_alive:
            transport.close()
        connection.on_response_complete()


class App:
    """ASGI application over the routes.

    Arguments:
        open_session: opens the session of a request's token.
        bodies: bounds the bodies of requests.
        site: checks `Host` and `Origin`.
    """

    def __init__(
        self,
        router: Router,
        open_session: OpenSession,
        metrics: SurfaceMetrics,
        bodies: Bodies,
        site: Site,
    ) -> None:
        self._router = router
        self._open_session = open_session
        self._metrics = metrics
        self._bodies = bodies
        self._site = site
        streams = b"|".join(re.escape(each.path.encode()) for each in router.routes if each.answer == STREAM)
        self.whole_targets = re.compile(rb"(?!(?:%b)\Z)/v1/[^%%?#]+" % streams)
        self._decoders = {
            route.body: msgspec.json.Decoder(route.body) for route in router.routes if route.body
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request of ASGI."""
        await self._serve(AsgiExchange(scope, receive, send))

    def begin(
        self, connection: HttpConnection, target: bytes, headers: Headers, body: bytes, *, keep_alive: bool
    ) -> "tuple[Any, Coroutine[Any, Any, None]]":
        """Return a request that came in one piece, and the work that answers it; see `WholeRequests`."""
        request = WholeRequest(connection, target, headers, body, keep_alive, connection.scheme or "http")
        return request, self._serve(request)

    async def _serve(self, exchange: Exchange) -> None:
        """Serve one request, however it came."""
        started = time.perf_counter()
        headers = dict(exchange.headers)
        recorder = NO_TRACER if exchange.raw_path in UNTRACED else tracer()
        parent = _trace_context(headers) if b"traceparent" in headers else None
        caller = headers[b"x-corr-id"].decode("latin-1") if b"x-corr-id" in headers else None
        corr_id = correlate_task(caller)
        try:
            with recorder.serve(exchange.method, "http", parent) as span:
                route, reply = await self._answer(exchange, headers, corr_id)
                if reply is None:
                    return
                await exchange.send(reply, corr_id)
                seconds = time.perf_counter() - started
                self._metrics.answered_http(exchange.method, route, reply.status)
                describe(span, exchange.method, route, reply.status)
                logger().info(
                    "http.request",
                    method=exchange.method,
                    route=route,
                    status=reply.status,
                    ms=round(1_000 * seconds, 1),
                )
        finally:
            self._bodies.used -= exchange.held
            if not exchange.response_complete and not exchange.connection.transport.is_closing():
                exchange.connection.transport.close()

    async def _answer(
        self, exchange: Exchange, headers: dict[bytes, bytes], corr_id: str
    ) -> tuple[str, Reply | None]:
        """Return the path of a request's route, and the answer; None if the client is gone."""
        connection: HttpConnection = exchange.connection
        name = "other"
        try:
            if b"x-corr-id" in headers:
                _check_corr_id(headers)
            self._site.check_api(exchange.headers, headers, exchange.scheme)
            route, path = self._router.find(exchange.method, exchange.raw_path)
            name, caller, open_session = route.path, None, partial(self._open_session, None)
            if not route.is_public:
                if b"authorization" in headers:
                    open_session = partial(self._open_session, read_bearer(_authorization(exchange.headers)))
                caller = await open_session()
                connection.set_authenticated(True)
            query = None
            if route.query is not None or exchange.query:
                query = parse_query(exchange.query, route.query)
            self._bodies.check(headers)
            body = self._read(route, headers, await exchange.read(self._bodies))
            call = Call(corr_id, headers, path, query, body, connection, open_session, caller)
            return name, await route.handler(call)
        except ClientGone:
            return name, None
        except PostroomError as error:
            self._metrics.refused(error)
            if isinstance(error, Unauthenticated):
                connection.set_authenticated(False)
            return name, refusal(error, corr_id, ends_connection=b"expect" in headers)
        except Exception:
            logger().exception("http.request_failed")
            defect = InternalError(
                "The request failed because of a defect; its traceback is in the server's log."
            )
            return name, refusal(defect, corr_id)

    def _read(self, route: HttpRoute, headers: dict[bytes, bytes], body: bytes) -> Any:
        """Return a body as the route's type."""
        if route.body is None:
            if body:
                raise InvalidRequest(f"{route.method} {route.path} takes no body.")
            return None
        if route.takes_cloud_events and _is_cloud_event(headers):
            pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items()]
            return new_message(read_message(pairs, body, is_percent_encoded=True))
        if not body and route.body_is_optional:
            body = b"{}"
        elif headers.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
            raise UnsupportedMediaType("The body must be JSON; send Content-Type: application/json.")
        return decode(body, self._decoders[route.body])


def _is_cloud_event(headers: dict[bytes, bytes]) -> bool:
    """Return whether a request is a CloudEvent (HTTP protocol binding, section 3); names are lower-case."""
    return b"ce-specversion" in headers or headers.get(b"content-type", b"").lower().startswith(
        b"application/cloudevents"
    )


def _trace_context(headers: dict[bytes, bytes]) -> TraceContext | None:
    names = (b"traceparent", b"tracestate", b"baggage")
    return read_context(*(headers.get(name, b"").decode("latin-1") for name in names))


def describe(span: Span, method: str, route: str, status: int) -> None:
    """Describe a request by the semantic conventions of HTTP servers."""
    span.rename(f"{method} {route}")
    span.set("http.request.method", method)
    span.set("http.route", route)
    span.set("http.response.status_code", status)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        span.fail(str(status))


def _authorization(headers: Headers) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == b"authorization"]


def _check_corr_id(headers: dict[bytes, bytes]) -> None:
    value = headers.get(b"x-corr-id")
    if value is not None and not is_corr_id(value.decode("latin-1")):
        raise InvalidRequest(f"X-Corr-Id must have 1 to {MAX_CORR_ID_CHARS} visible ASCII characters.")


def refusal(error: PostroomError, corr_id: str, *, ends_connection: bool = False) -> Reply:
    """Return the answer to a refused request.

    Arguments:
        ends_connection: close the connection, as after an `Expect` without 100: the next bytes may be the
            body or a new request.
    """
    headers: Headers = []
    wait_ms = retry_after_ms(error)
    if wait_ms is not None:
        headers.append((b"retry-after", retry_after(wait_ms)))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if isinstance(error, Unauthenticated):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, UnsupportedMediaType):
        headers.append((b"accept-encoding", b"identity"))
    if ends_connection or isinstance(error, FrameTooLarge):
        headers.append(CLOSE)
    return Reply(msgspec.json.encode(problem(error, corr_id)), error.status, TYPE, tuple(headers))


async def send_reply(reply: Reply, corr_id: str, send: Any) -> None:
    """Send an answer by ASGI, in pieces (svc-mailbox I-6)."""
    body = reply.body
    headers = [(b"content-type", reply.content_type), (b"x-corr-id", corr_id.encode()), *reply.headers]
    if isinstance(body, bytes):
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    if isinstance(body, bytes):
        for start in range(0, len(body) - CHUNK_BYTES, CHUNK_BYTES):
            await _write(send, body[start : start + CHUNK_BYTES])
        last = body[(len(body) - 1) // CHUNK_BYTES * CHUNK_BYTES :] if len(body) > CHUNK_BYTES else body
        await send({"type": "http.response.body", "body": last})
    else:
        await _stream(body, send)


async def _stream(body: AsyncIterator[bytes], send: Any) -> None:
    try:
        async for piece in body:
            for start in range(0, len(piece), CHUNK_BYTES):
                await _write(send, piece[start : start + CHUNK_BYTES])
    finally:
        await body.aclose()  # type: ignore[attr-defined]  # the handlers' streams are generators
    await send({"type": "http.response.body"})


async def _write(send: Any, piece: bytes) -> None:
    await send({"type": "http.response.body", "body": piece, "more_body": True})
