"""Ingestion while its store is down, full or taken over, and while its stream is."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from nats.aio.client import Client

from postroom.adapters.compose import open_mailbox
from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.ingest.ingester import Ingester
from postroom.application.ingest.namespace import IngestCounts, IngestSettings
from postroom.application.ingest.redrive import DeadLetterSubject
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.ports.outbox import PublishAck
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Fenced, NotFound, Saturated, Unavailable
from tests.integration.ingest_world import (
    DEAD,
    DURABLE,
    IDLE_MS,
    MAILBOX,
    STREAM,
    dead_letters,
    envelopes,
    ingest,
    ingesting,
    namespace,
    publish,
    stored,
    unacked,
)
from tests.support.stores import envelope
from tests.support.troubled_store import TroubledStore
from tests.support.waiting import SECONDS, until


async def test_a_mailbox_taken_over_by_somebody_else_ends_the_ingester(
    nats_url: str, client: Client, sqlite: str
) -> None:
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        await publish(client, envelope("1"))
        await until(lambda: ingester.counts.stored)
        await take_over(sqlite)
        await publish(client, envelope("2"))
        with pytest.raises(Fenced, match="taken over"):
            await running
    assert await ingest(namespace(nats_url, sqlite)) == IngestCounts(received=1, stored=1)


async def take_over(store: str) -> None:
    """Open the mailbox as a process does that got its lock while we still believe to have it."""
    log = SqliteEventLog(store, MAILBOX)
    engine = MailboxEngine(log, SystemClock())
    await engine.open("somebody else", "archive")
    await engine.close()
    log.close()


async def test_a_stream_that_is_deleted_ends_the_ingester(nats_url: str, client: Client, sqlite: str) -> None:
    async with ingesting(namespace(nats_url, sqlite)) as ingester:
        running = asyncio.create_task(ingester.run())
        await asyncio.sleep(0.1)
        await client.jetstream().delete_stream(STREAM)
        with pytest.raises(NotFound, match="no stream EVENTS"):
            await running


@pytest.fixture
async def troubled(
    nats_url: str, client: Client, sqlite: str, request: pytest.FixtureRequest
) -> AsyncIterator["Troubled"]:
    consumer = PullConsumer(durable=DURABLE, stream=STREAM, create=True)
    source = await JetStreamSource.open(NatsSettings(url=nats_url), consumer, prefetch=100)
    dead = DeadLetterSubject(StreamPublisher(client), DEAD, DURABLE) if request.param == "dlq" else None
    async with open_mailbox(sqlite, MAILBOX, mode="archive") as postroom:
        trouble = TroubledStore(postroom.send_envelopes)
        settings = IngestSettings(10, max_retries=1)
        yield trouble, lambda: Ingester(source, trouble, settings, dead_letters=dead)  # type: ignore[arg-type]
    await source.close()


class StreamPublisher:
    def __init__(self, client: Client) -> None:
        self._stream = client.jetstream()

    async def publish(self, subject: str, payload: bytes, headers: Any) -> PublishAck:
        stored = await self._stream.publish(subject, payload, headers=dict(headers))
        return PublishAck(stored.stream, stored.seq, bool(stored.duplicate))

    async def close(self) -> None:
        pass


Troubled = tuple[TroubledStore, Callable[[], Ingester]]


"""A store, and what makes an ingester of the same source into it."""


@pytest.mark.parametrize("troubled", ["dlq"], indirect=True)
async def test_a_store_that_is_down_is_waited_for_and_makes_no_dead_letters(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    ids = [str(number) for number in range(60)]
    await publish(client, *envelopes(ids))
    store.fail = lambda _: Unavailable("down") if store.calls < 20 else None
    counts = await ingester.run(idle_ms=IDLE_MS)
    assert (counts.stored, counts.dead_lettered, counts.deferred) == (60, 0, 0)
    assert counts.retries > 0
    assert stored(sqlite) == Counter(ids)
    assert await unacked(client) == 0


def is_poison(blob: bytes) -> bool:
    return PrismEnvelope.FromString(blob).metadata.message_id == "poison"


@pytest.mark.parametrize("troubled", ["dlq"], indirect=True)
async def test_a_message_that_fails_alone_while_others_are_stored_is_dead_lettered(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    ids = [str(number) for number in range(30)]
    await publish(client, envelope("poison"), *envelopes(ids))
    store.fail = lambda blobs: Unavailable("does not compute") if any(map(is_poison, blobs)) else None
    running = asyncio.create_task(ingester.run(idle_ms=IDLE_MS))
    async with asyncio.timeout(SECONDS):
        while not ingester.counts.dead_lettered:  # it takes others to show that the store works
            await publish(client, envelope(f"later-{store.calls}"))
            await asyncio.sleep(0.05)
        counts = await running
    assert counts.dead_lettered == 1
    assert stored(sqlite).keys() >= set(ids)
    assert set(stored(sqlite).values()) == {1}
    ((data, headers),) = await dead_letters(client)
    assert is_poison(data)
    assert headers["Postroom-Reason"] == "does not compute"
    assert await unacked(client) == 0


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_without_a_dead_letter_subject_it_is_left_to_the_source(
    client: Client, troubled: Troubled, sqlite: str
) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, envelope("poison"), *envelopes(["1", "2"]))
    store.fail = lambda blobs: Unavailable("does not compute") if any(map(is_poison, blobs)) else None
    running = asyncio.create_task(ingester.run(idle_ms=IDLE_MS))
    async with asyncio.timeout(SECONDS):
        while not ingester.counts.deferred:
            await publish(client, envelope(f"later-{store.calls}"))
            await asyncio.sleep(0.05)
        await running
    assert await unacked(client) == 1
    store.fail = lambda _: None
    await client.jetstream().delete_consumer(STREAM, DURABLE)  # or wait a minute
    assert "poison" not in stored(sqlite)


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_a_full_mailbox_is_waited_for(client: Client, troubled: Troubled, sqlite: str) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, *envelopes(["1", "2", "3"]))
    store.fail = lambda _: Saturated("many commands", 5) if store.calls < 3 else None
    store.refuse = lambda blob: Saturated("full", 5) if store.calls < 6 and b"2" in blob else None
    counts = await ingester.run(idle_ms=IDLE_MS)
    assert counts == IngestCounts(received=3, stored=3)
    assert stored(sqlite) == Counter(["1", "2", "3"])


@pytest.mark.parametrize("troubled", ["none"], indirect=True)
async def test_stopping_while_the_store_is_down_hands_the_messages_back(
    client: Client, troubled: Troubled
) -> None:
    store, make = troubled
    ingester = make()
    await publish(client, *envelopes(["1", "2"]))
    store.fail = lambda _: Unavailable("down")
    running = asyncio.create_task(ingester.run())
    await until(lambda: ingester.counts.retries)
    ingester.stop()
    counts = await running
    assert counts.stored == 0
    store.fail = lambda _: None
    again = await make().run(idle_ms=IDLE_MS)
    assert again.stored == 2
