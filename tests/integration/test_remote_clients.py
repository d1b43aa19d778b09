"""The HTTP and gRPC clients beside servers that stop, restart, lose answers, or are no mailboxes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.connect import connect, connect_remote
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.grpc.calls import METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.messages import Sent, read_receipt
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import (
    FrameTooLarge,
    InvalidRequest,
    NotFound,
    PostroomError,
    Rejected,
    Saturated,
    Unavailable,
)
from postroom.domain.policy import TopicPolicy
from tests.support.servers.http import PostroomServer
from tests.support.servers.process import free_port
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

SECONDS = 30
"""Deadline of every wait."""


@pytest.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    async with open_mailbox("memory:", MAILBOX) as opened:
        yield opened


@pytest.fixture(params=["http", "grpc"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_a_client_waits_for_a_server_that_restarts(mailbox: OwnedMailbox, protocol: str) -> None:
    async with AsyncExitStack() as running:
        url = await running.enter_async_context(served(mailbox, protocol))
        async with connect_remote(url, timeout_ms=20_000) as client:
            await running.aclose()
            sending = asyncio.create_task(client.send_message(message()))
            await asyncio.sleep(0.2)
            assert not sending.done()
            async with served(mailbox, protocol, url.rpartition("/")[2]):
                assert not (await sending).duplicate


@pytest.mark.parametrize("call", ["send_message", "send_batch"])
async def test_a_send_whose_answer_was_lost_is_repeated_and_is_no_duplicate(
    mailbox: OwnedMailbox, protocol: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, attempts = getattr(mailbox, call), []

    async def send_and_fail(new: Any) -> Any:
        sent = await send(new)
        attempts.append(sent)
        if len(attempts) == 1:
            raise Unavailable("The connection was lost.", retry_after_ms=10)
        return sent

    monkeypatch.setattr(mailbox, call, send_and_fail)
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=20_000) as client:
        sent = await (
            client.send_message(message()) if call == "send_message" else client.send_batch([message()])
        )
    first, second = [each if isinstance(each, Sent) else each[0] for each in attempts]
    assert (first.duplicate, second.duplicate) == (False, True)
    assert not (sent if isinstance(sent, Sent) else sent[0]).duplicate  # type: ignore[union-attr]
    assert len(await mailbox.receive_messages("orders")) == 1


async def test_a_refusal_for_now_is_repeated_when_the_server_asks_for_it(
    mailbox: OwnedMailbox, protocol: str
) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(shard_capacity=1))
    await mailbox.send_message(message())
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=20_000) as client:
        sending = asyncio.create_task(client.send_message(message(b"second")))
        await asyncio.sleep(0.1)
        (first,) = await mailbox.receive_messages("orders")
        await first.ack()
        assert not (await sending).duplicate


async def test_a_refusal_for_now_is_raised_when_its_pause_is_longer_than_the_call(
    mailbox: OwnedMailbox, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(_: Any) -> Any:
        raise Saturated("The shard is full; retry later.", retry_after_ms=600_000)

    monkeypatch.setattr(mailbox, "send_message", refuse)
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=120_000) as client:
        async with asyncio.timeout(SECONDS):
            with pytest.raises(Saturated, match="shard is full") as refused:
                await client.send_message(message())
    assert refused.value.retry_after_ms == 600_000


async def test_a_redrive_with_an_unknown_outcome_is_not_repeated(
    mailbox: OwnedMailbox, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = []

    async def fail(*arguments: Any, **_: Any) -> Any:
        attempts.append(arguments)
        raise Unavailable("The outcome is unknown.", retry_after_ms=10)

    monkeypatch.setattr(mailbox, "redrive_dead_letters", fail)
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=5_000) as client:
        with pytest.raises(Unavailable, match="outcome is unknown"):
            await client.redrive_dead_letters("orders")
    assert len(attempts) == 1


async def test_a_call_without_an_answer_in_time_has_an_unknown_outcome(
    mailbox: OwnedMailbox, protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.sleep(SECONDS)

    monkeypatch.setattr(mailbox, "send_message", hang)
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=300) as client:
        with pytest.raises(Unavailable, match="whether the call took effect is unknown"):
            await client.send_message(message())


async def test_a_long_poll_lasts_longer_than_other_calls_may(mailbox: OwnedMailbox, protocol: str) -> None:
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=1_000) as client:
        polling = asyncio.create_task(client.receive_messages("orders", wait_ms=20_000))
        await asyncio.sleep(1.5)
        await mailbox.send_message(message())
        assert len(await polling) == 1


async def test_a_batch_larger_than_a_request_is_sent_in_several(mailbox: OwnedMailbox, protocol: str) -> None:
    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=20_000) as client:
        answers = await client.send_batch([message(b"x" * 400_000) for _ in range(5)])
        assert len({answer.message_id for answer in answers if isinstance(answer, Sent)}) == 5
        received: list[Any] = []
        while len(received) < 5:
            received += await client.receive_messages("orders", max_bytes=1 << 20)
        many = await client.send_batch([message(b"x")] * 1_001)
        assert len(many) == 1_001
        assert await client.ack_messages([received[0].receipt] * 1_001) == [None] * 1_001


async def test_many_callers_share_a_client(mailbox: OwnedMailbox, protocol: str) -> None:
    async def send_and_settle(number: int) -> bytes:
        topic = f"topic-{number % 8}"
        await client.send_message(message(str(number).encode(), topic=topic))
        (received,) = await client.receive_messages(topic, max_messages=1, wait_ms=20_000)
        await received.ack()
        return received.payload

    async with served(mailbox, protocol) as url, connect_remote(url, timeout_ms=20_000) as client:
        payloads = await asyncio.gather(*(send_and_settle(number) for number in range(200)))
    assert sorted(map(int, payloads)) == list(range(200))
    assert (await mailbox.get_backlog()).shards == []


async def test_a_client_without_a_server_says_so(protocol: str) -> None:
    with pytest.raises(Unavailable, match=rf"{protocol}://127.0.0.1:1 can't be reached") as refused:
        async with connect_remote(f"{protocol}://127.0.0.1:1", timeout_ms=500):
            pass
    assert refused.value.retry_after_ms > 0


async def test_a_client_that_expects_another_mailbox_is_refused(mailbox: OwnedMailbox, protocol: str) -> None:
    async with served(mailbox, protocol) as url:
        with pytest.raises(NotFound, match=f"serves the mailbox {MAILBOX}, not other@one"):
            async with connect_remote(url, "other@one", timeout_ms=20_000):
                pass
        async with connect_remote(url, MAILBOX, timeout_ms=20_000) as client:
            assert client.name == MAILBOX


async def test_a_call_after_the_end_of_a_connection_says_so(mailbox: OwnedMailbox, protocol: str) -> None:
    async with served(mailbox, protocol) as url:
        async with connect_remote(url, timeout_ms=60_000) as client:
            await client.send_message(message())
            (received,) = await client.receive_messages("orders")
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable, match="is closed; connect again"):
                await client.get_backlog()
            with pytest.raises(Unavailable, match="is closed; connect again"):
                await received.ack()


async def test_a_call_in_progress_at_the_end_of_a_connection_says_so(
    mailbox: OwnedMailbox, protocol: str
) -> None:
    async with served(mailbox, protocol) as url:
        async with connect_remote(url, timeout_ms=60_000) as client:
            polling = asyncio.create_task(client.receive_messages("orders", wait_ms=60_000))
            await asyncio.sleep(0.2)
        async with asyncio.timeout(30):
            with pytest.raises(Unavailable):
                await polling


async def test_coroutines_and_threads_connect_to_a_server(mailbox: OwnedMailbox, protocol: str) -> None:
    def send(url: str) -> str:
        with connect(url, MAILBOX, timeout_ms=20_000) as client:
            return client.send_message(message()).message_id

    async with served(mailbox, protocol) as url:
        id_ = await asyncio.to_thread(send, url)
        async with connect(url, timeout_ms=20_000) as client:
            (received,) = await client.receive_messages("orders")
            assert received.message_id == id_
        with pytest.raises(NotFound, match="not other@one"):
            async with connect(url, "other@one"):
                pass


@pytest.mark.parametrize(
    ("status", "headers", "error", "retry_after_ms"),
    [
        (200, {}, InvalidRequest, None),
        (302, {"Location": "http://127.0.0.1:1/"}, InvalidRequest, None),
        (404, {}, InvalidRequest, None),
        (413, {}, FrameTooLarge, None),
        (429, {"Retry-After": "60"}, Unavailable, 60_000),
        (502, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}, Unavailable, 1_000),
    ],
)
async def test_an_answer_of_something_that_is_no_mailbox_is_an_error(
    status: int, headers: dict[str, str], error: type[PostroomError], retry_after_ms: int | None
) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers=headers, text="<html>")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        with pytest.raises(error, match="check the address") as refused:
            async with connect_remote(f"http://127.0.0.1:{port}", timeout_ms=900):
                pass
        assert type(refused.value) is error
        assert getattr(refused.value, "retry_after_ms", None) == retry_after_ms
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
async def test_a_proxy_of_the_environment_is_not_used_on_the_loopback_interface(
    mailbox: OwnedMailbox, address: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, f"http://127.0.0.1:{free_port()}")
    async with served(mailbox, "grpc", address) as url, connect_remote(url, timeout_ms=20_000) as client:
        assert not (await client.send_message(message())).duplicate


async def test_what_is_settled_over_http_makes_room_in_a_grpc_stream(mailbox: OwnedMailbox) -> None:
    for payload in (b"1", b"2"):
        await mailbox.send_message(message(payload, sticky_key="key"))
    surfaces = [open_http_surface("127.0.0.1:0", HttpSettings()), open_grpc_surface("127.0.0.1:0")]
    async with (
        serve_mailbox("memory:", mailbox, surfaces, access=unrestricted) as (http, url),
        connect_remote(http, timeout_ms=20_000) as client,
        grpc.aio.insecure_channel(url.removeprefix("grpc://")) as channel,
        asyncio.timeout(SECONDS),
    ):
        method = METHODS["recv_stream"]
        stream: grpc.aio.UnaryStreamCall[pb.RecvStreamRequest, pb.RecvStreamResponse] = channel.unary_stream(
            method.path, method.request.SerializeToString, method.response.FromString
        )(pb.RecvStreamRequest(topics=["orders"], max_messages=1, visibility_ms=600_000, heartbeat_ms=60_000))
        responses = aiter(stream)
        first = (await anext(responses)).delivery.messages[0]
        assert await client.ack_messages([read_receipt(first.receipt)]) == [None]
        second = (await anext(responses)).delivery.messages[0]
        assert [each.envelope.payload.value for each in (first, second)] == [b"1", b"2"]
        stream.cancel()


async def test_every_message_is_stored_once_though_the_server_is_killed(
    tmp_path: Path, protocol: str
) -> None:
    payloads = [str(number).encode() for number in range(300)]
    waiting = iter(payloads)
    addresses = {"address": f"127.0.0.1:{free_port()}", "grpc": f"127.0.0.1:{free_port()}"}
    url = f"{protocol}://{addresses['address' if protocol == 'http' else 'grpc']}"

    async def send_some(client: Mailbox) -> int:
        count = 0
        for payload in waiting:
            await client.send_message(message(payload))
            count += 1
        return count

    server = PostroomServer(tmp_path, **addresses).__enter__()
    try:
        async with connect(url, timeout_ms=120_000) as client:
            sending = [asyncio.create_task(send_some(client)) for _ in range(8)]
            for _ in range(2):
                await asyncio.sleep(0.3)
                server.process.kill()
                server = await asyncio.to_thread(PostroomServer(tmp_path, **addresses).__enter__)
            async with asyncio.timeout(120):
                assert sum(await asyncio.gather(*sending)) == len(payloads)
                received: list[bytes] = []
                while len(received) < len(payloads):
                    for each in await client.receive_messages("orders", visibility_ms=600_000):
                        received.append(each.payload)
                        await each.ack()
            assert sorted(received) == sorted(payloads)
            assert (await client.get_backlog()).shards == []
    finally:
        server.process.stop()


async def test_one_process_serves_http_and_grpc(tmp_path: Path) -> None:
    with PostroomServer(tmp_path, grpc="127.0.0.1:0") as server:
        http, url = server.addresses
        assert url.startswith("grpc://")
        async with (
            connect_remote(http, timeout_ms=20_000) as one,
            connect_remote(url, timeout_ms=20_000) as two,
        ):
            sent = await one.send_message(message())
            (received,) = await two.receive_messages("orders")
            assert (received.message_id, one.name) == (sent.message_id, two.name)
            (refusal,) = await one.nack_messages([received.receipt], delay_ms=0)
            assert refusal is None
            answers = await two.ack_messages([received.receipt])
            assert [type(each) for each in answers if isinstance(each, Rejected)] != []
