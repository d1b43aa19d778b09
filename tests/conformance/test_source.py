"""The source conformance suite on JetStream, and what only JetStream has."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.js.api import AckPolicy, ConsumerConfig

from postroom.adapters.nats.pull_consumer import PullConsumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import HEARTBEAT_SECONDS, ROUND_TRIP_SECONDS, JetStreamSource
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.conformance.source import NOTHING_MS, PATIENT_MS, SHORT_MS, SourceConformance, bodies, fetch
from tests.support.servers.nats import NatsServer

STREAM, SUBJECT, DURABLE = "EVENTS", "acme.orders.placed", "reader"


class JetStreamPlace:
    def __init__(self, url: str, prefetch: int, opened: AsyncExitStack) -> None:
        self.url = url
        self._settings = NatsSettings(url=url)
        self._prefetch = prefetch
        self._opened = opened

    async def begin(self) -> None:
        client = await nats.connect(self.url)
        self._opened.push_async_callback(client.close)
        self.stream = client.jetstream()
        await self.stream.add_stream(name=STREAM, subjects=["acme.>"])  # or find it

    async def publish(self, *data: bytes) -> None:
        for each in data:
            await self.stream.publish(SUBJECT, each)

    async def open(self, *, ack_wait_ms: int = PATIENT_MS, **settings: object) -> JetStreamSource:
        values = {"durable": DURABLE, "stream": STREAM, "create": True, "ack_wait_ms": ack_wait_ms} | settings
        consumer = PullConsumer(**values)  # type: ignore[arg-type]
        source = await JetStreamSource.open(self._settings, consumer, prefetch=self._prefetch)
        self._opened.push_async_callback(source.close)
        return source


@pytest.fixture(params=[0, 8], ids=["exact", "ahead"])
async def place(nats_url: str, request: pytest.FixtureRequest) -> AsyncIterator[JetStreamPlace]:
    async with AsyncExitStack() as opened:
        place = JetStreamPlace(nats_url, request.param, opened)
        await place.begin()
        yield place


class TestJetStreamSource(SourceConformance):
    pass


class OwnServer(JetStreamPlace):
    """A place whose server can be killed."""

    def __init__(self, server: NatsServer, opened: AsyncExitStack) -> None:
        super().__init__(server.url, 0, opened)
        self.server = server


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[OwnServer]:
    async with AsyncExitStack() as opened:
        place = OwnServer(opened.enter_context(NatsServer(tmp_path, sync_always=True)), opened)
        await place.begin()
        yield place


async def test_headers_are_read_when_asked_for(place: JetStreamPlace) -> None:
    source = await place.open()
    sent = {"Nats-Msg-Id": "1", "correlation-id": "a: b", "name": "Grüße"}
    await place.stream.publish(SUBJECT, b"with", headers=sent)
    await place.publish(b"without")
    first, second = await fetch(source, 2)
    assert dict(first.headers) == sent
    assert first.headers.get("Correlation-Id") is None
    assert dict(second.headers) == {}


async def test_of_a_header_that_stands_twice_the_first_counts(place: JetStreamPlace) -> None:
    source = await place.open()
    client = await nats.connect(place.url)
    block = b"NATS/1.0\r\nname: 1\r\nname: 2\r\n\r\n"
    await client._send_command(b"HPUB %b %d %d\r\n%b\r\n" % (SUBJECT.encode(), len(block), len(block), block))
    await client.flush()
    (message,) = await fetch(source, 1)
    assert dict(message.headers) == {"name": "1"}
    await client.close()


async def test_subjects_choose_what_is_read_with_wildcards(place: JetStreamPlace) -> None:
    source = await place.open(subjects=("acme.*.placed", "acme.audit.>"))
    for subject in ("acme.orders.placed", "acme.orders.paid", "acme.audit.a.b", "acme.x.y.placed"):
        await place.stream.publish(subject, subject.encode())
    assert [message.subject for message in await fetch(source, 2)] == ["acme.orders.placed", "acme.audit.a.b"]
    assert list(await source.fetch(10, NOTHING_MS)) == []


async def test_the_stream_is_found_by_its_subject(place: JetStreamPlace) -> None:
    source = await place.open(stream=None, subjects=("acme.orders.>",))
    await place.publish(b"1")
    assert bodies(await fetch(source, 1)) == [b"1"]


async def test_a_new_consumer_may_begin_with_what_is_new(place: JetStreamPlace) -> None:
    await place.publish(b"old")
    source = await place.open(deliver="new")
    await place.publish(b"new")
    assert bodies(await fetch(source, 1)) == [b"new"]


async def test_a_consumer_that_exists_keeps_what_it_has(place: JetStreamPlace) -> None:
    await place.stream.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, ack_wait=7, max_deliver=20))
    source = await place.open(ack_wait_ms=1_000, max_deliver=-1)
    assert source.ack_wait_ms == 7_000
    assert (await place.stream.consumer_info(STREAM, DURABLE)).config.max_deliver == 20


async def test_a_missing_stream_or_consumer_is_told_with_what_to_run(place: JetStreamPlace) -> None:
    with pytest.raises(NotFound, match=r"no stream NONE; .*postroom streams apply"):
        await place.open(stream="NONE")
    with pytest.raises(NotFound, match=r"subject other\.>; .*postroom streams apply"):
        await place.open(stream=None, subjects=("other.>",))
    with pytest.raises(NotFound, match=r"no consumer reader of stream EVENTS; .*postroom streams apply"):
        await place.open(create=False)
    with pytest.raises(InvalidRequest, match="neither a stream nor a subject"):
        await place.open(stream=None)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"deliver_subject": "push.here"}, "is a push consumer"),
        ({"ack_policy": AckPolicy.NONE}, "ack policy none"),
        ({"filter_subject": "acme.audit.>"}, r"reads acme\.audit\.>, but the settings name acme\.orders\.>"),
    ],
)
async def test_a_consumer_that_is_something_else_is_refused(
    place: JetStreamPlace, config: dict[str, Any], reason: str
) -> None:
    await place.stream.add_consumer(STREAM, ConsumerConfig(durable_name=DURABLE, **config))
    with pytest.raises(InvalidRequest, match=reason):
        await place.open(subjects=("acme.orders.>",))


async def test_a_consumer_that_cannot_be_made_is_told_with_the_servers_reason(place: JetStreamPlace) -> None:
    with pytest.raises(InvalidRequest, match="Stream EVENTS refuses a consumer"):
        await place.open(subjects=("acme.orders.>", "acme.orders.placed"))


async def test_a_consumer_that_the_source_made_is_made_again_when_it_is_deleted(
    place: JetStreamPlace,
) -> None:
    await place.publish(b"1")
    source = await place.open()
    assert len(await source.fetch(1, PATIENT_MS)) == 1
    await place.stream.delete_consumer(STREAM, DURABLE)
    await place.publish(b"2")
    # The server may drop a request that arrives while it deletes the consumer: the next fetch finds out.
    received: set[bytes] = set()
    async with asyncio.timeout(60):
        while received != {b"1", b"2"}:
            received |= {message.data for message in await source.fetch(2, 1_000)}


async def test_a_request_that_the_server_lost_with_its_consumer_is_repeated_before_its_wait_is_over(
    place: JetStreamPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await place.open()
    await place.publish(b"1")
    publish, requests = source.client.publish, []

    async def lose_the_first(subject: str, *arguments: Any, **options: Any) -> None:
        if ".MSG.NEXT." in subject:
            requests.append(subject)
            if len(requests) == 1:
                await place.stream.delete_consumer(STREAM, DURABLE)
                return
        await publish(subject, *arguments, **options)

    monkeypatch.setattr(source.client, "publish", lose_the_first)
    longer_than_a_test_may_take_ms = 3_600_000
    assert bodies(await source.fetch(1, longer_than_a_test_may_take_ms)) == [b"1"]


async def test_a_consumer_that_has_no_messages_for_a_while_keeps_its_request(
    place: JetStreamPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await place.open()
    publish, requests = source.client.publish, []

    async def count(subject: str, *arguments: Any, **options: Any) -> None:
        requests.append(subject)
        await publish(subject, *arguments, **options)

    monkeypatch.setattr(source.client, "publish", count)
    fetching = asyncio.create_task(source.fetch(1, 3_600_000))
    await asyncio.sleep(2 * (HEARTBEAT_SECONDS + ROUND_TRIP_SECONDS))
    assert len(requests) == 1
    await place.publish(b"1")
    assert bodies(await fetching) == [b"1"]


async def test_a_consumer_of_others_that_is_deleted_while_it_is_read_is_missed(place: JetStreamPlace) -> None:
    await place.stream.add_consumer(
        STREAM, ConsumerConfig(durable_name=DURABLE, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=100)
    )
    source = await place.open()
    fetching = asyncio.create_task(source.fetch(1, PATIENT_MS))
    await asyncio.sleep(NOTHING_MS / 1_000)
    await place.stream.delete_consumer(STREAM, DURABLE)
    with pytest.raises(NotFound, match="no consumer reader"):
        await fetching
    with pytest.raises(NotFound, match="no consumer reader"):
        await source.fetch(1, PATIENT_MS)


async def test_nobody_at_the_address_is_told(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="can't be reached"):
        await JetStreamSource.open(NatsSettings(url="nats://127.0.0.1:1"), PullConsumer(durable=DURABLE))


async def test_what_was_prefetched_and_not_fetched_is_handed_back(nats_url: str) -> None:
    async with AsyncExitStack() as opened:
        place = JetStreamPlace(nats_url, 100, opened)
        await place.begin()
        ack_wait_ms = 10 * PATIENT_MS  # too long to wait for
        await place.publish(*[b"%d" % number for number in range(10)])
        source = await place.open(ack_wait_ms=ack_wait_ms)
        await source.ack(await fetch(source, 1))
        await source.close()
        again = await place.open(ack_wait_ms=ack_wait_ms)
        assert sorted(bodies(await fetch(again, 9))) == [b"%d" % number for number in range(1, 10)]


async def test_reading_goes_on_after_the_server_was_killed(own_server: OwnServer) -> None:
    source = await own_server.open(ack_wait_ms=SHORT_MS)
    await own_server.publish(b"1", b"2")
    first = await fetch(source, 2)
    await source.ack([first[0]])
    own_server.server.kill()
    with pytest.raises(Unavailable, match="NATS is not connected"):
        await _until_unavailable(source)
    with pytest.raises(Unavailable, match="NATS is not connected"):
        await source.ack([first[1]])
    own_server.server.start()
    await _until_answered(source, [first[1]])
    await own_server.begin()
    await own_server.publish(b"3")
    came: list[SourceMessage] = []
    while b"3" not in bodies(came):  # a crash may undo acks, and then their messages come again
        with suppress(Unavailable):
            came += await source.fetch(10, PATIENT_MS)


async def _until_unavailable(source: JetStreamSource) -> None:
    while True:
        assert list(await source.fetch(1, NOTHING_MS)) == []


async def _until_answered(source: JetStreamSource, messages: list[SourceMessage]) -> None:
    while True:
        with suppress(Unavailable):
            await source.ack(messages)
            return
        await asyncio.sleep(0.05)
