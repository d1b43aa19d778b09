"""The gRPC surface, by a caller that knows only the contract."""

import asyncio
import os
import socket
import stat
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status as RpcStatus
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from postroom.adapters.compose import Postroom, open_mailbox
from postroom.adapters.grpc import server
from postroom.adapters.grpc.methods import METHODS
from postroom.adapters.grpc.server import MAX_REQUEST_BYTES, grpc_surface
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.ports.mailbox import Mailbox
from postroom.application.service import Service, unrestricted
from postroom.application.surface_metrics import SurfaceMetrics
from postroom.application.write_health import WriteHealth
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from postroom.domain.message import Status
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, FoundMessage, SearchPage
from tests.support.stores import MAILBOX, envelope, message

SECONDS = 30
"""Deadline of every wait."""


async def no_search(filter_: EventFilter) -> SearchPage:
    raise NotFound("There are no read models.")


def serve_grpc(
    mailbox: Mailbox, address: str, search: Callable[[EventFilter], Awaitable[SearchPage]] = no_search
) -> AbstractAsyncContextManager[str]:
    session = unrestricted(mailbox, search)
    service = Service(
        mailbox, session, TopicPolicy(), asyncio.Event(), DeliveryWindows(), SurfaceMetrics(), WriteHealth()
    )
    return grpc_surface(address)(service)


