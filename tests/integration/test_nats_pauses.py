"""A NATS server is paused under load: relay, worker and ingester go on, and no message is lost or doubled."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.inbox import InboxSettings, open_worker
from postroom.adapters.compose.ingest import open_ingester
from postroom.adapters.compose.outbox import OutboxSettings, open_relay
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import Unavailable
from tests.integration.ingest_world import MAILBOX, namespace, stored
from tests.support.outboxes import column, order_placed, record
from tests.support.servers.nats import NatsServer
from tests.support.stores import envelope

EVENTS = ConsumerDefinition(
    stream="SEA_EVENTS", durable="mail", ack_wait_ms=5_000, max_deliver=20, max_ack_pending=50
)
RESUME_SECONDS = 240.0
"""Within which each of them has dealt with something published after the pause."""
DRAIN_SECONDS = 240.0
"""Within which all that was published is dealt with."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats") as server:
        yield server


class Load:
    """Traffic through relay, worker and ingester of one server, and what came of it."""

    def __init__(self, server: NatsServer, database: str, store: str, pause_seconds: float) -> None:
        self.nats = NatsSettings(server.url)
        self.interval_seconds = max(0.05, pause_seconds / 100)  # a longer pause leaves no larger backlog
        self.database = database
        self.store = store
        self.stop = asyncio.Event()
        self.handled: Counter[str] = Counter()
        self.recorded: list[str] = []
        self.envelopes: list[str] = []

    async def make_streams(self) -> None:
        async with connect(self.nats, "test") as client:
            stream = client.jetstream()
            await stream.add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])
            await stream.add_stream(name="SEA_DLQ", subjects=["sea.dlq.>"])
            await stream.add_stream(name="EVENTS", subjects=["acme.>"])

    async def record_events(self) -> None:
        for n in count():
            if self.stop.is_set():
                return
            events = [order_placed(f"order-{n % 100}-{k}", n) for k in range(5)]
            self.recorded += map(str, await asyncio.to_thread(record, self.database, *events))
            await asyncio.sleep(self.interval_seconds)

    async def publish_envelopes(self) -> None:
        async with connect(self.nats, "test publisher") as client:
            publisher = JetStreamPublisher(client, timeout_ms=2_000)
            for n in count():
                if self.stop.is_set():
                    return
                ids = [f"e-{n}-{k}" for k in range(25)]
                await asyncio.gather(*(self._publish_envelope(publisher, id_) for id_ in ids))
                self.envelopes += ids
                await asyncio.sleep(self.interval_seconds)

    async def _publish_envelope(self, publisher: JetStreamPublisher, id_: str) -> None:
        while True:
            with suppress(Unavailable):
                await publisher.publish("acme.orders.placed", envelope(id_), {"Nats-Msg-Id": id_})
                return
            await asyncio.sleep(0.1)

    async def handle(self, request: HandlerRequest) -> None:
        await asyncio.sleep(0.1)
        self.handled[request.message_id] += 1

    @asynccontextmanager
    async def relaying(self) -> AsyncIterator[None]:
        settings = OutboxSettings(cleanup_every_ms=0)
        async with (
            open_relay(MessagingSettings(self.database, "sea"), self.nats, settings) as relay,
            _running(relay.run()),
        ):
            yield
            relay.stop()

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        stop = asyncio.Event()
        messaging, settings = MessagingSettings(self.database, "sea"), InboxSettings(cleanup_every_ms=0)
        handler = FunctionEventHandler(self.handle)
        async with (
            open_worker(messaging, self.nats, EVENTS, settings, handler=handler) as worker,
            _running(worker.run(stop)),
        ):
            yield
            stop.set()

    @asynccontextmanager
    async def ingesting(self) -> AsyncIterator[None]:
        what = namespace(self.nats.url, self.store, ack_wait_seconds=5)
        async with (
            open_mailbox(what.store, MAILBOX, mode="archive", durability="relaxed") as postroom,
            open_ingester(what, postroom) as ingester,
            _running(ingester.run()),
        ):
            yield
            ingester.stop()

    def published(self) -> int:
        return sum(at is not None for at in column(self.database, "published_at"))

    def progress(self) -> dict[str, int]:
        return {
            "relay": self.published(),
            "worker": len(self.handled),
            "ingester": len(stored(self.store)),
        }


@pytest.mark.parametrize("seconds", [1, 4, *(pytest.param(n, marks=pytest.mark.extended) for n in (20, 60))])
async def test_after_a_pause_of_the_server_everything_published_is_dealt_with_once(
    server: NatsServer, messaging_database: str, tmp_path: Path, seconds: float
) -> None:
    load = Load(server, messaging_database, str(tmp_path / "store.db"), seconds)
    await load.make_streams()
    async with AsyncExitStack() as running:
        for each in (load.relaying, load.working, load.ingesting):
            await running.enter_async_context(each())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.record_events())
            tasks.create_task(load.publish_envelopes())
            await _until(lambda: min(load.progress().values()) > 100, RESUME_SECONDS, load)
            server.pause()
            await asyncio.sleep(seconds)
            server.resume()
            events, envelopes = len(load.recorded), len(load.envelopes)
            targets = {"relay": events + 5, "worker": events + 5, "ingester": envelopes + 5}
            await _until(
                lambda: all(n >= targets[name] for name, n in load.progress().items()), RESUME_SECONDS, load
            )
            load.stop.set()
        await _until(
            lambda: (
                load.progress()
                == {
                    "relay": len(load.recorded),
                    "worker": len(load.recorded),
                    "ingester": len(load.envelopes),
                }
            ),
            DRAIN_SECONDS,
            load,
        )
    assert load.handled == Counter(load.recorded)
    assert stored(load.store) == Counter(load.envelopes)


async def _until(is_so: Callable[[], bool], seconds: float, load: Load) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(is_so):
        assert time.monotonic() < deadline, (load.progress(), len(load.recorded), len(load.envelopes))
        await asyncio.sleep(0.2)


@asynccontextmanager
async def _running(work: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Run work that ends by itself once it was told to."""
    task = asyncio.create_task(work)
    try:
        yield
        await asyncio.wait_for(task, DRAIN_SECONDS)
    finally:
        await cancel_and_wait(task)
