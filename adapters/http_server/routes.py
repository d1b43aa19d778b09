"""Routes, the calls that they answer, and their answers, apart from ASGI."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec

from postroom.adapters.http_server.connection import HttpConnection
from postroom.adapters.http_server.problems import MethodNotAllowed
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import Session
from postroom.domain.errors import InvalidRequest, NotFound

_ENCODER = msgspec.json.Encoder()


class Call(msgspec.Struct):
    """A request whose path, parameters and body have been checked.

    Arguments:
        path: values of the path's placeholders.
        query: the parameters, as the route's type.
        body: the body, as the route's type; None without one.
        connection: the client's connection; its end cancels waits on behalf of the client.
        open_session: opens the session again, which fails once the token has expired or is revoked.
        caller: the session with which the request was accepted; None for a public route.
    """

    corr_id: str
    headers: Mapping[bytes, bytes]
    path: dict[str, str]
    query: Any
    body: Any
    connection: HttpConnection
    open_session: Callable[[], Awaitable[Session]]
    caller: Session | None

    @property
    def session(self) -> Session:
        """Return the caller's session."""
        assert self.caller is not None, "a public route has no session"
        return self.caller

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox as the caller may use it."""
        return self.session.mailbox

    @property
    def closed(self) -> asyncio.Event:
        """Return the event that is set when the client is gone."""
        return self.connection.closed


CLOSE: Final = (b"connection", b"close")
"""Header of an answer after which the connection is closed."""


class Reply(msgspec.Struct):
    """An answer.

    Arguments:
        body: bytes, or an iterator of pieces.
    """

    body: bytes | AsyncIterator[bytes]
    status: int = 200
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_reply(value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Reply:
    """Return a value as JSON."""
    return Reply(_ENCODER.encode(value), status, headers=headers)


class HttpRoute(NamedTuple):
    """A call of the HTTP interface.

    Arguments:
        path: path with placeholders such as `{msg_id}`.
        body: type of the JSON body; None if it takes none.
        query: struct of the query parameters; None if it takes none.
        answer: type of the JSON answer, or a tuple of them; the media type of another one.
        refusals: error statuses of this route, in addition to the common ones.
        examples: of body and answer.
        is_public: whether it needs no token.
        takes_cloud_events: whether its body may also be a CloudEvent, which becomes a `NewMessage`.
    """

    method: str
    path: str
    handler: Callable[[Call], Awaitable[Reply]]
    summary: str
    answer: Any
    body: Any = None
    query: Any = None
    body_is_optional: bool = False
    refusals: tuple[int, ...] = ()
    examples: tuple[Any, Any] = (None, None)
    is_public: bool = False
    takes_cloud_events: bool = False

    @property
    def segments(self) -> tuple[str, ...]:
        """Return the segments of the path."""
        return tuple(self.path.split("/")[1:])


class Router:
    """Finder of routes."""

    def __init__(self, routes: Sequence[HttpRoute]) -> None:
        self.routes = routes
        self._fixed = {
            (route.method, route.path.encode()): route for route in routes if "{" not in route.path
        }
        self._by_start: dict[tuple[str, ...], dict[tuple[str, ...], dict[str, HttpRoute]]] = {}
        """Routes by the first two segments of their paths, which are no placeholders, and by all of them."""
        for route in routes:
            paths = self._by_start.setdefault(route.segments[:2], {})
            paths.setdefault(route.segments, {})[route.method] = route

    def find(self, method: str, raw_path: bytes) -> tuple[HttpRoute, dict[str, str]]:
        """Return the route of a request, and the values of its placeholders.

        Raises: NotFound, MethodNotAllowed; InvalidRequest for a path that is not UTF-8.
        """
        route = self._fixed.get((method, raw_path))
        if route is not None:
            return route, {}
        asked = "GET" if method == "HEAD" else method
        segments = _segments(raw_path)
        path = "/" + "/".join(segments)
        route = self._fixed.get((asked, path.encode()))
        if route is not None:
            return route, {}
        for pattern, methods in self._by_start.get(tuple(segments[:2]), {}).items():
            values = _match(pattern, segments)
            if values is not None:
                if asked not in methods:
                    raise MethodNotAllowed(method, path[:200], ", ".join(sorted(methods)))
                return methods[asked], values
        raise NotFound(f"There is nothing at {path[:200]}; GET /openapi.json lists the calls.")


def _segments(raw_path: bytes) -> list[str]:
    """Return the segments of a path; a slash within a segment is written as %2F."""
    if b"%" not in raw_path and raw_path.isascii():
        return raw_path.decode().split("/")[1:]
    try:
        return [unquote_to_bytes(each).decode() for each in raw_path.split(b"/")[1:]]
    except UnicodeDecodeError:
        raise InvalidRequest("The path is not UTF-8.") from None


def _match(pattern: tuple[str, ...], segments: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    values = {}
    for expected, actual in zip(pattern, segments, strict=True):
        if expected.startswith("{"):
            if not actual:
                return None
            values[expected[1:-1]] = actual
        elif expected != actual:
            return None
    return values
