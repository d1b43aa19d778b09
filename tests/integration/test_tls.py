"""TLS of HTTP and gRPC: certificates of servers and clients, and peers that are silent or do not speak it."""

import asyncio
import json
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector
from trustme import CA, LeafCert

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.connect import ClientTls, connect, connect_remote
from postroom.adapters.compose.serve import HttpSettings, ServerTls, SurfaceProtection, TlsFiles
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

SECONDS = 30
"""Deadline of every wait."""
REFUSALS = {"http": InvalidRequest, "grpc": Unavailable}
"""Errors of a client whose certificate is refused: gRPC does not tell it from a server that is gone."""
TIMEOUTS_MS = {"http": 600_000, "grpc": 500}
PAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC)


class Authority:
    """A certificate authority whose certificates are files.

    Arguments:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = CA()
        self._count = 0
        self.path = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.path)

    def issue(self, name: str = "127.0.0.1", **options: Any) -> tuple[str, str]:
        """Return the paths of a new certificate and its key."""
        leaf: LeafCert = self._ca.issue_cert(name, **options)
        self._count += 1
        certificate, key = (str(self._folder / f"{self._count}.{kind}") for kind in ("pem", "key"))
        Path(certificate).write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(key)
        return certificate, key


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    """Two authorities: the server's, and another."""
    folder = tmp_path_factory.mktemp("authorities")
    return Authority(folder / "own"), Authority(folder / "other")


@pytest.fixture
def own(authorities: tuple[Authority, Authority]) -> Authority:
    return authorities[0]


