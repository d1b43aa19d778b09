"""Response headers, cookies, prefixes of links, and the link that starts one session of a local user."""

import re
from collections.abc import Mapping
from contextlib import suppress
from secrets import token_urlsafe
from typing import Protocol

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router

from postroom.adapters.console.sessions import OneTimeCode, Sessions
from postroom.adapters.console.settings import is_prefix
from postroom.adapters.sockets.connections import address_of
from postroom.domain.errors import PostroomError, Unauthenticated

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    # `no-referrer` would make browsers send `Origin: null` with forms.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
_RETURN_PATH = re.compile(r"/(?![/\\])[!-\[\]-~]{0,4000}\Z")


def protect(response: Response, *, is_cacheable: bool = False) -> Response:
    """Add the security headers to a response, and return it."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    if not is_cacheable:
        response.headers["cache-control"] = "no-store"
    return response


def public_prefix(request: Request, proxy_prefix: str, *, trusts_proxy: bool) -> str:
    """Return the prefix of all links of a page.

    Arguments:
        proxy_prefix: the setting; if empty, `X-Forwarded-Prefix` is used if a proxy is trusted.
    """
    prefix = proxy_prefix
    if not prefix and trusts_proxy:
        forwarded = request.headers.get("x-forwarded-prefix", "").rstrip("/")
        prefix = forwarded if is_prefix(forwarded) else ""
    root: str = request.scope["root_path"]
    return prefix + root


def client_address(request: Request, *, trusts_proxy: bool) -> str:
    """Return the address of a browser, as limits count it; see `address_of`.

    Arguments:
        trusts_proxy: whether a proxy in front appends the address to `X-Forwarded-For`.
    """
    forwarded = request.headers.get("x-forwarded-for", "") if trusts_proxy else ""
    with suppress(ValueError):
        return address_of((forwarded.rpartition(",")[2].strip(),))
    return address_of(request.scope.get("client"))


def return_path(text: object) -> str:
    """Return a path within the console if the text is one, else the path of the overview."""
    return text if isinstance(text, str) and _RETURN_PATH.match(text) else "/"


def cookie_name(request: Request) -> str:
    """Return the name of the session's cookie, which includes the port, as cookies are shared by ports."""
    _, _, port = request.headers.get("host", "").rpartition(":")
    return f"postroom-console-{port}" if port.isdecimal() else "postroom-console"


def set_cookie(response: Response, request: Request, prefix: str, value: str, *, is_secure: bool) -> None:
    """Set the session's cookie, which the browser deletes when it closes."""
    response.set_cookie(
        cookie_name(request), value, path=prefix, secure=is_secure, httponly=True, samesite="strict"
    )


def delete_cookie(response: Response, request: Request, prefix: str, *, is_secure: bool) -> None:
    """Delete the session's cookie."""
    response.delete_cookie(
        cookie_name(request), path=prefix, secure=is_secure, httponly=True, samesite="strict"
    )


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
        return protect(HTMLResponse(self._console.render("session/start", request, code=text)))

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
