"""Wiring of the clients of a mailbox that a server serves over a network."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from postroom.adapters.compose.tracing import trace_if_used
from postroom.application.extras import explain_missing_extra
from postroom.domain.arguments import check_int, check_path, check_text, check_type
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.policy import MAX_DURATION_MS

if TYPE_CHECKING:  # most processes connect to a store
    from postroom.application.operations.mailbox import Mailbox

CLUSTER_SCHEMES = ("postroom", "postrooms")
SCHEMES = ("http", "https", "http+unix", "grpc", "grpcs", "grpc+unix", *CLUSTER_SCHEMES)
TLS_SCHEMES = ("https", "grpcs", "postrooms")
MAX_URL_CHARS = 2_000
MAX_TOKEN_CHARS = 4_000
_TOKEN = re.compile(rf"[!-~]{{1,{MAX_TOKEN_CHARS}}}")


class ClientTls(NamedTuple):
    """Certificates, as paths of files in PEM, for `https://`, `grpcs://` and `postrooms://`.

    Arguments:
        ca: of the authorities that the server's certificate may be signed by; None takes the system's.
        certificate, key: of the client, for a server that asks for them.
    """

    ca: str | None = None
    certificate: str | None = None
    key: str | None = None

    def check(self) -> "ClientTls":
        """Return the certificates, or raise InvalidRequest."""
        for name, path in self._asdict().items():
            if path is not None:
                check_path(name, path)
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("ClientTls needs both certificate and key, or neither.")
        return self


def is_remote(address: object) -> bool:
    """Return whether an address is one of a server, not of a store."""
    return isinstance(address, str) and address.partition(":")[0].lower() in SCHEMES


@asynccontextmanager
async def connect_remote(
    url: str,
    mailbox: str | None = None,
    *,
    timeout_ms: int,
    token: str | None = None,
    tls: ClientTls | None = None,
) -> AsyncIterator["Mailbox"]:
    """Use the mailbox that a server or a cluster serves, for as long as the context lasts.

    Arguments:
        url: `http://host:port` or `grpc://host:port`, with TLS `https://host:port` or `grpcs://host:port`, or
            for a Unix socket `http+unix:/path` or `grpc+unix:/path`; or of a cluster (see `connect_cluster`).
        mailbox: the mailbox that the server is expected to serve; None takes its only one.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent with each call as `Authorization: Bearer`; it is in no log, error or `repr`.
        tls: certificates for `https://`, `grpcs://` and `postrooms://`.

    Raises: InvalidRequest for a malformed URL or token, and for a certificate that this client or the server
        does not accept; NotFound when the server serves another mailbox, MissingExtra when a package is not
        installed, Unavailable when the server can't be reached.
    """
    check_int("timeout_ms", timeout_ms, 1, MAX_DURATION_MS)
    scheme = check_text("The URL", url, 1, MAX_URL_CHARS).partition(":")[0].lower()
    address = "" if scheme in CLUSTER_SCHEMES else _parse(url)[1]
    if token is not None:
        _check_token(token)
    if tls is not None:
        check_type("tls", tls, ClientTls).check()
        if scheme not in TLS_SCHEMES:
            raise InvalidRequest(
                f"tls is for https://, grpcs:// and postrooms:// URLs, not for {scheme}; change one of them."
            )
    if scheme in CLUSTER_SCHEMES:
        with explain_missing_extra("grpc"):
            from postroom.adapters.compose.cluster_client import connect_cluster
        trace_if_used()
        credentials = (tls or ClientTls()) if scheme == "postrooms" else None
        async with connect_cluster(
            url, mailbox, timeout_ms=timeout_ms, token=token, tls=credentials
        ) as cluster:
            yield cluster
        return
    if scheme.startswith("grpc"):
        with explain_missing_extra("grpc"):
            from postroom.adapters.grpc.client import connect_grpc
        credentials = (tls or ClientTls()) if scheme == "grpcs" else None
        client = connect_grpc(address, timeout_ms=timeout_ms, token=token, tls=credentials, mailbox=mailbox)
    else:
        with explain_missing_extra("http"):
            from postroom.adapters.http_client.client import connect_http
        client = connect_http(address, timeout_ms=timeout_ms, token=token, tls=tls or ClientTls())
    trace_if_used()
    async with client as opened:
        if mailbox not in (None, opened.name):
            raise NotFound(f"The server at {url} serves the mailbox {opened.name}, not {mailbox}.")
        yield opened


def _check_token(token: object) -> None:
    """Check a token without showing it."""
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise InvalidRequest(
            f"token must be text of 1 to {MAX_TOKEN_CHARS} visible ASCII characters without spaces; it is "
            "left out of this message."
        )


def _parse(url: str) -> tuple[str, str]:
    """Return the scheme of a URL, and the address as the client of the scheme takes it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise _malformed_url(url) from None
    if parts.query or parts.fragment or parts.username is not None or parts.password is not None:
        raise _malformed_url(url)
    if parts.scheme.endswith("+unix"):
        if host or not parts.path.startswith("/"):
            raise _malformed_url(url)
        return parts.scheme, f"unix:{parts.path}"
    if parts.scheme not in SCHEMES or not host or parts.path not in ("", "/"):
        raise _malformed_url(url)
    shown = f"[{host}]" if ":" in host else host
    if parts.scheme in ("grpc", "grpcs"):
        if port is None:
            raise _malformed_url(url)
        return parts.scheme, f"{shown}:{port}"
    return parts.scheme, f"{parts.scheme}://{shown}" + ("" if port is None else f":{port}")


def _malformed_url(url: str) -> InvalidRequest:
    shown = url.rpartition("@")[2][:200]  # before the @ there may be a password
    return InvalidRequest(
        f"{shown!r} is not the URL of a server; expected http://HOST:PORT, grpc://HOST:PORT, https, grpcs, "
        "http+unix:/PATH, grpc+unix:/PATH or postroom://HOST:PORT/NAMESPACE."
    )
