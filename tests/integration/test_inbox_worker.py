"""The inbox worker on a real NATS server and a real PostgreSQL."""

import asyncio
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
from nats.js.api import ConsumerConfig

from postroom.adapters.compose.inbox import InboxSettings
from postroom.application.cloudevents import NATS
from postroom.application.ports.inbox import HandlerRequest
from postroom.domain.errors import NotFound, PoisonMessage, Unavailable
from tests.integration.inbox_world import CONSUMER, DLQ, EVENTS, SOON, SUBJECT, World, opened_world
from tests.support.archived import cloud_events
from tests.support.waiting import within


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


async def test_cloud_events_are_handled_once_and_invalid_ones_become_dead_letters(world: World) -> None:
    first, second, again, *invalid = cloud_events(NATS)
    for event in (first, again, *invalid, second):
        await world.publish(event.payload, id_="", headers=event.headers)
    log = Log()
    worker = await world.work(log)
    assert worker.counts == {"processed": 2, "duplicate": 1, "dead_lettered": 2}
    order, image = sorted(log.seen, key=lambda each: each.content_type or "")
    assert (order.event_type, order.payload) == ("order.placed", {"total": 12})
    assert (image.content_type, image.payload) == ("image/png", b"\x00\xff")
    assert order.attributes is not None
    assert order.attributes["subject"] == "Größe 100%"
    assert [(letter.reason, letter.headers) for letter in await world.dead_letters()] == [
        ("unreadable", event.headers) for event in invalid
    ]


class Log:
    """A handler that notes what it is asked, and does what a test says."""

    def __init__(self, *steps: str) -> None:
        """Take what to do with the first requests, `ok`, `poison` or `fail`; later ones are `ok`."""
        self.seen: list[HandlerRequest] = []
        self._steps = list(steps)

    async def __call__(self, request: HandlerRequest) -> None:
        self.seen.append(request)
        match self._steps.pop(0) if self._steps else "ok":
            case "poison":
                raise PoisonMessage("no total")
            case "fail":
                raise RuntimeError("down")

    @property
    def payloads(self) -> list[Any]:
        return [request.payload for request in self.seen]


async def test_a_message_is_handled_once_and_acknowledged(world: World) -> None:
    id_ = await world.publish({"n": 1})
    log = Log()
    worker = await world.work(log)
    assert [request.message_id for request in log.seen] == [id_]
    assert world.inbox() == [(True, False, 1)]
    assert worker.counts == {"processed": 1}
    info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
    assert info.ack_floor is not None
    assert info.ack_floor.stream_seq == 1


async def test_the_request_is_what_the_relay_said(world: World) -> None:
    headers = {
        "Event-Type": "order_placed",
        "Event-Version": "7",
        "Occurred-At": "2025-12-28T22:00:00.000000Z",
        "Correlation-Id": "0193f0f2-0000-7000-8000-000000000001",
        "Causation-Id": "0193f0f2-0000-7000-8000-000000000002",
    }
    id_ = await world.publish({"n": 1}, headers=headers)
    log = Log()
    await world.work(log)
    assert log.seen == [
        HandlerRequest(
            message_id=id_,
            subject=SUBJECT,
            event_type="order_placed",
            event_version=7,
            occurred_at="2025-12-28T22:00:00.000000Z",
            correlation_id="0193f0f2-0000-7000-8000-000000000001",
            causation_id="0193f0f2-0000-7000-8000-000000000002",
            payload={"n": 1},
        )
    ]


async def test_without_headers_the_subject_says_what_the_event_is(world: World) -> None:
    await world.publish({}, subject="shop.event.order_shipped.v12")
    await world.publish({}, subject="shop.event.other")
    log = Log()
    await world.work(log)
    assert [(each.event_type, each.event_version) for each in log.seen] == [
        ("order_shipped", 12),
        ("shop.event.other", 1),
    ]


async def test_a_message_without_an_id_is_named_after_its_place_in_the_stream(world: World) -> None:
    await world.publish({"n": 1}, id_="")
    await world.publish({"n": 2}, id_="order-1/placed")
    log = Log("fail", "ok", "ok")
    await world.work(log, InboxSettings(concurrency=1, backoff_base_ms=1, backoff_max_ms=1))
    by_payload = {request.payload["n"]: request.message_id for request in log.seen}
    assert str(UUID(by_payload[1])) == by_payload[1]
    assert by_payload[2] == "order-1/placed"
    assert sorted(attempts for _, _, attempts in world.inbox()) == [1, 2]


