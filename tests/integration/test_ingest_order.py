"""The order of a sticky key holds, whatever the store does."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from random import Random
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs

from postroom.adapters.compose import open_mailbox
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.kafka.source import KafkaTopicSource, TopicConsumer
from postroom.application.ingest.ingester import Ingester
from postroom.application.ingest.namespace import IngestSettings
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Unavailable
from tests.integration.ingest_world import MAILBOX, stored_ids
from tests.support.stores import envelope
from tests.support.troubled_store import TroubledStore
from tests.support.waiting import SECONDS

KEYS, MESSAGES = 5, 400


@pytest.fixture
async def source(kafka_servers: str) -> AsyncIterator[KafkaTopicSource]:
    """A topic with messages of several keys, of which each names its key and its number."""
    topic = f"order-{uuid4().hex}"
    admin = AdminClient({"bootstrap.servers": kafka_servers})
    await asyncio.to_thread(admin.create_topics([NewTopic(topic, 1, 1)])[topic].result, 20)
    producer = Producer({"bootstrap.servers": kafka_servers})
    for number in range(MESSAGES):
        key = number % KEYS
        producer.produce(topic, envelope(f"{key}-{number // KEYS}"), key=b"%d" % key)
    assert await asyncio.to_thread(producer.flush, 20) == 0
    consumer = TopicConsumer(topic=topic, group=topic, session_timeout_ms=3_000)
    source = await KafkaTopicSource.open(KafkaSettings(url=f"kafka://{kafka_servers}"), consumer)
    yield source
    await source.close()


def id_of(blob: bytes) -> str:
    return PrismEnvelope.FromString(blob).metadata.message_id


async def ingest_in_order(
    source: KafkaTopicSource, store: str, fail: Callable[[int, Sequence[str]], bool]
) -> None:
    """Ingest into a store that fails for some calls, and check that each key has its order."""
    async with open_mailbox(store, MAILBOX, mode="archive") as postroom:
        trouble = TroubledStore(postroom.send_envelopes)
        trouble.fail = lambda blobs: (
            Unavailable("down") if fail(trouble.calls, [id_of(blob) for blob in blobs]) else None
        )
        send: Any = trouble
        ingester = Ingester(source, send, IngestSettings(10, max_retries=3))
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            running = tasks.create_task(ingester.run())
            while ingester.counts.stored < MESSAGES:
                assert not running.done()
                await asyncio.sleep(0.01)
            ingester.stop()
    by_key = defaultdict(list)
    for id_ in stored_ids(store):
        key, _, number = id_.partition("-")
        by_key[key].append(int(number))
    assert by_key == {str(key): list(range(MESSAGES // KEYS)) for key in range(KEYS)}


async def test_the_order_of_a_key_holds_while_the_store_fails_now_and_then(
    source: KafkaTopicSource, sqlite: str
) -> None:
    random = Random(15)
    await ingest_in_order(source, sqlite, lambda call, ids: random.random() < 0.2)


async def test_messages_of_a_key_wait_for_one_that_fails_alone_while_others_are_stored(
    source: KafkaTopicSource, sqlite: str
) -> None:
    failures = 0

    def fail(_: int, ids: Sequence[str]) -> bool:
        nonlocal failures
        if "2-7" not in ids or failures >= 3:
            return False
        failures += len(ids) == 1
        return True

    await ingest_in_order(source, sqlite, fail)
    assert failures == 3
