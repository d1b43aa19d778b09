"""Ingestion from each broker into SQLite, beside the broker's own client and the bare writes, in one run.

The time begins with the first batch, so that joining a consumer group does not count.
"""

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing, closing
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import aio_pika
import msgspec
import nats
from blake3 import blake3
from confluent_kafka import Consumer
from redis.asyncio import Redis

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_ingester
from postroom.application.threads import exempt_heap
from postroom.domain.errors import Unavailable
from tests.benchmarks.figures import Figures
from tests.integration.broker_drill import BROKERS, KEYS, NAME, Broker
from tests.integration.ingest_world import namespace
from tests.support.stores import envelope

MESSAGES = 20_000
BATCH = 500
GOAL = 0.8
_GROUP = "client"
_FLOOR = "CREATE TABLE messages (position INTEGER PRIMARY KEY, id TEXT UNIQUE, hash BLOB, envelope BLOB)"
_INSERT = "INSERT INTO messages (id, hash, envelope) VALUES (?, ?, ?)"


class Cost(NamedTuple):
    """Seconds that a message took, and seconds of CPU of this process."""

    seconds: float
    cpu_seconds: float


class Meter:
    """Measures what messages cost from the first batch to the last."""

    def __init__(self) -> None:
        self._first: tuple[int, float, float] | None = None
        self._last = (0, 0.0, 0.0)

    def update(self, count: int) -> bool:
        """Note how many messages are done, and return whether all are."""
        if count > self._last[0]:
            self._last = (count, time.perf_counter(), time.process_time())
            self._first = self._first or self._last
        return count >= MESSAGES

    @property
    def cost(self) -> Cost:
        """Return what one message cost."""
        assert self._first is not None
        count, seconds, cpu_seconds = (
            last - first for first, last in zip(self._first, self._last, strict=True)
        )
        return Cost(seconds / count, cpu_seconds / count)


async def publish(broker: Broker, bodies: Sequence[bytes]) -> None:
    """Publish messages, several at once, and each until the broker has acknowledged it."""

    async def publish_one(key: str, body: bytes) -> None:
        while not await broker.publish(key, body):
            pass

    for start in range(0, len(bodies), KEYS):
        batch = enumerate(bodies[start : start + KEYS])
        await asyncio.gather(*(publish_one(str(n), body) for n, body in batch))


async def ingest(broker: Broker, store: str, meter: Meter) -> None:
    """Ingest all messages into a new archive."""
    what = msgspec.structs.replace(namespace("", store, batch_size=BATCH), source=broker.source())
    async with (
        open_mailbox(store, what.mailbox, mode="archive") as postroom,
        open_ingester(what, postroom) as ingester,
    ):
        with exempt_heap():  # as the command does
            running = asyncio.create_task(ingester.run())
            while not meter.update(ingester.counts.stored) and not running.done():
                await asyncio.sleep(0.002)
            ingester.stop()
            await running


async def consume_kafka(broker: Any, meter: Meter) -> None:
    """Fetch messages by the client's batches, and commit after each."""
    await asyncio.to_thread(_consume_kafka, broker.server.servers, meter)


def _consume_kafka(servers: str, meter: Meter) -> None:
    settings = {"bootstrap.servers": servers, "group.id": _GROUP, "auto.offset.reset": "earliest"}
    consumer, count = Consumer(settings | {"enable.auto.commit": False}), 0
    consumer.subscribe([NAME])
    while not meter.update(count):
        messages = consumer.consume(BATCH, 1.0)
        count += len(messages)
        if messages:
            consumer.commit(asynchronous=False)
    consumer.close()


async def consume_rabbitmq(broker: Any, meter: Meter) -> None:
    """Consume messages, and ack each batch by one frame."""
    async with await aio_pika.connect(broker.server.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=2 * BATCH)
        queue, count = await channel.get_queue(NAME), 0
        async with queue.iterator() as messages:
            async for message in messages:
                count += 1
                if count % BATCH == 0:
                    await message.ack(multiple=True)
                    if meter.update(count):
                        return


