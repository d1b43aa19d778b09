"""`Page`, the argument of page handlers, and `route`, which serves a handler."""

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import quote, urlencode

from starlette.datastructures import FormData, QueryParams
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from postroom.adapters.console.event_filter import EPOCH, MS, parse_time
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.security import Refresh, read_choice
from postroom.adapters.console.sessions import BrowserSession, Sessions
from postroom.adapters.console.settings import ConsoleData, ConsoleSettings
from postroom.adapters.console.templating import Templates
from postroom.application.masking import NO_MASK, Mask
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.read_models import SearchQueries
from postroom.application.query_results import Moment
from postroom.application.service import Grant, Service, Session
from postroom.application.threads import in_query_thread
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, PostroomError
from postroom.domain.search import topic_matches

P = ParamSpec("P")
T = TypeVar("T")

_CHANGED_IN_PATHS = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x20\x7f\\]")
"""Path segments that browsers remove, and characters that they replace or servers refuse."""
INSTANCES: Final = "/instances"
"""Path of the page of all instances; the consoles are below it, except that of the process's own mailbox."""
READS = frozenset((Right.READ_HEADERS, Right.READ_PAYLOAD))


class Frame(Protocol):
    """The console of a service, as pages use it.

    Arguments:
        siblings: paths of all instances by name, including this one; empty if there is only this one.
        streams: number of open event streams by `BrowserSession.bearer`.
        is_secure: whether clients use TLS, here or at a proxy.
        place: path of this console among the instances; empty for the mailbox that the process itself serves.
    """

    service: Service
    data: ConsoleData
    settings: ConsoleSettings
    templates: Templates
    samples: Samples
    nav: Sequence["NavEntry"]
    siblings: Mapping[str, str]
    streams: Counter[str]
    is_secure: bool
    place: str

    def root(self, request: Request) -> str:
        """Return the prefix of the links of all instances."""

    @property
    def sessions(self) -> Sessions:
        """Return the sessions of browsers."""

    def find(self, request: Request, *, touch: bool = True) -> BrowserSession | None:
        """Return the session of a request's cookie; see `Sessions.find`."""

    async def serve(self, path: str, handler: "Handler", request: Request) -> Response:
        """Answer a request by a handler; see `route`."""


NavGroup = Literal["Now", "History", "Operations"]
"""Groups of pages: the state of the mailbox, its past, and its changes and configuration."""


class NavEntry(NamedTuple):
    """An entry of the navigation.

    Arguments:
        label: text of the entry.
        path: path within the console, such as `/search`.
        order: sort key of the entries of a group.
        operation: the entry is shown only to callers who may do this.
        key: letter that, typed after `g`, opens the page.
        all_topics: whether the page needs a token that is not limited to topics.
    """

    label: str
    path: str
    order: int
    operation: Right = Right.READ_HEADERS
    group: NavGroup = "Now"
    key: str = ""
    all_topics: bool = False