async def test_a_redelivered_message_that_was_processed_is_acknowledged_without_its_handler(
    nats_url: str, messaging_database: str
) -> None:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams(duplicate_window=0.1)
        log = Log()
        id_ = await world.publish({"n": 1})
        await world.work(log)
        while (await world.stream.stream_info(EVENTS)).state.messages < 2:
            await world.publish({"n": 1}, id_=id_)  # the stream forgets it after a while
        worker = await world.work(log)
        assert worker.counts["duplicate"] == 1
        assert len(log.seen) == 1


class SlowHandler:
    """A handler that takes its time, and counts its calls and how many run at once."""

    def __init__(self, *steps: str) -> None:
        self.calls = self.most_at_once = 0
        self._at_once = 0
        self._steps = list(steps)

    async def __call__(self, request: HandlerRequest) -> None:
        self.calls += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        await asyncio.sleep(0.2)
        self._at_once -= 1
        if self._steps and self._steps.pop(0) == "fail":
            raise RuntimeError("down")


@asynccontextmanager
async def world_of_duplicates(nats_url: str, database: str, **headers: str) -> AsyncIterator[World]:
    """A stream that holds the same message eight times."""
    async with opened_world(nats_url, database) as world:
        await world.make_streams(duplicate_window=0.1)
        id_ = str(uuid4())
        async with asyncio.timeout(240):
            while (await world.stream.stream_info(EVENTS)).state.messages < 8:
                await world.publish({"n": 1}, id_=id_, headers=headers)
        yield world


AGGREGATE = {"Aggregate-Type": "order", "Aggregate-Id": "o-1"}


@pytest.mark.parametrize("headers", [{}, AGGREGATE], ids=["no aggregate", "an aggregate"])
async def test_duplicates_in_flight_wait_for_the_first_and_use_up_no_attempts(
    nats_url: str, messaging_database: str, headers: dict[str, str]
) -> None:
    async with world_of_duplicates(nats_url, messaging_database, **headers) as world:
        handler = SlowHandler()
        worker = await world.work(handler)
        assert (handler.calls, handler.most_at_once) == (1, 1)
        assert world.inbox() == [(True, False, 1)]
        assert worker.counts == {"processed": 1, "duplicate": 7}


async def test_duplicates_of_a_message_that_failed_wait_for_its_retry(
    nats_url: str, messaging_database: str
) -> None:
    async with world_of_duplicates(nats_url, messaging_database) as world:
        handler = SlowHandler("fail")
        await world.work(handler, InboxSettings(backoff_base_ms=500, backoff_max_ms=500))
        assert (handler.calls, handler.most_at_once) == (2, 1)
        assert world.inbox() == [(True, False, 2)]


async def test_duplicates_at_two_workers_wait_for_each_other(nats_url: str, messaging_database: str) -> None:
    async with world_of_duplicates(nats_url, messaging_database) as world:
        handler = SlowHandler()
        settings = InboxSettings(concurrency=1, backoff_base_ms=50, backoff_max_ms=200, cleanup_every_ms=0)
        await asyncio.gather(world.work(handler, settings), world.work(handler, settings))
        assert (handler.calls, handler.most_at_once) == (1, 1)
        assert world.inbox() == [(True, False, 1)]


async def test_poison_becomes_a_dead_letter_and_is_acknowledged(world: World) -> None:
    id_ = await world.publish({"n": 1}, aggregate="1")
    worker = await world.work(Log("poison"))
    assert worker.counts == {"dead_lettered": 1}
    assert world.inbox() == [(False, True, 1)]
    stored = await world.stream.get_msg(DLQ, 1)
    assert stored.subject == f"sea.dlq.{SUBJECT}"
    body = msgspec.json.decode(stored.data or b"")
    assert body.pop("at").endswith("+00:00")
    assert body == {
        "message_id": id_,
        "original_subject": SUBJECT,
        "reason": "poison",
        "attempts": 1,
        "last_error": "no total",
        "consumer": "sea__from_shop",
        "stream": EVENTS,
        "sequence": "1",
        "headers": {"Nats-Msg-Id": id_, "Aggregate-Type": "order", "Aggregate-Id": "1"},
        "payload": {"n": 1},
        "original_message_id": id_,
        "body_bytes": 7,
        "body_sha256": sha256(b'{"n":1}').hexdigest(),
    }


