"""Kills and pauses of an ingester and its broker while messages are published, for each broker.

Every message whose publishing the broker acknowledged is stored once, byte for byte; for brokers that keep
the order of a key, in that order. As a module: `python -m tests.integration.broker_drill kafka 100000 20`
publishes 100,000 messages, and kills and pauses each process 20 times.
"""

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import aio_pika
import msgspec
import nats
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs
from nats.errors import Error as NatsError
from nats.js.api import StreamConfig
from redis.asyncio import Redis
from redis.exceptions import RedisError

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_ingester
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.ingest.namespace import (
    KafkaSource,
    MessageSource,
    NatsSource,
    RabbitmqSource,
    RedisSource,
)
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.message import MessageSent
from postroom.domain.names import message_id
from tests.integration.ingest_world import DURABLE, MAILBOX, namespace
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.nats import NatsServer
from tests.support.servers.process import ServerProcess
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.servers.redis import RedisServer
from tests.support.servers.server import LoopbackServer
from tests.support.stores import envelope

ROOT = Path(__file__).parents[2]
NAME = "orders"
KEYS = 32
ACK_WAIT_SECONDS = 5
OWNER_WAIT_MS = 20_000
PATIENCE_SECONDS = 3_000
SETTLE_SECONDS = 10


class Figures(msgspec.Struct):
    """What one run saw."""

    messages: int = 0
    faults: dict[str, int] = {}
    seconds: float = 0.0


class Broker(Protocol):
    """A broker, and how messages are published to it."""

    @property
    def server(self) -> LoopbackServer:
        """Return its process."""

    @property
    def is_durable(self) -> bool:
        """Return whether it still has its messages after it was killed."""

    @property
    def keeps_order(self) -> bool:
        """Return whether it redelivers messages before later ones."""

    def source(self) -> MessageSource:
        """Return what is ingested."""

    async def create(self) -> None:
        """Create what is ingested."""

    async def publish(self, key: str, data: bytes) -> bool:
        """Publish a message, and return whether the broker acknowledged it."""

    async def aclose(self) -> None:
        """Close what publishes."""


class KafkaBroker:
    is_durable, keeps_order = False, True

    def __init__(self, folder: Path, partitions: int = 3) -> None:
        self.server = KafkaServer(folder)
        self._partitions = partitions
        self._producer: Producer | None = None

    def source(self) -> MessageSource:
        return KafkaSource(
            url=f"kafka://{self.server.servers}",
            topic=NAME,
            consumer_group=DURABLE,
            ack_wait_seconds=ACK_WAIT_SECONDS,
        )

    async def create(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.servers})
        await asyncio.to_thread(admin.create_topics([NewTopic(NAME, self._partitions, 1)])[NAME].result, 20)
        self._producer = Producer({"bootstrap.servers": self.server.servers, "linger.ms": 5})

    async def publish(self, key: str, data: bytes) -> bool:
        assert self._producer is not None
        answers: list[KafkaError | None] = []
        self._producer.produce(
            NAME, data, key=key.encode(), on_delivery=lambda error, _: answers.append(error)
        )
        while not answers:
            self._producer.poll(0)
            await asyncio.sleep(0.002)
        return answers[0] is None

    async def aclose(self) -> None:
        self._producer = None


class RedisBroker:
    is_durable, keeps_order = True, False

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder, sync_always=True)
        self._client: Any = None

    def source(self) -> MessageSource:
        return RedisSource(
            url=self.server.url,
            stream=NAME,
            consumer_group=DURABLE,
            field="data",
            ack_wait_seconds=ACK_WAIT_SECONDS,
        )

    async def create(self) -> None:
        self._client = Redis.from_url(self.server.url, socket_timeout=5)

    async def publish(self, key: str, data: bytes) -> bool:
        with suppress(RedisError, OSError):
            await self._client.xadd(NAME, {"data": data})
            return True
        return False

    async def aclose(self) -> None:
        await self._client.aclose()


