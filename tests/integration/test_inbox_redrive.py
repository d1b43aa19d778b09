"""Dead letters on a real NATS server: looked at, and put back in the order of the stream they came from."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import psycopg
import pytest

from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.middleware import inbox, pipeline, transaction
from postroom.application.inbox.redrive import Redriven
from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.errors import InvalidRequest, PoisonMessage
from tests.integration.inbox_world import DLQ, Handler, World, opened_world


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


async def poison(request: HandlerRequest) -> None:
    raise PoisonMessage("no total")


async def redrive(
    world: World, handler: Handler, subject: str = ">", limit: int | None = None
) -> list[Redriven]:
    async with world.office(handler) as office:
        return [each async for each in office.redrive((await office.list(subject))[:limit])]


def noting(seen: list[Any], fails: Callable[[Any], bool] = lambda payload: False) -> Handler:
    async def handler(request: HandlerRequest) -> None:
        seen.append((request.message_id, request.payload))
        if fails(request.payload):
            raise PoisonMessage("no total")

    return handler


async def test_wolverine_986_dead_letters_are_put_back_in_the_order_of_their_stream(world: World) -> None:
    """They died in another order: the earlier a message came, the more attempts it took to give it up."""
    ids = [await world.publish(n, aggregate=str(n)) for n in range(3)]

    async def handler(request: HandlerRequest) -> None:
        if request.payload == 0:
            raise RuntimeError("down")
        raise PoisonMessage("no total")

    await world.work(handler)
    arrived = [(await world.stream.get_msg(DLQ, n)).data or b"" for n in (1, 2, 3)]
    assert ids[0].encode() in arrived[2]  # the first to come was the last to die
    seen: list[Any] = []
    redriven = await redrive(world, noting(seen))
    assert seen == [(id_, n) for n, id_ in enumerate(ids)]
    assert [each.ending for each in redriven] == ["processed"] * 3
    assert await world.dead_letters() == []
    assert [row[:2] for row in world.inbox()] == [(True, False)] * 3


async def test_a_dead_letter_keeps_its_id_and_its_history(world: World) -> None:
    id_ = await world.publish({"n": 1})
    await world.work(poison)
    await redrive(world, noting([]))
    assert world.rows("SELECT message_id::text, attempts FROM inbox_messages") == [(id_, 2)]
    assert world.rows("SELECT type FROM aggregate_events ORDER BY version") == [
        ("InboxMessageReceived.1",),
        ("InboxMessageDeadLettered.1",),
        ("InboxMessageReceived.1",),
        ("InboxMessageProcessed.1",),
    ]
    assert (await world.stream.stream_info("SHOP_EVENTS")).state.messages == 1


async def test_a_letter_that_fails_stays_and_holds_back_its_aggregate(world: World) -> None:
    for payload in ("a0", "b0", "a1", "b1"):
        await world.publish(payload, aggregate=payload[0])
    await world.work(poison)
    seen: list[Any] = []
    redriven = await redrive(world, noting(seen, lambda payload: payload == "a0"))
    assert [payload for _, payload in seen] == ["a0", "b0", "b1"]
    assert [each.ending for each in redriven] == ["failed", "processed", "held", "processed"]
    assert redriven[0].reason == "no total"
    assert [bytes(letter.payload) for letter in await world.dead_letters()] == [b'"a0"', b'"a1"']
    assert sorted(row[:2] for row in world.inbox()) == [(False, True)] * 2 + [(True, False)] * 2
    assert [each.ending for each in await redrive(world, noting([]))] == ["processed"] * 2


async def test_only_what_is_asked_for_is_put_back(world: World) -> None:
    for number in range(3):
        await world.publish(number)
        await world.publish(number, subject="shop.event.order_shipped.v1")
    await world.work(poison)
    seen: list[Any] = []
    await redrive(world, noting(seen), "shop.event.order_shipped.*", limit=2)
    assert [payload for _, payload in seen] == [0, 1]
    assert len(await world.dead_letters()) == 4


async def test_a_letter_that_was_processed_since_is_only_removed(world: World) -> None:
    await world.publish({"n": 1})
    await world.work(poison)
    async with world.office(noting([])) as office:
        letters = await office.list()
    await redrive(world, noting([]))
    await world.stream.publish(letters[0].message.subject, letters[0].message.data)
    seen: list[Any] = []
    assert [each.ending for each in await redrive(world, noting(seen))] == ["duplicate"]
    assert seen == []
    assert await world.dead_letters() == []


async def test_what_is_no_json_can_be_looked_at_and_fails_again(world: World) -> None:
    await world.publish(b"no json")
    await world.work(poison)
    (redriven,) = await redrive(world, noting([]))
    assert redriven.ending == "failed"
    assert "is not JSON" in redriven.reason


async def test_a_handler_with_an_inbox_in_the_same_table_handles_a_redriven_message(world: World) -> None:
    """To it a dead letter must not look as if it had been processed."""
    await world.publish({"n": 1})
    await world.work(poison)
    seen: list[Any] = []
    database = transaction(lambda: psycopg.AsyncConnection.connect(world.messaging.database))
    await redrive(world, pipeline(database, inbox(), noting(seen)))
    assert len(seen) == 1
    assert [row[:2] for row in world.inbox()] == [(True, False)]


async def test_two_do_not_redrive_at_once(world: World) -> None:
    other = PostgresInbox(world.messaging.database)
    async with other.alone("redrive"):
        with pytest.raises(InvalidRequest, match="Somebody else is putting dead letters back"):
            await redrive(world, noting([]))


async def test_what_others_put_there_is_left_alone(world: World) -> None:
    await world.stream.publish("sea.dlq.shop.event.other", b"of another tool")
    assert await world.dead_letters() == []
    await redrive(world, noting([]))
    assert (await world.stream.stream_info(DLQ)).state.messages == 1
