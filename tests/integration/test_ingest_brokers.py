"""What can't be stored goes to a dead-letter target of the same broker; the rest is stored once."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs
from redis.asyncio import Redis

from postroom.application.cloudevents import KAFKA
from postroom.application.ingest.namespace import IngestCounts, KafkaSource, Namespace, RedisSource
from tests.integration.ingest_world import DURABLE, ingest, namespace, stored
from tests.integration.test_ingest import postroom
from tests.support.archived import ARCHIVED, archived, cloud_events, sdk_event
from tests.support.cloud_events import write_by_sdk
from tests.support.logs import capture_logs
from tests.support.stores import envelope


def of_redis(redis_url: str, sqlite: str) -> tuple[Namespace, str, str]:
    """Return a namespace that ingests a new stream of Redis, the stream, and the stream for dead letters."""
    stream, dead = f"acme-{uuid4().hex}", f"dead-{uuid4().hex}"
    source = RedisSource(
        url=redis_url, stream=stream, consumer_group=DURABLE, field="data", dead_letter_stream=dead
    )
    return msgspec.structs.replace(namespace("", sqlite), source=source), stream, dead


async def test_redis_streams_have_a_stream_for_dead_letters(redis_url: str, sqlite: str) -> None:
    what, stream, dead = of_redis(redis_url, sqlite)
    redis: Any
    async with Redis.from_url(redis_url) as redis:
        await redis.xadd(stream, {"data": envelope("1")})
        place = (await redis.xadd(stream, {"data": b"\x00junk\xff", "trace": "abc"})).decode()
        assert await ingest(what) == IngestCounts(received=2, stored=1, dead_lettered=1)
        ((_, fields),) = await redis.xrange(dead)
    headers = {name.decode(): value for name, value in fields.items()}
    assert headers.pop("data") == b"\x00junk\xff"
    assert (headers["trace"], headers["Postroom-Original-Sequence"]) == (b"abc", place.encode())
    assert headers["Postroom-Original-Subject"] == stream.encode()
    assert b"not a PrismEnvelope" in headers["Postroom-Reason"]
    assert headers["Postroom-Dead-Letter-Id"].startswith(b"dlq:")


async def test_cloud_events_of_redis_are_archived(redis_url: str, sqlite: str) -> None:
    what, stream, _ = of_redis(redis_url, sqlite)
    redis: Any
    async with Redis.from_url(redis_url) as redis:
        for event in cloud_events(KAFKA):
            await redis.xadd(stream, event.headers | {"data": event.payload})
    assert await ingest(what) == IngestCounts(received=5, stored=2, duplicates=1, dead_lettered=2)
    assert archived(sqlite, what.mailbox) == ARCHIVED


async def test_without_such_a_stream_they_stay_where_they_are(redis_url: str, sqlite: str) -> None:
    redis: Any
    async with Redis.from_url(redis_url) as redis:
        stream, dead = f"acme-{uuid4().hex}", f"dead-{uuid4().hex}"
        await redis.set(dead, "not a stream")
        await redis.xadd(stream, {"data": b"junk"})
        source = RedisSource(
            url=redis_url, stream=stream, consumer_group=DURABLE, field="data", dead_letter_stream=dead
        )
        what = msgspec.structs.replace(namespace("", sqlite), source=source)
        with capture_logs() as logs:
            assert await ingest(what) == IngestCounts(received=1, deferred=1)
        (refusal,) = [each for each in logs if each["event"] == "ingest.dead_letter_refused"]
        assert "WRONGTYPE" in refusal["error"]
        assert (await redis.xpending(stream, DURABLE))["pending"] == 1


async def test_kafka_topics_are_ingested_with_dead_letters_and_tombstones(
    kafka_servers: str, tmp_path: Path
) -> None:
    topic, dead = f"acme-{uuid4().hex}", f"dead-{uuid4().hex}"
    await asyncio.to_thread(create_topics, kafka_servers, topic, dead)
    producer = Producer({"bootstrap.servers": kafka_servers})
    registry = b"\x00\x00\x00\x00\x07\x00"  # the framing of a schema registry
    for value in (envelope("1"), registry + envelope("2"), None, envelope("1")):
        producer.produce(topic, value, key=b"order-1")
    producer.produce(topic, b"junk", key=b"order-2", headers=[("trace", b"abc")])
    assert await asyncio.to_thread(producer.flush, 20) == 0
    store = str(tmp_path / "store.db")
    source = KafkaSource(
        url=f"kafka://{kafka_servers}", topic=topic, consumer_group=f"group-{topic}", dead_letter_topic=dead
    )
    what = msgspec.structs.replace(namespace("", store), source=source)
    counts = await ingest(what)
    assert counts == IngestCounts(received=5, stored=2, duplicates=1, skipped=1, dead_lettered=1)
    assert stored(store) == Counter(["1", "2"])
    data, headers = await asyncio.to_thread(read_one, kafka_servers, dead)
    assert data == b"junk"
    assert (headers["trace"], headers["Postroom-Original-Key"]) == (b"abc", b"order-2")
    assert (headers["Postroom-Original-Subject"], headers["Postroom-Original-Sequence"]) == (
        topic.encode(),
        b"0:4",
    )
    assert b"not a PrismEnvelope" in headers["Postroom-Reason"]
    again = await postroom(
        "ingest", "--url", source.url, "--subject", topic, "--durable", source.consumer_group,
        "--store", store, "--mailbox", what.mailbox, "--once", "--json",
    )  # fmt: skip
    assert again["received"] == 0


@pytest.mark.extended
async def test_cloud_events_of_kafka_are_archived_also_one_without_data(
    kafka_servers: str, tmp_path: Path
) -> None:
    topic, dead = f"acme-{uuid4().hex}", f"dead-{uuid4().hex}"
    await asyncio.to_thread(create_topics, kafka_servers, topic, dead)
    producer = Producer({"bootstrap.servers": kafka_servers})
    for event in cloud_events(KAFKA):
        producer.produce(topic, event.payload, key=b"o-1", headers=list(event.headers.items()))
    empty = write_by_sdk(sdk_event("3", None), KAFKA, "binary")
    producer.produce(topic, None, key=b"o-1", headers=list(empty.headers.items()))
    assert await asyncio.to_thread(producer.flush, 20) == 0
    store = str(tmp_path / "store.db")
    source = KafkaSource(
        url=f"kafka://{kafka_servers}", topic=topic, consumer_group=f"group-{topic}", dead_letter_topic=dead
    )
    what = msgspec.structs.replace(namespace("", store), source=source)
    assert await ingest(what) == IngestCounts(received=6, stored=3, duplicates=1, dead_lettered=2)
    assert archived(store, what.mailbox) == [*ARCHIVED, ("order.placed", "/shop|3", None, b"", None)]
    _, headers = await asyncio.to_thread(read_one, kafka_servers, dead)
    assert b"This is a batch of CloudEvents" in headers["Postroom-Reason"]


def create_topics(servers: str, *topics: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers})
    for each in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        each.result(20)


def read_one(servers: str, topic: str) -> tuple[bytes, dict[str, bytes]]:
    consumer = Consumer({"bootstrap.servers": servers, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    message = consumer.poll(60)
    assert message is not None
    assert message.error() is None
    data, headers = message.value() or b"", dict(message.headers() or [])
    consumer.close()
    return data, headers  # type: ignore[return-value]  # headers with text are bytes
