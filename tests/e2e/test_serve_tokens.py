"""`postroom serve` with capabilities: it needs a key, checks every call, and shows tokens nowhere."""

import json
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import grpc
import pytest
from trustme import CA

from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.domain.capability.token import Token
from tests.e2e.conftest import ROOT, Postroom
from tests.support.servers.http import PostroomServer
from tests.support.waiting import wait_until

CONTRACT: dict[str, Any] = json.loads((ROOT / "docs/reference/openapi.json").read_text())
OPERATIONS = "send,recv,ack,nack,extend,read-headers,read-payload,redrive,admin"
JUNK = "canary-junk-7f3a9c51"
SECONDS = 60


def server_of(postroom: Postroom) -> PostroomServer:
    """Return a server of the command line's store that asks for tokens."""
    return PostroomServer(
        postroom.folder / "server",
        str(postroom.store),
        log_level="debug",
        dev=False,
        grpc="127.0.0.1:0",
    )


def test_without_a_key_it_does_not_start_and_says_how_to_make_one(postroom: Postroom) -> None:
    refused = postroom("serve", "--http", "127.0.0.1:0")
    assert refused.code != 0
    assert "`postroom token rotate`" in refused.err
    assert "--dev" in refused.err
    assert not postroom.store.exists()


def fetch_certificate(server: PostroomServer, ca: str) -> bytes:
    """Return the certificate of a server; empty while it is of another authority."""
    try:
        return ssl.get_server_certificate(("127.0.0.1", server.port), ca_certs=ca, timeout=SECONDS).encode()
    except ssl.SSLCertVerificationError:
        return b""


def test_commands_reach_a_server_with_tls_by_a_token_and_its_authority(
    postroom: Postroom, tmp_path: Path
) -> None:
    ca, certificate, key = (str(tmp_path / name) for name in ("ca.pem", "server.pem", "server.key"))
    authority = CA()
    leaf = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(ca)
    leaf.cert_chain_pems[0].write_to_path(certificate)
    leaf.private_key_pem.write_to_path(key)
    postroom.ok("token", "rotate")
    token = postroom.ok("token", "mint", "shop", "--operation", "send").out.strip()
    tls = {"tls_certificate": certificate, "tls_key": key}
    with PostroomServer(postroom.folder / "server", str(postroom.store), dev=False, **tls) as server:
        assert server.address.startswith("https://")
        send = ("--store", server.address, "send", "orders", "hello")
        postroom.ok(*send, POSTROOM_TOKEN=token, POSTROOM_CLIENT__CA=ca)
        unknown = postroom(*send, POSTROOM_TOKEN=token)
        assert "is not accepted" in unknown.err
        anonymous = postroom(*send, POSTROOM_CLIENT__CA=ca)
        assert "E_CAP_AUTH" in anonymous.err or "no capability" in anonymous.err
        assert (unknown.code != 0, anonymous.code != 0) == (True, True)
        renewed = CA()
        leaf = renewed.issue_cert("127.0.0.1")
        renewed.cert_pem.write_to_path(ca)
        leaf.cert_chain_pems[0].write_to_path(certificate)
        leaf.private_key_pem.write_to_path(key)
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: b"BEGIN" in fetch_certificate(server, ca))
    assert "orders" in postroom.ok("backlog").out


def call_http(server: PostroomServer, token: str) -> list[tuple[int, str]]:
    """Make every call of the contract with a token; return status, and headers and body as text."""
    answers = []
    for path, operations in CONTRACT["paths"].items():
        for method, operation in operations.items():
            target = path.replace("{msg_id}", "unknown").replace("{topic}", "orders")
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            body = {"topic": "orders", "wait_ms": 1} if path == "/v1/recv/stream" else content.get("example")
            answer = server.call(method.upper(), target, body, {"Authorization": f"Bearer {token}"})
            answers.append((answer.status, f"{dict(answer.headers)} {answer.text}"))
    return answers


def call_grpc(address: str, token: str) -> list[tuple[grpc.StatusCode, str]]:
    """Make every call of gRPC with a token; return code, and all metadata and details as text."""
    answers = []
    with grpc.insecure_channel(address.removeprefix("grpc://")) as channel:
        for name, method in METHODS.items():
            make = channel.unary_stream if method.is_stream else channel.unary_unary
            calling = make(method.path, method.request.SerializeToString, method.response.FromString)
            options: Any = {"metadata": [("authorization", f"Bearer {token}")], "timeout": SECONDS}
            try:
                if method.is_stream:
                    stream = calling(pb.RecvStreamRequest(topics=["orders"], heartbeat_ms=250), **options)
                    answers.append((grpc.StatusCode.OK, f"{name} {next(stream)}"))
                    stream.cancel()
                else:
                    answers.append((grpc.StatusCode.OK, f"{name} {calling(method.request(), **options)}"))
            except grpc.RpcError as failure:
                error: Any = failure  # it is the call, too
                shown = f"{name} {error.details()} {error.trailing_metadata()} {error.initial_metadata()}"
                answers.append((error.code(), shown))
    return answers


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="command lines are read from /proc")
def test_a_token_is_in_no_log_answer_metric_file_or_command_line(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "hello")
    postroom.ok("token", "rotate")
    minted = postroom.ok("token", "mint", "caller", "--operation", OPERATIONS)
    token = minted.out.strip()
    altered = token[:-8] + ("A" * 8 if not token.endswith("A" * 8) else "B" * 8)
    shown = [minted.err]
    with server_of(postroom) as server:
        for bad in (altered, JUNK):
            http, rpc = call_http(server, bad), call_grpc(server.addresses[1], bad)
            public = {200, 404} if bad else set()  # 404: the page of an error code that does not exist
            assert {status for status, _ in http} == {401} | public
            assert [status for status, _ in http].count(200) == 3  # healthz, readyz and the contract
            assert {code for code, _ in rpc} == {grpc.StatusCode.UNAUTHENTICATED}
            shown += [text for _, text in (*http, *rpc)]
        http, rpc = call_http(server, token), call_grpc(server.addresses[1], token)
        assert not {status for status, _ in http} & {401, 403, 500}
        assert not {code for code, _ in rpc} & {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INTERNAL}
        shown += [text for _, text in (*http, *rpc)]
        shown.append(server.call("GET", f"/v1/topics?token={token}").text)
        metrics = server.call("GET", "/metrics", headers={"Authorization": f"Bearer {token}"})
        assert metrics.status == 200
        shown.append(metrics.text)
        for name in ("cmdline", "environ"):
            shown.append(Path(f"/proc/{server.process.pid}/{name}").read_text("latin-1"))
    shown += [path.read_text("latin-1") for path in postroom.folder.rglob("*") if path.is_file()]
    tag = Token.decode(token).tag
    secrets = (token, token[-40:], altered[-40:], JUNK, tag.hex(), tag.decode("latin-1"))
    for text in shown:
        assert [number for number, secret in enumerate(secrets) if secret in text] == []
    assert "http.request" in server.log
