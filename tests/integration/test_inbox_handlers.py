"""Handlers by event type in inbox workers, on a real NATS server and a real PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from postroom.adapters.compose.inbox import open_dead_letters, open_monitored_worker
from postroom.application.inbox.delivery import EventHandlers
from postroom.application.ports.inbox import HandlerRequest
from tests.integration.inbox_world import CONSUMER, SOON, World, opened_world

WORK_SECONDS = 300


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


@pytest.mark.parametrize("ordered", [False, True])
async def test_each_event_type_has_its_function_and_aggregates_keep_their_order(
    world: World, ordered: bool
) -> None:
    seen: list[tuple[str, int]] = []
    failures = {4, 10}
    handlers = EventHandlers()

    @handlers.on("order_placed")
    async def place(request: HandlerRequest) -> None:
        seen.append(("place", request.payload))

    @handlers.on("order_*")
    async def change(request: HandlerRequest) -> None:
        if request.payload in failures:
            failures.remove(request.payload)
            raise RuntimeError("down")
        seen.append(("change", request.payload))

    for n in range(12):
        event_type = ("order_placed", "order_paid", "invoice_sent")[n % 3]
        subject = f"shop.event.{event_type}.v1"
        await world.publish(n, aggregate="o-1", subject=subject)
    settings = msgspec.structs.replace(SOON, ordered=ordered)
    async with (
        asyncio.timeout(WORK_SECONDS),
        open_monitored_worker(world.messaging, world.nats, CONSUMER, settings, handler=handlers) as opened,
    ):
        worker, monitor = opened
        while worker.counts["processed"] + worker.counts["dead_lettered"] < 12:
            await worker.run(asyncio.Event(), until_idle=True)
        metrics = {each.name: each.samples for each in await monitor.collect()}
    placed, changed = (0, 3, 6, 9), (1, 4, 7, 10)
    assert seen == [("place" if n in placed else "change", n) for n in range(12) if n in placed + changed]
    calls = {
        (labels["handler"], labels["outcome"]): value
        for labels, value in metrics["postroom_inbox_handler_calls"]
    }
    assert (calls["order_placed", "processed"], calls["order_*", "processed"]) == (4, 4)
    assert calls["order_*", "failed"] == 2
    assert metrics["postroom_inbox_unhandled"] == [({"context": "sea"}, 4)]
    letters = await world.dead_letters()
    assert [(letter.reason, letter.payload) for letter in letters] == [
        ("unhandled", msgspec.Raw(b"%d" % n)) for n in (2, 5, 8, 11)
    ]


async def test_a_function_that_takes_too_long_is_cancelled_and_its_event_redriven_to_a_new_handler(
    world: World,
) -> None:
    handlers = EventHandlers()
    cancelled = asyncio.Event()

    @handlers.on("order_*")
    async def hang(request: HandlerRequest) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await world.publish({"n": 1})
    settings = msgspec.structs.replace(SOON, timeout_ms=50)
    consumer = msgspec.structs.replace(CONSUMER, max_deliver=1)
    async with (
        asyncio.timeout(WORK_SECONDS),
        open_monitored_worker(world.messaging, world.nats, consumer, settings, handler=handlers) as (
            worker,
            _,
        ),
    ):
        await worker.run(asyncio.Event(), until_idle=True)
    assert cancelled.is_set()
    (letter,) = await world.dead_letters()
    assert letter.last_error == "the handler did not return within 50 ms"
    again = EventHandlers()
    seen: list[object] = []

    @again.on("order_placed")
    async def place(request: HandlerRequest) -> None:
        seen.append(request.payload)

    async with open_dead_letters(world.messaging, world.nats, settings, handler=again) as admin:
        results = [each async for each in admin.redrive(await admin.list())]
    assert ([each.outcome for each in results], seen) == (["processed"], [{"n": 1}])
