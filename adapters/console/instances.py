"""Several mailboxes in one console: a page of all, and the console of each below a path of its own.

Each instance has its own sessions, CSRF tokens and access control: no instance accepts the cookie of another.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from secrets import token_urlsafe
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from postroom.adapters.console.app import Console
from postroom.adapters.console.page import INSTANCES
from postroom.adapters.console.security import ROUTE, Shell, cookie_name, protect, read_choice, set_cookie
from postroom.adapters.console.sessions import BrowserSession, OneTimeCode, Sessions
from postroom.adapters.console.settings import ConsoleSettings
from postroom.adapters.console.topic_list import age_at
from postroom.application.queries.mailbox_past import to_us
from postroom.application.service import SurfaceMetrics
from postroom.application.threads import cancel_and_wait, query_pool
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, NotFound, PostroomError, Unauthenticated, Unavailable

WAIT_SECONDS: Final = 0.5
"""Time after which the page shows an instance without counts; the query goes on in the background."""
REFRESH_SECONDS: Final = 5


class Instance:
    """A mailbox of the console.

    Arguments:
        name: name of the instance, as people call it.
        place: path of its console; empty for the mailbox that the process serves.
        sessions: sessions of browsers, which may begin before the mailbox can be reached.
        siblings: paths of all instances by name; empty if there is only one.

    Attributes:
        token: token of the sessions that the link starts; None if users sign in with tokens.
        app: its console; None until the mailbox was reached for the first time.
        error: why it could not be reached at the latest attempt.
    """

    def __init__(self, name: str, place: str, sessions: Sessions, siblings: Mapping[str, str]) -> None:
        self.label = name
        self.place = place
        self.sessions = sessions
        self.siblings = siblings
        self.token: str | None = None
        self.app: Starlette | None = None
        self.error: PostroomError | None = None
        self._reading: dict[BrowserSession, asyncio.Task[Counted]] = {}

    @property
    def name(self) -> str:
        """Return its name in cookies."""
        return self.place.rpartition("/")[2]

    @property
    def console(self) -> Console | None:
        """Return its console; None until the mailbox was reached for the first time."""
        return None if self.app is None else self.app.state.console

    @property
    def is_reached(self) -> bool:
        """Return whether the mailbox was reached when its console was opened."""
        return self.app is not None

    def open(self, app: Starlette, token: str | None) -> None:
        """Show the console from now on, also to the sessions that the link has started."""
        if token is not None:
            self.token = token
            for each in self.sessions.sessions():
                each.token = token
        app.state.console.siblings = self.siblings
        self.app, self.error = app, None

    async def read(self, browser: BrowserSession) -> "Counted":
        """Return what a browser may see of the mailbox.

        A mailbox that does not answer soon is asked in the background, once at a time for each browser.

        Raises: Unavailable if the mailbox has not answered, and every other error of its calls.
        """
        console = self.console
        if console is None:
            raise self.error or Unavailable("It has not been reached yet.")
        reading = self._reading.get(browser)
        if reading is None:
            reading = self._reading[browser] = asyncio.create_task(_count(console, browser))
            reading.add_done_callback(partial(self._forget, browser))
        done, _ = await asyncio.wait([reading], timeout=WAIT_SECONDS)
        if not done:
            raise Unavailable(f"It has not answered within {WAIT_SECONDS:g} s.")
        return reading.result()

    def _forget(self, browser: BrowserSession, reading: "asyncio.Task[Counted]") -> None:
        self._reading.pop(browser, None)
        if not reading.cancelled():
            reading.exception()  # silences asyncio's 'exception was never retrieved'

    async def close(self) -> None:
        """Cancel the queries that have not ended."""
        await cancel_and_wait(*self._reading.values())


class Counted(NamedTuple):
    """What a browser may see of a mailbox; numbers cover the topics of its token.

    Arguments:
        owner: the process that owns it; empty for a token that is limited to topics.
        oldest: age of its oldest message in µs, or None.
    """

    mailbox: str
    store: str
    owner: str
    ready: int
    delayed: int
    in_flight: int
    dead: int
    oldest: int | None


class InstanceRow(NamedTuple):
    """A row of the page of all.

    Arguments:
        counted: None without a session, without the right to see it, and if it can't be reached.
        error: why it can't be reached; only for browsers that are signed in to it.
        is_signed_in: whether the browser has a session with it.
        is_reached: whether it answered, as far as the console knows.
    """

    label: str
    href: str
    is_signed_in: bool
    is_reached: bool
    counted: Counted | None = None
    error: str = ""


async def _count(console: Console, browser: BrowserSession) -> Counted:
    """Count what a session may see now; raise Forbidden or Unauthenticated if it may not see the mailbox."""
    session = await console.service.open_session(browser.token)
    await session.grant.check(Right.READ_HEADERS)
    counts, sees_all = await console.samples.count(), session.grant.covers_all_topics
    topics = [each for each in counts.topics if sees_all or session.grant.covers(each.topic)]
    now = to_us(datetime.fromisoformat(counts.backlog.as_of))
    oldest = min((each.oldest_at for each in topics if each.oldest_at is not None), default=None)
    sums = {name: sum(map(attrgetter(name), topics)) for name in ("ready", "delayed", "in_flight", "dead")}
    backlog = counts.backlog
    return Counted(
        backlog.mailbox,
        console.data.store if sees_all else "",
        f"{backlog.owner}, epoch {backlog.epoch}" if sees_all else "",
        oldest=age_at(oldest, now),
        **sums,
    )


class Instances(Shell):
    """The page of all instances, which links to the console of each.

    Arguments:
        instances: instances in the order of the page.
        options: of `Shell`.
    """

    def __init__(self, *arguments: Any, instances: Sequence[Instance], **options: Any) -> None:
        super().__init__(*arguments, place=INSTANCES, **options)
        self._instances = instances
        self._by_name: Mapping[str, Instance] = {each.name: each for each in instances if each.name}

    def routes(self) -> list[BaseRoute]:
        """Return the routes below `INSTANCES`."""
        return [
            Route("/", self.show, methods=["GET"]),
            Route("/static/{name}", self.serve_static, methods=["GET"]),
            Route("/refresh", self.choose_refresh, methods=["POST"]),
            Route("/{instance}", self.show_slash, methods=["GET"]),
            Mount("/{instance}", self._serve),
        ]

    async def show_all(self, request: Request) -> Response:
        """Redirect the root of a console without a mailbox of its own to the page of all."""
        request.scope[ROUTE] = "/"
        return protect(RedirectResponse(f"{self.base(request)}{INSTANCES}/", 303))

    async def show(self, request: Request) -> Response:
        """Show the instances to a browser that has a session with at least one of them."""
        request.scope[ROUTE] = INSTANCES
        browsers = [self._find(request, each) for each in self._instances]
        if not any(browsers):
            return protect(self._ask_to_sign_in(request))
        rows = await asyncio.gather(
            *(self._row(request, *each) for each in zip(self._instances, browsers, strict=True))
        )
        text = self.render(
            "instances/table" if "hx-request" in request.headers else "instances/page",
            request,
            rows=rows,
            refresh=read_choice(request),
            shortest=REFRESH_SECONDS,
        )
        return protect(HTMLResponse(text), request)

    async def show_slash(self, request: Request) -> Response:
        """Redirect to the path of an instance with its slash."""
        request.scope[ROUTE] = f"{INSTANCES}/{{instance}}"
        return protect(RedirectResponse(f"{self.base(request)}/{request.path_params['instance']}/", 308))

    def _find(self, request: Request, instance: Instance) -> BrowserSession | None:
        return instance.sessions.find(request.cookies.get(cookie_name(request, instance.name)))

    def _ask_to_sign_in(self, request: Request) -> Response:
        """Redirect a browser without a session to the page on which it can sign in."""
        if self._code is None:
            return RedirectResponse(f"{self.root(request)}/sign-in?next={quote(INSTANCES, safe='')}/", 303)
        return self.sign_in_page(request, 401)

    async def _row(self, request: Request, instance: Instance, browser: BrowserSession | None) -> InstanceRow:
        row = InstanceRow(
            instance.label,
            f"{self.root(request)}{instance.place}/",
            is_signed_in=browser is not None,
            is_reached=instance.is_reached,
        )
        if browser is None:
            return row
        try:
            return row._replace(counted=await instance.read(browser), is_reached=True)
        except Unauthenticated:
            return row._replace(is_signed_in=False)
        except Forbidden:
            return row
        except PostroomError as error:
            return row._replace(is_reached=False, error=str(error))

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request of the console of an instance."""
        instance = self._by_name.get(scope["path_params"]["instance"])
        if instance is not None and instance.app is not None:
            query_pool.set(instance.name)  # queries of an instance that hangs delay no others
            await instance.app(scope, receive, send)
            return
        request = Request(scope, receive)
        scope["root_path"] = scope["root_path"].removesuffix(f"/{scope['path_params']['instance']}")
        scope[ROUTE] = f"{INSTANCES}/{{instance}}"
        error: PostroomError = NotFound("There is no instance of this name.")
        if instance is not None:
            is_known = self._find(request, instance) is not None and instance.error is not None
            reason = f": {instance.error}" if is_known else "; try again shortly."
            error = Unavailable(f"{instance.label} can't be reached{reason}")
        await protect(self.error_page(request, error))(scope, receive, send)


