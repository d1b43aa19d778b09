"""A capture publishes each committed row to Kafka and RabbitMQ, in order, through kills and pauses."""

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import aio_pika
import pytest
from confluent_kafka import Consumer, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs

from postroom.adapters.postgres.migrate import migrate
from postroom.domain.errors import Unavailable
from tests.integration.test_outbox_capture_crashes import ORDERS, Captures, insert_round
from tests.support.captures import LOGICAL, ServiceDatabase
from tests.support.outboxes import column, numbers
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import pause
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.servers.server import LoopbackServer
from tests.support.waiting import SECONDS, wait_until

TOPIC = "sea.order"
PARTITIONS = 3
ROWS = 50 * ORDERS
PAUSE_SECONDS = 6.0
"""Longer than the time within which a target must confirm a message."""


class Target(Protocol):
    """A broker to which rows are published, and what it has of them."""

    server: LoopbackServer
    is_durable: bool

    @property
    def url(self) -> str: ...

    async def create(self) -> None: ...

    async def take(self) -> list[tuple[str, bytes]]:
        """Return ids and payloads of the messages that were not returned before, in the order of each key."""


class KafkaTarget:
    is_durable = False

    def __init__(self, folder: Path) -> None:
        self.server = KafkaServer(folder)
        self._offsets = dict.fromkeys(range(PARTITIONS), 0)

    @property
    def url(self) -> str:
        return f"kafka://{self.server.servers}"

    async def create(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.servers})
        await asyncio.to_thread(admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result, 60)

    async def take(self) -> list[tuple[str, bytes]]:
        return await asyncio.to_thread(self._take)

    def _take(self) -> list[tuple[str, bytes]]:
        consumer = Consumer({"bootstrap.servers": self.server.servers, "group.id": "test"})
        consumer.assign([TopicPartition(TOPIC, *each) for each in self._offsets.items()])
        messages: list[Message] = []
        while taken := [each for each in consumer.consume(1_000, 1.0) if each.error() is None]:
            messages += taken
        consumer.close()
        for each in messages:
            self._offsets[each.partition() or 0] = (each.offset() or 0) + 1
        return [(dict(each.headers() or [])["Event-Id"].decode(), each.value() or b"") for each in messages]  # type: ignore[union-attr]


class RabbitmqTarget:
    is_durable = True

    def __init__(self, folder: Path) -> None:
        self.server: RabbitmqServer = RabbitmqServer(folder)

    @property
    def url(self) -> str:
        return self.server.url

    async def create(self) -> None:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            await channel.declare_queue(TOPIC, durable=True)

    async def take(self) -> list[tuple[str, bytes]]:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            queue = await channel.declare_queue(TOPIC, passive=True)
            messages = []
            while message := await queue.get(no_ack=True, fail=False):
                messages.append(message)
        return [(message.message_id or "", message.body) for message in messages]


@pytest.fixture(params=[KafkaTarget, RabbitmqTarget])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Target]:
    open_target: Callable[[Path], Target] = request.param
    try:
        target = open_target(tmp_path / "broker")
    except Unavailable as error:
        pytest.skip(str(error))
    with target.server:
        asyncio.run(target.create())
        yield target


@pytest.fixture
def database() -> Iterator[ServiceDatabase]:
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        url = server.create_database()
        migrate(url, "messaging")
        yield ServiceDatabase(url)


@pytest.mark.extended
def test_every_committed_row_is_published_in_order_while_target_and_capture_are_killed_and_paused(
    target: Target, database: ServiceDatabase, tmp_path: Path
) -> None:
    captures = Captures(tmp_path, database, "nats://127.0.0.1:1")
    arguments = ("--to", target.url, "--topic", "{context}.{aggregate_type}")
    captures.run("outbox", "capture", "--create")
    stored: list[tuple[str, bytes]] = []

    def has(count: int) -> bool:
        stored.extend(asyncio.run(target.take()))
        return len({id_ for id_, _ in stored}) >= count

    with captures.start(*arguments) as first:
        insert_round(database, 0)
        wait_until(lambda: has(1))
        first.kill()
        first.wait(SECONDS)
    with captures.start(*arguments) as second:
        target.server.pause()
        insert_round(database, 1)
        time.sleep(PAUSE_SECONDS)
        target.server.resume()
        wait_until(lambda: has(2 * ROWS))
        pause(second.pid)
        insert_round(database, 2)
        if target.is_durable:
            target.server.kill()
            target.server.start()
        second.send_signal(signal.SIGCONT)
        insert_round(database, 3)
        wait_until(lambda: has(4 * ROWS))
        assert second.poll() is None
    assert {id_ for id_, _ in stored} == {str(id_) for (id_,) in database.execute("SELECT id FROM events")}
    first_times = dict(reversed(stored))
    payloads = [first_times[id_] for id_ in dict(stored)]
    for order in range(ORDERS):
        assert numbers(payloads, f"o-{order}") == list(range(4 * 50))
    assert column(database.url, "id") == []