class Caller:
    """Calls of one channel, by the names of their methods."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = METHODS[name]
        make = self.channel.unary_stream if method.is_stream else self.channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Caller]:
    target = url.removeprefix("grpc://").removeprefix("grpc+")
    async with grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Caller(channel)


@pytest.fixture
async def mailbox() -> AsyncIterator[Postroom]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.fixture
async def address(mailbox: Postroom) -> AsyncIterator[str]:
    async with serve_grpc(mailbox, "127.0.0.1:0") as served:
        yield served


@pytest.fixture
async def caller(address: str) -> AsyncIterator[Caller]:
    async with connected(address) as opened:
        yield opened


def new(payload: bytes = b"hello", topic: str = "orders", **fields: Any) -> pb.SendRequest:
    return pb.SendRequest(message=pb.NewMessage(topic=topic, payload=payload, **fields))


def details(error: grpc.aio.AioRpcError) -> tuple[ErrorInfo, RetryInfo | None]:
    trailers = dict(error.trailing_metadata() or ())
    status = RpcStatus.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    info, retry = ErrorInfo(), RetryInfo()
    assert status.details[0].Unpack(info)
    return info, retry if len(status.details) > 1 and status.details[1].Unpack(retry) else None


async def read(stream: Any, kind: str = "delivery") -> Any:
    """Return the next item of a kind; heartbeats are passed over unless they are asked for."""
    async with asyncio.timeout(SECONDS):
        while True:
            item = await stream.read()
            assert item is not grpc.aio.EOF
            if item.WhichOneof("item") == kind:
                return getattr(item, kind)
            assert item.WhichOneof("item") == "heartbeat", item


async def wait_until(is_true: Callable[[], Any]) -> None:
    async with asyncio.timeout(SECONDS):
        while not await is_true():
            await asyncio.sleep(0.02)


# -- errors ---


@pytest.mark.parametrize(
    ("name", "request_", "code", "reason"),
    [
        ("send", new(topic="no spaces"), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("send", pb.SendRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("send", new(b"x" * (1 << 20)), grpc.StatusCode.RESOURCE_EXHAUSTED, "E_FRAME_TOO_LARGE"),
        ("recv", pb.RecvRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("recv", pb.RecvRequest(topics=["a"], wait_ms=-1), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("recv_stream", pb.RecvStreamRequest(), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        (
            "recv_stream",
            pb.RecvStreamRequest(topics=["a"], heartbeat_ms=1),
            grpc.StatusCode.INVALID_ARGUMENT,
            "E_SCHEMA",
        ),
        ("get", pb.GetRequest(message_id="nowhere"), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        ("purge", pb.PurgeRequest(topic="nowhere"), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        ("query", pb.QueryRequest(limit=0), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(order="no"), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(statuses=["no"]), grpc.StatusCode.INVALID_ARGUMENT, "E_SCHEMA"),
        ("query", pb.QueryRequest(), grpc.StatusCode.NOT_FOUND, "E_NOT_FOUND"),
        (
            "backlog",
            pb.BacklogRequest(at=pb.Moment(time="yesterday")),
            grpc.StatusCode.INVALID_ARGUMENT,
            "E_SCHEMA",
        ),
    ],
)
async def test_a_refused_call_has_the_code_of_its_error(
    caller: Caller, name: str, request_: Any, code: grpc.StatusCode, reason: str
) -> None:
    call = getattr(caller, name)(request_, timeout=SECONDS)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if METHODS[name].is_stream else call)
    info, retry = details(refused.value)
    assert (refused.value.code(), info.reason, info.domain, retry) == (code, reason, "postroom", None)


async def test_a_refusal_for_now_says_when_to_retry(mailbox: Postroom, caller: Caller) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(shard_capacity=1))
    await caller.send(new())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new())
    info, retry = details(refused.value)
    assert (refused.value.code(), info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "E_SATURATED")
    assert retry is not None
    assert retry.retry_delay.ToMilliseconds() > 0
    answer = await caller.send_batch(pb.SendBatchRequest(messages=[new().message]))
    assert (answer.results[0].error.code, answer.results[0].error.retry_after_ms > 0) == ("E_SATURATED", True)


async def test_conflicts_have_codes_of_their_own(mailbox: Postroom, caller: Caller) -> None:
    await caller.send(new(idem_key="key"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new(b"other", idem_key="key"))
    assert refused.value.code() == grpc.StatusCode.ALREADY_EXISTS
    assert details(refused.value)[0].reason == "E_DUPLICATE"
    received = (await caller.recv(pb.RecvRequest(topics=["orders"]))).messages[0]
    await caller.nack(pb.NackRequest(receipts=[received.receipt], delay_ms=0))
    answer = await caller.ack(pb.AckRequest(receipts=[received.receipt, "nonsense"]))
    assert [result.error.code for result in answer.results] == ["E_STALE_RECEIPT", "E_SCHEMA"]


async def test_a_request_above_the_limit_is_refused_before_it_is_read(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.send(new(b"x" * (MAX_REQUEST_BYTES + 1)))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not (await caller.send(new())).duplicate


async def test_fields_that_the_server_does_not_know_are_refused(caller: Caller) -> None:
    unknown = b"\x0a\x0b" + b"\x0a\x06orders\xd8\x3e\x01"  # field 1003 within the message
    raw: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = caller.channel.unary_unary(METHODS["send"].path)
    with pytest.raises(grpc.aio.AioRpcError, match="does not know") as refused:
        await raw(unknown)
    assert details(refused.value)[0].reason == "E_SCHEMA"
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"is not the encoding of a postroom\.v1\.SendRequest"
    ) as malformed:
        await raw(b"\xff\xff")
    assert details(malformed.value)[0].reason == "E_SCHEMA"
    assert not (await caller.send(new())).duplicate


async def test_a_long_error_fits_into_the_trailers(caller: Caller) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.get(pb.GetRequest(message_id="é" * 255))
    assert details(refused.value)[0].reason == "E_NOT_FOUND"


async def test_a_defect_is_an_internal_error_without_its_details(
    mailbox: Postroom, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(mailbox, "get_backlog", broken)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await caller.backlog(pb.BacklogRequest())
    assert refused.value.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in str(refused.value)


# -- deliveries ---


async def test_a_delivery_has_the_envelope_without_the_publishers_token(
    mailbox: Postroom, caller: Caller
) -> None:
    sent = pb.RecvResponse.FromString(b"")
    external = sent.messages.add().envelope
    external.MergeFromString(envelope("order-1"))
    external.security.auth_token = "secret"
    external.security.publisher_id = "shop"
    await mailbox.send_envelopes([external.SerializeToString()])
    received = (await caller.recv(pb.RecvRequest(topics=["orders"]))).messages[0]
    assert (received.message_id, received.envelope.payload.value) == ("order-1", b"hi")
    assert (received.envelope.security.publisher_id, received.envelope.security.auth_token) == ("shop", "")
    detail = await caller.get(pb.GetRequest(message_id="order-1"))
    assert b"shop" in detail.item.envelope_blob
    assert b"secret" not in detail.SerializeToString()


async def test_a_receive_waits_no_longer_than_its_caller(caller: Caller) -> None:
    response = await caller.recv(pb.RecvRequest(topics=["orders"], wait_ms=60_000), timeout=1)
    assert list(response.messages) == []


async def test_a_caller_that_stops_waiting_takes_no_message(mailbox: Postroom, caller: Caller) -> None:
    waiting = caller.recv(pb.RecvRequest(topics=["orders"], wait_ms=60_000))
    await asyncio.sleep(0.2)
    waiting.cancel()
    await asyncio.sleep(0.2)
    await caller.send(new())
    assert (await caller.recv(pb.RecvRequest(topics=["orders"]))).messages[0].attempt == 1


async def test_a_stream_delivers_what_is_sent_and_heartbeats_in_between(caller: Caller) -> None:
    stream = caller.recv_stream(pb.RecvStreamRequest(topics=["orders", "others"], heartbeat_ms=250))
    await read(stream, "heartbeat")
    await caller.send(new(b"1"))
    await caller.send(new(b"2", topic="others"))
    payloads: list[bytes] = []
    while len(payloads) < 2:
        payloads.extend(each.envelope.payload.value for each in (await read(stream)).messages)
    assert sorted(payloads) == [b"1", b"2"]
    stream.cancel()


async def test_a_stream_has_no_more_unsettled_messages_than_its_caller_asked_for(caller: Caller) -> None:
    for number in range(6):
        await caller.send(new(str(number).encode(), sticky_key="key"))
    stream = caller.recv_stream(
        pb.RecvStreamRequest(topics=["orders"], max_messages=2, visibility_ms=60_000, heartbeat_ms=250)
    )
    taken = list((await read(stream)).messages)
    assert len(taken) == 2
    await read(stream, "heartbeat")
    await caller.ack(pb.AckRequest(receipts=[taken[0].receipt]))
    (third,) = (await read(stream)).messages
    assert third.envelope.payload.value == b"2"
    await caller.nack(pb.NackRequest(receipts=[taken[1].receipt], delay_ms=60_000))
    assert len((await read(stream)).messages) == 1
    stream.cancel()


async def test_a_message_whose_visibility_ended_makes_room_for_its_redelivery(caller: Caller) -> None:
    await caller.send(new())
    stream = caller.recv_stream(pb.RecvStreamRequest(topics=["orders"], max_messages=1, visibility_ms=250))
    attempts = [(await read(stream)).messages[0].attempt for _ in range(2)]
    assert attempts == [1, 2]
    stream.cancel()


async def test_an_extended_message_takes_room_for_longer(caller: Caller) -> None:
    for _ in range(2):
        await caller.send(new(sticky_key="key"))
    request = pb.RecvStreamRequest(topics=["orders"], max_messages=1, visibility_ms=1_000, heartbeat_ms=250)
    stream = caller.recv_stream(request)
    (received,) = (await read(stream)).messages
    await caller.extend(pb.ExtendRequest(receipts=[received.receipt], visibility_ms=60_000))
    for _ in range(6):
        await read(stream, "heartbeat")
    stream.cancel()


@pytest.mark.parametrize("end", ["cancel", "disconnect"])
async def test_messages_of_a_caller_that_goes_are_ready_at_once(
    caller: Caller, address: str, end: str
) -> None:
    await caller.send(new(b"settled", topic="settled"))
    await caller.send(new())
    async with AsyncExitStack() as closing:
        other = await closing.enter_async_context(connected(address))
        stream = other.recv_stream(pb.RecvStreamRequest(topics=["orders", "settled"], visibility_ms=60_000))
        received: list[pb.ReceivedMessage] = []
        while len(received) < 2:
            received.extend((await read(stream)).messages)
        (settled,) = [each for each in received if each.topic == "settled"]
        await other.ack(pb.AckRequest(receipts=[settled.receipt]))
        if end == "cancel":
            stream.cancel()
        else:
            await other.channel.close()
        again = await caller.recv(
            pb.RecvRequest(topics=["orders", "settled"], wait_ms=20_000), timeout=SECONDS
        )
    assert [(each.topic, each.attempt) for each in again.messages] == [("orders", 2)]


PAUSED = """
import asyncio, os, signal, sys
import grpc
from postroom.adapters.grpc.methods import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb

