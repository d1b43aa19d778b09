"""Messages that are posted to a service in batches: killed workers, one failure, a restarted NATS server."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest
from aiohttp import web

from postroom.adapters.compose.inbox import InboxSettings
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.application.ports.inbox import HandlerRequest
from tests.integration import inbox_crash_worker
from tests.integration.inbox_crash_worker import ACK_WAIT_MS, KEY, order_handler
from tests.integration.inbox_world import CONSUMER, EVENTS, World, opened_world
from tests.support.fork_server import popen
from tests.support.servers.nats import NatsServer
from tests.support.waiting import until

QUICK = msgspec.structs.replace(CONSUMER, ack_wait_ms=ACK_WAIT_MS, max_deliver=1_000)
STATUS = {"processed": 200, "already_processed": 409, "poison": 422, "failed": 503}


class Orders:
    """A service that handles each order of a batch in a transaction of its own.

    Arguments:
        before: called with the number of orders so far before the next is handled.
    """

    def __init__(self, database: str, before: Callable[[int], None] = lambda _: None) -> None:
        self._handler = FunctionEventHandler(order_handler(database))
        self._before = before
        self.batches: list[int] = []
        self.handled = 0

    async def respond(self, incoming: web.Request) -> web.Response:
        calls = msgspec.json.decode(await incoming.read())
        self.batches.append(len(calls))
        answers = []
        for call in calls:
            self._before(self.handled)
            result = await self._handler.handle(msgspec.convert(call["request"], HandlerRequest))
            self.handled += 1
            answers.append({"status": STATUS[result.outcome], "body": result.reason or ""})
        return web.json_response(answers)


@asynccontextmanager
async def serving(orders: Orders) -> AsyncIterator[str]:
    """Serve orders while the context lasts, and yield the URL."""
    application = web.Application()
    application.router.add_post("/orders", orders.respond)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/orders"
    finally:
        await runner.cleanup()


def batches_to(url: str) -> InboxSettings:
    return InboxSettings(
        handler=url,
        allow=(f"{url} 127.0.0.0/8",),
        signing_key=KEY,
        batch=20,
        backoff_base_ms=5,
        backoff_max_ms=20,
        cleanup_every_ms=0,
    )


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (name text)")
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


def names(world: World) -> list[str]:
    return sorted(name for (name,) in world.rows("SELECT name FROM orders"))


async def test_one_failing_message_of_a_batch_affects_only_itself(world: World) -> None:
    good = [f"order {n}" for n in range(10)]
    ids = {name: await world.publish(name) for name in (*good[:5], "poison", "down", *good[5:])}
    orders = Orders(world.messaging.database)
    async with serving(orders) as url:
        await world.work(None, batches_to(url), CONSUMER)
    assert max(orders.batches) > 1
    assert names(world) == sorted(good)
    assert sorted((letter.message_id, letter.reason) for letter in await world.dead_letters()) == sorted(
        [(ids["poison"], "poison"), (ids["down"], "max_deliver")]
    )


async def test_a_worker_killed_in_the_middle_of_a_batch_loses_and_doubles_nothing(world: World) -> None:
    good = [f"order {n}" for n in range(30)]
    for name in good:
        await world.publish(name)
    workers: list[subprocess.Popen[bytes]] = []

    def kill_worker(handled: int) -> None:
        if handled == 7:
            os.kill(workers[0].pid, signal.SIGKILL)

    orders = Orders(world.messaging.database, kill_worker)
    async with serving(orders) as url:
        script = Path(inbox_crash_worker.__file__)
        arguments = [world.nats.url, world.messaging.database, "nowhere", "1000", url]
        workers.append(popen([sys.executable, script, *arguments]))
        assert await asyncio.to_thread(workers[0].wait, 240) == -signal.SIGKILL
        assert orders.batches[0] > 7
        await world.work(None, batches_to(url), QUICK)
    assert names(world) == sorted(good)
    assert {row[:2] for row in world.inbox()} == {(True, False)}
    assert await world.dead_letters() == []


@pytest.mark.parametrize("point", ["handler.handle.after", "inbox.mark_processed.after", "source.ack.after"])
async def test_a_worker_killed_between_the_steps_of_a_batch_loses_and_doubles_nothing(
    world: World, point: str
) -> None:
    good = [f"order {n}" for n in range(30)]
    for name in good:
        await world.publish(name)
    async with serving(Orders(world.messaging.database)) as url:
        script = Path(inbox_crash_worker.__file__)
        worker = popen([sys.executable, script, world.nats.url, world.messaging.database, point, "1000", url])
        assert await asyncio.to_thread(worker.wait, 240) == -signal.SIGKILL
        await world.work(None, batches_to(url), QUICK)
    assert names(world) == sorted(good)
    assert await world.dead_letters() == []


async def test_a_nats_server_that_restarts_in_the_middle_of_batches_costs_nothing(
    messaging_database: str, tmp_path: Path
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (name text)")
    good = [f"order {n}" for n in range(200)]
    stop = asyncio.Event()
    with NatsServer(tmp_path / "nats") as nats:
        async with opened_world(nats.url, messaging_database) as world:
            await world.make_streams()
            for name in good:
                await world.publish(name)
            orders = Orders(messaging_database)
            async with (
                serving(orders) as url,
                world.worker(None, batches_to(url), QUICK) as worker,
            ):
                running = asyncio.create_task(worker.run(stop))
                await until(lambda: orders.handled >= 30)
                nats.kill()
                await asyncio.sleep(0.3)
                nats.start()
                await until(lambda: len(names(world)) >= len(good))
                stop.set()
                await running
                await world.work(None, batches_to(url), QUICK)
            assert max(orders.batches) > 1
            assert names(world) == sorted(good)
            info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
            assert (info.num_pending, info.num_ack_pending) == (0, 0)
            assert await world.dead_letters() == []