class RabbitmqBroker:
    is_durable, keeps_order = True, True

    def __init__(self, folder: Path) -> None:
        self.server = RabbitmqServer(folder)
        self._connection: Any = None
        self._channel: Any = None
        self._lock = asyncio.Lock()

    def source(self) -> MessageSource:
        return RabbitmqSource(
            url=self.server.url, queue=NAME, consumer_group=DURABLE, ack_wait_seconds=ACK_WAIT_SECONDS
        )

    async def create(self) -> None:
        await self._connect()
        # The server stores the names of new quorum queues some time after it has confirmed their declaration.
        await asyncio.sleep(SETTLE_SECONDS)

    async def publish(self, key: str, data: bytes) -> bool:
        with suppress(*CONNECTION_EXCEPTIONS, aio_pika.exceptions.AMQPError, OSError, TimeoutError):
            async with self._lock:
                if self._channel is None or self._channel.is_closed:
                    async with asyncio.timeout(10):
                        await self._connect()
            message = aio_pika.Message(data, delivery_mode=2)
            await self._channel.default_exchange.publish(message, NAME, timeout=10)
            return True
        return False

    async def aclose(self) -> None:
        await self._connection.close()

    async def _connect(self) -> None:
        self._connection = await aio_pika.connect(self.server.url)
        self._channel = await self._connection.channel()
        # Without a single active consumer, a new one may get later messages before those of the lost one.
        arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True}
        await self._channel.declare_queue(NAME, durable=True, arguments=arguments)


class NatsBroker:
    is_durable, keeps_order = True, False

    def __init__(self, folder: Path) -> None:
        self.server = NatsServer(folder, sync_always=True)
        self._client: Any = None

    def source(self) -> MessageSource:
        return NatsSource(
            url=self.server.url, subject=NAME, consumer_group=DURABLE, ack_wait_seconds=ACK_WAIT_SECONDS
        )

    async def create(self) -> None:
        async def ignore(_: Exception) -> None:
            pass

        self._client = await nats.connect(
            self.server.url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=ignore
        )
        await self._client.jetstream().add_stream(StreamConfig(name="ORDERS", subjects=[NAME]))

    async def publish(self, key: str, data: bytes) -> bool:
        with suppress(NatsError, OSError, TimeoutError):
            await self._client.jetstream().publish(NAME, data, timeout=5)
            return True
        return False

    async def aclose(self) -> None:
        await self._client.close()


BROKERS: dict[str, Callable[[Path], Broker]] = {
    "kafka": KafkaBroker,
    "redis": RedisBroker,
    "rabbitmq": RabbitmqBroker,
    "nats": NatsBroker,
}


async def run(broker: Broker, folder: Path, count: int, times: int, max_pause: float) -> Figures:
    """Publish messages while processes are killed and paused; check what the archive holds then."""
    await broker.create()
    async with aclosing(broker):
        return await disturb(broker, folder, count, times, max_pause)