async def main():
    method = METHODS["recv_stream"]
    async with grpc.aio.insecure_channel(sys.argv[1]) as channel:
        call = channel.unary_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )(pb.RecvStreamRequest(topics=["orders"], visibility_ms=600_000))
        while (await call.read()).WhichOneof("item") != "delivery":
            pass
        print("paused", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


async def test_messages_of_a_caller_that_is_paused_are_ready_again(
    mailbox: Postroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = {"grpc.keepalive_time_ms": 1_000, "grpc.http2.ping_timeout_ms": 500}
    monkeypatch.setattr(server, "OPTIONS", list((dict(server.OPTIONS) | quick).items()))
    await mailbox.send_message(message())
    async with serve_grpc(mailbox, "127.0.0.1:0") as served:
        paused = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PAUSED, served.removeprefix("grpc://"), stdout=PIPE
        )
        try:
            async with asyncio.timeout(SECONDS):
                assert paused.stdout is not None
                await paused.stdout.readline()
                received = await mailbox.receive_messages("orders", wait_ms=20_000)
        finally:
            paused.kill()
            await paused.wait()
    assert [each.attempt for each in received] == [2]


async def test_a_stream_survives_a_mailbox_that_is_unavailable_for_a_while(
    mailbox: Postroom, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = mailbox.receive_messages
    failures = [Unavailable("The store is locked; try again.", retry_after_ms=10)]

    async def receive_later(*args: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await receive(*args, **options)

    monkeypatch.setattr(mailbox, "receive_messages", receive_later)
    await caller.send(new())
    stream = caller.recv_stream(pb.RecvStreamRequest(topics=["orders"]))
    error = await read(stream, "error")
    assert (error.code, error.retry_after_ms) == ("E_UNAVAILABLE", 10)
    assert len((await read(stream)).messages) == 1
    stream.cancel()


async def test_a_server_that_stops_ends_its_streams_and_leaves_their_receipts_valid(
    mailbox: Postroom,
) -> None:
    await mailbox.send_message(message())
    async with AsyncExitStack() as running, AsyncExitStack() as closing:
        served = await running.enter_async_context(serve_grpc(mailbox, "127.0.0.1:0"))
        caller = await closing.enter_async_context(connected(served))
        stream = caller.recv_stream(pb.RecvStreamRequest(topics=["orders"]))
        (received,) = (await read(stream)).messages
        polling = asyncio.ensure_future(caller.recv(pb.RecvRequest(topics=["none"], wait_ms=60_000)))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(3):
            await running.aclose()
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await polling
        with pytest.raises(grpc.aio.AioRpcError, match="stopping") as ended:
            await read(stream)
    assert details(ended.value)[0].reason == "E_UNAVAILABLE"
    async with serve_grpc(mailbox, "127.0.0.1:0") as served, connected(served) as caller:
        answer = await caller.ack(pb.AckRequest(receipts=[received.receipt]))
        assert [result.HasField("error") for result in answer.results] == [False]


# -- the server ---


async def test_health_and_reflection_are_served(caller: Caller) -> None:
    # The types of both packages leave out the methods and the channels of asyncio.
    channel: Any = caller.channel
    health: Any = HealthStub(channel)
    for service in ("", "postroom.v1.Mailbox", "postroom.v1.MailboxAdmin"):
        answer = await health.Check(HealthCheckRequest(service=service))
        assert answer.status == HealthCheckResponse.SERVING
    reflection: Any = ServerReflectionStub(channel)
    requests = [
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="prism.envelope.v1.PrismEnvelope"),
    ]
    answers = [answer async for answer in reflection.ServerReflectionInfo(iter(requests))]
    services = {service.name for service in answers[0].list_services_response.service}
    assert {"postroom.v1.Mailbox", "postroom.v1.MailboxAdmin", "grpc.health.v1.Health"} <= services
    assert answers[1].file_descriptor_response.file_descriptor_proto


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0:0",
        "[::]:0",
        "192.0.2.1:8080",
        "example.org:80",
        "127.0.0.1",
        ":1",
        "127.0.0.1:70000",
        "dns:x:1",
        "unix:",
    ],
)
def test_only_this_host_is_served(address: str) -> None:
    with pytest.raises(InvalidRequest):
        grpc_surface(address)


