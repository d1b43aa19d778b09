"""Health, addresses and search of the gRPC server."""

import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc.operations import read_answer
from postroom.adapters.grpc.server import grpc_surface
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.page import Page
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.message import Status
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, FoundMessage
from tests.support.grpc_callers import Caller, connected, serve_grpc
from tests.support.messages import message
from tests.support.stores import MAILBOX, envelope


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


async def test_an_address_that_is_in_use_is_refused(mailbox: OwnedMailbox, address: str) -> None:
    with pytest.raises(Unavailable, match="choose another address"):
        async with serve_grpc(mailbox, address.removeprefix("grpc://")):
            pass


async def test_a_unix_socket_is_for_this_user_alone(mailbox: OwnedMailbox, tmp_path: Path) -> None:
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


async def test_read_models_are_searched_for_this_mailbox_alone(mailbox: OwnedMailbox) -> None:
    filters: list[EventFilter] = []

    async def search(filter_: EventFilter) -> Page[FoundMessage]:
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
        return Page((found,), "next")

    async with serve_grpc(mailbox, "127.0.0.1:0", search=search) as served, connected(served) as caller:
        page = await caller.query(
            pb.QueryRequest(topics=["orders.*"], statuses=["dead"], headers={"a": "b"}, order="oldest")
        )
    (filter_,) = filters
    assert (filter_.mailbox, filter_.topics, filter_.headers) == (MAILBOX, ("orders.*",), {"a": "b"})
    assert (page.next_cursor, page.items[0].status, page.items[0].shard) == ("next", "acked", 3)
    assert dict(page.items[0].item.custom_headers) == {"tenant": "acme"}


async def test_numbers_are_cursors_of_dead_letters_also_of_servers_that_tell_no_cursor(
    mailbox: OwnedMailbox, caller: Caller
) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=1))
    await mailbox.send_batch([message(b"1"), message(b"2")])
    for received in await mailbox.receive_messages("orders"):
        await received.nack()
    first = await caller.list_dead_letters(pb.ListDeadLettersRequest(limit=1))
    second = await caller.list_dead_letters(pb.ListDeadLettersRequest(cursor=int(first.next_cursor)))
    assert first.next_cursor == str(first.dead_letters[0].position)
    assert (len(second.dead_letters), second.HasField("next_cursor"), second.next_cursor) == (1, True, "")
    operation = OPERATIONS["list_dead_letters"]
    page = await mailbox.list_dead_letters(limit=1)
    assert read_answer(operation, pb.ListDeadLettersResponse(dead_letters=first.dead_letters)) == page
    assert read_answer(operation, pb.ListDeadLettersResponse()) == Page(())
