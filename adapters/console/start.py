"""The link of `postroom console`, which starts one session."""

from secrets import token_urlsafe
from typing import Protocol

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

from postroom.adapters.console.security import protect, set_cookie
from postroom.adapters.console.sessions import OneTimeCode, Sessions
from postroom.domain.errors import PostroomError, Unauthenticated


class Frame(Protocol):
    """The console, as the link uses it."""

    is_secure: bool

    @property
    def sessions(self) -> Sessions:
        """Return the sessions of browsers."""

    def base(self, request: Request) -> str:
        """Return the prefix of all links."""

    def render(self, template: str, request: Request, **facts: object) -> str:
        """Render a page without a session."""

    async def read_public_form(self, request: Request, route: str) -> FormData:
        """Return a form that needs no session, or raise a PostroomError."""

    def error_page(self, request: Request, error: PostroomError) -> Response:
        """Return the page of an error."""

    def sign_in_page(self, request: Request, status: int, error: str | None = None) -> Response:
        """Return the page without a session."""


class StartLink:
    """The link, and the path below which its session is.

    The path is random and not in the link: browsers send cookies to all ports of a host, and another user of
    the machine may serve pages at one of them, and may see the link among the arguments of a browser.
    """

    def __init__(self, console: Frame, code: OneTimeCode) -> None:
        self._console = console
        self._code = code
        self._path = f"/{token_urlsafe(16)}"

    def routes(self, inner: list[BaseRoute], static: BaseRoute) -> list[BaseRoute]:
        """Return the routes of the console.

        Arguments:
            inner: routes below the random path.
            static: route of style sheets and scripts.
        """
        return [
            Mount(self._path, Router(inner, redirect_slashes=False)),
            Route("/start", self.show, methods=["GET"]),
            Route("/start", self.start, methods=["POST"]),
            static,
            Route("/{path:path}", self.show_other, methods=["GET", "POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show the button that uses the code; programs that only look at links don't."""
        text = request.query_params.get("code", "")
        if not self._code.can_use(text):
            return self._refuse(request)
        return protect(HTMLResponse(self._console.render("start.html", request, code=text)))

    async def start(self, request: Request) -> Response:
        """Exchange the code for a session, once."""
        try:
            text = (await self._console.read_public_form(request, "/start")).get("code")
        except PostroomError as error:
            return protect(self._console.error_page(request, error))
        if not self._code.use(text):
            return self._refuse(request)
        cookie, _ = self._console.sessions.start(self._code.token)
        base = self._console.base(request) + self._path
        response = RedirectResponse(base + "/", 303)
        set_cookie(response, request, base, cookie, is_secure=self._console.is_secure)
        return protect(response)

    async def show_other(self, request: Request) -> Response:
        """Answer a request beside the random path as one without a session."""
        return protect(self._console.sign_in_page(request, 401))

    def _refuse(self, request: Request) -> Response:
        error = Unauthenticated(
            "The link has been used or has expired; start `postroom console` again for a new one."
        )
        return protect(self._console.sign_in_page(request, error.status, str(error)))
