"""A proxy between a caller and the owner of a mailbox: calls look as if the caller had called the owner."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc.calls import METHODS, NAMES
from postroom.adapters.grpc.client import connect_grpc
from postroom.adapters.grpc.server import serve_handlers
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.sockets.address import resolve
from tests.support.access_matrix import grpc_cases, known_of_nothing
from tests.support.fixed_control_plane import FixedControlPlane
from tests.support.messages import message
from tests.support.proxies import Owner, RunningProxy, running_owner, running_proxy
from tests.support.waiting import SECONDS

MAILBOX = "köln-50%@one"
NAME = ("postroom-mailbox", "k%C3%B6ln-50%25@one")
_NOW = re.compile(rb"\d{4}-\d\d-\d\dT[\d:.]+Z")  # of a backlog
CORR_ID = ("x-corr-id", "canary-corr-id")


class Answer(NamedTuple):
    """All that a caller sees of a call."""

    items: list[bytes]
    code: grpc.StatusCode
    details: str | None
    initial: tuple[tuple[str, Any], ...]
    trailing: tuple[tuple[str, Any], ...]


class World(NamedTuple):
    """A mailbox, its owner, and a proxy."""

    control_plane: FixedControlPlane
    owner: Owner
    mailbox: OwnedMailbox
    proxy: RunningProxy


@pytest.fixture
async def world() -> AsyncIterator[World]:
    control_plane = FixedControlPlane()
    async with running_owner() as owner:
        mailbox = await owner.own(MAILBOX)
        control_plane.lease(MAILBOX, owner.address)
        async with running_proxy(control_plane) as proxy:
            yield World(control_plane, owner, mailbox, proxy)


@asynccontextmanager
async def channel_to(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def pairs(metadata: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((key, value) for key, value in metadata or () if key not in ("date", "server")))


async def call(
    channel: Any, path: str, data: bytes, *metadata: tuple[str, str], is_stream: bool = False
) -> Answer:
    """Make a call, and return all that its caller sees; of a stream, the first item."""
    items: list[bytes] = []
    options: Any = {"metadata": (NAME, CORR_ID, *metadata), "timeout": SECONDS}
    calling = (channel.unary_stream if is_stream else channel.unary_unary)(path)(data, **options)
    try:
        if is_stream:
            item = await calling.read()
            items += [] if item is grpc.aio.EOF else [item]
            calling.cancel()
            return Answer(items, grpc.StatusCode.OK, "", pairs(await calling.initial_metadata()), ())
        items.append(_NOW.sub(b"", await calling))
    except grpc.aio.AioRpcError as error:
        return Answer(
            items,
            error.code(),
            error.details(),
            pairs(error.initial_metadata()),
            pairs(error.trailing_metadata()),
        )
    return Answer(
        items,
        await calling.code(),
        await calling.details(),
        pairs(await calling.initial_metadata()),
        pairs(await calling.trailing_metadata()),
    )


class Probe(grpc.GenericRpcHandler):
    """A server that records what it gets; it answers any unary call with `out`."""

    names = NAMES

    def __init__(self) -> None:
        self.metadata: list[tuple[str, Any]] = []
        self.remaining: float | None = None

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_unary_rpc_method_handler(self.answer)

    async def answer(self, data: bytes, context: Any) -> bytes:
        assert data == b"in"
        self.metadata = [tuple(pair) for pair in context.invocation_metadata()]
        self.remaining = context.time_remaining()
        await context.send_initial_metadata((("begin", "1"),))
        context.set_trailing_metadata((("end-bin", b"\x00\xff"),))
        return b"out"

    def watch(self, connections: object) -> None:
        pass

    def end_waits(self) -> None:
        pass

    async def close(self) -> None:
        pass


REPEATED: dict[str, list[Any]] = {
    "send": [pb.SendRequest(message=pb.NewMessage(topic="orders.eu", payload=b"x", message_id="own"))],
    "send_batch": [
        pb.SendBatchRequest(
            messages=[
                pb.NewMessage(topic="orders.eu", payload=b"x", message_id="own"),
                pb.NewMessage(topic="no spaces", payload=b"x", message_id="own"),
            ]
        )
    ],
    "get": [pb.GetRequest(message_id="sent"), pb.GetRequest(message_id="none")],
    "start_redrive": [pb.StartRedriveRequest(spec=pb.RedriveSpec(topics=["orders"]), job_id="no UUID")],
    "explain": [pb.ExplainRequest(message_id="sent"), pb.ExplainRequest(message_id="none")],
}
"""Requests whose answer is the same each time but the first, where others' are not."""


