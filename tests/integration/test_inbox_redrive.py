"""Dead letters on a real NATS server: looked at, and put back in the order of the stream they came from."""

from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from typing import Any
from uuid import UUID

import psycopg
import pytest

from postroom.adapters.postgres.messaging.aggregate_events import AggregateEvents
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.middleware import inbox, pipeline, transaction
from postroom.application.inbox.dead_letter_admin import RedriveResult
from postroom.application.ports.inbox import HandlerRequest
from postroom.domain.errors import InvalidRequest, NotFound, PoisonMessage
from postroom.domain.inbox import InboxMessageDiscarded, inbox_stream
from tests.integration.inbox_world import CONSUMER, DLQ, EVENTS, SUBJECT, Handler, World, opened_world


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


async def poison(request: HandlerRequest) -> None:
    raise PoisonMessage("no total")


async def redrive(
    world: World, handler: Handler, subject: str = ">", limit: int | None = None
) -> list[RedriveResult]:
    async with world.admin(handler) as admin:
        return [each async for each in admin.redrive((await admin.list(subject))[:limit])]


def noting(seen: list[Any], fails: Callable[[Any], bool] = lambda payload: False) -> Handler:
    async def handler(request: HandlerRequest) -> None:
        seen.append((request.message_id, request.payload))
        if fails(request.payload):
            raise PoisonMessage("no total")

    return handler


async def test_wolverine_986_dead_letters_are_redriven_in_the_order_of_their_stream(world: World) -> None:
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
    assert [each.outcome for each in redriven] == ["processed"] * 3
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
    assert [each.outcome for each in redriven] == ["failed", "processed", "held", "processed"]
    assert redriven[0].reason == "no total"
    assert [bytes(letter.payload) for letter in await world.dead_letters()] == [b'"a0"', b'"a1"']
    assert sorted(row[:2] for row in world.inbox()) == [(False, True)] * 2 + [(True, False)] * 2
    assert [each.outcome for each in await redrive(world, noting([]))] == ["processed"] * 2


async def test_only_selected_dead_letters_are_redriven(world: World) -> None:
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
    async with world.admin(noting([])) as admin:
        letters = await admin.list()
    await redrive(world, noting([]))
    await world.stream.publish(letters[0].message.subject, letters[0].message.data)
    seen: list[Any] = []
    assert [each.outcome for each in await redrive(world, noting(seen))] == ["duplicate"]
    assert seen == []
    assert await world.dead_letters() == []


async def test_a_dead_letter_that_is_not_json_is_listed_and_fails_again(world: World) -> None:
    await world.publish(b"no json")
    await world.work(poison)
    (redriven,) = await redrive(world, noting([]))
    assert redriven.outcome == "failed"
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


async def test_concurrent_redrives_are_refused(world: World) -> None:
    other = PostgresInbox(world.messaging.database)
    async with other.exclusive("redrive"):
        with pytest.raises(InvalidRequest, match="Another process is changing dead letters"):
            await redrive(world, noting([]))


async def test_what_others_put_there_is_left_alone(world: World) -> None:
    await world.stream.publish("sea.dlq.shop.event.other", b"of another tool")
    assert await world.dead_letters() == []
    await redrive(world, noting([]))
    assert (await world.stream.stream_info(DLQ)).state.messages == 1


def hpub(subject: str, headers: list[tuple[str, str]], data: bytes) -> bytes:
    """Return a publish command with headers that nats-py can't write, such as repeated ones."""
    head = "".join(["NATS/1.0\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n"]).encode()
    return b"HPUB %b %d %d\r\n%b%b\r\n" % (subject.encode(), len(head), len(head) + len(data), head, data)


async def test_a_dead_letter_has_all_repeated_headers_and_the_original_message_id(world: World) -> None:
    headers = [("Nats-Msg-Id", "order-1/placed"), ("Via", "a"), ("X", "1"), ("Via", "b"), ("Via", "")]
    await world.client._send_command(hpub(SUBJECT, headers, b"{}"))
    await world.client.flush()
    await world.work(poison)
    (record,) = await world.dead_letters()
    assert record.original_message_id == "order-1/placed"
    assert record.headers == {"Nats-Msg-Id": "order-1/placed", "Via": ["a", "b", ""], "X": "1"}
    assert list(record.message.header_pairs) == sorted(headers, key=lambda pair: pair[0] == "X")
    stored = await world.stream.get_msg(DLQ, 1)
    assert (stored.headers or {})["Postroom-Original-Msg-Id"] == "order-1/placed"