async def consume_redis(broker: Any, meter: Meter) -> None:
    """Read batches of a consumer group, and ack each by one command."""
    client: Any = Redis.from_url(broker.server.url, protocol=2)
    async with client:
        await client.xgroup_create(NAME, _GROUP, id="0")
        count = 0
        while not meter.update(count):
            ((_, entries),) = await client.xreadgroup(_GROUP, _GROUP, {NAME: ">"}, count=BATCH)
            await client.xack(NAME, _GROUP, *(id_ for id_, _ in entries))
            count += len(entries)


async def consume_nats(broker: Any, meter: Meter) -> None:
    """Fetch batches of a durable consumer, and ack each message."""
    client = await nats.connect(broker.server.url)
    subscription = await client.jetstream().pull_subscribe(NAME, durable=_GROUP)
    count = 0
    while not meter.update(count):
        messages = await subscription.fetch(BATCH)
        for message in messages:
            await message.ack()
        count += len(messages)
    await client.drain()


CLIENTS: dict[str, Callable[[Any, Meter], Awaitable[None]]] = {
    "kafka": consume_kafka,
    "rabbitmq": consume_rabbitmq,
    "redis": consume_redis,
    "nats": consume_nats,
}


def write_bare(path: Path, bodies: Sequence[bytes], meter: Meter) -> None:
    """Hash messages and insert them into a table, in a durable transaction for each batch."""
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        database.execute(_FLOOR)
        for start in range(0, len(bodies), BATCH):
            batch = enumerate(bodies[start : start + BATCH], start)
            database.execute("BEGIN")
            database.executemany(_INSERT, [(str(n), blake3(body).digest(), body) for n, body in batch])
            database.execute("COMMIT")
            meter.update(start + BATCH)


async def compare(kind: str, broker: Broker, folder: Path, bodies: Sequence[bytes]) -> tuple[Cost, Cost]:
    """Return the costs of ingestion and of the client alone, of the same messages."""
    async with AsyncExitStack() as stack:
        await broker.create()
        await stack.enter_async_context(aclosing(broker))
        await publish(broker, bodies)
        ingestion, client = Meter(), Meter()
        await ingest(broker, str(folder / "store.db"), ingestion)
        if kind == "rabbitmq":  # whose queue is empty now
            await publish(broker, bodies)
        await CLIENTS[kind](broker, client)
        return ingestion.cost, client.cost


def _measure_broker(kind: str) -> Callable[[Figures, Path, int], None]:
    def run(figures: Figures, folder: Path, _: int) -> None:
        bodies = [envelope(str(n)) for n in range(MESSAGES)]
        costs: list[tuple[Cost, Cost]] = []
        for number in range(figures.runs):
            place = folder / f"{kind}-{number}"
            try:
                broker = BROKERS[kind](place)
            except Unavailable as error:
                figures.progress(f"ingest.sources.{kind} is left out: {error}")
                return
            with broker.server:
                costs.append(asyncio.run(compare(kind, broker, place, bodies)))
        name = f"ingest.sources.{kind}"
        _add(figures, name, [ingestion for ingestion, _ in costs])
        _add(figures, f"{name}.client", [client for _, client in costs])
        ratios = [client.seconds / ingestion.seconds for ingestion, client in costs]
        figures.add(f"{name}.of_client", median(ratios), "times", GOAL)

    return run


def _measure_floor(figures: Figures, folder: Path, _: int) -> None:
    bodies = [envelope(str(n)) for n in range(MESSAGES)]
    meters = [Meter() for _ in range(figures.runs)]
    for number, meter in enumerate(meters):
        write_bare(folder / f"floor-{number}.db", bodies, meter)
    _add(figures, "ingest.sources.floor", [meter.cost for meter in meters])


def _add(figures: Figures, name: str, costs: Sequence[Cost]) -> None:
    figures.add(name, median(1 / each.seconds for each in costs), "messages/s")
    micros = median(each.cpu_seconds * 1_000_000 for each in costs)
    figures.add(f"{name}.cpu", micros, "us of CPU per message")


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"ingest.sources.floor": _measure_floor} | {
    f"ingest.sources.{kind}": _measure_broker(kind) for kind in CLIENTS
}
"""What is measured, by name."""
