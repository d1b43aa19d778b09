"""Capabilities over HTTP and gRPC: what a token covers, and what it does not, whatever the identifier."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession

from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.testing import ManualClock, MemoryMailbox
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.service import OpenSession, Search
from postroom.domain.capability.rights import Quota, Right
from postroom.domain.errors import Forbidden, Saturated, Unauthenticated
from postroom.domain.message import Receipt
from postroom.domain.names import message_stream
from tests.support.access import Controlled, controlled_mailbox
from tests.support.surfaces import served

SECONDS = 30
"""Deadline of every wait."""
HOUR_MS = 3_600_000
REFRESH_SECONDS = 31
"""Longer than revocations are remembered by default."""


class World:
    """A mailbox under access control that is served.

    Arguments:
        url: where it is served.
    """

    def __init__(self, controlled: "Controlled[MemoryMailbox, ManualClock]", url: str) -> None:
        self.controlled = controlled
        self.mailbox = controlled.mailbox
        self.url = url

    @asynccontextmanager
    async def client(self, token: str | None = None, **rights: Any) -> AsyncIterator[Mailbox]:
        """Connect with a token, or with a new one that has some rights."""
        text = self.controlled.issue(**rights) if token is None else token
        async with connect_remote(self.url, timeout_ms=2_000, token=text) as client:
            yield client

    async def deliver(self, topic: str) -> Any:
        """Send a message and receive it, past the access control."""
        await self.mailbox.send_message(NewMessage(topic=topic, payload=b"x"))
        (received,) = await self.mailbox.receive_messages(topic, visibility_ms=HOUR_MS)
        return received


@pytest.fixture(params=["http", "grpc"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with controlled_mailbox() as controlled:

        def access(mailbox: Mailbox, search: Search) -> OpenSession:
            return controlled.control.open_session

        async with served(controlled.mailbox, request.param, access=access) as url:
            yield World(controlled, url)


async def test_a_token_covers_its_topics_and_operations(world: World) -> None:
    async with world.client(topics=["orders.*"], operations=[Right.SEND, Right.RECV, Right.ACK]) as own:
        await own.send_message(NewMessage(topic="orders.eu", payload=b"x"))
        (received,) = await own.receive_messages("orders.eu")
        await received.ack()
        for call in (
            lambda: own.send_message(NewMessage(topic="invoices", payload=b"x")),
            lambda: own.receive_messages("invoices"),
            lambda: own.receive_messages(["orders.eu", "invoices"]),
            lambda: own.get_message(received.message_id),
            lambda: own.redrive_dead_letters("orders.eu"),
            lambda: own.purge_topic("orders.eu"),
            lambda: own.pause_topic("orders.eu"),
        ):
            with pytest.raises(Forbidden):
                await call()


async def test_no_identifier_leads_to_another_topic_or_tells_whether_it_exists(world: World) -> None:
    foreign = await world.deliver("invoices")
    unknown = Receipt(message_stream(world.mailbox.name, "unknown"), 2, foreign.receipt.epoch)
    async with world.client(topics=["orders"]) as client:
        answers = []
        for receipt in (foreign.receipt, unknown):
            for settle in (
                client.ack_messages,
                client.nack_messages,
                lambda receipts: client.extend_visibility(receipts, 1_000),
            ):
                (answer,) = await settle([receipt])
                answers.append((type(answer), str(answer)))
        for id_ in (foreign.message_id, "0" * 8):
            for read in (client.get_message, client.explain_message):
                with pytest.raises(Forbidden) as refused:
                    await read(id_)
                answers.append((Forbidden, str(refused.value)))
    assert {kind for kind, _ in answers} == {Forbidden}
    assert len({text for _, text in answers}) == 1
    assert (await world.mailbox.get_backlog("invoices")).shards[0].in_flight == 1


async def test_an_ack_without_a_receipt_is_checked_like_one_with_it(world: World) -> None:
    if world.url.startswith("grpc"):
        pytest.skip("gRPC has no ack without a receipt")
    foreign, own = await world.deliver("invoices"), await world.deliver("orders")
    await world.mailbox.send_message(NewMessage(topic="invoices", payload=b"x", message_id="waiting"))
    limited = world.controlled.issue(topics=["orders"], operations=[Right.ACK])
    problems = []
    async with ClientSession(world.url, headers={"Authorization": f"Bearer {limited}"}) as session:
        for id_ in (foreign.message_id, "unknown", "waiting"):
            async with session.post(f"/v1/ack/{id_}") as answer:
                problems.append((answer.status, json.loads(await answer.text())["message"]))
        async with session.post(f"/v1/ack/{own.message_id}") as answer:
            assert answer.status == 200
    assert {status for status, _ in problems} == {403}
    assert len(set(problems)) == 1


async def test_after_a_revocation_nothing_new_is_permitted_and_deliveries_are_settled(world: World) -> None:
    token = world.controlled.issue()
    async with world.client(token) as client:
        for _ in range(2):
            await client.send_message(NewMessage(topic="orders", payload=b"x"))
        first, second = await client.receive_messages("orders", visibility_ms=HOUR_MS)
        (issued,) = world.controlled.capabilities.list()
        world.controlled.capabilities.revoke(bytes.fromhex(issued.nonce))
        await world.controlled.clock.advance(REFRESH_SECONDS)
        await first.ack()
        await second.nack()
        for call in (
            lambda: client.send_message(NewMessage(topic="orders", payload=b"x")),
            lambda: client.receive_messages("orders"),
            client.get_backlog,
        ):
            with pytest.raises(Unauthenticated, match="revoked"):
                await call()
    with pytest.raises(Unauthenticated):
        async with world.client(token):
            pass


async def test_a_token_that_expires_is_refused(world: World) -> None:
    async with world.client(lifetime_ms=60_000) as client:
        await client.get_backlog()
        await world.controlled.clock.advance(61)
        with pytest.raises(Unauthenticated, match="expired"):
            await client.get_backlog()


async def test_a_quota_that_is_used_up_is_saturation_with_a_time(world: World) -> None:
    token = world.controlled.issue(Quota(3, None, HOUR_MS))
    async with world.client(token) as client:
        for _ in range(3):
            await client.send_message(NewMessage(topic="orders", payload=b"x"))
        with pytest.raises(Saturated) as refused:
            await client.send_message(NewMessage(topic="orders", payload=b"x"))
    assert refused.value.retry_after_ms > 2_000


async def test_a_refused_ack_makes_no_room_in_the_stream_of_another(world: World) -> None:
    async with world.client() as owner, world.client(topics=["orders"]) as other:
        for _ in range(2):
            await world.mailbox.send_message(NewMessage(topic="invoices", payload=b"x"))
        async with owner.stream_messages(
            "invoices", max_messages=1, visibility_ms=HOUR_MS, heartbeat_ms=250
        ) as stream:
            first = await anext(stream)
            for settle in (other.ack_messages, other.nack_messages):
                (answer,) = await settle([first.receipt])
                assert isinstance(answer, Forbidden)
            for _ in range(20):  # as long as a delivery would take
                await owner.get_backlog("invoices")
            assert (await world.mailbox.get_backlog("invoices")).shards[0].ready == 1
            await first.ack()
            assert (await anext(stream)).message_id != first.message_id
