"""The names of the server: which `Host` and `Origin` requests may have."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from postroom.adapters.http_server.problems import ForeignHost, ForeignOrigin
from postroom.adapters.sockets.address import is_loopback_name
from postroom.adapters.sockets.protection import ANY_HOST

MAX_HOST_CHARS: Final = 256
Headers = list[tuple[bytes, bytes]]


class Site:
    """Names by which clients may reach the server.

    Arguments:
        any_host: accept any `Host`, as on a Unix socket; otherwise loopback names only.
    """

    def __init__(self, *, any_host: bool) -> None:
        self.any_host = any_host
        self._names: frozenset[str] = frozenset()

    def allow(self, names: Iterable[str]) -> None:
        """Accept requests whose `Host` is one of these, too; `*` is any."""
        self._names = frozenset(each.lower() for each in names)

    def check_host(self, headers: Headers) -> bytes:
        """Return the `Host` of a request; raise ForeignHost for one that is not of the server.

        A web page may have bound its name to this machine (DNS rebinding).
        """
        hosts = [value for name, value in headers if name == b"host"]
        if self.any_host:
            return hosts[0] if hosts else b""
        if not (len(hosts) == 1 and self._is_own(hosts[0])):
            raise ForeignHost(
                "The Host header must name this machine, such as localhost, or one of its allowed_hosts."
            )
        return hosts[0]

    def check_api(self, headers: Headers, scheme: bytes) -> None:
        """Refuse requests of web pages, whose browser runs on this machine.

        Besides binding names, a page may send forms and requests without a body, for which browsers don't ask
        the server first; then they name the page's origin.
        """
        if self.any_host:
            return
        host = self.check_host(headers)
        if any(name == b"origin" and value != scheme + b"://" + host for name, value in headers):
            raise ForeignOrigin("Web pages may not use the service; a proxy for them must remove Origin.")

    def check_form(self, headers: Headers) -> None:
        """Refuse a form that a page of another site sent, by what its browser says of it.

        A proxy may have replaced `Host`; then the origin must be one of the server's names.
        """
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if sites:
            is_own = sites == [b"same-origin"]
        else:
            host = self.check_host(headers)
            origins = [value for name, value in headers if name == b"origin"]
            is_own = all(self._is_origin(each, host) for each in origins)
        if not is_own:
            raise ForeignOrigin("The form was sent by a page of another site; open the console itself.")

    def _is_own(self, host: bytes) -> bool:
        return _is_this_machine(host) or bool(self._names & {ANY_HOST, _name(host)})

    def _is_origin(self, origin: bytes, host: bytes) -> bool:
        scheme, separator, place = origin.partition(b"://")
        if not separator or scheme not in (b"http", b"https"):
            return False
        return place == host or _name(place) in self._names - {ANY_HOST}


@lru_cache(1_024)
def _is_this_machine(host: bytes) -> bool:
    return len(host) < MAX_HOST_CHARS and is_loopback_name(host.decode("latin-1"))


def _name(host: bytes) -> str:
    """Return the name in the value of a `Host` header, without the port."""
    name, _, port = host.decode("latin-1").lower().rpartition(":")
    return name if port.isdecimal() else host.decode("latin-1").lower()
