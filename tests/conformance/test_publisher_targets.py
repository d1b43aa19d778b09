"""The publisher conformance suite on mailboxes and on Kafka; on RabbitMQ see `test_rabbitmq_source.py`."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]  # not in its stubs

from postroom import ReceivedMessage, connect
from postroom.adapters.kafka.publisher import KafkaPublisher
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.application.cloudevents import KAFKA, MAILBOX
from postroom.application.operations.mailbox import Mailbox
from postroom.application.outbox.message_relay import JSON, MailboxPublisher
from postroom.application.ports.outbox import Publisher
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.conformance.publisher import PublisherConformance, Stored
from tests.support.servers.kafka import KafkaServer

PATIENT_MS, IMPATIENT_MS = 60_000, 2_000
"""Impatient, but long enough to connect on a busy machine, and too short for the take-over of a mailbox."""
EVENT_ID = "Event-Id"


class MailboxTarget:
    """A topic of a mailbox in a SQLite file, which a lock of another process makes wait."""

    def __init__(self, store: Path, mailbox: Mailbox, topic: str) -> None:
        self._mailbox = mailbox
        self._topic = topic
        self._store = sqlite3.connect(store, isolation_level=None, timeout=60)

    async def messages(self) -> list[Stored]:
        received: list[ReceivedMessage] = []
        while batch := await self._mailbox.receive_messages(self._topic, max_messages=256):
            received += batch
        return [
            Stored(
                each.topic,
                each.payload,
                {EVENT_ID: each.message_id}
                | each.attrs
                | ({} if each.content_type == JSON else {"Content-Type": each.content_type or ""})
                | ({"Correlation-Id": each.correlation_id} if each.correlation_id else {}),
            )
            for each in received
        ]

    async def pause(self) -> None:
        self._store.execute("BEGIN IMMEDIATE")

    async def resume(self) -> None:
        self._store.execute("ROLLBACK")

    def close(self) -> None:
        self._store.close()


class TestMailboxPublisher(PublisherConformance):
    subject = "sea.order"
    refused = "sea order"
    refusal = "Topic name 'sea order' must be"
    id_header = EVENT_ID
    binding = MAILBOX
    in_flight = 500
    too_large = 20 << 20

    @pytest.fixture
    def store(self, tmp_path: Path) -> Path:
        return tmp_path / "sea.db"

    @pytest.fixture
    async def mailbox(self, store: Path) -> AsyncIterator[Mailbox]:
        async with connect(str(store), timeout_ms=PATIENT_MS) as mailbox:
            yield mailbox

    @pytest.fixture
    def publisher(self, mailbox: Mailbox) -> MailboxPublisher:
        return MailboxPublisher(mailbox)

    @pytest.fixture
    async def impatient(self, store: Path, mailbox: Mailbox) -> AsyncIterator[Publisher]:
        async with connect(str(store), timeout_ms=IMPATIENT_MS) as other:
            yield MailboxPublisher(other)

    @pytest.fixture
    def stream(self, store: Path, mailbox: Mailbox) -> Iterator[MailboxTarget]:
        target = MailboxTarget(store, mailbox, self.subject)
        yield target
        target.close()

    async def test_one_refused_event_of_many_at_once_affects_only_itself(
        self, publisher: Publisher, mailbox: Mailbox
    ) -> None:
        subjects = [self.subject] * 10 + [self.refused] + [self.subject] * 10
        published = await asyncio.gather(
            *(
                publisher.publish(subject, b"%d" % n, {EVENT_ID: f"e-{n}"})
                for n, subject in enumerate(subjects)
            ),
            return_exceptions=True,
        )
        assert [n for n, each in enumerate(published) if isinstance(each, InvalidRequest)] == [10]
        messages = await mailbox.receive_messages(self.subject, max_messages=100)
        assert [message.payload for message in messages] == [b"%d" % n for n in range(21) if n != 10]

    async def test_events_whose_batch_is_refused_are_sent_one_by_one(self, mailbox: Mailbox) -> None:
        class RefusesBatches:
            name = mailbox.name
            send_message = mailbox.send_message

            async def send_batch(self, _: object) -> None:
                raise InvalidRequest("One of them is wrong.")

        publisher = MailboxPublisher(RefusesBatches())  # type: ignore[arg-type]  # of what it uses
        publishes = (publisher.publish(self.subject, b"%d" % n, {EVENT_ID: f"e-{n}"}) for n in range(3))
        assert [each.duplicate for each in await asyncio.gather(*publishes)] == [False] * 3
        messages = await mailbox.receive_messages(self.subject)
        assert sorted(message.payload for message in messages) == [b"0", b"1", b"2"]

    async def test_an_event_is_a_message_with_its_own_id_and_aggregate(
        self, publisher: Publisher, mailbox: Mailbox
    ) -> None:
        trace, span = "a" * 32, "b" * 16
        headers = {
            EVENT_ID: "e-1",
            "Aggregate-Id": "x" * 300,
            "Causation-Id": "e-0",
            "traceparent": f"00-{trace}-{span}-01",
        }
        await publisher.publish(self.subject, b"{}", headers)
        again = await publisher.publish(self.subject, b"{}", headers)
        (message,) = await mailbox.receive_messages(self.subject)
        assert (again.duplicate, message.message_id, message.content_type) == (
            True,
            "e-1",
            "application/json",
        )
        assert (message.causality_parent, message.trace_id, message.span_id) == ("e-0", trace, span)


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker of this file's own, which is paused."""
    try:
        server = KafkaServer(tmp_path_factory.mktemp("kafka"))
    except Unavailable as error:
        pytest.skip(str(error))
    with server:
        yield server


