"""`Page`: what the handler of a page gets, and `route`, which serves a handler."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, urlencode

from starlette.datastructures import FormData, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from postroom.adapters.console.data import ConsoleData
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.sessions import BrowserSession, Sessions
from postroom.adapters.console.settings import ConsoleSettings
from postroom.adapters.console.templating import Templates
from postroom.application.ports.mailbox import Mailbox
from postroom.application.query_threads import in_query_thread
from postroom.application.service import Grant, Service, Session
from postroom.domain.capability.rights import Operation

P = ParamSpec("P")
T = TypeVar("T")

_CHANGED_IN_PATHS = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x20\x7f\\]")
"""Segments that are removed from paths, and characters that are refused there or replaced."""
READS = frozenset((Operation.READ_HEADERS, Operation.READ_PAYLOAD))


class Frame(Protocol):
    """What all pages share: the console of one service.

    Arguments:
        streams: number of open streams of events by `BrowserSession.bearer`.
        is_secure: clients use TLS, here or at a proxy.
    """

    service: Service
    data: ConsoleData
    settings: ConsoleSettings
    templates: Templates
    samples: Samples
    nav: Sequence["NavEntry"]
    streams: Counter[str]
    is_secure: bool

    @property
    def sessions(self) -> Sessions:
        """Return the sessions of browsers."""

    def find(self, request: Request, *, touch: bool = True) -> BrowserSession | None:
        """Return the session of a request's cookie; see `Sessions.find`."""

    async def serve(self, path: str, handler: "Handler", request: Request) -> Response:
        """Answer a request by a handler; see `route`."""


class NavEntry(NamedTuple):
    """An entry of the navigation.

    Arguments:
        label: its text.
        path: within the console, such as `/search`.
        order: entries are sorted by it.
        operation: shown to callers who may do it only.
    """

    label: str
    path: str
    order: int
    operation: Operation = Operation.READ_HEADERS


class Page:
    """One request of a browser that is signed in.

    Arguments:
        request: of Starlette; its form has been read and its CSRF token checked.
        browser: the session of the browser.
        session: what the bearer of its token may use, opened for this request.
        form: fields of a POST; empty otherwise.
        base: what links begin with.
    """

    def __init__(
        self,
        console: Frame,
        request: Request,
        browser: BrowserSession,
        session: Session,
        base: str,
        form: FormData | None = None,
    ) -> None:
        self.console = console
        self.request = request
        self.browser = browser
        self.session = session
        self.base = base
        self.form: FormData = form or FormData()

    @property
    def service(self) -> Service:
        """Return the service."""
        return self.console.service

    @property
    def data(self) -> ConsoleData:
        """Return what pages read besides the mailbox."""
        return self.console.data

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox as the caller may use it."""
        return self.session.mailbox

    @property
    def grant(self) -> Grant:
        """Return what the caller's token permits."""
        return self.session.grant

    @property
    def query(self) -> QueryParams:
        """Return the parameters of the URL."""
        return self.request.query_params

    @property
    def path(self) -> Mapping[str, str]:
        """Return the values of the path's placeholders."""
        return self.request.path_params

    @property
    def is_fragment(self) -> bool:
        """Return whether htmx asks for a part of the page."""
        headers = self.request.headers
        return "hx-request" in headers and "hx-history-restore-request" not in headers

    def field(self, name: str, default: str = "") -> str:
        """Return a text field of the form."""
        value = self.form.get(name)
        return value if isinstance(value, str) else default

    def may(self, operation: Operation) -> bool:
        """Return whether to offer an operation; the mailbox checks it again."""
        if self.console.settings.read_only and operation not in READS:
            return False
        return operation in self.grant.operations

    @property
    def operations(self) -> list[Operation]:
        """Return the operations to offer, in the order of `Operation`."""
        return [each for each in Operation if self.may(each)]

    @property
    def role(self) -> str:
        """Return what the caller is, by the widest operation: administrator, operator or reader."""
        if self.may(Operation.ADMIN):
            return "Administrator"
        if self.may(Operation.REDRIVE):
            return "Operator"
        return "Payload reader" if self.may(Operation.READ_PAYLOAD) else "Reader"

    async def check(self, operation: Operation) -> None:
        """Raise Forbidden or Unauthenticated unless the token permits an operation now, on some topics."""
        await self.grant.check(operation)

    def require_all(self, operation: Operation) -> None:
        """Raise unless the token permits an operation on all topics of the mailbox."""
        self.session.require(operation)

    async def blocking(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call that blocks, made in a thread."""
        return await in_query_thread(call, *args, **kwargs)

    def url(self, path: str, /, **query: Any) -> str:
        """Return the link to a path of the console; parameters that are None or empty are left out."""
        pairs = [(name, each) for name, value in query.items() for each in _values(value)]
        return self.base + quote(path, safe="/:@!$&'()*+,;=-._~") + (f"?{urlencode(pairs)}" if pairs else "")

    def message_url(self, id_: str) -> str:
        """Return the link to a message; an id that browsers would change in a path is in the query."""
        is_plain = not _CHANGED_IN_PATHS.search(id_)
        return self.url(f"/messages/{id_}") if is_plain else self.url("/messages", id=id_)

    async def render(self, template: str, status: int = 200, /, **facts: Any) -> Response:
        """Return a page from its template; see `templates/base.html` for what all templates know."""
        notices, self.browser.notices = self.browser.notices, []
        return HTMLResponse(self.part(template, notices=notices, **facts), status)

    def part(self, template: str, /, **facts: Any) -> str:
        """Return the text of a template, such as a part of a page."""
        frame: dict[str, Any] = {
            "base": self.base,
            "page": self,
            "url": self.url,
            "csrf": self.browser.csrf,
            "nav": [each for each in self.console.nav if self.may(each.operation)],
            "here": self.request.scope["path"].removeprefix(self.request.scope["root_path"]) or "/",
            "notices": [],
        }
        return self.console.templates.render(template, **frame | facts)

    def redirect(self, path: str, notice: str | None = None, /, **query: Any) -> Response:
        """Return the answer to a form that leads to a page, with a sentence about what was done."""
        if notice is not None:
            self.browser.notices = [*self.browser.notices[-4:], notice]
        return RedirectResponse(self.url(path, **query), 303)


Handler = Callable[[Page], Awaitable[Response]]


def route(path: str, handler: Handler, *, method: str = "GET", name: str | None = None) -> Route:
    """Return the route of a handler.

    A request whose session is over leads to sign-in and back; what its form has is not lost. Errors are shown
    as pages in their words.

    Arguments:
        path: within the console, with placeholders as of Starlette.
        method: `GET`, or `POST` for an action, whose form must have the session's CSRF token.
    """
    return Route(path, partial(_serve, path, handler), methods=[method], name=name or f"{method} {path}")


async def _serve(path: str, handler: Handler, request: Request) -> Response:
    console: Frame = request.app.state.console
    return await console.serve(path, handler, request)


def _values(value: Any) -> list[str]:
    if value is None or value == "":
        return []
    return [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
