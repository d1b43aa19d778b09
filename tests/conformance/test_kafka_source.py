"""The source conformance suite on Kafka, and what only Kafka has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs

from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.kafka.source import KafkaTopicSource, TopicConsumer
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.conformance.source import PATIENT_MS, SourceConformance, bodies, fetch

GROUP = "reader"
SESSION_TIMEOUT_MS = 3_000
"""The broker of the tests makes a member wait for half of this when it joins."""


class KafkaPlace:
    """A topic with one partition, unless a test creates it with more."""

    def __init__(self, servers: str, opened: AsyncExitStack) -> None:
        self.servers = servers
        self.topic = f"test-{uuid4().hex}"
        self._opened = opened
        self._client = Producer({"bootstrap.servers": servers, "linger.ms": 0})

    async def create(self, partitions: int = 1) -> None:
        admin = AdminClient({"bootstrap.servers": self.servers})
        for each in admin.create_topics([NewTopic(self.topic, partitions, 1)]).values():
            await asyncio.to_thread(each.result, 20)

    async def publish(self, *data: bytes | None, **options: Any) -> None:
        for each in data:
            self._client.produce(self.topic, each, **options)
        assert await asyncio.to_thread(self._client.flush, 20) == 0

    async def open(self, *, ack_wait_ms: int = PATIENT_MS, **settings: Any) -> KafkaTopicSource:
        values: dict[str, Any] = {
            "topic": self.topic,
            "group": f"{GROUP}-{self.topic}",
            "session_timeout_ms": SESSION_TIMEOUT_MS,
        } | settings
        source = await KafkaTopicSource.open(
            KafkaSettings(url=f"kafka://{self.servers}"), TopicConsumer(ack_wait_ms=ack_wait_ms, **values)
        )
        self._opened.push_async_callback(source.close)
        return source


@pytest.fixture
async def place(kafka_servers: str) -> AsyncIterator[KafkaPlace]:
    async with AsyncExitStack() as opened:
        place = KafkaPlace(kafka_servers, opened)
        await place.create()
        yield place


class TestKafkaSource(SourceConformance):
    pass


async def test_keys_are_sticky_keys_and_headers_and_tombstones_arrive(place: KafkaPlace) -> None:
    source = await place.open()
    await place.publish(b"1", key=b"order-1", headers=[("trace", b"\xff"), ("trace", b"2"), ("none", None)])
    await place.publish(None, key=b"\xff\xff")
    await place.publish(b"")
    first, tombstone, empty = await fetch(source, 3)
    assert (first.sticky_key, first.subject, first.sequence) == ("order-1", place.topic, "0:0")
    assert list(first.header_pairs) == [("trace", "\ufffd"), ("trace", "2"), ("none", "")]
    assert (tombstone.data, tombstone.is_tombstone, empty.is_tombstone) == (b"", True, False)
    assert (tombstone.sticky_key or "").startswith("b3:")
    assert bodies([empty]) == [b""]
    assert empty.sticky_key is None


async def test_the_framing_of_a_schema_registry_is_not_part_of_the_envelope(place: KafkaPlace) -> None:
    source = await place.open()
    framed = b"\x00\x00\x00\x00\x07\x02\x00" + b"\x08\x01"
    await place.publish(framed, b"\x00\x00\x00\x00\x07\x00\x08\x01", b"\x08\x01")
    messages = await fetch(source, 3)
    assert [message.envelope for message in messages] == [b"\x08\x01"] * 3
    assert messages[0].data == framed


async def test_messages_of_a_full_buffer_wait_at_the_broker_and_the_member_stays(place: KafkaPlace) -> None:
    source = await place.open(prefetch=10, max_unsettled=20)
    await place.publish(*[b"%d" % number for number in range(3_000)])
    seen: list[bytes] = []
    while len(seen) < 3_000:
        await asyncio.sleep(1.5 if not seen else 0)  # longer than it takes to pause the partitions
        messages = await source.fetch(1_000, PATIENT_MS)
        seen += bodies(messages)
        await source.ack(messages)
    assert seen == [b"%d" % number for number in range(3_000)]
    assert await source.count_pending() == 0


async def test_of_a_partition_that_is_revoked_the_next_member_receives_what_was_not_acked(
    place: KafkaPlace,
) -> None:
    first = await place.open()
    await place.publish(*[b"%d" % number for number in range(50)])
    messages = await fetch(first, 20)
    await first.ack(messages[:10])
    await first.nack(messages[10:], 60_000)
    second = await place.open()
    await first.close()
    again = await fetch(second, 40)
    assert bodies(again) == [b"%d" % number for number in range(10, 50)]
    await second.ack(again)
    assert await second.count_pending() == 0


async def test_a_missing_topic_and_a_wrong_address_are_told(place: KafkaPlace) -> None:
    with pytest.raises(NotFound, match=r"create the topic, or name another\.$"):
        await place.open(topic="missing")
    with pytest.raises(InvalidRequest, match="not the name of a Kafka topic"):
        await place.open(topic="^a.*")
    settings = KafkaSettings(url="kafka://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"can't be opened: .*\. Check its URL and that a broker runs"):
        await KafkaTopicSource.open(settings, TopicConsumer(topic="orders", group=GROUP))


@pytest.mark.parametrize(
    "settings",
    [
        {"url": "nats://127.0.0.1"},
        {"url": "kafka://user:secret@127.0.0.1"},
        {"url": "kafka://127.0.0.1:99999"},
        {"url": "kafka://"},
        {"url": "kafka://127.0.0.1", "ca": "ca.pem"},
        {"url": "kafka://127.0.0.1", "user": "reader"},
        {"url": "kafka+ssl://127.0.0.1", "key": "key.pem"},
    ],
    ids=["scheme", "password", "port", "empty", "ca", "user", "key"],
)
def test_settings_that_are_inconsistent_are_refused_without_secrets(settings: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        KafkaSettings(**settings)  # type: ignore[arg-type]  # values of the parameters are text
    assert "secret" not in str(refused.value)


async def test_a_password_is_read_from_a_file(tmp_path: Path) -> None:
    settings = KafkaSettings(url="kafka+ssl://a:1,b", user="reader", password_file=str(tmp_path / "password"))
    with pytest.raises(InvalidRequest, match=r"password file .* can't be read"):
        settings.client_settings()
    (tmp_path / "password").write_text("secret\n")
    client = settings.client_settings()
    assert (client["security.protocol"], client["sasl.password"]) == ("sasl_ssl", "secret")
    assert client["bootstrap.servers"] == "a:1,b"
