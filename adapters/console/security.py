"""Response headers, cookies, prefixes of links, and the pages that need no session."""

import gzip
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute

from postroom.adapters.console.sessions import OneTimeCode
from postroom.adapters.console.settings import ConsoleSettings, is_prefix
from postroom.adapters.console.templating import StaticFiles, Templates
from postroom.adapters.sockets.connections import address_of
from postroom.application.service import SurfaceMetrics
from postroom.application.tracing import current_corr_id
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError

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
MIN_BYTES = 1_000
GZIP_LEVEL = 5
_RETURN_PATH = re.compile(r"(?!\S*/(\.|%2e){1,2}([/?#]|\Z))/(?![/\\])[!-\[\]-~]{0,4000}\Z", re.IGNORECASE)
"""A path without segments that lead out of the console, such as to another instance."""


def protect(response: Response, request: Request | None = None, *, is_cacheable: bool = False) -> Response:
    """Add the security headers to a response, compress it, and return it.

    A page contains a secret of its session, and text from the request. Nobody can learn it from sizes
    (BREACH), as no other site can have a browser send a request with the session's cookie
    (`SameSite=Strict`).

    Arguments:
        request: of a page, which is compressed by gzip if the browser accepts that.
    """
    for name, value in HEADERS.items():
        response.headers[name] = value
    if not is_cacheable:
        response.headers["cache-control"] = "no-store"
    if request is not None and isinstance(response, HTMLResponse) and len(response.body) > MIN_BYTES:
        response.headers["vary"] = "accept-encoding"
        if "gzip" in request.headers.get("accept-encoding", ""):
            response.body = gzip.compress(response.body, GZIP_LEVEL)
            response.headers["content-encoding"] = "gzip"
            response.headers["content-length"] = str(len(response.body))
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


def cookie_name(request: Request, instance: str = "") -> str:
    """Return the name of a session's cookie.

    It includes the port, because the ports of a host share cookies, and the instance, because instances
    don't.
    """
    _, _, port = request.headers.get("host", "").rpartition(":")
    return "-".join(
        filter(None, ("postroom-console", port if port.isdecimal() else "", instance and f"at-{instance}"))
    )


def set_cookie(
    response: Response, request: Request, prefix: str, value: str, instance: str = "", *, is_secure: bool
) -> None:
    """Set the cookie of a session, which the browser deletes when it closes."""
    name = cookie_name(request, instance)
    response.set_cookie(name, value, path=prefix, secure=is_secure, httponly=True, samesite="strict")


def delete_cookie(
    response: Response, request: Request, prefix: str, instance: str = "", *, is_secure: bool
) -> None:
    """Delete the cookie of a session."""
    name = cookie_name(request, instance)
    response.delete_cookie(name, path=prefix, secure=is_secure, httponly=True, samesite="strict")


REFRESH_COOKIE: Final = "postroom-console-refresh"
YEAR_SECONDS: Final = 365 * 24 * 3_600


class Refresh(NamedTuple):
    """An interval of updates.

    Arguments:
        key: value of the cookie and of the form.
        seconds: time between two updates; 0 is as often as a page can, None is never.
    """

    key: str
    label: str
    seconds: int | None

    @property
    def is_off(self) -> bool:
        """Return whether pages are updated only when they are loaded."""
        return self.seconds is None

    def pause(self, shortest: float) -> float:
        """Return the seconds between two updates of a part that could be updated every `shortest` seconds."""
        return max(shortest, self.seconds or 0)

    def trigger(self, shortest: int) -> str:
        """Return htmx's trigger for reloading a part every `shortest` seconds at most; empty for never."""
        return "" if self.is_off else f"every {self.pause(shortest):g}s"

    @property
    def state(self) -> str:
        """Return the text about updates on a live page."""
        return f"Updated {self.label.lower()}" if self.seconds else "Live"


REFRESH_CHOICES: Final = {
    each.key: each
    for each in (
        Refresh("live", "As it happens", 0),
        Refresh("5", "Every 5 s", 5),
        Refresh("15", "Every 15 s", 15),
        Refresh("60", "Every minute", 60),
        Refresh("off", "Off", None),
    )
}
DEFAULT: Final = REFRESH_CHOICES["live"]


def read_choice(request: Request) -> Refresh:
    """Return the choice in the browser's cookie; the default if it is missing or unknown."""
    return REFRESH_CHOICES.get(request.cookies.get(REFRESH_COOKIE, ""), DEFAULT)


def keep_choice(response: Response, key: object, path: str, *, is_secure: bool) -> None:
    """Keep a choice in the browser for a year.

    Arguments:
        path: prefix of the links of the console.

    Raises: InvalidRequest for an unknown interval.
    """
    if not isinstance(key, str) or key not in REFRESH_CHOICES:
        raise InvalidRequest(f"every is {str(key)[:40]!r}; choose one of {', '.join(REFRESH_CHOICES)}.")
    response.set_cookie(
        REFRESH_COOKIE, key, YEAR_SECONDS, path=path, secure=is_secure, httponly=True, samesite="strict"
    )


MAX_FIELDS: Final = 1_000
REFUSAL: Final = "postroom.refusal"
ROUTE: Final = "postroom.route"