class StartLink:
    """The link that starts sessions, and the path to which their cookies are limited.

    The path is random and not in the link: browsers send cookies to all ports of a host, and another user of
    the machine may serve pages at one of them, and may see the link among the arguments of a browser.

    Arguments:
        instances: each gets a session of its own, with its own cookie.
    """

    def __init__(self, console: Shell, code: OneTimeCode, instances: Sequence[Instance]) -> None:
        self._console = console
        self._code = code
        self._instances = instances
        self._path = f"/{token_urlsafe(16)}"

    def lead_to(self, inner: ASGIApp) -> Starlette:
        """Return the application whose link leads to another one, below the random path."""
        routes: list[BaseRoute] = [
            Mount(self._path, inner),
            Route("/start", self.show, methods=["GET"]),
            Route("/start", self.start, methods=["POST"]),
            Route("/static/{name}", self._console.serve_static, methods=["GET"]),
            Route("/{path:path}", self.show_other, methods=["GET", "POST"]),
        ]
        return self._console.make_app(routes)

    async def show(self, request: Request) -> Response:
        """Show the button that uses the code, so that programs that only follow links don't use it."""
        text = request.query_params.get("code", "")
        if not self._code.can_use(text):
            return self._refuse(request)
        names = [each.name for each in self._instances if each.name]
        return protect(HTMLResponse(self._console.render("session/start", request, code=text, names=names)))

    async def start(self, request: Request) -> Response:
        """Exchange the code for the sessions, once."""
        try:
            text = (await self._console.read_public_form(request, "/start")).get("code")
        except PostroomError as error:
            return protect(self._console.error_page(request, error))
        if not self._code.use(text):
            return self._refuse(request)
        base = self._console.base(request) + self._path
        response = RedirectResponse(base + "/", 303)
        for each in self._instances:
            cookie, _ = each.sessions.start(each.token)
            set_cookie(response, request, base, cookie, each.name, is_secure=self._console.is_secure)
        return protect(response)

    async def show_other(self, request: Request) -> Response:
        """Answer a request outside of the random path like a request without a session."""
        return protect(self._console.sign_in_page(request, 401))

    def _refuse(self, request: Request) -> Response:
        error = Unauthenticated(
            "The link has been used or has expired; start `postroom console` again for a new one."
        )
        return protect(self._console.sign_in_page(request, error.status, str(error)))


def find_places(names: Sequence[str]) -> dict[str, str]:
    """Return the paths of the consoles of instances by their names."""
    return {name: f"{INSTANCES}/{name}" for name in names}


def join(
    instances: Sequence[Instance], settings: ConsoleSettings, metrics: SurfaceMetrics, **options: Any
) -> ASGIApp:
    """Return the application of a console of one or several instances, behind its link if it has a code.

    Arguments:
        instances: all instances; the mailbox that the process itself serves, if any, comes first.
        options: of `Shell`.
    """
    own = next((each.app for each in instances if not each.place), None)
    code: OneTimeCode | None = options["code"]
    shell = Shell(settings, metrics, **options)
    if own is not None and len(instances) == 1:
        app: ASGIApp = own
    else:
        overview = Instances(settings, metrics, instances=instances, **options)
        routes: list[BaseRoute] = [
            Route(INSTANCES, overview.show_all, methods=["GET"]),
            Mount(INSTANCES, overview.make_app(overview.routes())),
            Route("/", overview.show_all, methods=["GET"]) if own is None else Mount("", own),
        ]
        app = shell.make_app(routes)
    return app if code is None else StartLink(shell, code, instances).lead_to(app)