@pytest.fixture
def other(authorities: tuple[Authority, Authority]) -> Authority:
    return authorities[1]


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def serve(
    mailbox: OwnedMailbox,
    protocol: str,
    certificate: tuple[str, str],
    client_ca: str | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[str]:
    """Serve a mailbox with TLS."""
    tls = ServerTls(TlsFiles(*certificate, client_ca))
    return served(mailbox, protocol, protection=SurfaceProtection(tls), **options)


def client(url: str, tls: ClientTls | None, timeout_ms: int = 20_000) -> AbstractAsyncContextManager[Mailbox]:
    return connect_remote(url, timeout_ms=timeout_ms, tls=tls)


async def test_a_mailbox_is_used_with_tls(mailbox: OwnedMailbox, protocol: str, own: Authority) -> None:
    async with serve(mailbox, protocol, own.issue()) as url:
        assert url.startswith(f"{protocol}s://127.0.0.1:")
        async with connect(url, timeout_ms=20_000, token="t", tls=ClientTls(own.path)) as opened:
            await opened.send_message(message(b"x" * 600_000))
            (received,) = await opened.receive_messages("orders")
            assert len(received.payload) == 600_000
            await received.ack()


@pytest.mark.parametrize(
    ("name", "options", "trust", "reason"),
    [
        ("127.0.0.1", {}, "other", r"unable to get local issuer|self.signed|unable to verify"),
        ("127.0.0.1", {}, None, r"unable to get local issuer|self.signed|unable to verify"),
        ("127.0.0.1", {"not_before": PAST[0], "not_after": PAST[1]}, "own", "expired"),
        ("elsewhere.example", {}, "own", r"not valid for|another one|mismatch"),
    ],
    ids=["other authority", "authorities of the system", "expired", "other name"],
)
async def test_a_client_refuses_a_wrong_certificate_at_once(
    mailbox: OwnedMailbox,
    protocol: str,
    authorities: Any,
    name: str,
    options: Any,
    trust: str | None,
    reason: str,
) -> None:
    own, other = authorities
    ca = {"own": own.path, "other": other.path, None: None}[trust]
    async with serve(mailbox, protocol, own.issue(name, **options)) as url, asyncio.timeout(SECONDS):
        with pytest.raises(
            InvalidRequest, match=rf"(?i)certificate of {protocol}s://.* not accepted.*({reason})"
        ):
            async with client(url, ClientTls(ca), timeout_ms=600_000):
                pass


async def test_a_server_may_require_certificates_of_its_clients(
    mailbox: OwnedMailbox, protocol: str, own: Authority, other: Authority
) -> None:
    wrong = [ClientTls(own.path), ClientTls(own.path, *other.issue("client.example"))]
    async with serve(mailbox, protocol, own.issue(), own.path) as url, asyncio.timeout(SECONDS):
        for tls in wrong:
            with pytest.raises(REFUSALS[protocol], match=r"this client's certificate, or asks? for one"):
                async with client(url, tls, timeout_ms=TIMEOUTS_MS[protocol]):
                    pass
        async with client(url, ClientTls(own.path, *own.issue("client.example"))) as opened:
            assert opened.name == MAILBOX


async def test_a_client_without_tls_is_not_answered(
    mailbox: OwnedMailbox, protocol: str, own: Authority
) -> None:
    async with serve(mailbox, protocol, own.issue()) as url:
        with pytest.raises(Unavailable):
            async with client(url.replace("s://", "://"), None, timeout_ms=300):
                pass


async def test_a_client_with_tls_is_told_that_the_server_has_none(
    mailbox: OwnedMailbox, protocol: str, own: Authority
) -> None:
    async with served(mailbox, protocol) as url, asyncio.timeout(SECONDS):
        with pytest.raises(InvalidRequest, match="does not speak TLS"):
            async with client(url.replace("://", "s://"), ClientTls(own.path), timeout_ms=600_000):
                pass


async def test_silent_peers_hold_up_nobody_and_are_closed(
    mailbox: OwnedMailbox, protocol: str, own: Authority
) -> None:
    settings = HttpSettings(header_timeout_ms=500)
    async with serve(mailbox, protocol, own.issue(), settings=settings) as url, asyncio.timeout(SECONDS):
        address = url.partition("://")[2].split(":")
        silent = [await asyncio.open_connection(*address) for _ in range(20)]
        async with client(url, ClientTls(own.path)) as opened:
            await opened.send_message(message())
        if protocol == "http":  # that of gRPC is 5 s
            for reader, _ in silent:
                assert await reader.read() == b""
        for _, writer in silent:
            writer.close()


async def test_above_the_limit_of_handshakes_the_oldest_ones_are_closed(
    mailbox: OwnedMailbox, own: Authority
) -> None:
    settings = HttpSettings(max_connections=3, header_timeout_ms=600_000)
    async with serve(mailbox, "http", own.issue(), settings=settings) as url, asyncio.timeout(SECONDS):
        address = url.partition("://")[2].split(":")
        peers = [await asyncio.open_connection(*address) for _ in range(9)]
        async with client(url, ClientTls(own.path)) as opened:
            await opened.send_message(message())
        for reader, _ in peers[:6]:
            assert await reader.read() == b""
        for _, writer in peers:
            writer.close()


async def test_a_silent_connection_is_answered_and_closed_after_its_handshake(
    mailbox: OwnedMailbox, own: Authority
) -> None:
    settings = HttpSettings(header_timeout_ms=200)
    async with serve(mailbox, "http", own.issue(), settings=settings) as url, asyncio.timeout(SECONDS):
        host, port = url.partition("://")[2].split(":")
        context = ssl.create_default_context(cafile=own.path)
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        assert writer.get_extra_info("ssl_object").selected_alpn_protocol() is None
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "E_TIMEOUT"
        writer.close()


async def test_new_connections_get_a_certificate_that_replaced_the_old_one(
    mailbox: OwnedMailbox, protocol: str, own: Authority, other: Authority, tmp_path: Path
) -> None:
    files = TlsFiles(*(str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")))

    def install(authority: Authority, key: str | None = None) -> None:
        certificate, own_key = authority.issue()
        sources = (certificate, key or own_key, authority.path)
        for source, target in zip(sources, files, strict=True):
            Path(str(target)).write_bytes(Path(source).read_bytes())

    install(own)
    tls = ServerTls(files)
    old, new = (ClientTls(each.path, *each.issue("client.example")) for each in (own, other))
    async with served(mailbox, protocol, protection=SurfaceProtection(tls)) as url, asyncio.timeout(SECONDS):
        async with client(url, old) as opened:
            install(other, key=own.issue()[1])
            with pytest.raises(InvalidRequest, match="is not the key of the certificate"):
                tls.reload()
            async with client(url, old):
                pass
            install(other)
            tls.reload()
            assert (await opened.get_backlog()).shards == []  # connections that are open stay
        async with client(url, new):
            pass
        for wrong in (old, ClientTls(other.path, *own.issue("client.example"))):
            with pytest.raises((InvalidRequest, Unavailable)):
                async with client(url, wrong, timeout_ms=TIMEOUTS_MS[protocol]):
                    pass


def test_files_that_can_not_be_used_are_named(own: Authority, other: Authority, tmp_path: Path) -> None:
    certificate, key = own.issue()
    missing, garbage, locked = (str(tmp_path / name) for name in ("missing", "garbage", "locked"))
    Path(garbage).write_text("-----BEGIN CERTIFICATE-----\nno base64\n-----END CERTIFICATE-----\n")
    Path(locked).write_bytes(
        b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMIIB\n-----END ENCRYPTED PRIVATE KEY-----\n"
    )
    for files, reason in (
        (TlsFiles(missing, key), f"tls_certificate: the file {missing} can't be read: No such file"),
        (TlsFiles(certificate, str(tmp_path)), "tls_key: the file .* can't be read: Is a directory"),
        (TlsFiles(key, key), "tls_certificate: the file .* has no CERTIFICATE in PEM"),
        (TlsFiles(certificate, certificate), "tls_key: the file .* has no PRIVATE KEY in PEM"),
        (TlsFiles(garbage, key), "tls_certificate .* can't be used"),
        (TlsFiles(certificate, other.issue()[1]), "tls_key: .* is not the key of the certificate"),
        (TlsFiles(certificate, locked), "can't be used|encrypted"),
        (TlsFiles(certificate, key, garbage), "tls_client_ca is malformed"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            ServerTls(files)


def test_a_certificate_that_has_expired_is_served_with_a_warning(
    own: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "postroom"):
        ServerTls(TlsFiles(*own.issue()))
        assert caplog.text == ""
        ServerTls(TlsFiles(*own.issue(not_before=PAST[0], not_after=PAST[1])))
    assert "tls.certificate_invalid" in caplog.text
    assert "has expired" in caplog.text


async def test_a_client_refuses_files_and_urls_that_do_not_fit(own: Authority, other: Authority) -> None:
    certificate, key = own.issue("client.example")
    for url, tls, reason in (
        ("http://127.0.0.1:1", ClientTls(own.path), "tls is for https://, grpcs:// and postrooms://"),
        ("grpc://127.0.0.1:1", ClientTls(), "tls is for https://, grpcs:// and postrooms://"),
        ("https://127.0.0.1:1", ClientTls("missing.pem"), "ca: the file missing.pem can't be read"),
        ("grpcs://127.0.0.1:1", ClientTls(own.path, certificate), "needs both certificate and key"),
        ("grpcs://127.0.0.1:1", ClientTls(own.path, certificate, other.issue()[1]), "is not the key of"),
        ("https://127.0.0.1:1", ClientTls(own.path, key, key), "has no CERTIFICATE in PEM"),
        ("store.db", ClientTls(own.path), "A store takes no tls"),
        ("https://127.0.0.1:1", "ca.pem", "tls must be"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            async with connect(url, timeout_ms=300, tls=tls):  # type: ignore[arg-type]  # on purpose
                pass


async def test_an_address_beyond_loopback_needs_tls_capabilities_and_names(
    mailbox: OwnedMailbox, protocol: str, own: Authority
) -> None:
    tls = ServerTls(TlsFiles(*own.issue()))
    anywhere = "0.0.0.0:0"
    with pytest.raises(InvalidRequest, match="from other machines, which needs TLS"):
        async with served(mailbox, protocol, anywhere):
            pass
    for protection in (SurfaceProtection(tls, allowed_hosts=("*",)), SurfaceProtection(None, True, ("*",))):
        with pytest.raises(InvalidRequest, match="--dev asks for no tokens"):
            async with served(mailbox, protocol, anywhere, protection=protection):
                pass
    if protocol == "http":
        for settings, protection, reason in (
            (HttpSettings(), SurfaceProtection(tls), "needs allowed_hosts"),
            (HttpSettings(open_metrics=True), SurfaceProtection(tls, allowed_hosts=("*",)), "open_metrics"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                async with served(mailbox, protocol, anywhere, settings=settings, protection=protection):
                    pass


def everybody(mailbox: Any, search: Any) -> Any:
    """Sessions of callers whatever their token, of a service that is not for development."""
    from postroom.application.service import unrestricted

    return unrestricted(mailbox, search)


async def test_the_host_of_a_request_is_one_that_the_server_is_reached_by(
    mailbox: OwnedMailbox, own: Authority
) -> None:
    tls = ServerTls(TlsFiles(*own.issue()))
    context = ssl.create_default_context(cafile=own.path)
    for hosts, statuses in ((("Mail.Example",), (200, 421, 200)), (("*",), (200, 200, 200))):
        protection = SurfaceProtection(tls, allowed_hosts=hosts)
        async with (
            served(mailbox, "http", "0.0.0.0:0", access=everybody, protection=protection) as url,
            ClientSession(connector=TCPConnector(ssl=context)) as session,
        ):
            here = url.replace("0.0.0.0", "127.0.0.1")
            for host, status in zip(("mail.example:443", "evil.example", "localhost"), statuses, strict=True):
                async with session.get(f"{here}/v1/topics", headers={"Host": host}) as answer:
                    assert answer.status == status
            for origin, status in (("https://localhost", 200), ("http://localhost", 403)):
                headers = {"Host": "localhost", "Origin": origin}
                async with session.get(f"{here}/v1/topics", headers=headers) as answer:
                    assert answer.status == status