BINARY = b"\xff" * (1_000 << 10)
"""In base64 it exceeds the 1 MiB that a server takes by default."""
QUOTES = {"Note": '"' * 38_000}
"""Each takes two bytes in JSON."""
LARGE = [
    (BINARY, {}, "unreadable"),
    (b'"' + b"x" * (985 << 10) + b'"', QUOTES, "poison"),
]


@pytest.mark.parametrize(("data", "headers", "reason"), LARGE, ids=["binary", "JSON"])
async def test_a_dead_letter_too_large_for_its_stream_omits_the_data_and_says_so(
    world: World, data: bytes, headers: dict[str, str], reason: str
) -> None:
    id_ = await world.publish(data, headers=headers)
    await world.work(poison)
    (record,) = await world.dead_letters()
    assert (record.message_id, record.reason, record.message.data) == (id_, reason, b"")
    assert (record.body_bytes, record.body_sha256) == (len(data), sha256(data).hexdigest())
    assert f"{len(data):,} bytes" in record.omitted
    assert f"see sequence 1 of stream {EVENTS}" in record.omitted
    assert record.headers == {"Nats-Msg-Id": id_} | headers
    assert "headers" not in record.omitted
    assert world.inbox() == [(False, True, 1)]
    info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
    assert not info.num_ack_pending


async def test_a_stream_that_takes_only_small_messages_gets_a_small_dead_letter(
    nats_url: str, messaging_database: str
) -> None:
    async with opened_world(nats_url, messaging_database) as world:
        await world.stream.add_stream(name=EVENTS, subjects=["shop.event.>"])
        await world.stream.add_stream(name=DLQ, subjects=["sea.dlq.>"], max_msg_size=2_000)
        await world.publish({"text": "x" * 5_000})
        await world.publish({}, headers={"Note": "y" * 5_000})
        await world.publish({}, headers={f"Note-{number:03}": "y" for number in range(200)})
        long_id = await world.publish({}, id_="z" * 1_800)
        await world.work(poison)
        large, long_header, many_headers, of_long_id = await world.dead_letters()
        assert (large.body_bytes, "5,011 bytes" in large.omitted) == (5_011, True)
        assert long_header.headers["Note"] == "y" * 100
        assert "some headers" in long_header.omitted
        assert many_headers.headers.keys() > {f"Note-{number:03}" for number in range(49)}
        assert "Note-050" not in many_headers.headers
        assert long_id.startswith(of_long_id.original_message_id)
        assert len(of_long_id.original_message_id) == 100


async def test_the_data_that_a_dead_letter_omits_is_redriven_from_its_stream(world: World) -> None:
    text = "x" * (985 << 10)
    id_ = await world.publish({"text": text}, headers=QUOTES)
    await world.work(poison)
    seen: list[Any] = []
    assert [each.outcome for each in await redrive(world, noting(seen))] == ["processed"]
    assert seen == [(id_, {"text": text})]


async def test_a_dead_letter_whose_data_left_the_stream_stays(world: World) -> None:
    await world.publish(BINARY)
    await world.work(poison)
    await world.stream.purge_stream(EVENTS)
    seen: list[Any] = []
    (result,) = await redrive(world, noting(seen))
    assert (result.outcome, seen) == ("failed", [])
    assert "too large for the dead letter and has left the stream: data of 1,024,000 bytes" in result.reason
    assert len(await world.dead_letters()) == 1


async def test_a_discarded_dead_letter_stays_in_the_history_of_its_message(world: World) -> None:
    first, second = [await world.publish(n) for n in range(2)]
    await world.work(poison)
    async with world.admin(None) as admin:
        with pytest.raises(NotFound, match="There is no dead letter nobody"):
            await admin.list(ids=[first, "nobody"])
        letters = await admin.list(ids=[first])
        assert [each.record.message_id for each in letters] == [first]
        await admin.discard(letters, "a test order")
    assert [record.message_id for record in await world.dead_letters()] == [second]
    with psycopg.connect(world.messaging.database) as connection:
        stream = UUID(bytes=inbox_stream(UUID(first), "inbox_messages"))
        events = AggregateEvents(connection, lambda: 0).history(stream)
    last = events[-1]
    assert isinstance(last, InboxMessageDiscarded)
    assert (last.reason, last.dead_letter) == ("a test order", letters[0].message.data)
    assert [each.outcome for each in await redrive(world, noting([]))] == ["processed"]


async def test_dead_letters_are_not_discarded_during_a_redrive(world: World) -> None:
    await world.publish(1)
    await world.work(poison)
    other = PostgresInbox(world.messaging.database)
    async with other.exclusive("redrive"), world.admin(None) as admin:
        with pytest.raises(InvalidRequest, match="Another process is changing dead letters"):
            await admin.discard(await admin.list(), "a test order")
    assert len(await world.dead_letters()) == 1