@cache
def load_templates() -> tuple[StaticFiles, Templates]:
    """Return the files and templates, which the consoles of a process share."""
    static = StaticFiles()
    return static, Templates(static, refresh_choices=tuple(REFRESH_CHOICES.values()))


class BrowserPage(Protocol):
    """The request of a browser that is signed in, whose pages have the navigation."""

    def part(self, template: str, /, **facts: Any) -> str:
        """Render a template to text."""


class Shell:
    """The frame of a console.

    Arguments:
        metrics: counts the requests that are refused.
        is_secure: whether clients use TLS, here or at a proxy.
        trusts_proxy: whether `X-Forwarded-Prefix` is trusted.
        code: starts the sessions of the local user without a token; None if users sign in with tokens.
        place: path of this instance below the console, such as `/instances/orders`, or empty.

    Attributes:
        name: of the instance, or empty.
    """

    def __init__(
        self,
        settings: ConsoleSettings,
        metrics: SurfaceMetrics,
        *,
        is_secure: bool,
        trusts_proxy: bool,
        code: OneTimeCode | None,
        place: str = "",
    ) -> None:
        self.settings = settings.validate()
        self.is_secure = is_secure
        self.place = place
        self._static, self.templates = load_templates()
        self._metrics = metrics
        self._trusts_proxy = trusts_proxy
        self._code = code
        self.name = place.rpartition("/")[2]

    def base(self, request: Request) -> str:
        """Return the prefix of all links."""
        return public_prefix(request, self.settings.proxy_prefix, trusts_proxy=self._trusts_proxy)

    def root(self, request: Request) -> str:
        """Return the prefix of the links of all instances, below which browsers send the cookies."""
        return self.base(request).removesuffix(self.place)

    def cookie(self, request: Request) -> str | None:
        """Return the cookie of the session with this console; cookies of other consoles have other names."""
        return request.cookies.get(cookie_name(request, self.name))

    async def read_public_form(self, request: Request, route: str) -> FormData:
        """Return a form that needs no session.

        Raises: InvalidRequest, or the error for which the server refused the request.
        """
        request.scope[ROUTE] = route
        if REFUSAL in request.scope:
            raise request.scope[REFUSAL]
        try:
            return await read_form(request)
        except HTTPException as error:
            raise InvalidRequest(str(error.detail)) from None

    def sign_in_page(
        self,
        request: Request,
        status: int,
        error: str | None = None,
        path: str = "/",
        fields: Sequence[tuple[str, str]] | None = None,
    ) -> Response:
        """Return the sign-in page; `fields` are fields of a form to submit again after signing in."""
        facts = {"error": error, "path": path, "fields": fields, "is_local": self._code is not None}
        return HTMLResponse(self.render("session/sign_in", request, **facts), status)

    def error_page(self, request: Request, error: PostroomError, page: BrowserPage | None = None) -> Response:
        """Return the page of an error.

        Arguments:
            page: the request of a browser that is signed in, whose navigation the page keeps.
        """
        self._metrics.refused(error)
        facts: Mapping[str, Any] = {"error": error, "corr_id": current_corr_id()}
        template = "error/part" if "hx-request" in request.headers else "error/page"
        text = self.render(template, request, **facts) if page is None else page.part(template, **facts)
        return HTMLResponse(text, error.status)

    def make_app(self, routes: Sequence[BaseRoute]) -> Starlette:
        """Return an application with the console's error pages."""
        handlers: Any = dict.fromkeys((404, 405), self.show_routing_error)
        app = Starlette(routes=routes, exception_handlers=handlers)
        app.router.redirect_slashes = False
        return app

    async def find_page(self, request: Request) -> BrowserPage | None:
        """Return the request of a browser that is signed in; None without sessions."""
        return None

    async def show_routing_error(self, request: Request, error: Exception) -> Response:
        """Return the page for an unknown path or a method that the page does not accept."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        text = "This page does not exist." if status == 404 else "The page does not accept this method."
        refusal = NotFound(text) if status == 404 else InvalidRequest(text)
        return protect(self.error_page(request, refusal, await self.find_page(request)))

    async def serve_static(self, request: Request) -> Response:
        """Return a style sheet or script."""
        request.scope[ROUTE] = "/static"
        return protect(self._static.serve(request), is_cacheable=True)

    async def choose_refresh(self, request: Request) -> Response:
        """Store the interval of live updates in a cookie, with or without a session."""
        try:
            form = await self.read_public_form(request, "/refresh")
            path = return_path(form.get("next"))
            response: Response = RedirectResponse(self.base(request) + path, 303)
            keep_choice(response, form.get("every"), self.root(request), is_secure=self.is_secure)
        except PostroomError as error:
            response = self.error_page(request, error)
        return protect(response)

    def render(self, template: str, request: Request, **facts: Any) -> str:
        """Render a page without a session."""
        base = self.base(request)
        return self.templates.render(
            template, **{"base": base, "page": None, "notices": [], "nav": []} | facts
        )


async def read_form(request: Request) -> FormData:
    """Return the form of a POST; empty for other methods."""
    if request.method != "POST":
        return FormData()
    return await request.form(max_files=0, max_fields=MAX_FIELDS)