class Page:
    """One request of a browser that is signed in.

    Arguments:
        request: the request, whose form has been read and CSRF token checked.
        browser: the session of the browser.
        session: the service session of the browser's token, opened for this request.
        form: fields of a POST; empty for other methods.
        base: prefix of all links.
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
        """Return the data sources besides the mailbox."""
        return self.console.data

    @property
    def mailbox(self) -> Mailbox:
        """Return the mailbox, restricted to the caller's rights."""
        return self.session.mailbox

    @property
    def search_queries(self) -> SearchQueries | None:
        """Return the queries of the read models as the caller may make them; None if the store has none."""
        raw = self.data.search_queries
        return None if raw is None else self.session.search_queries(raw)

    @property
    def grant(self) -> Grant:
        """Return the caller's rights."""
        return self.session.grant

    @property
    def mask(self) -> Mask:
        """Return the headers and payload fields that are hidden from the caller."""
        return NO_MASK if Right.ADMIN in self.grant.operations else self.data.mask

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
        """Return whether htmx requests a part of the page."""
        headers = self.request.headers
        return "hx-request" in headers and "hx-history-restore-request" not in headers

    def field(self, name: str, default: str = "") -> str:
        """Return a text field of the form."""
        value = self.form.get(name)
        return value if isinstance(value, str) else default

    def may(self, operation: Right) -> bool:
        """Return whether to offer an operation; the mailbox checks it again."""
        if self.console.settings.read_only and operation not in READS:
            return False
        return operation in self.grant.operations

    @property
    def operations(self) -> list[Right]:
        """Return the operations to offer, in the order of `Right`."""
        return [each for each in Right if self.may(each)]

    @property
    def nav(self) -> list[NavEntry]:
        """Return the entries of the navigation that the caller may see."""
        sees_all = self.grant.covers_all_topics
        return [
            each
            for each in self.console.nav
            if self.may(each.operation) and (sees_all or not each.all_topics)
        ]

    @property
    def instances(self) -> list[tuple[str, str]]:
        """Return the names and links of the instances of the console; empty if it has only one."""
        root = self.console.root(self.request)
        return [(name, f"{root}{place}/") for name, place in self.console.siblings.items()]

    @property
    def instance(self) -> str:
        """Return the name of the instance in a console of several."""
        names = {place: name for name, place in self.console.siblings.items()}
        return names[self.console.place]

    @property
    def all_instances(self) -> str:
        """Return the link to the page of all instances."""
        return self.console.root(self.request) + INSTANCES + "/"

    @property
    def refresh(self) -> Refresh:
        """Return how often the browser wants its live pages to be updated."""
        return read_choice(self.request)

    @property
    def here_and_query(self) -> str:
        """Return the path of this page with its query, still escaped."""
        query = self.request.url.query
        path = self.request.scope["path"].removeprefix(self.request.scope["root_path"])
        return quote(path or "/") + (f"?{query}" if query else "")

    @property
    def role(self) -> str:
        """Return the role that corresponds to the caller's widest operation."""
        if self.may(Right.ADMIN):
            return "Administrator"
        if self.may(Right.REDRIVE):
            return "Operator"
        if self.may(Right.READ_PAYLOAD):
            return "Payload reader"
        return "Sender" if self.operations == [Right.SEND] else "Reader"

    async def check(self, operation: Right) -> None:
        """Raise Forbidden or Unauthenticated unless the token permits an operation now, on some topics."""
        await self.grant.check(operation)

    def require_all(self, operation: Right) -> None:
        """Raise unless the token permits an operation on all topics of the mailbox."""
        self.session.require(operation)

    def own_topics(self) -> list[str]:
        """Return the topics and globs that the token is limited to, which its searches must name."""
        access = self.grant.access
        if access is None or self.grant.covers_all_topics:
            return []
        return [each for patterns in access.topics for each in patterns if self.grant.covers(each)]

    async def blocking(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of a call that blocks, made in a thread."""
        return await in_query_thread(call, *args, **kwargs)

    def url(self, path: str, /, **query: Any) -> str:
        """Return the link to a path of the console, without parameters that are None or empty."""
        values = {name: value for name, value in query.items() if value not in (None, "")}
        text = urlencode(values, doseq=True)
        return self.base + quote(path, safe="/:@!$&'()*+,;=-._~") + (f"?{text}" if text else "")

    def message_url(self, id_: str) -> str:
        """Return the link to a message, with the id in the query if browsers would change it in a path."""
        is_plain = not _CHANGED_IN_PATHS.search(id_)
        return self.url(f"/messages/{id_}") if is_plain else self.url("/messages", id=id_)

    async def render(self, template: str, status: int = 200, /, **facts: Any) -> Response:
        """Render a page; `templates/base.html` lists the variables of all templates."""
        notices, self.browser.notices = self.browser.notices, []
        return HTMLResponse(self.part(template, notices=notices, **facts), status)

    def part(self, template: str, /, **facts: Any) -> str:
        """Render a template to text, such as a part of a page."""
        frame: dict[str, Any] = {
            "base": self.base,
            "page": self,
            "url": self.url,
            "csrf": self.browser.csrf,
            "nav": self.nav,
            "here": self.request.scope["path"].removeprefix(self.request.scope["root_path"]) or "/",
            "notices": [],
        }
        return self.console.templates.render(template, **frame | facts)

    def redirect(self, path: str, notice: str | None = None, /, **query: Any) -> Response:
        """Return the redirect that answers a form; the next page shows the notice."""
        if notice is not None:
            self.browser.notices = [*self.browser.notices[-4:], notice]
        return RedirectResponse(self.url(path, **query), 303)


Handler = Callable[[Page], Awaitable[Response]]


def route(
    path: str,
    handler: Handler,
    *,
    method: str = "GET",
    name: str | None = None,
    query: Collection[str] = (),
    lists: Collection[str] = (),
) -> Route:
    """Return the route of a handler.

    A request without a session leads to sign-in and back, and keeps the fields of its form. Errors are shown
    as pages.

    Arguments:
        path: path within the console, with Starlette's placeholders.
        method: `GET`, or `POST` for an action, whose form must contain the session's CSRF token.
        query: parameters that the URL may have; the page refuses others, as a misspelt one would filter
            nothing.
        lists: parameters that may be repeated; the page refuses repetitions of others, as it would ignore a
            value.
    """
    serve = partial(_serve, path, handler, query, lists)
    return Route(path, serve, methods=[method], name=name or f"{method} {path}")


async def _serve(
    path: str, handler: Handler, query: Collection[str], lists: Collection[str], request: Request
) -> Response:
    console: Frame = request.app.state.console
    if request.method != "POST":
        for name, count in Counter(name for name, _ in request.query_params.multi_items()).items():
            if name not in query or (count > 1 and name not in lists):
                handler = partial(_refuse, query, name)
    return await console.serve(path, handler, request)


async def _refuse(names: Collection[str], name: str, _page: Page) -> Response:
    """Raise InvalidRequest for a parameter of a URL that is unknown to the page, or may not be repeated."""
    if name in names:
        raise InvalidRequest(f"The parameter {name} occurs twice; give one value.")
    others = f"it has {', '.join(sorted(names))}" if names else "it has none"
    raise InvalidRequest(f"This page has no parameter {name[:80]!r}; {others}.")


MAX_DEAD_LETTERS: Final = 100


def parse_moment(text: str) -> Moment | None:
    """Return a log position or a time, or None for empty text.

    Raises: InvalidRequest for anything else.
    """
    if not text:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        return int(text)
    try:
        return EPOCH + parse_time("moment", text) * MS
    except OverflowError:
        raise InvalidRequest(
            f"The moment {text[:80]!r} is out of range; expected a time from year 1 to 9999."
        ) from None


async def moment_facts(page: Page, at: Moment, topics: Sequence[str]) -> dict[str, Any]:
    """Return the unsettled messages by shard and the dead letters at a moment, or the error.

    Arguments:
        topics: names or globs; all if empty.
    """
    topic = topics[0] if len(topics) == 1 and "*" not in topics[0] else None
    try:
        backlog = await page.mailbox.get_backlog(topic, at=at)
        dead = await page.mailbox.list_dead_letters(topic, limit=MAX_DEAD_LETTERS, at=at)
    except PostroomError as error:
        return {"error": error}

    def is_shown(name: str) -> bool:
        return not topics or any(topic_matches(each, name) for each in topics)

    return {
        "error": None,
        "backlog": backlog,
        "shards": [each for each in backlog.shards if is_shown(each.topic)],
        "letters": [each for each in dead.items if is_shown(each.topic)],
        "is_whole": dead.next_cursor is None,
    }