class KafkaTarget:
    """A topic of Kafka."""

    def __init__(self, server: KafkaServer, topic: str) -> None:
        self._server = server
        self._topic = topic

    async def create(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._server.servers})
        for each in admin.create_topics([NewTopic(self._topic, 1, 1)]).values():
            await asyncio.to_thread(each.result, 20)

    async def messages(self) -> list[Stored]:
        return await asyncio.to_thread(self._read)

    def _read(self) -> list[Stored]:
        consumer = Consumer(
            {"bootstrap.servers": self._server.servers, "group.id": "test", "enable.partition.eof": True}
        )
        consumer.assign([TopicPartition(self._topic, 0, 0)])
        messages: list[Message] = []
        while (message := consumer.poll(60)) is not None and message.error() is None:
            messages.append(message)
        consumer.close()
        problem = None if message is None else message.error()
        assert problem is not None
        assert problem.code() == KafkaError._PARTITION_EOF
        return [
            Stored(
                each.topic() or "",
                each.value() or b"",
                {name: str(value, "utf-8") for name, value in each.headers() or []},  # type: ignore[arg-type, str-unpack]
            )
            for each in messages
        ]

    async def pause(self) -> None:
        self._server.pause()

    async def resume(self) -> None:
        self._server.resume()


class TestKafkaPublisher(PublisherConformance):
    refused = "no.such.topic"
    refusal = "Kafka refuses a message for topic no.such.topic: .*create the topic"
    id_header = EVENT_ID
    binding = KAFKA
    in_flight = 1_000
    stores_once = False

    @pytest.fixture
    async def stream(self, kafka: KafkaServer) -> KafkaTarget:
        self.subject = f"sea.order.{uuid4().hex}"
        target = KafkaTarget(kafka, self.subject)
        await target.create()
        return target

    @pytest.fixture
    async def publisher(self, kafka: KafkaServer, stream: KafkaTarget) -> AsyncIterator[Publisher]:
        publisher = KafkaPublisher(
            KafkaSettings(url=f"kafka://{kafka.servers}"), PATIENT_MS, key_header="Aggregate-Id"
        )
        yield publisher
        await publisher.close()

    @pytest.fixture
    async def impatient(self, kafka: KafkaServer, stream: KafkaTarget) -> AsyncIterator[Publisher]:
        publisher = KafkaPublisher(KafkaSettings(url=f"kafka://{kafka.servers}"), IMPATIENT_MS)
        yield publisher
        await publisher.close()
