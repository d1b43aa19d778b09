"""`kill -9` of the worker at every point, and of the servers it works with: nothing lost, nothing twice."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psycopg
import pytest

from postroom.adapters.compose.inbox import InboxSettings
from postroom.adapters.postgres.migrate import migrate
from postroom.application.ports.inbox import HandlerRequest
from tests.integration import inbox_crash_worker
from tests.integration.inbox_crash_worker import ACK_WAIT_MS, order_handler
from tests.integration.inbox_world import CONSUMER, EVENTS, SOON, World, opened_world
from tests.support.fork_server import popen
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer
from tests.support.waiting import until

QUICK = msgspec.structs.replace(CONSUMER, ack_wait_ms=ACK_WAIT_MS)
# Where one part ends and the next begins, one of the two stands for both.
POINTS = [
    "inbox.insert.before",
    "inbox.insert.after",
    "handler.handle.after",
    "inbox.mark_processed.after",
    "publisher.publish.before",
    "publisher.publish.after",
    "inbox.mark_dead_lettered.after",
    "inbox.record_error.before",
    "inbox.record_error.after",
    "source.ack.after",
]


@pytest.fixture
async def world(nats_url: str, messaging_database: str) -> AsyncIterator[World]:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (name text)")
    async with opened_world(nats_url, messaging_database) as world:
        await world.make_streams()
        yield world


async def crash(world: World, point: str, max_deliver: int) -> None:
    """Run a worker until it kills itself."""
    script = Path(inbox_crash_worker.__file__)
    arguments = [world.nats.url, world.messaging.database, point, str(max_deliver)]
    worker = popen([sys.executable, script, *arguments])
    assert await asyncio.to_thread(worker.wait, 240) == -signal.SIGKILL


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_any_point_the_effect_is_there_once_and_nothing_is_lost(
    world: World, point: str
) -> None:
    ids = {name: await world.publish(name) for name in ("good", "poison", "down")}
    await crash(world, point, 3)
    await world.work(order_handler(world.messaging.database), consumer=QUICK)
    assert world.rows("SELECT name FROM orders") == [("good",)]
    assert sorted((letter.message_id, letter.reason) for letter in await world.dead_letters()) == sorted(
        [(ids["poison"], "poison"), (ids["down"], "max_deliver")]
    )
    assert sorted(row[:2] for row in world.inbox()) == [(False, True), (False, True), (True, False)]


async def test_nats_server_7817_a_worker_killed_during_the_last_attempt_leaves_a_dead_letter(
    world: World,
) -> None:
    id_ = await world.publish("good")
    once = msgspec.structs.replace(QUICK, max_deliver=1)
    await crash(world, "handler.handle.before", 1)
    calls = 0

    async def handler(request: HandlerRequest) -> None:
        nonlocal calls
        calls += 1

    await world.work(handler, consumer=once)
    assert calls == 0
    (letter,) = await world.dead_letters()
    assert (letter.message_id, letter.reason, letter.attempts) == (id_, "max_deliver", 2)
    assert letter.last_error == "the worker ended during the last attempt"


async def test_killed_servers_cost_neither_a_message_nor_an_effect(
    postgres_server: PostgresServer, tmp_path: Path
) -> None:
    messages, stop = 200, asyncio.Event()
    with NatsServer(tmp_path / "nats") as nats:
        database = postgres_server.create_database()
        migrate(database, "messaging")
        with psycopg.connect(database) as connection:
            connection.execute("CREATE TABLE orders (name text)")
        async with opened_world(nats.url, database) as world:
            await world.make_streams()
            for n in range(messages):
                await world.publish(f"order {n}")
            handler = order_handler(database)

            async def slow(request: HandlerRequest) -> None:
                await asyncio.sleep(0.01)
                await handler(request)

            settings = InboxSettings(
                concurrency=8, backoff_base_ms=20, backoff_max_ms=200, cleanup_every_ms=0
            )
            often = msgspec.structs.replace(QUICK, max_deliver=1_000)
            async with world.worker(slow, settings, often) as worker:
                running = asyncio.create_task(worker.run(stop))
                await until(lambda: worker.counts["processed"] >= 50)
                postgres_server.kill()
                await until(lambda: worker.counts["failed"] >= 5)
                postgres_server.start()
                await until(lambda: worker.counts["processed"] >= 100)
                nats.kill()
                await asyncio.sleep(0.3)
                nats.start()
                await until(lambda: _orders(database) >= messages)
                stop.set()
                await running
            await world.work(handler, SOON, often)
            names = [name for (name,) in world.rows("SELECT name FROM orders")]
            assert sorted(names) == sorted(f"order {n}" for n in range(messages))
            assert {row[:2] for row in world.inbox()} == {(True, False)}
            info = await world.stream.consumer_info(EVENTS, CONSUMER.durable)
            assert (info.num_pending, info.num_ack_pending) == (0, 0)
            assert await world.dead_letters() == []


def _orders(database: str) -> int:
    with psycopg.connect(database) as connection:
        ((count,),) = connection.execute("SELECT count(*) FROM orders").fetchall()
        return int(count)
