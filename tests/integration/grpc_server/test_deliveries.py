"""Deliveries over gRPC, by a caller that knows only the contract."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc import server
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.domain.errors import Unavailable
from postroom.domain.subscription import SubscriptionFilter
from tests.support.grpc_callers import Caller, connected, details, new, read, serve_grpc
from tests.support.stores import envelope, message
from tests.support.waiting import SECONDS, within


async def test_a_delivery_has_the_envelope_without_the_publishers_token(
    mailbox: OwnedMailbox, caller: Caller
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


async def test_a_delivery_of_a_copy_names_the_topic_of_the_original(
    mailbox: OwnedMailbox, caller: Caller
) -> None:
    await mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
    await caller.send(new(b"1"))
    (copy,) = (await caller.recv(pb.RecvRequest(topics=["mail"]))).messages
    assert (copy.topic, copy.published_topic) == ("mail", "orders")
    (original,) = (await caller.recv(pb.RecvRequest(topics=["orders"]))).messages
    assert (original.topic, original.HasField("published_topic")) == ("orders", False)


async def test_a_receive_waits_no_longer_than_its_caller(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.grpc.service.ANSWER_MS", 30_000)  # the machine may be busy
    response = await caller.recv(pb.RecvRequest(topics=["orders"], wait_ms=60_000), timeout=30.5)
    assert list(response.messages) == []


async def test_a_caller_that_stops_waiting_takes_no_message(mailbox: OwnedMailbox, caller: Caller) -> None:
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
from postroom.adapters.grpc.calls import METHODS
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
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
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
            await within(paused.wait())
    assert [each.attempt for each in received] == [2]


async def test_a_stream_survives_a_mailbox_that_is_unavailable_for_a_while(
    mailbox: OwnedMailbox, caller: Caller, monkeypatch: pytest.MonkeyPatch
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
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_message(message())
    async with AsyncExitStack() as running, AsyncExitStack() as closing:
        served = await running.enter_async_context(serve_grpc(mailbox, "127.0.0.1:0"))
        caller = await closing.enter_async_context(connected(served))
        stream = caller.recv_stream(pb.RecvStreamRequest(topics=["orders"]))
        (received,) = (await read(stream)).messages
        polling = asyncio.ensure_future(caller.recv(pb.RecvRequest(topics=["none"], wait_ms=60_000)))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(30):  # half of what the call would wait
            await running.aclose()
        with pytest.raises(grpc.aio.AioRpcError, match="stopping"):
            await polling
        with pytest.raises(grpc.aio.AioRpcError, match="stopping") as ended:
            await read(stream)
    assert details(ended.value)[0].reason == "E_UNAVAILABLE"
    async with serve_grpc(mailbox, "127.0.0.1:0") as served, connected(served) as caller:
        answer = await caller.ack(pb.AckRequest(receipts=[received.receipt]))
        assert [result.HasField("error") for result in answer.results] == [False]