async def test_a_message_that_is_not_json_is_dead_lettered_and_never_reaches_the_handler(
    world: World,
) -> None:
    await world.publish(b"\xff\x00 no json")
    log = Log()
    await world.work(log)
    assert log.seen == []
    (letter,) = await world.dead_letters()
    assert letter.reason == "unreadable"
    assert b64decode(letter.data_b64) == letter.message.data == b"\xff\x00 no json"


async def test_a_message_that_failed_is_not_acknowledged_and_is_redelivered(world: World) -> None:
    await world.publish({"n": 1})
    log = Log("fail", "fail", "ok")
    worker = await world.work(log)
    assert len(log.seen) == 3
    assert worker.counts == {"failed": 2, "processed": 1}
    assert world.inbox() == [(True, False, 3)]
    assert world.rows("SELECT last_error FROM inbox_messages") == [("RuntimeError: down",)]


async def test_nats_server_7817_the_last_attempt_is_a_dead_letter_and_nothing_is_lost(world: World) -> None:
    id_ = await world.publish({"n": 1})
    log = Log("fail", "fail", "fail")
    await world.work(log)
    assert len(log.seen) == 3
    (letter,) = await world.dead_letters()
    assert (letter.message_id, letter.reason, letter.attempts) == (id_, "max_deliver", 3)
    assert letter.last_error == "RuntimeError: down"
    info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
    assert info.config.max_deliver == -1


async def test_a_server_with_a_limit_of_its_own_is_never_left_with_its_last_delivery(world: World) -> None:
    config = ConsumerConfig(durable_name="theirs", max_deliver=2, ack_wait=30, max_ack_pending=50)
    await world.stream.add_consumer(EVENTS, config)
    await world.publish({"n": 1})
    theirs = msgspec.structs.replace(CONSUMER, durable="theirs", max_deliver=20)
    log = Log("fail", "fail")
    await world.work(log, consumer=theirs)
    assert len(log.seen) == 2
    (letter,) = await world.dead_letters()
    assert (letter.reason, letter.consumer) == ("max_deliver", "theirs")


async def test_a_dead_letter_is_stored_in_a_stream_that_has_the_original_too(
    nats_url: str, messaging_database: str
) -> None:
    """There the message's own id would make the server take the letter for a repetition."""
    async with opened_world(nats_url, messaging_database) as world:
        await world.stream.add_stream(name=EVENTS, subjects=["shop.event.>", "sea.dlq.>"])
        id_ = await world.publish({"n": 1})
        await world.work(Log("poison"))
        assert [letter.message_id for letter in await world.dead_letters()] == [id_]


@pytest.mark.extended
async def test_while_dead_letters_cannot_be_stored_poison_is_not_acknowledged(world: World) -> None:
    id_ = await world.publish({"n": 1})
    stop = asyncio.Event()
    async with world.worker(Log(*["poison"] * 50)) as worker:
        await world.stream.delete_stream(DLQ)
        running = asyncio.create_task(worker.run(stop))
        while worker.counts["failed"] < 2:
            await asyncio.sleep(0.01)
        stop.set()
        await running
        info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
        assert info.num_ack_pending == 1
        await world.stream.add_stream(name=DLQ, subjects=["sea.dlq.>"])
    await world.work(Log(*["poison"] * 50))
    assert [letter.message_id for letter in await world.dead_letters()] == [id_]
    assert [row[:2] for row in world.inbox()] == [(False, True)]


async def test_a_worker_does_not_start_where_dead_letters_would_have_no_stream(world: World) -> None:
    await world.stream.delete_stream(DLQ)
    with pytest.raises(NotFound, match=r"No stream has the subject sea\.dlq\.>"):
        await world.work(Log())


async def test_a_worker_does_not_start_without_its_stream_or_its_tables(
    world: World, empty_database: str
) -> None:
    other = msgspec.structs.replace(CONSUMER, stream="OTHER")
    with pytest.raises(NotFound, match="no stream OTHER"):
        await world.work(Log(), consumer=other)
    world.messaging = msgspec.structs.replace(world.messaging, database=empty_database)
    with pytest.raises(Unavailable, match="postroom migrate --messaging"):
        await world.work(Log())


