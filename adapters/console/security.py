"""Headers of answers, cookies, and the paths that links begin with."""

import re
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response

from postroom.adapters.console.settings import is_prefix

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
    """Add the headers that all answers have, and return the response."""
    for name, value in HEADERS.items():
        response.headers[name] = value
    if not is_cacheable:
        response.headers["cache-control"] = "no-store"
    return response


def public_prefix(request: Request, proxy_prefix: str, *, trusts_proxy: bool) -> str:
    """Return what the links of a page begin with.

    Arguments:
        proxy_prefix: the setting; without it, `X-Forwarded-Prefix` counts where a proxy is trusted.
    """
    prefix = proxy_prefix
    if not prefix and trusts_proxy:
        forwarded = request.headers.get("x-forwarded-prefix", "").rstrip("/")
        prefix = forwarded if is_prefix(forwarded) else ""
    root: str = request.scope["root_path"]
    return prefix + root


def return_path(text: object) -> str:
    """Return the path within the console to which a sign-in leads; the overview for anything else."""
    return text if isinstance(text, str) and _RETURN_PATH.match(text) else "/"


def cookie_name(request: Request) -> str:
    """Return the name of the session's cookie: cookies don't tell the ports of a host apart."""
    _, _, port = request.headers.get("host", "").rpartition(":")
    return f"postroom-console-{port}" if port.isdecimal() else "postroom-console"


def set_cookie(response: Response, request: Request, prefix: str, value: str, *, is_secure: bool) -> None:
    """Set the session's cookie, which ends with the browser."""
    response.set_cookie(
        cookie_name(request), value, path=prefix, secure=is_secure, httponly=True, samesite="strict"
    )


def delete_cookie(response: Response, request: Request, prefix: str, *, is_secure: bool) -> None:
    """Delete the session's cookie."""
    response.delete_cookie(
        cookie_name(request), path=prefix, secure=is_secure, httponly=True, samesite="strict"
    )
