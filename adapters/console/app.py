"""The console: pages for operators, served through the same handlers and capabilities as HTTP and gRPC."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Final, get_args

from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from postroom.adapters.console import pages
from postroom.adapters.console.page import Handler, NavEntry, NavGroup, Page
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.security import (
    REFUSAL,
    ROUTE,
    Shell,
    client_address,
    cookie_name,
    delete_cookie,
    protect,
    read_form,
    return_path,
    set_cookie,
)
from postroom.adapters.console.sessions import BrowserSession, OneTimeCode, Sessions, SignInThrottle, same
from postroom.adapters.console.settings import ConsoleData, ConsoleSettings
from postroom.application.service import Service
from postroom.application.telemetry import logger
from postroom.domain.capability.access import Access
from postroom.domain.capability.token import Token
from postroom.domain.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    PostroomError,
    Saturated,
    Unauthenticated,
)

MAX_TOKEN_CHARS: Final = 16_384
RESUME: Final = "resume."
"""Prefix of the hidden fields in which the sign-in page carries the fields of an interrupted form."""
NO_SESSION: Final = "Your session has ended; sign in again."


class Console(Shell):
    """The console of a service.

    Arguments:
        options: of `Shell`.
        sessions: sessions of browsers; None starts without sessions.

    Attributes:
        siblings: paths of all instances by name, including this one; empty if there is only this one.
    """

    def __init__(
        self,
        service: Service,
        data: ConsoleData,
        settings: ConsoleSettings,
        samples: Samples,
        *,
        sessions: Sessions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(settings, service.metrics, **options)
        self.service = service
        self.data = data
        self.samples = samples
        self.nav: Sequence[NavEntry] = ()
        self.siblings: Mapping[str, str] = {}
        self.streams: Counter[str] = Counter()
        self._sessions = new_sessions(settings) if sessions is None else sessions
        self._throttle = SignInThrottle(time.monotonic, settings.max_failed_sign_ins)

    @property
    def sessions(self) -> Sessions:
        """Return the sessions of browsers."""
        return self._sessions

    # -- requests of signed-in browsers ---

    async def serve(self, path: str, handler: Handler, request: Request) -> Response:
        """Answer a request by the handler of its page; see `route`."""
        request.scope[ROUTE] = path
        base = self.base(request)
        browser: BrowserSession | None = None
        form: FormData | None = None
        cookie: str | None = None
        page: Page | None = None
        try:
            if REFUSAL in request.scope:
                raise request.scope[REFUSAL]
            browser = self.find(request)
            form = await read_form(request)
            if browser is None and self.service.is_dev and self._code is None:
                cookie, browser = self._sessions.start(None)
            if browser is None:
                raise Unauthenticated(NO_SESSION)
            session = await self.service.open_session(browser.token)
            request.scope["state"]["connection"].set_authenticated(True)
            access = session.grant.access
            if access is not None:
                browser.principal, browser.capability = access.principal, access.nonce.hex()
            page = Page(self, request, browser, session, base, form)
            if request.method == "POST":
                if self.settings.read_only:
                    raise Forbidden("This console is read-only: it refuses all changes.")
                if not same(browser.csrf, form.get("csrf")):
                    return self._answer(self._resume(request, browser, base, form, 403), request, cookie)
            response = await handler(page)
        except Unauthenticated as error:
            response = await self._ask_to_sign_in(request, base, error, form)
        except PostroomError as error:
            response = self.error_page(request, error, page)
        except HTTPException as error:
            response = self.error_page(request, InvalidRequest(str(error.detail)), page)
        except Exception:
            logger().exception("http.request_failed")
            response = self.error_page(
                request,
                InternalError(
                    "The request failed because of a defect; its traceback is in the server's log."
                ),
                page,
            )
        return self._answer(response, request, cookie)

    def find(self, request: Request, *, touch: bool = True) -> BrowserSession | None:
        """Return the session of a request's cookie; see `Sessions.find`."""
        return self._sessions.find(request.cookies.get(cookie_name(request, self.name)), touch=touch)

    def _answer(self, response: Response, request: Request, cookie: str | None) -> Response:
        if cookie is not None:
            set_cookie(response, request, self.root(request), cookie, self.name, is_secure=self.is_secure)
        return protect(response, request)

    # -- sign-in ---

    async def show_sign_in(self, request: Request) -> Response:
        """Show the form for a token."""
        request.scope[ROUTE] = "/sign-in"
        if self.service.is_dev and self._code is None:
            return protect(RedirectResponse(self.base(request) + "/", 303))
        return protect(self.sign_in_page(request, 200, path=return_path(request.query_params.get("next"))))

    async def sign_in(self, request: Request) -> Response:
        """Exchange a token for a session."""
        try:
            form = await self.read_public_form(request, "/sign-in")
        except PostroomError as error:
            return protect(self.error_page(request, error))
        token = form.get("token")
        path = return_path(form.get("next"))
        fields = [
            (name.removeprefix(RESUME), value)
            for name, value in form.multi_items()
            if name.startswith(RESUME) and isinstance(value, str)
        ]
        text = token.strip() if isinstance(token, str) else ""
        try:
            if self._code is not None:
                raise Unauthenticated("This console accepts no tokens; open the link that it printed.")
            if not text or len(text) > MAX_TOKEN_CHARS:
                raise Unauthenticated("Enter a capability token.", "missing")
            access = await self._open_session(text, request)
        except PostroomError as error:
            self.service.metrics.refused(error)
            resume = fields if form.get("resume") else None
            response = self.sign_in_page(request, error.status, str(error), path, resume)
            if isinstance(error, Saturated):
                response.headers["retry-after"] = str(-(-error.retry_after_ms // 1_000))
            return protect(response)
        self._sessions.end(self.cookie(request))
        names = () if access is None else (access.principal, access.nonce.hex())
        cookie, browser = self._sessions.start(text, *names)
        base = self.base(request)
        if form.get("resume"):
            response = self._resume_page(request, browser, base, path, fields, 200)
        else:
            response = RedirectResponse(base + path, 303)
        return self._answer(response, request, cookie)

    async def _open_session(self, token: str, request: Request) -> Access | None:
        """Return the access that a token permits; raise Saturated after too many failures."""
        try:
            capability = Token.decode(token).read_identifier().nonce.hex()
        except Unauthenticated:
            capability = ""
        address = client_address(request, trusts_proxy=self._trusts_proxy)
        self._throttle.check(capability, address)
        try:
            return (await self.service.open_session(token)).grant.access
        except PostroomError:
            self._throttle.note_failure(capability, address)
            raise

    async def sign_out(self, request: Request) -> Response:
        """End the session."""
        request.scope[ROUTE] = "/sign-out"
        base = self.base(request)
        browser = self.find(request)
        if browser is not None:
            try:
                is_own = REFUSAL not in request.scope and same(
                    browser.csrf, (await read_form(request)).get("csrf")
                )
            except HTTPException:
                is_own = False
            if not is_own:
                return protect(RedirectResponse(base + "/", 303))
        self._sessions.end(self.cookie(request))
        response = RedirectResponse(base + "/sign-in", 303)
        delete_cookie(response, request, self.root(request), self.name, is_secure=self.is_secure)
        return protect(response)

    async def _ask_to_sign_in(
        self, request: Request, base: str, error: Unauthenticated, form: FormData | None
    ) -> Response:
        self._sessions.end(self.cookie(request))
        self.service.metrics.refused(error)
        path = _path(request)
        if request.method == "POST":
            if self.service.is_dev and self._code is None:
                cookie, browser = self._sessions.start(None)
                return self._answer(self._resume(request, browser, base, form, 401), request, cookie)
            fields = _fields(form)
            response = self.sign_in_page(request, 401, str(error), return_path(path), fields)
        else:
            query = request.url.query
            target = return_path(f"{path}?{query}" if query else path)
            is_first = self.cookie(request) is None
            response = self.sign_in_page(request, 401, None if is_first else str(error), target)
        if "hx-request" in request.headers:
            response.headers["hx-retarget"] = "body"
            response.headers["hx-reswap"] = "innerHTML"
        return response

    def _resume(
        self, request: Request, browser: BrowserSession, base: str, form: FormData | None, status: int
    ) -> Response:
        path = return_path(_path(request))
        return self._resume_page(request, browser, base, path, _fields(form), status)

    def _resume_page(
        self,
        request: Request,
        browser: BrowserSession,
        base: str,
        path: str,
        fields: Sequence[tuple[str, str]],
        status: int,
    ) -> Response:
        """Return a page with a button that submits the form again."""
        facts = {"action": base + path, "path": path, "fields": fields, "csrf": browser.csrf}
        return HTMLResponse(self.render("session/resume", request, **facts), status)

    async def find_page(self, request: Request) -> Page | None:
        """Return the request of a browser that is signed in, for an unknown path."""
        browser = self.find(request)
        if browser is None:
            return None
        with suppress(PostroomError):
            session = await self.service.open_session(browser.token)
            return Page(self, request, browser, session, self.base(request))
        return None


def new_sessions(settings: ConsoleSettings) -> Sessions:
    """Return an empty store of browser sessions."""
    return Sessions(time.monotonic, settings.idle_timeout_ms / 1_000)


def make_console(
    service: Service,
    data: ConsoleData,
    settings: ConsoleSettings,
    samples: Samples,
    *,
    is_secure: bool = False,
    trusts_proxy: bool = False,
    code: OneTimeCode | None = None,
    place: str = "",
    sessions: Sessions | None = None,
) -> Starlette:
    """Return the ASGI application of the console; see `Console`.

    The server that mounts it buffers and limits request bodies, and sets `root_path`.
    """
    console = Console(
        service,
        data,
        settings,
        samples,
        is_secure=is_secure,
        trusts_proxy=trusts_proxy,
        code=code,
        place=place,
        sessions=sessions,
    )
    routes: list[BaseRoute] = [
        Route("/sign-in", console.show_sign_in, methods=["GET"]),
        Route("/sign-in", console.sign_in, methods=["POST"]),
        Route("/sign-out", console.sign_out, methods=["POST"]),
        Route("/refresh", console.choose_refresh, methods=["POST"]),
        Route("/static/{name}", console.serve_static, methods=["GET"]),
    ]
    nav: list[NavEntry] = []
    for module in iter_modules(pages.__path__):
        each = import_module(f"{pages.__name__}.{module.name}")
        routes += getattr(each, "ROUTES", ())
        nav += [each.NAV] if hasattr(each, "NAV") else []
    groups = get_args(NavGroup)
    console.nav = sorted(nav, key=lambda entry: (groups.index(entry.group), entry.order))
    app = console.make_app(routes)
    app.state.console = console
    return app


def _path(request: Request) -> str:
    """Return the path within the console, still escaped: an id may contain an escaped slash."""
    path: bytes = request.scope["raw_path"]
    return path.decode("latin-1").removeprefix(request.scope["root_path"])


def _fields(form: FormData | None) -> list[tuple[str, str]]:
    """Return the fields of a form without its CSRF token."""
    items = form.multi_items() if form is not None else []
    return [(name, value) for name, value in items if isinstance(value, str) and name != "csrf"]