async def disturb(broker: Broker, folder: Path, count: int, times: int, max_pause: float) -> Figures:
    """Do what `run` does, with a broker that can be published to."""
    figures, began, seed = Figures(count), time.monotonic(), random.Random(15)
    sent = {f"{number % KEYS}-{number // KEYS}": b"" for number in range(count)}
    store = str(folder / "store.db")
    with ingester_process(broker.source(), store, folder) as ingester:
        faults = [
            ("ingester killed", ingester.kill, ingester.start),
            ("ingester paused", ingester.pause, ingester.resume),
        ]
        faults.append(("broker paused", broker.server.pause, broker.server.resume))
        if broker.is_durable:
            faults.append(("broker killed", broker.server.kill, broker.server.start))
        schedule = faults * times
        seed.shuffle(schedule)
        acked = 0

        async def publish(key: int) -> None:
            nonlocal acked
            for id_ in [id_ for id_ in sent if id_.startswith(f"{key}-")]:
                sent[id_] = envelope(id_)
                while not await broker.publish(str(key), sent[id_]):
                    await asyncio.sleep(0.05)
                acked += 1

        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            for key in range(KEYS):
                tasks.create_task(publish(key))
            for at, (name, begin, end) in enumerate(schedule):
                while acked < count * at // len(schedule):
                    await asyncio.sleep(0.01)
                await asyncio.sleep(seed.uniform(0, min(2.0, max_pause)))
                begin()
                await asyncio.sleep(0.0 if "killed" in name else seed.uniform(min(1.0, max_pause), max_pause))
                end()
                figures.faults[name] = figures.faults.get(name, 0) + 1
        async with asyncio.timeout(PATIENCE_SECONDS):
            while last_position(store) < count or len(read_archive(store)) < count:
                await asyncio.sleep(0.5)
    figures.seconds = round(time.monotonic() - began, 1)
    archive = read_archive(store)
    assert Counter(id_ for id_, _ in archive) == Counter(sent.keys())
    assert dict(archive) == sent
    if broker.keeps_order:
        for key in range(KEYS):
            numbers = [int(id_.partition("-")[2]) for id_, _ in archive if id_.startswith(f"{key}-")]
            assert numbers == sorted(numbers), f"key {key} is out of order"
    with read_mailbox(store, MAILBOX) as reader:
        assert reader.verify_log().messages == count
    return figures


def read_archive(store: str) -> list[tuple[str, bytes]]:
    """Return ids and bytes of the messages in the order of the log."""
    with suppress(NotFound, Unavailable), read_mailbox(store, MAILBOX) as reader:
        return [
            (message_id(record.event.stream, record.event.headers.message_id), record.event.envelope)
            for record in reader.log.read()
            if isinstance(record.event, MessageSent)
        ]
    return []


def last_position(store: str) -> int:
    """Return the position of the last record of the archive, or 0 if it is empty."""
    with suppress(NotFound, Unavailable), read_mailbox(store, MAILBOX) as reader:
        head = reader.log.head()
        return 0 if head is None else head.position
    return 0


class IngesterProcess:
    """A process that ingests, and that is killed and paused."""

    def __init__(self, source: MessageSource, store: str, log: Path) -> None:
        kind, fields = type(source).__name__, msgspec.json.encode(source).decode()
        command = [sys.executable, "-m", "tests.integration.broker_drill", "ingest", kind, fields, store]
        self._process = ServerProcess("ingester", ["env", "-C", str(ROOT), *command], log)

    def start(self) -> None:
        self._process.start(lambda: True)

    def kill(self) -> None:
        self._process.kill()

    def pause(self) -> None:
        self._process.pause()

    def resume(self) -> None:
        self._process.resume()


@contextmanager
def ingester_process(source: MessageSource, store: str, folder: Path) -> Iterator[IngesterProcess]:
    process = IngesterProcess(source, store, folder / "ingester.log")
    process.start()
    try:
        yield process
    finally:
        process.kill()


async def ingest(kind: str, fields: str, store: str) -> None:
    """Ingest, and begin again when the broker was not there at the start, as a supervisor would."""
    kinds = {each.__name__: each for each in (KafkaSource, NatsSource, RabbitmqSource, RedisSource)}
    source = msgspec.json.decode(fields, type=kinds[kind])
    what = msgspec.structs.replace(namespace("", store, batch_size=100), source=source)
    while True:
        with suppress(Unavailable, NotFound):
            async with (
                open_mailbox(store, what.mailbox, mode="archive", wait_ms=OWNER_WAIT_MS) as postroom,
                open_ingester(what, postroom) as ingester,
            ):
                await ingester.run()
        await asyncio.sleep(0.1)


def main(kind: str, count: str, times: str, max_pause: str = "30") -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        broker = BROKERS[kind](folder / "broker")
        with broker.server:
            figures = asyncio.run(run(broker, folder, int(count), int(times), float(max_pause)))
        print(kind, figures, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "ingest":
        asyncio.run(ingest(*sys.argv[2:]))
    else:
        main(*sys.argv[1:])