def requests_of(name: str) -> list[bytes]:
    """Return requests to a method: valid ones, refused ones, and bytes that are no request."""
    cases = [case.request for case in grpc_cases(known_of_nothing()) if case.name == name]
    requests = (
        REPEATED[name]
        if name in ("send", "send_batch", "start_redrive")
        else [*REPEATED.get(name, ()), *cases[:3], cases[-1]]
    )
    empty = [] if name == "start_redrive" else [b""]  # which starts another job each time
    return [*(each.SerializeToString() for each in requests), *empty, b"\xff\xff"]


@pytest.mark.parametrize("name", METHODS)
async def test_every_method_through_a_proxy_is_answered_as_by_the_owner_itself(
    world: World, name: str
) -> None:
    await world.mailbox.send_message(message(topic="others", message_id="sent"))
    path, is_stream = METHODS[name].path, METHODS[name].is_stream
    async with channel_to(world.owner.address) as direct, channel_to(world.proxy.address) as forwarded:
        for data in requests_of(name):
            await call(direct, path, data, is_stream=is_stream)  # which changes what it changes
            expected = await call(direct, path, data, is_stream=is_stream)
            assert await call(forwarded, path, data, is_stream=is_stream) == expected


async def test_a_mailbox_is_used_through_a_proxy_as_if_it_were_its_owner(world: World) -> None:
    async with connect_grpc(world.proxy.address, timeout_ms=60_000, mailbox=MAILBOX) as client:
        assert client.name == MAILBOX
        sent = await client.send_message(message(b"1", message_id="own"))
        again = await client.send_message(message(b"1", message_id="own"))
        assert (sent.message_id, again.duplicate) == ("own", True)
        (received,) = await client.receive_messages("orders")
        await received.extend(60_000)
        await received.nack(delay_ms=0)
        async with client.stream_messages("orders", wait_ms=60_000) as stream:
            (redelivered,) = [each async for each in first_of(stream)]
            await redelivered.ack()
        assert (redelivered.payload, redelivered.attempt) == (b"1", 2)
        backlog = await world.mailbox.get_backlog()
        assert [shard.ready for shard in backlog.shards] == []


async def first_of(stream: Any) -> AsyncIterator[Any]:
    async for each in stream:
        yield each
        return


async def test_a_method_that_only_the_owner_knows_is_answered_by_it(world: World) -> None:
    path = "/postroom.v1.Mailbox/Invented"
    async with channel_to(world.owner.address) as direct, channel_to(world.proxy.address) as forwarded:
        expected = await call(direct, path, b"")
        assert expected.code == grpc.StatusCode.UNIMPLEMENTED
        answer = await call(forwarded, path, b"")
    assert (answer.code, answer.details) == (expected.code, expected.details)
    assert world.proxy.metric("forwarded", method="other", status="UNIMPLEMENTED") == 1


async def test_metadata_and_the_deadline_pass_a_proxy_unchanged() -> None:
    probe = Probe()
    control_plane = FixedControlPlane()
    async with serve_handlers(resolve("127.0.0.1:0"), [probe]) as url:
        control_plane.lease(MAILBOX, url.removeprefix("grpc://"))
        async with running_proxy(control_plane) as proxy, channel_to(proxy.address) as channel:
            metadata = (
                ("authorization", "Bearer canary"),
                ("traceparent", "00-1"),
                ("postroom-forwarded-by", "x"),
            )
            answer = await call(channel, METHODS["info"].path, b"in", *metadata)
    assert answer.items == [b"out"]
    assert dict(answer.initial)["begin"] == "1"
    assert dict(answer.trailing)["end-bin"] == b"\x00\xff"
    assert {*metadata, NAME, CORR_ID, ("postroom-forwarded", "1")} <= {*probe.metadata}
    assert probe.remaining is not None
    assert 0 < probe.remaining < SECONDS + 2  # gRPC rounds long deadlines up
