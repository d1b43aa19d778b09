"""Permitted URLs of handlers, and permitted addresses of their hosts (protection against SSRF)."""

import asyncio
import re
import socket
from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import NamedTuple

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from postroom.domain.errors import Forbidden, InvalidRequest

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# IPv6 addresses that end in the IPv4 address that they lead to: IPv4-compatible (RFC 4291; not :: and ::1),
# IPv4-mapped, IPv4-translated (SIIT, RFC 2765) and NAT64 (RFC 6052).
_EMBEDDING = tuple(map(ip_network, ("::/96", "::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
_ISATAP = bytes.fromhex("00005efe")
"""Begin of the interface id of an ISATAP address, without the bit of global uniqueness (RFC 5214)."""
# Not public, although some Python versions classify them as global: cloud metadata services, local NAT64 and
# 6to4 relays, benchmark networks, and shared address space.
_NOT_PUBLIC = tuple(
    map(
        ip_network,
        ("192.0.0.0/24", "168.63.129.16/32", "100.64.0.0/10", "198.18.0.0/15", "64:ff9b:1::/48", "fec0::/10"),
    )
)
_PLAIN = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]*[a-z0-9_])?")
_HIDDEN = re.compile(r"%(?:2e|2f|5c|00)", re.IGNORECASE)
_PORTS = {"http": 80, "https": 443}


class AllowEntry(NamedTuple):
    """One entry of the allow-list.

    Arguments:
        path: the URL's path must equal it or be below it.
        networks: networks that the host's addresses must be in; empty permits every public address.
    """

    scheme: str
    host: str
    port: int
    path: str
    networks: tuple[Network, ...]

    def covers(self, url: URL) -> bool:
        """Return whether this entry permits a parsed URL."""
        same_origin = (url.scheme, _host(url), url.port) == (self.scheme, self.host, self.port)
        below = url.raw_path == self.path or url.raw_path.startswith(self.path.rstrip("/") + "/")
        return same_origin and below


def parse_allow_entry(entry: str) -> AllowEntry:
    """Parse one entry of the allow-list.

    Arguments:
        entry: a host (`handlers.example.com`, HTTPS only) or a URL prefix (`http://sea-handlers:8000/handle`),
            followed by the networks that its addresses must be in (`10.0.0.0/8`), separated by spaces.
            Without networks only public addresses are permitted.

    Raises: InvalidRequest for a malformed entry.
    """
    prefix, *networks = entry.split()
    url = _parse(prefix if "://" in prefix else f"https://{prefix}/", "The allowed handler")
    try:
        parsed = tuple(ip_network(network) for network in networks)
    except ValueError as error:
        raise InvalidRequest(
            f"The allowed handler {entry!r} has an invalid network: {error}; write it like 10.0.0.0/8."
        ) from None
    return AllowEntry(url.scheme, _host(url), url.port or 0, url.raw_path, parsed)


class Destination(NamedTuple):
    """A permitted URL, with the networks that its host may be in."""

    url: URL
    networks: tuple[Network, ...]


def check_url(text: str, allowed: Iterable[AllowEntry]) -> Destination:
    """Check a handler's URL, parsed by the library that will connect to it.

    Raises:
        InvalidRequest: it is malformed, or parsers could interpret it differently.
        Forbidden: the allow-list has no entry for it, or its address is not permitted.
    """
    url = _parse(text, "The handler's URL")
    entries = [entry for entry in allowed if entry.covers(url)]
    if not entries:
        raise Forbidden(
            f"The handler's URL {url.scheme}://{url.raw_authority}{url.raw_path} is not on the allow-list; "
            "add its prefix to [inbox] allow, with the network of its addresses if they are not public."
        )
    networks = tuple(network for entry in entries for network in entry.networks)
    literal = _literal(_host(url))
    if literal is not None:
        check_address(literal, networks, _host(url))
    return Destination(url, networks)


def check_address(address: Address, networks: tuple[Network, ...], host: str) -> None:
    """Check that an address is permitted.

    Raises: Forbidden if it is in none of the networks, or, without networks, not public.
    """
    real = _embedded_address(address)
    if networks:
        if not any(real in network for network in networks):
            raise Forbidden(
                f"{host} has the address {address}, which is in none of its permitted networks; check its "
                "name server, or [inbox] allow."
            )
    elif not real.is_global or real.is_multicast or any(real in network for network in _NOT_PUBLIC):
        raise Forbidden(
            f"{host} has the address {address}, which is not public; if that is intended, add its network "
            "to the handler's entry in [inbox] allow."
        )


class CheckedResolver(AbstractResolver):
    """Resolver that checks all addresses of a host, once per connection.

    The client connects only to the checked addresses, which prevents DNS rebinding.
    """

    def __init__(self, networks: tuple[Network, ...]) -> None:
        self._networks = networks

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the host's addresses; raise `OSError` if it has none, or one is not permitted."""
        infos = await asyncio.get_running_loop().getaddrinfo(
            host, port, type=socket.SOCK_STREAM, family=family, flags=socket.AI_ADDRCONFIG
        )
        results = []
        for kind, _, protocol, _, where in infos:
            try:
                check_address(ip_address(where[0]), self._networks, host)
            except Forbidden as error:
                raise OSError(str(error)) from error
            results.append(
                ResolveResult(
                    hostname=host,
                    host=str(where[0]),
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        """Do nothing; the resolver has no resources."""


def _parse(text: str, what: str) -> URL:
    advice = "write it like https://handlers.example.com/handle"
    if not _PLAIN.fullmatch(text) or "\\" in text or _HIDDEN.search(text) or ".." in text:
        raise InvalidRequest(
            f"{what} {text!r} has spaces, `..` or characters that URL parsers interpret differently; "
            f"{advice}."
        )
    try:
        url = URL(text)
    except ValueError as error:
        raise InvalidRequest(f"{what} is malformed: {error}; {advice}.") from None
    if url.scheme not in _PORTS or not url.raw_host:
        raise InvalidRequest(f"{what} must begin with https:// or an allowed http:// and a host; {advice}.")
    if url.raw_user is not None or url.raw_password is not None or "@" in url.raw_authority:
        raise InvalidRequest(f"{what} contains credentials; remove them, as requests are signed.")
    if url.raw_fragment:
        raise InvalidRequest(f"{what} has a fragment, which is never sent; {advice}.")
    host = _host(url)
    if _literal(host) is None and (not _HOST.fullmatch(host) or _looks_numeric(host)):
        raise InvalidRequest(
            f"{what} has the host {host!r}, which is neither a host name nor an address in standard "
            f"notation; {advice}."
        )
    return url


def _host(url: URL) -> str:
    return (url.raw_host or "").lower().rstrip(".")


def _looks_numeric(host: str) -> bool:
    """Return whether resolvers would interpret a name as an address: `2130706433`, `0x7f.1`, `0177.0.0.1`."""
    last = host.rpartition(".")[2]
    return last.isdecimal() or last.startswith("0x")


def _literal(host: str) -> Address | None:
    try:
        return None if "%" in host else ip_address(host)
    except ValueError:
        return None


def _embedded_address(address: Address) -> Address:
    """Return the IPv4 address embedded in an IPv6 address, or else the address."""
    if not isinstance(address, IPv6Address):
        return address
    packed = address.packed
    is_embedding = any(address in network for network in _EMBEDDING) and int(address) > 1
    if is_embedding or bytes([packed[8] & 0xFD]) + packed[9:12] == _ISATAP:
        return IPv4Address(packed[-4:])
    return address.sixtofour or (address.teredo[1] if address.teredo else None) or address
