"""TLS and authentication of connections to NATS, with real servers."""

import json
import os
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import nkeys
import pytest

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.ingest.namespace import NatsSource
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.certificates import PASSWORD, TOKEN, Certificates
from tests.support.servers.nats import NatsServer


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def server(files: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that demands a client's certificate and a password."""
    users = [{"user": "relay", "password": PASSWORD}]
    settings = files.tls(files.server, verify=True) | {"authorization": {"users": users}}
    with NatsServer(tmp_path_factory.mktemp("nats"), **settings) as server:
        yield server


def settings_of(server: NatsServer, files: Certificates, **changes: Any) -> NatsSettings:
    """Return settings that the server accepts, with changes."""
    certificate, key = files.client
    right = {"ca": files.ca, "certificate": certificate, "key": key, "user": "relay"}
    return NatsSettings(server.url, **(right | {"password_file": files.password} | changes))


async def refusal(settings: NatsSettings) -> str:
    """Return why a connection is refused."""
    with pytest.raises(Unavailable) as refused:
        async with connect(settings, "test"):
            pytest.fail("connected")
    text = str(refused.value)
    assert PASSWORD not in text
    assert text.count(". ") == 1
    return text


async def refusal_of_password(settings: NatsSettings) -> str:
    """Return why a password is refused; on a busy machine, the server may be gone before it is read."""
    text = ""
    for _ in range(20):
        text = await refusal(settings)
        if "Broken pipe" not in text and "reset" not in text:
            break
    return text


async def test_a_client_with_a_certificate_and_a_password_connects(
    server: NatsServer, files: Certificates
) -> None:
    async with connect(settings_of(server, files), "test") as client:
        await client.publish("acme.orders", b"one")
        await client.flush()


async def test_a_server_of_another_authority_is_refused(server: NatsServer, files: Certificates) -> None:
    text = await refusal(settings_of(server, files, ca=files.other_ca))
    assert "refuses the connection" in text or "certificate verify failed" in text
    assert "Check ca of the NATS settings" in text


async def test_a_server_whose_authority_the_system_does_not_know_is_refused(
    server: NatsServer, files: Certificates
) -> None:
    assert "Check ca of the NATS settings" in await refusal(settings_of(server, files, ca=None))


@pytest.mark.parametrize("pair", [None, "expired", "foreign"])
async def test_a_client_without_a_valid_certificate_is_told_to_check_it(
    server: NatsServer, files: Certificates, pair: str | None
) -> None:
    certificate, key = (None, None) if pair is None else getattr(files, pair)
    text = await refusal(settings_of(server, files, certificate=certificate, key=key))
    assert "certificate" in text


async def test_a_wrong_password_is_refused_at_once(server: NatsServer, files: Certificates) -> None:
    wrong = files.write("wrong-password", b"canary-wrong")
    text = await refusal_of_password(settings_of(server, files, password_file=wrong))
    assert "Authorization Violation" in text
    assert "Check credentials, nkey, user, token or certificate" in text
    assert "canary-wrong" not in text


async def test_a_server_with_an_expired_certificate_is_refused(files: Certificates, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats", **files.tls(files.expired)) as server:
        text = await refusal(NatsSettings(server.url, ca=files.ca))
    assert "expired" in text
    assert "Check ca of the NATS settings" in text


async def test_a_server_without_tls_is_told_no_password(files: Certificates, tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats", authorization={"token": TOKEN}) as server:
        for url, ca in ((server.url, files.ca), (server.url.replace("nats://", "tls://"), None)):
            settings = NatsSettings(url, token_file=files.token, ca=ca)
            assert "the server offers no TLS" in await refusal(settings)
        async with connect(NatsSettings(server.url, token_file=files.token), "test") as client:
            await client.flush()


async def test_tls_may_begin_before_the_first_message_of_the_server(
    files: Certificates, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats", **files.tls(files.server, handshake_first=True)) as server:
        async with connect(NatsSettings(server.url, ca=files.ca, tls_first=True), "test") as client:
            await client.flush()


async def test_a_password_that_was_replaced_is_read_by_the_next_connection(
    server: NatsServer, files: Certificates
) -> None:
    path = files.write("rotated", b"old")
    settings = settings_of(server, files, password_file=path)
    assert "Authorization Violation" in await refusal_of_password(settings)
    files.write("rotated", PASSWORD.encode())
    async with connect(settings, "test") as client:
        await client.flush()


@pytest.mark.parametrize(
    ("access", "reason"),
    [
        ({"user": "relay"}, "user and password_file need each other"),
        ({"key": "key.pem"}, "certificate and key need each other"),
        ({"token_file": "token", "nkey": "seed"}, "nkey and token_file exclude each other"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(access: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        NatsSettings(**access)


@pytest.mark.parametrize("name", ["ca", "token_file"])
async def test_a_file_that_does_not_exist_is_named(name: str) -> None:
    access: dict[str, Any] = {name: "missing.pem"}
    settings = NatsSettings(**access)
    with pytest.raises(
        InvalidRequest, match=rf"missing.pem of the NATS setting {name} can't be used: No such"
    ):
        async with connect(settings, "test"):
            pytest.fail("connected")


async def test_a_seed_of_an_nkey_authenticates(files: Certificates, tmp_path: Path) -> None:
    (pair, seed), (_, other) = new_nkey(nkeys.PREFIX_BYTE_USER), new_nkey(nkeys.PREFIX_BYTE_USER)
    users = [{"nkey": pair.public_key.decode()}]
    with NatsServer(tmp_path / "nats", authorization={"users": users}) as server:
        async with connect(NatsSettings(server.url, nkey=files.write("seed", seed)), "test") as client:
            await client.flush()
        text = await refusal_of_password(NatsSettings(server.url, nkey=files.write("other-seed", other)))
    assert "Check credentials, nkey" in text


async def test_a_credentials_file_with_a_jwt_and_its_seed_authenticates(
    files: Certificates, tmp_path: Path
) -> None:
    operator, _ = new_nkey(nkeys.PREFIX_BYTE_OPERATOR)
    account, _ = new_nkey(nkeys.PREFIX_BYTE_ACCOUNT)
    user, seed = new_nkey(nkeys.PREFIX_BYTE_USER)
    account_jwt = sign_jwt(operator, account, "account", {"limits": {"subs": -1, "conn": -1, "payload": -1}})
    settings = {
        "operator": files.write("operator.jwt", sign_jwt(operator, operator, "operator", {}).encode()),
        "resolver": "MEMORY",
        "resolver_preload": {account.public_key.decode(): account_jwt},
        "system_account": account.public_key.decode(),
    }
    user_jwt = sign_jwt(account, user, "user", {"subs": -1, "data": -1, "payload": -1})
    stranger_jwt = sign_jwt(new_nkey(nkeys.PREFIX_BYTE_ACCOUNT)[0], user, "user", {})
    with NatsServer(tmp_path / "nats", **settings) as server:
        credentials = files.write("user.creds", credentials_of(user_jwt, seed))
        async with connect(NatsSettings(server.url, credentials=credentials), "test") as client:
            await client.flush()
        stranger = files.write("stranger.creds", credentials_of(stranger_jwt, seed))
        text = await refusal_of_password(NatsSettings(server.url, credentials=stranger))
    assert "Check credentials, nkey" in text


def new_nkey(prefix: int) -> tuple[nkeys.KeyPair, bytes]:
    """Return a new pair of keys and its seed."""
    seed = bytes(nkeys.encode_seed(os.urandom(32), prefix))
    return nkeys.from_seed(bytearray(seed)), seed


def sign_jwt(issuer: nkeys.KeyPair, subject: nkeys.KeyPair, kind: str, claims: dict[str, Any]) -> str:
    """Return a JWT as NATS reads it."""
    body = {
        "jti": kind,
        "iat": 1_700_000_000,
        "iss": issuer.public_key.decode(),
        "sub": subject.public_key.decode(),
        "name": kind,
        "nats": claims | {"type": kind, "version": 2},
    }
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, body]
    text = ".".join(encode(json.dumps(each).encode()) for each in parts)
    return f"{text}.{encode(issuer.sign(text.encode()))}"


def encode(data: bytes) -> str:
    return urlsafe_b64encode(data).rstrip(b"=").decode()


def credentials_of(jwt: str, seed: bytes) -> bytes:
    """Return a credentials file, as `nsc` writes it."""
    parts = {"NATS USER JWT": jwt, "USER NKEY SEED": seed.decode()}
    return "".join(
        f"-----BEGIN {name}-----\n{part}\n------END {name}------\n\n" for name, part in parts.items()
    ).encode()


def test_settings_of_a_url_with_a_password_do_not_show_it() -> None:
    url = f"nats://relay:{PASSWORD}@127.0.0.1:4222"
    source = NatsSource(url=url, subject="acme.>", consumer_group="archive")
    for each in (NatsSettings(url), source):
        assert PASSWORD not in repr(each)
        assert PASSWORD in msgspec.json.encode(each).decode()
