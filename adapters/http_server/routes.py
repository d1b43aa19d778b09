"""Routes: which handler answers a method and a path, and with what."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from postroom.adapters.http_server.call import Call, Reply
from postroom.adapters.http_server.problems import MethodNotAllowed
from postroom.domain.errors import NotFound


class Route(NamedTuple):
    """A call of the HTTP interface.

    Arguments:
        path: with placeholders such as `{msg_id}`.
        body: type of the JSON body; None if it takes none.
        query: struct of the query parameters; None if it takes none.
        answer: type of the JSON answer, or a tuple of them; the media type of another one.
        refusals: error statuses of this route, besides those that every route has.
        examples: of body and answer.
        is_public: it needs no token.
        takes_cloud_events: its body may also be a CloudEvent, which becomes a `NewMessage`.
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

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes
        self._fixed = {(route.method, route.path): route for route in routes if "{" not in route.path}
        self._by_path: dict[tuple[str, ...], dict[str, Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.segments, {})[route.method] = route

    def find(self, method: str, segments: list[str]) -> tuple[Route, dict[str, str]]:
        """Return the route of a request, and the values of its placeholders.

        Raises: NotFound, MethodNotAllowed.
        """
        path = "/" + "/".join(segments)
        asked = "GET" if method == "HEAD" else method
        route = self._fixed.get((asked, path))
        if route is not None:
            return route, {}
        for pattern, methods in self._by_path.items():
            values = _match(pattern, segments)
            if values is not None:
                if asked not in methods:
                    raise MethodNotAllowed(method, path[:200], ", ".join(sorted(methods)))
                return methods[asked], values
        raise NotFound(f"There is nothing at {path[:200]}; GET /openapi.json lists the calls.")


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
