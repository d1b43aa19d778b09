"""The conformance suites of sources and publishers on RabbitMQ, and what only RabbitMQ has."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import aio_pika
import msgspec
import pytest
from aio_pika.abc import AbstractConnection
from aio_pika.exceptions import CONNECTION_EXCEPTIONS

from postroom.adapters.rabbitmq import connection
from postroom.adapters.rabbitmq import source as adapter
from postroom.adapters.rabbitmq.connection import RabbitmqPublisher
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.adapters.rabbitmq.source import QueueConsumer, RabbitmqQueueSource
from postroom.application.cloudevents import AMQP, read_message
from postroom.application.ingest.namespace import IngestCounts, RabbitmqSource
from postroom.application.ports.outbox import Publisher
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.conformance.publisher import PublisherConformance, Stored
from tests.conformance.source import NOTHING_MS, PATIENT_MS, SourceConformance, bodies, fetch
from tests.integration.ingest_world import ingest, namespace, stored
from tests.support.archived import ARCHIVED, archived, cloud_events
from tests.support.servers.rabbitmq import RabbitmqServer
from tests.support.stores import envelope
from tests.support.waiting import within

ID_HEADER = "Event-Id"


class RabbitmqPlace:
    """A quorum queue, or a stream."""

    def __init__(self, url: str, kind: str, opened: AsyncExitStack) -> None:
        self.url = url
        self.kind = kind
        self.queue = f"test-{uuid4().hex}"
        self._opened = opened

    async def create(self) -> None:
        connection = await aio_pika.connect(self.url)
        self._opened.push_async_callback(_close, connection)
        self.channel = await connection.channel()
        await self.declare(self.queue)

    async def declare(self, name: str, **arguments: Any) -> None:
        kind = {"x-queue-type": self.kind}
        await self.channel.declare_queue(name, durable=True, arguments=kind | arguments)

    async def publish(self, *data: bytes, **options: Any) -> None:
        for each in data:
            message = aio_pika.Message(each, delivery_mode=2, **options)
            await self.channel.default_exchange.publish(message, self.queue)

    async def open(self, *, ack_wait_ms: int = PATIENT_MS, **settings: Any) -> RabbitmqQueueSource:
        values: dict[str, Any] = {
            "queue": self.queue,
            "group": "reader",
            "is_stream": self.kind == "stream",
        } | settings
        source = await RabbitmqQueueSource.open(
            RabbitmqSettings(url=self.url), QueueConsumer(ack_wait_ms=ack_wait_ms, **values)
        )
        self._opened.push_async_callback(source.close)
        return source


@pytest.fixture
async def place(rabbitmq_server: RabbitmqServer) -> AsyncIterator[RabbitmqPlace]:
    async with AsyncExitStack() as opened:
        place = RabbitmqPlace(rabbitmq_server.url, "quorum", opened)
        await place.create()
        yield place


@pytest.fixture
async def stream(rabbitmq_server: RabbitmqServer) -> AsyncIterator[RabbitmqPlace]:
    async with AsyncExitStack() as opened:
        place = RabbitmqPlace(rabbitmq_server.url, "stream", opened)
        await place.create()
        yield place


class TestRabbitmqSource(SourceConformance):
    pass


async def test_a_group_reads_a_stream_from_its_beginning_and_goes_on_where_it_was(
    stream: RabbitmqPlace,
) -> None:
    await stream.publish(*[b"%d" % number for number in range(20)])
    first = await stream.open()
    messages = await fetch(first, 15)
    assert bodies(messages) == [b"%d" % number for number in range(15)]
    assert [message.sequence for message in messages] == [str(number) for number in range(15)]
    await first.ack(messages[:5])
    await first.ack(messages[7:])
    await first.close()
    again = await stream.open()
    assert bodies(await fetch(again, 15)) == [b"%d" % number for number in range(5, 20)]
    other = await stream.open(group="other")
    assert bodies(await fetch(other, 1)) == [b"0"]


async def test_headers_and_earlier_deliveries_are_told(place: RabbitmqPlace) -> None:
    source = await place.open()
    await place.publish(b"1", headers={"trace": "abc", "count": 3}, message_id="order-1")
    (message,) = await fetch(source, 1)
    assert dict(message.headers) == {"trace": "abc", "count": "3", "message_id": "order-1"}
    assert (message.subject, message.delivered) == (place.queue, 1)
    await source.close()
    (again,) = await fetch(await place.open(), 1)
    assert again.delivered == 2


async def test_a_missing_queue_a_wrong_user_and_a_stream_named_as_a_queue_are_told(
    place: RabbitmqPlace, stream: RabbitmqPlace
) -> None:
    with pytest.raises(NotFound, match=r"no queue 'missing'.*; create it, or name another\.$"):
        await place.open(queue="missing")
    url = f"amqp://nobody:secret@{place.url.rpartition('@')[2]}"
    with pytest.raises(InvalidRequest, match="check user, password and virtual host") as refused:
        await RabbitmqQueueSource.open(RabbitmqSettings(url=url), QueueConsumer(queue="a", group="b"))
    assert "secret" not in str(refused.value)
    with pytest.raises(Unavailable, match=r"can't be opened: .* when RabbitMQ is available"):
        await RabbitmqQueueSource.open(
            RabbitmqSettings(url="amqp://127.0.0.1:1"), QueueConsumer(queue="a", group="b")
        )


async def test_a_queue_that_is_deleted_while_it_is_read_is_missed(
    place: RabbitmqPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await place.open()
    await place.channel.queue_delete(place.queue)
    monkeypatch.setattr("postroom.adapters.rabbitmq.source.PROBE_SECONDS", 0)
    with pytest.raises(NotFound):
        await _fetch_until_it_fails(source)


async def test_a_queue_with_a_single_active_consumer_keeps_order_for_a_second_ingester(
    place: RabbitmqPlace,
) -> None:
    place.queue = f"test-{uuid4().hex}"
    await place.declare(place.queue, **{"x-single-active-consumer": True})
    first, second = await place.open(), await place.open()
    await place.publish(b"0", b"1")
    assert bodies(await fetch(first, 2)) == [b"0", b"1"]
    await place.publish(b"2", b"3")
    assert await second.fetch(10, NOTHING_MS) == []
    await first.close()
    assert bodies(await fetch(second, 4)) == [b"0", b"1", b"2", b"3"]


async def test_a_connection_that_opens_after_its_timeout_consumes_nothing(
    place: RabbitmqPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_late = asyncio.Event()
    late: list[asyncio.Task[Any]] = []

    async def connect_late(*arguments: Any) -> AbstractConnection:
        """Connect when the event is set, and ignore a cancellation, as the client may."""
        monkeypatch.setattr(adapter, "connect", connection.connect)

        async def connect() -> AbstractConnection:
            await within(is_late.wait())
            return await connection.connect(*arguments)

        late.append(asyncio.create_task(connect()))
        while True:
            with suppress(asyncio.CancelledError):
                return await asyncio.shield(late[0])

    source = RabbitmqQueueSource(
        RabbitmqSettings(url=place.url), QueueConsumer(queue=place.queue, group="reader")
    )
    monkeypatch.setattr(adapter, "connect", connect_late)
    with monkeypatch.context() as impatient:
        impatient.setattr(adapter, "TIMEOUT_SECONDS", 0.05)
        with pytest.raises(Unavailable):
            await source.fetch(10, 0)
    assert await source.fetch(10, 0) == []
    is_late.set()
    await asyncio.wait(late)
    await asyncio.sleep(0.3)  # in which a late consumer would be declared
    queue = await place.channel.declare_queue(place.queue, passive=True)
    assert queue.declaration_result.consumer_count == 1
    await place.publish(*(str(number).encode() for number in range(4)))
    messages = await fetch(source, 4)
    assert bodies(messages) == [b"0", b"1", b"2", b"3"]
    await source.close()


async def test_what_can_not_be_stored_goes_to_the_dead_letter_exchange(
    place: RabbitmqPlace, tmp_path: Path
) -> None:
    dead = f"dead-{uuid4().hex}"
    await place.declare(dead)
    await place.publish(envelope("1"), envelope("1"))
    await place.publish(b"junk", headers={"trace": "abc"})
    source = RabbitmqSource(
        url=place.url, queue=place.queue, consumer_group="archive", dead_letter_routing_key=dead
    )
    store = str(tmp_path / "store.db")
    what = msgspec.structs.replace(namespace("", store), source=source)
    counts = IngestCounts(received=3, stored=1, duplicates=1, dead_lettered=1)
    assert await ingest(what) == counts
    assert stored(store) == Counter(["1"])
    letter = await (await place.channel.get_queue(dead)).get(timeout=20)
    assert letter is not None
    assert (letter.body, letter.headers["trace"]) == (b"junk", "abc")
    assert "not a PrismEnvelope" in str(letter.headers["Postroom-Reason"])
    assert (letter.message_id or "").startswith("dlq:archive:")
    await place.publish(b"junk")
    nowhere = msgspec.structs.replace(source, dead_letter_routing_key="nowhere")
    assert await ingest(msgspec.structs.replace(what, source=nowhere)) == IngestCounts(received=1, deferred=1)


async def test_cloud_events_are_archived_and_invalid_ones_become_dead_letters(
    place: RabbitmqPlace, tmp_path: Path
) -> None:
    for event in cloud_events(AMQP):
        headers = dict(event.headers)
        content_type = headers.pop("content-type")
        await place.publish(event.payload, headers=headers, content_type=content_type)
    dead = f"dead-{uuid4().hex}"
    await place.declare(dead)
    source = RabbitmqSource(
        url=place.url, queue=place.queue, consumer_group="archive", dead_letter_routing_key=dead
    )
    what = msgspec.structs.replace(namespace("", str(tmp_path / "store.db")), source=source)
    assert await ingest(what) == IngestCounts(received=5, stored=2, duplicates=1, dead_lettered=2)
    assert archived(what.store, what.mailbox) == ARCHIVED
    letter = await (await place.channel.get_queue(dead)).get(timeout=20)
    assert letter is not None
    assert letter.content_type == "application/cloudevents-batch+json"


async def test_both_prefixes_of_amqp_and_its_types_are_read(place: RabbitmqPlace) -> None:
    source = await place.open()
    time = datetime(2026, 1, 15, 8, tzinfo=UTC)
    headers: Any = {"cloudEvents:id": "1", "cloudEvents_source": "/s", "cloudEvents_specversion": "1.0"}
    headers |= {"cloudEvents_type": "t", "cloudEvents_time": time, "cloudEvents_urgent": True}
    await place.publish(b"1", headers=headers)
    (message,) = await fetch(source, 1)
    event = read_message(message.header_pairs, message.data)
    assert (event.attributes["id"], event.attributes["urgent"]) == ("1", "true")
    assert event.time_us == 1_768_464_000_000_000


class RabbitmqTarget:
    """A quorum queue, written to by the default exchange."""

    def __init__(self, server: RabbitmqServer, place: RabbitmqPlace) -> None:
        self._server = server
        self._place = place

    async def messages(self) -> list[Stored]:
        queue = await self._place.channel.get_queue(self._place.queue)
        stored = []
        while (message := await queue.get(fail=False, no_ack=True, timeout=60)) is not None:
            assert message.message_id == message.headers.get(ID_HEADER, message.message_id)
            headers = {k: str(value) for k, value in message.headers.items() if k != "x-delivery-count"}
            stored.append(Stored(message.routing_key or "", message.body, headers))
        return stored

    async def pause(self) -> None:
        self._server.pause()

    async def resume(self) -> None:
        self._server.resume()


class TestRabbitmqPublisher(PublisherConformance):
    refused = "no.such.queue"
    refusal = "no queue is bound with the routing key no.such.queue; bind one"
    id_header = ID_HEADER
    binding = AMQP
    in_flight = 100
    too_large = None
    stores_once = False

    @pytest.fixture
    def stream(self, rabbitmq_server: RabbitmqServer, place: RabbitmqPlace) -> RabbitmqTarget:
        self.subject = place.queue
        return RabbitmqTarget(rabbitmq_server, place)

    @pytest.fixture
    async def publisher(
        self, rabbitmq_server: RabbitmqServer, stream: RabbitmqTarget
    ) -> AsyncIterator[Publisher]:
        publisher = RabbitmqPublisher(
            RabbitmqSettings(url=rabbitmq_server.url), "", ID_HEADER, timeout_seconds=60
        )
        yield publisher
        await publisher.close()

    @pytest.fixture
    async def impatient(
        self, rabbitmq_server: RabbitmqServer, stream: RabbitmqTarget
    ) -> AsyncIterator[Publisher]:
        publisher = RabbitmqPublisher(
            RabbitmqSettings(url=rabbitmq_server.url), "", ID_HEADER, timeout_seconds=2
        )
        yield publisher
        await publisher.close()

    async def test_a_missing_exchange_and_a_routing_key_that_is_too_long_are_refused(
        self, rabbitmq_server: RabbitmqServer
    ) -> None:
        publisher = RabbitmqPublisher(
            RabbitmqSettings(url=rabbitmq_server.url), "no.such.exchange", ID_HEADER
        )
        with pytest.raises(InvalidRequest, match=r"no exchange 'no\.such\.exchange'.*; create it"):
            await publisher.publish("a", b"", {})
        with pytest.raises(InvalidRequest, match="has more than 255 bytes; shorten it"):
            await publisher.publish("ü" * 128, b"", {})
        await publisher.close()


async def _fetch_until_it_fails(source: RabbitmqQueueSource) -> None:
    async with asyncio.timeout(60):
        while True:
            await source.fetch(1, NOTHING_MS)


async def _close(connection: AbstractConnection) -> None:
    """Close a connection, which waits for ever if the server was killed."""
    with suppress(*CONNECTION_EXCEPTIONS, TimeoutError):
        await asyncio.wait_for(connection.close(), 2)