async def test_an_address_that_is_in_use_is_refused(mailbox: Postroom, address: str) -> None:
    with pytest.raises(Unavailable, match="choose another address"):
        async with serve_grpc(mailbox, address.removeprefix("grpc://")):
            pass


async def test_a_unix_socket_is_for_this_user_alone(mailbox: Postroom, tmp_path: Path) -> None:
    path = tmp_path / "grpc.socket"
    before = os.umask(0o022)
    try:
        async with serve_grpc(mailbox, f"unix:{path}") as served, connected(served) as caller:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
            assert (await caller.info(pb.InfoRequest())).mailbox == MAILBOX
            with pytest.raises(Unavailable, match="Another process serves"):
                async with serve_grpc(mailbox, f"unix:{path}"):
                    pass
            assert (await caller.info(pb.InfoRequest())).mailbox == MAILBOX
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as killed:
            killed.bind(str(path))
        async with serve_grpc(mailbox, f"unix:{path}") as served, connected(served) as caller:
            assert (await caller.info(pb.InfoRequest())).mailbox == MAILBOX
    finally:
        os.umask(before)


async def test_read_models_are_searched_for_this_mailbox_alone(mailbox: Postroom) -> None:
    filters: list[EventFilter] = []

    async def search(filter_: EventFilter) -> SearchPage:
        filters.append(filter_)
        found = FoundMessage(
            message_id="order-1",
            timestamp=5,
            topic="orders",
            envelope_blob=envelope("order-1"),
            custom_headers={"tenant": "acme"},
            mailbox=MAILBOX,
            position=1,
            status=Status.ACKED,
            attempts=1,
            shard=3,
        )
        return SearchPage((found,), "next")

    async with serve_grpc(mailbox, "127.0.0.1:0", search=search) as served, connected(served) as caller:
        page = await caller.query(
            pb.QueryRequest(topics=["orders.*"], statuses=["dead"], headers={"a": "b"}, order="oldest")
        )
    (filter_,) = filters
    assert (filter_.mailbox, filter_.topics, filter_.headers) == (MAILBOX, ("orders.*",), {"a": "b"})
    assert (page.next_cursor, page.items[0].status, page.items[0].shard) == ("next", "acked", 3)
    assert dict(page.items[0].item.custom_headers) == {"tenant": "acme"}
