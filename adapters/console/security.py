"""Response headers, cookies, and the prefixes of links."""

import re
from collections.abc import Mapping
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from postroom.adapters.console.settings import is_prefix
from postroom.adapters.sockets.connections import address_of

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
    """Return a path within the console if the text is one, else that of the overview."""
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
