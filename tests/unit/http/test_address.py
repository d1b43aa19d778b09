import asyncio
import socket
from collections.abc import Sequence
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from postroom.adapters.http.address import CheckedResolver, check_address, check_url, parse_allow_entry
from postroom.domain.errors import Forbidden, InvalidRequest, PostroomError

PUBLIC = "https://handlers.example.com/"


def allowed(*entries: str) -> list[Any]:
    return [parse_allow_entry(entry) for entry in entries]


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        (PUBLIC, "https://handlers.example.com/handle"),
        (PUBLIC, "https://HANDLERS.example.com:443/handle?tenant=1"),
        ("handlers.example.com", "https://handlers.example.com/any/path"),
        ("handlers.example.com:8443", "https://handlers.example.com:8443/"),
        ("https://handlers.example.com/a", "https://handlers.example.com/a"),
        ("https://handlers.example.com/a", "https://handlers.example.com/a/b"),
        ("http://sea-handlers:8000/ 10.0.0.0/8", "http://sea-handlers:8000/handle"),
        ("http://127.0.0.1:8000/ 127.0.0.0/8", "http://127.0.0.1:8000/handle"),
        ("http://[::1]:8000/ ::1/128", "http://[::1]:8000/handle"),
        ("https://93.184.216.34/", "https://93.184.216.34/handle"),
    ],
)
def test_urls_on_the_allow_list_are_permitted(entry: str, url: str) -> None:
    assert str(check_url(url, allowed(entry)).url.path).startswith("/")


@pytest.mark.parametrize(
    "url",
    [
        "http://handlers.example.com/handle",  # another scheme
        "https://handlers.example.com:444/handle",  # another port
        "https://handlers.example.com.evil.example/handle",
        "https://evil.example/handlers.example.com/",
        "https://xhandlers.example.com/handle",
        "https://127.0.0.1/",
        "https://[::1]/",
    ],
)
def test_urls_not_on_the_allow_list_are_forbidden(url: str) -> None:
    with pytest.raises(Forbidden, match="allow-list"):
        check_url(url, allowed(PUBLIC))


def test_a_prefix_ends_between_two_segments_of_the_path() -> None:
    with pytest.raises(Forbidden):
        check_url("https://handlers.example.com/ab", allowed("https://handlers.example.com/a"))


def test_an_empty_allow_list_allows_nothing() -> None:
    with pytest.raises(Forbidden):
        check_url("https://handlers.example.com/handle", [])


@pytest.mark.parametrize(
    "url",
    [
        "https://user@handlers.example.com/",
        "https://user:secret@handlers.example.com/",
        "https://handlers.example.com@evil.example/",
        "https://handlers.example.com\\@evil.example/",
        "https://handlers.example.com/a/../../admin",
        "https://handlers.example.com/%2e%2e/admin",
        "https://handlers.example.com/a%2Fb",
        "https://handlers.example.com/a%00b",
        "https://handlers.example.com/#@evil.example",
        "https://handlers.example.com/ handle",
        "https://handlers.example.com/\r\nHost: evil",
        "https:///handle",
        "https://",
        "//handlers.example.com/",
        "handlers.example.com/handle",
        "file:///etc/passwd",
        "gopher://handlers.example.com/",
        "ftp://handlers.example.com/",
        "https://handlers.example.com:99999/",
        "https://①②⑦.⓪.⓪.①/",
        "https://handlers。example。com/",
        "",
    ],
)
def test_a_url_that_can_be_read_in_two_ways_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        check_url(url, allowed(PUBLIC, "evil.example", "127.0.0.1"))


@pytest.mark.parametrize(
    "host",
    ["2130706433", "0x7f000001", "0177.0.0.1", "127.1", "127.0.1", "0x7f.0.0.1", "1.2.3.4.5", "[::1%25lo]"],
)
def test_an_address_written_otherwise_than_addresses_are_is_refused(host: str) -> None:
    with pytest.raises(InvalidRequest):
        check_url(f"https://{host}/", [])
    with pytest.raises(InvalidRequest):
        parse_allow_entry(host)


NOT_PUBLIC = [
    *["127.0.0.1", "127.255.255.254", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"],
    *["100.64.0.1", "192.0.0.192", "192.0.2.1", "198.18.0.1", "168.63.129.16", "224.0.0.1", "240.0.0.1"],
    *["255.255.255.255", "::", "::1", "fe80::1", "fd00:ec2::254", "fc00::1", "ff02::1", "2001:db8::1"],
    *["::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"],
    *["2002:7f00:1::", "2002:a9fe:a9fe::", "64:ff9b:1::1", "fec0::1"],
    *["::127.0.0.1", "::10.0.0.1", "::169.254.169.254", "::ffff:0:127.0.0.1", "::ffff:0:a9fe:a9fe"],
    *["2a00:1450::5efe:127.0.0.1", "2a00:1450::200:5efe:10.0.0.1", "2001:0:1:2:3:4:80ff:fffe"],
]


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_an_address_that_is_not_public_is_forbidden(address: str) -> None:
    with pytest.raises(Forbidden, match="not public"):
        check_address(ip_address(address), (), "handlers.example.com")


@pytest.mark.parametrize("address", ["93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34"])
def test_a_public_address_is_allowed(address: str) -> None:
    check_address(ip_address(address), (), "handlers.example.com")


def test_a_host_with_networks_must_be_in_them() -> None:
    networks = (ip_network("10.0.0.0/8"),)
    check_address(ip_address("10.9.9.9"), networks, "sea-handlers")
    check_address(ip_address("::ffff:10.9.9.9"), networks, "sea-handlers")
    for other in ("93.184.216.34", "127.0.0.1", "169.254.169.254"):
        with pytest.raises(Forbidden, match="none of its permitted networks"):
            check_address(ip_address(other), networks, "sea-handlers")


def test_an_address_that_is_not_public_needs_its_network_even_when_it_is_listed() -> None:
    with pytest.raises(Forbidden, match="not public"):
        check_url("https://127.0.0.1/", allowed("127.0.0.1"))


@pytest.mark.parametrize(
    "entry", ["https://example.com/ 10.0.0.0/99", "https://example.com/ 10.0.0.1/8", "a b"]
)
def test_a_network_that_is_none_is_refused(entry: str) -> None:
    with pytest.raises(PostroomError, match="network"):
        parse_allow_entry(entry)


class _Names:
    """Answer look-ups with one list of addresses after another."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)

    async def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        addresses = self._answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in addresses]


async def test_one_forbidden_address_among_many_forbids_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _Names(["93.184.216.34", "127.0.0.1"])
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    with pytest.raises(OSError, match=r"127\.0\.0\.1, which is not public"):
        await CheckedResolver(()).resolve("handlers.example.com", 443)


async def test_connections_go_to_exactly_the_checked_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    names = _Names(["93.184.216.34"], ["127.0.0.1"])  # a name server that changes its mind
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", names.getaddrinfo)
    (found,) = await CheckedResolver(()).resolve("handlers.example.com", 443)
    assert found["host"] == "93.184.216.34"
    assert found["flags"] & socket.AI_NUMERICHOST
    with pytest.raises(OSError, match="not public"):
        await CheckedResolver(()).resolve("handlers.example.com", 443)
