"""Who may call HTTP and gRPC: tokens of requests, the calls that need none, and servers that ask for none."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from multidict import CIMultiDict

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.grpc.calls import DETAILS_KEY, METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import OpenSession, Search, Session
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InvalidRequest, Saturated, Unauthenticated, Unavailable
from postroom.domain.policy import TopicPolicy
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

TOKEN = "prm1_0123456789abcdef-_"
GOOD = f"Bearer {TOKEN}"
SECONDS = 30
"""Deadline of every wait."""


class OneToken:
    """Access of the bearers of one token, which may be revoked."""

    def __init__(self) -> None:
        self.is_valid = True

    def __call__(self, mailbox: Mailbox, search: Search) -> OpenSession:
        def require(operation: Right) -> None:
            raise Forbidden(f"The capability does not cover {operation}.")

        async def open_session(token: str | None) -> Session:
            if token != TOKEN or not self.is_valid:
                raise Unauthenticated("The capability is missing or invalid; get a new one.")
            return Session(mailbox, search, require, mailbox.get_message)

        return open_session


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.fixture
def access() -> OneToken:
    return OneToken()


@asynccontextmanager
async def http_session(
    mailbox: OwnedMailbox, access: Any = None, **settings: Any
) -> AsyncIterator[ClientSession]:
    """Serve a mailbox over HTTP, and yield a client of it."""
    arguments = {} if access is None else {"access": access}
    async with (
        served(mailbox, "http", settings=HttpSettings(**settings), **arguments) as url,
        ClientSession(url) as session,
    ):
        yield session


@asynccontextmanager
async def grpc_channel(mailbox: OwnedMailbox, access: Any = None) -> AsyncIterator[grpc.aio.Channel]:
    """Serve a mailbox over gRPC, and yield a channel to it."""
    arguments = {} if access is None else {"access": access}
    async with (
        served(mailbox, "grpc", **arguments) as url,
        grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel,
    ):
        yield channel


def call(channel: grpc.aio.Channel, name: str, request: Any, *headers: str) -> Any:
    """Call a method with `authorization` metadata."""
    method = METHODS[name]
    make = channel.unary_stream if method.is_stream else channel.unary_unary
    calling = make(method.path, method.request.SerializeToString, method.response.FromString)
    return calling(request, metadata=[("authorization", each) for each in headers], timeout=SECONDS)


REFUSED = [
    [],
    ["Basic dXNlcjpwYXNz"],
    ["Bearer"],
    ["Bearer a b"],
    ["Bearer \xe9"],
    [GOOD, GOOD],
    ["Bearer x"],
]


@pytest.mark.parametrize("headers", REFUSED)
async def test_a_request_without_one_valid_token_is_not_authenticated(
    mailbox: OwnedMailbox, access: OneToken, headers: list[str]
) -> None:
    sent: CIMultiDict[str] = CIMultiDict(("Authorization", each) for each in headers)
    async with http_session(mailbox, access) as session:
        for method, path in (("GET", "/v1/topics"), ("POST", "/v1/send"), ("GET", "/metrics")):
            async with session.request(method, path, headers=sent) as answer:
                assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
                problem = await answer.json(content_type="application/problem+json")
                assert problem["code"] == "E_CAP_AUTH"
                assert TOKEN not in str(problem)


@pytest.mark.parametrize("headers", [each for each in REFUSED if "\xe9" not in "".join(each)])
@pytest.mark.parametrize(
    ("name", "request_"), [("send", pb.SendRequest()), ("recv_stream", pb.RecvStreamRequest())]
)
async def test_a_grpc_call_without_one_valid_token_is_not_authenticated(
    mailbox: OwnedMailbox, access: OneToken, headers: list[str], name: str, request_: Any
) -> None:
    async with grpc_channel(mailbox, access) as channel:
        calling = call(channel, name, request_, *headers)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await (calling.read() if METHODS[name].is_stream else calling)
    assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
    status, info = Status(), ErrorInfo()
    status.ParseFromString(dict(refused.value.trailing_metadata() or ())[DETAILS_KEY])
    assert status.details[0].Unpack(info)
    assert (info.reason, info.domain) == ("E_CAP_AUTH", "postroom")
    assert TOKEN not in str(status)


async def test_a_token_is_accepted_in_any_case_of_its_scheme(mailbox: OwnedMailbox, access: OneToken) -> None:
    async with http_session(mailbox, access) as session:
        for scheme in ("Bearer", "bearer", "BEARER"):
            async with session.get("/v1/topics", headers={"Authorization": f"{scheme} {TOKEN}"}) as answer:
                assert (answer.status, "x-postroom-mode" in answer.headers) == (200, False)


async def test_health_and_the_contract_need_no_token(mailbox: OwnedMailbox, access: OneToken) -> None:
    async with http_session(mailbox, access) as session:
        for path in ("/healthz", "/readyz", "/openapi.json"):
            async with session.get(path, headers={"Authorization": "Bearer x"}) as answer:
                assert answer.status == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_readiness_gives_up_writes_before_reads(
    mailbox: OwnedMailbox, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    surfaces = [open_http_surface("127.0.0.1:0", HttpSettings()), open_grpc_surface("127.0.0.1:0")]
    await mailbox.set_topic_policy("full", TopicPolicy(shard_capacity=1))
    await mailbox.send_message(message(topic="full"))

    async def fail(_: Any) -> Any:
        raise Unavailable("The disk is full.", retry_after_ms=60_000)

    async with (
        serve_mailbox("memory:", mailbox, surfaces, access=unrestricted) as (http, rpc),
        connect_remote(http if protocol == "http" else rpc, timeout_ms=1_000) as client,
        ClientSession(http) as session,
    ):

        async def ready() -> tuple[int, Any]:
            async with session.get("/readyz") as answer:
                return answer.status, await answer.json()

        good = (200, {"degraded": False, "missing": [], "writes": True})
        no_writes = (200, {"degraded": True, "missing": [], "writes": False})
        assert await ready() == good
        with pytest.raises(InvalidRequest):
            await client.send_message(message(topic="no spaces"))
        assert await ready() == good
        with pytest.raises(Saturated):
            await client.send_message(message(topic="full"))
        assert await ready() == no_writes
        assert len(await client.receive_messages("full")) == 1
        await client.send_batch([message()])
        assert await ready() == good
        with monkeypatch.context() as patched:
            patched.setattr(mailbox, "send_message", fail)
            with pytest.raises(Unavailable, match="disk is full"):
                await client.send_message(message())
        assert await ready() == no_writes


async def test_metrics_need_the_right_to_read_headers_unless_they_are_open(
    mailbox: OwnedMailbox, access: OneToken
) -> None:
    async with (
        http_session(mailbox, access) as session,
        session.get("/metrics", headers={"Authorization": GOOD}) as answer,
    ):
        assert answer.status == 403
        assert json.loads(await answer.text())["code"] == "E_CAP_SCOPE"
    async with http_session(mailbox, access, open_metrics=True) as session, session.get("/metrics") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_client_sends_its_token_with_each_call(
    mailbox: OwnedMailbox, access: OneToken, protocol: str
) -> None:
    async with served(mailbox, protocol, access=access) as url:
        async with connect_remote(url, timeout_ms=20_000, token=TOKEN) as client:
            await client.send_message(message())
            async with client.stream_messages("orders") as stream:
                await (await anext(stream)).ack()
        with pytest.raises(Unauthenticated, match="missing or invalid"):
            async with connect_remote(url, timeout_ms=20_000):
                pass


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_stream_ends_when_its_token_is_revoked_and_its_messages_stay_with_it(
    mailbox: OwnedMailbox, access: OneToken, protocol: str
) -> None:
    await mailbox.send_message(message())
    async with asyncio.timeout(SECONDS):
        if protocol == "http":
            async with http_session(mailbox, access, heartbeat_ms=60_000) as session:
                body = {"topic": "orders", "visibility_ms": 60_000}
                async with session.post(
                    "/v1/recv/stream", json=body, headers={"Authorization": GOOD}
                ) as answer:
                    lines = [json.loads(await answer.content.readline())]
                    access.is_valid = False
                    lines += [json.loads(line) async for line in answer.content]
            assert lines[0]["topic"] == "orders"
            assert [line["error"]["code"] for line in lines[1:]] == ["E_CAP_AUTH"]
        else:
            async with grpc_channel(mailbox, access) as channel:
                request = pb.RecvStreamRequest(topics=["orders"], visibility_ms=60_000, heartbeat_ms=60_000)
                stream = call(channel, "recv_stream", request, GOOD)
                assert (await stream.read()).delivery.messages
                access.is_valid = False
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    await stream.read()
            assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED
    (shard,) = (await mailbox.get_backlog("orders")).shards
    assert (shard.in_flight, shard.ready) == (1, 0)


async def test_a_server_that_asks_for_no_tokens_says_so_in_every_answer(mailbox: OwnedMailbox) -> None:
    async with http_session(mailbox) as session:
        for path in ("/healthz", "/v1/topics", "/nowhere", "/metrics"):
            async with session.get(path) as answer:
                assert answer.headers["X-Postroom-Mode"] == "dev"
        url = session._base_url
        assert url is not None
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"no HTTP\r\n\r\n")
        assert b"\r\nx-postroom-mode: dev\r\n" in await reader.read()
        writer.close()
    async with grpc_channel(mailbox) as channel:
        for request in (pb.BacklogRequest(), pb.BacklogRequest(topic="no spaces")):
            calling = call(channel, "backlog", request)
            assert ("x-postroom-mode", "dev") in tuple(await calling.trailing_metadata())
