"""The ASGI application: it checks requests, calls their handlers, and answers errors as problem documents."""

import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote_to_bytes

import msgspec

from postroom.adapters.http_server.connection import HttpConnection
from postroom.adapters.http_server.problems import (
    TYPE,
    MethodNotAllowed,
    UnsupportedMediaType,
    problem,
    retry_after,
)
from postroom.adapters.http_server.requests import Bodies, ClientGone, Site, decode, parse_query
from postroom.adapters.http_server.routes import CLOSE, Call, HttpRoute, Reply, Router
from postroom.application.caller import read_bearer
from postroom.application.cloudevents.message import new_message, read_message
from postroom.application.metrics import SurfaceMetrics
from postroom.application.remote_errors import retry_after_ms
from postroom.application.service import OpenSession
from postroom.application.telemetry import logger
from postroom.application.tracing import (
    MAX_CORR_ID_CHARS,
    NO_TRACER,
    Span,
    TraceContext,
    correlate,
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

CHUNK_BYTES: Final = 64 << 10
"""Size of the pieces in which answers are written (svc-mailbox I-6)."""
UNTRACED: Final = frozenset((b"/healthz", b"/readyz", b"/metrics"))
"""Paths that monitoring polls, for which no spans are recorded."""


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
        self._decoders = {
            route.body: msgspec.json.Decoder(route.body) for route in router.routes if route.body
        }

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        headers = dict(scope["headers"])
        caller = headers.get(b"x-corr-id", b"").decode("latin-1")
        recorder = NO_TRACER if scope["raw_path"] in UNTRACED else tracer()
        parent = _trace_context(headers) if b"traceparent" in headers else None
        with (
            self._bodies.hold() as hold,
            correlate(caller) as corr_id,
            recorder.serve(scope["method"], "http", parent) as span,
        ):
            await self._serve(scope, headers, corr_id, receive, send, hold, span)

    async def _serve(
        self,
        scope: Any,
        headers: dict[bytes, bytes],
        corr_id: str,
        receive: Any,
        send: Any,
        hold: Callable[[int], None],
        span: Span,
    ) -> None:
        started = time.perf_counter()
        connection: HttpConnection = scope["state"]["connection"]
        route: HttpRoute | None = None
        try:
            _check_corr_id(headers)
            self._site.check_api(scope["headers"], scope["scheme"].encode())
            route, path = self._router.find(scope["method"], _segments(scope["raw_path"]))
            token = None if route.is_public else read_bearer(_authorization(scope["headers"]))
            open_session = partial(self._open_session, token)
            caller = None
            if not route.is_public:
                caller = await open_session()
                connection.set_authenticated(True)
            call = Call(
                corr_id,
                headers,
                path,
                caller=caller,
                query=parse_query(scope["query_string"], route.query),
                body=await self._body(route, headers, receive, hold),
                connection=connection,
                open_session=open_session,
            )
            reply = await route.handler(call)
        except ClientGone:
            return
        except PostroomError as error:
            reply = refusal(error, corr_id, ends_connection=b"expect" in headers)
            self._metrics.refused(error)
            if isinstance(error, Unauthenticated):
                connection.set_authenticated(False)
        except Exception:
            logger().exception("http.request_failed")
            reply = refusal(
                InternalError(
                    "The request failed because of a defect; its traceback is in the server's log."
                ),
                corr_id,
            )
        await send_reply(reply, corr_id, send)
        seconds = time.perf_counter() - started
        name = route.path if route is not None else "other"
        self._metrics.answered_http(scope["method"], name, reply.status)
        describe(span, scope["method"], name, reply.status)
        logger().info(
            "http.request",
            method=scope["method"],
            route=name,
            status=reply.status,
            ms=round(1_000 * seconds, 1),
        )

    async def _body(
        self, route: HttpRoute, headers: dict[bytes, bytes], receive: Any, hold: Callable[[int], None]
    ) -> Any:
        body = await self._bodies.read(headers, receive, hold)
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


def _segments(raw_path: bytes) -> list[str]:
    """Return the segments of a path; a slash within a segment is written as %2F."""
    try:
        return [unquote_to_bytes(each).decode() for each in raw_path.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise InvalidRequest("The path is not UTF-8.") from None


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


def _authorization(headers: list[tuple[bytes, bytes]]) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == b"authorization"]


def _check_corr_id(headers: dict[bytes, bytes]) -> None:
    value = headers.get(b"x-corr-id")
    if value is not None and not is_corr_id(value.decode("latin-1")):
        raise InvalidRequest(f"X-Corr-Id must have 1 to {MAX_CORR_ID_CHARS} visible ASCII characters.")


def refusal(error: PostroomError, corr_id: str, *, ends_connection: bool = False) -> Reply:
    """Return the answer to a refused request.

    Arguments:
        ends_connection: close, as after an `Expect` without 100: what comes next may be the body or not.
    """
    headers: list[tuple[bytes, bytes]] = []
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
    """Send an answer, in pieces (svc-mailbox I-6)."""
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