async def test_a_handler_slower_than_ack_wait_is_called_once(world: World) -> None:
    calls = 0

    async def slow(request: HandlerRequest) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(4)

    await world.publish({"n": 1})
    await world.work(slow, consumer=msgspec.structs.replace(CONSUMER, ack_wait_ms=1_500))
    assert calls == 1
    assert world.inbox() == [(True, False, 1)]


async def test_messages_of_one_aggregate_are_handled_in_order_and_aggregates_in_parallel(
    world: World,
) -> None:
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()
    order: dict[str, list[int]] = {"a": [], "b": [], "c": []}

    async def handler(request: HandlerRequest) -> None:
        name = request.payload["of"]
        running[name] += 1
        most[name] = max(most[name], running[name])
        most["all"] = max(most["all"], running.total())
        await asyncio.sleep(0.002)
        order[name].append(request.payload["n"])
        running[name] -= 1

    for n in range(10):
        for name in order:
            await world.publish({"of": name, "n": n}, aggregate=name)
    await world.work(handler)
    assert all(numbers == list(range(10)) for numbers in order.values())
    assert (most["a"], most["b"], most["c"]) == (1, 1, 1)
    assert most["all"] > 1


async def test_a_message_that_fails_holds_back_the_later_ones_of_its_aggregate_only(world: World) -> None:
    done: list[str] = []
    failures = 2

    async def handler(request: HandlerRequest) -> None:
        nonlocal failures
        if request.payload == "a0" and failures:
            failures -= 1
            raise RuntimeError("down")
        done.append(request.payload)

    for name in ("a0", "a1", "b0", "a2", "b1"):
        await world.publish(name, aggregate=name[0])
    await world.work(handler)
    assert [name for name in done if name[0] == "a"] == ["a0", "a1", "a2"]
    assert [name for name in done if name[0] == "b"] == ["b0", "b1"]
    assert done.index("b1") < done.index("a0")


async def test_messages_that_were_held_back_are_handled_in_order_however_they_are_redelivered(
    world: World,
) -> None:
    handled: list[int] = []
    failures = 2

    async def handler(request: HandlerRequest) -> None:
        nonlocal failures
        if request.payload == 0 and failures:
            failures -= 1
            raise RuntimeError("down")
        handled.append(request.payload)

    for n in range(40):
        await world.publish(n, aggregate="a")
    await world.work(handler)
    assert handled == list(range(40))


async def test_with_one_message_at_a_time_the_whole_stream_keeps_its_order(world: World) -> None:
    strict = msgspec.structs.replace(CONSUMER, max_ack_pending=1, max_deliver=20)
    log = Log("fail", "ok", "fail", "fail")
    for n in range(5):
        await world.publish(n)
    await world.work(log, consumer=strict)
    assert log.payloads == [0, 0, 1, 1, 1, 2, 3, 4]


async def test_no_more_messages_are_in_hand_than_allowed(world: World) -> None:
    running, most = 0, 0

    async def handler(request: HandlerRequest) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    for n in range(40):
        await world.publish(n)
    await world.work(handler, msgspec.structs.replace(SOON, concurrency=4))
    assert most == 4


async def test_a_worker_that_is_stopped_finishes_the_messages_in_progress(world: World) -> None:
    stop, begun, go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()
    done: list[str] = []

    async def handler(request: HandlerRequest) -> None:
        begun.set()
        await within(go_on.wait())
        done.append(request.payload)

    for name in ("a0", "a1", "a2"):
        await world.publish(name, aggregate="a")
    async with world.worker(handler) as worker:
        running = asyncio.create_task(worker.run(stop))
        await within(begun.wait())
        stop.set()
        await asyncio.sleep(0)
        go_on.set()
        await running
        assert done[0] == "a0"
        assert worker.counts["processed"] == len(done)
    await world.work(handler)
    assert done == ["a0", "a1", "a2"]
    assert world.inbox() == [(True, False, 1)] * 3


async def test_two_workers_share_the_messages(world: World) -> None:
    logs = [Log(), Log()]
    for n in range(100):
        await world.publish(n)
    await asyncio.gather(*(world.work(log) for log in logs))
    assert sorted(logs[0].payloads + logs[1].payloads) == list(range(100))
    assert world.inbox() == [(True, False, 1)] * 100
