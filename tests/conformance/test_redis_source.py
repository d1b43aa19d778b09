"""The source conformance suite on Redis Streams, and what only they have."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from postroom.adapters.redis import source as redis_source
from postroom.adapters.redis.settings import StreamConsumer
from postroom.adapters.redis.source import RedisStreamSource
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.conformance.source import NOTHING_MS, PATIENT_MS, SHORT_MS, SourceConformance, bodies, fetch
from tests.support.servers.redis import RedisServer

GROUP = "reader"


class RedisPlace:
    def __init__(self, url: str, opened: AsyncExitStack) -> None:
        self.url = url
        self.stream = f"test-{uuid4().hex}"
        self.client: Any = Redis.from_url(url, protocol=2)
        self._opened = opened
        opened.push_async_callback(self.client.aclose)

    async def publish(self, *data: bytes) -> None:
        for each in data:
            await self.client.xadd(self.stream, {"data": each})

    async def open(self, *, ack_wait_ms: int = PATIENT_MS, **settings: Any) -> RedisStreamSource:
        values: dict[str, Any] = {
            "url": self.url,
            "stream": self.stream,
            "group": GROUP,
            "ack_wait_ms": ack_wait_ms,
        }
        source = await RedisStreamSource.open(StreamConsumer(**(values | settings)))
        self._opened.push_async_callback(source.close)
        return source


@pytest.fixture
async def place(redis_url: str) -> AsyncIterator[RedisPlace]:
    async with AsyncExitStack() as opened:
        place = RedisPlace(redis_url, opened)
        yield place
        await place.client.delete(place.stream)


class TestRedisStreamSource(SourceConformance):
    pass


async def test_other_fields_of_an_entry_are_its_headers(place: RedisPlace) -> None:
    source = await place.open()
    await place.client.xadd(place.stream, {"data": b"1", "kind": "Grüße", "raw": b"\xff"})
    (message,) = await fetch(source, 1)
    assert (message.subject, message.data) == (place.stream, b"1")
    assert dict(message.headers) == {"kind": "Grüße", "raw": "\ufffd"}


async def test_the_value_is_that_of_the_field_named_or_of_the_only_one(place: RedisPlace) -> None:
    source = await place.open(field="envelope")
    await place.client.xadd(place.stream, {"data": b"other", "envelope": b"1"})
    await place.client.xadd(place.stream, {"whatever": b"2"})
    await place.client.xadd(place.stream, {"neither": b"", "nor": b""})
    messages = await fetch(source, 3)
    assert bodies(messages) == [b"1", b"2", b""]
    assert [dict(message.headers) for message in messages[1:]] == [{}, {"neither": "", "nor": ""}]


async def test_what_was_there_before_the_group_is_read_from_its_beginning(place: RedisPlace) -> None:
    await place.publish(b"1", b"2")
    assert bodies(await fetch(await place.open(), 2)) == [b"1", b"2"]


async def test_a_while_may_be_longer_than_redis_can_be_told_at_once(place: RedisPlace) -> None:
    source = await place.open(ack_wait_ms=SHORT_MS)
    await place.publish(b"1")
    await source.nack(await fetch(source, 1), SHORT_MS * 2)
    assert list(await source.fetch(1, SHORT_MS + NOTHING_MS)) == []
    (again,) = await fetch(source, 1)
    assert (again.data, again.delivered) == (b"1", 2)


async def test_a_late_answer_takes_nothing_from_whoever_has_the_message_now(place: RedisPlace) -> None:
    late, prompt = await place.open(ack_wait_ms=SHORT_MS), await place.open(ack_wait_ms=SHORT_MS)
    await place.publish(b"1")
    missed = await fetch(late, 1)
    (taken,) = await fetch(prompt, 1)
    assert taken.delivered == 2
    await late.nack(missed, 0)
    await late.extend(missed)
    assert list(await late.fetch(1, 0)) == []
    (pending,) = await place.client.xpending_range(place.stream, GROUP, "-", "+", 10)
    assert pending["times_delivered"] == 2


async def test_what_the_stream_dropped_is_settled_and_not_waited_for(place: RedisPlace) -> None:
    source = await place.open(ack_wait_ms=SHORT_MS)
    await place.publish(b"1", b"2", b"3")
    first, *_ = await fetch(source, 3)
    await place.client.xdel(place.stream, first.sequence)
    assert bodies(await fetch(source, 2)) == [b"2", b"3"]
    pending = await place.client.xpending_range(place.stream, GROUP, "-", "+", 10)
    assert first.token not in [each["message_id"] for each in pending]


async def test_a_group_that_is_gone_is_made_again_and_reads_everything(place: RedisPlace) -> None:
    source = await place.open()
    await place.publish(b"1")
    await source.ack(await fetch(source, 1))
    await place.client.xgroup_destroy(place.stream, GROUP)
    await source.extend([])
    (again,) = await fetch(source, 1)
    assert (again.data, again.delivered) == (b"1", 1)


async def test_consumers_that_hold_nothing_are_forgotten_in_the_end(
    place: RedisPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    holding, idle = await place.open(), await place.open()
    await place.publish(b"1")
    await fetch(holding, 1)
    assert list(await idle.fetch(1, 0)) == []
    monkeypatch.setattr(redis_source, "FORGET_CONSUMERS_MS", 0)
    await place.open()
    (left,) = await place.client.xinfo_consumers(place.stream, GROUP)
    assert left["pending"] == 1
    await place.publish(b"2")
    assert bodies(await fetch(idle, 1)) == [b"2"]  # to be forgotten does no harm


async def test_a_key_that_is_no_stream_is_refused(place: RedisPlace) -> None:
    await place.client.set(place.stream, "text")
    with pytest.raises(InvalidRequest, match=r"can't be opened: WRONGTYPE .*; name a stream"):
        await place.open()


async def test_a_wrong_password_is_refused_and_not_shown(place: RedisPlace) -> None:
    url = place.url.replace("redis://", "redis://nobody:secret@")
    with pytest.raises(InvalidRequest, match="check user and password_file, or the URL's user") as refused:
        await place.open(url=url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["nats://127.0.0.1", "redis://127.0.0.1:port", "redis://127.0.0.1/0?db=x"])
async def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"URL of Redis stream orders is invalid: .*; write redis://"):
        await RedisStreamSource.open(StreamConsumer(url=url, stream="orders", group=GROUP))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"ca": "ca.pem"}, "need TLS; write rediss://"),
        ({"certificate": "a.pem", "key": "b.pem"}, "need TLS; write rediss://"),
        ({"user": "reader"}, "user and password_file need each other"),
        ({"user": "reader", "password_file": "no such file"}, "password file no such file can't be read"),
        ({"url": "rediss://:secret@127.0.0.1", "ca": "no such file"}, "can't be opened: .*No such file"),
    ],
)
async def test_access_that_is_inconsistent_or_missing_is_refused(
    settings: dict[str, str], reason: str
) -> None:
    values: dict[str, Any] = {"url": "redis://:secret@127.0.0.1"} | settings
    with pytest.raises((InvalidRequest, Unavailable), match=reason) as refused:
        await RedisStreamSource.open(StreamConsumer(stream="orders", group=GROUP, **values))
    assert "secret" not in str(refused.value)


async def test_nobody_at_the_address_is_told() -> None:
    consumer = StreamConsumer(url="redis://127.0.0.1:1/0", stream="orders", group=GROUP)
    with pytest.raises(Unavailable, match=r"Redis stream orders of 127\.0\.0\.1:1/0 can't be opened: "):
        await RedisStreamSource.open(consumer)


async def test_reading_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    try:
        server = RedisServer(tmp_path, sync_always=True)
    except Unavailable as error:
        pytest.skip(str(error))
    async with AsyncExitStack() as opened:
        opened.enter_context(server)
        place = RedisPlace(server.url, opened)
        source = await place.open(ack_wait_ms=SHORT_MS)
        await place.publish(b"1", b"2")
        first, second = await fetch(source, 2)
        await source.ack([first])
        server.kill()
        with pytest.raises(Unavailable, match="It is retried when Redis is available"):
            await source.fetch(1, NOTHING_MS)
        with pytest.raises(Unavailable, match="can't be answered"):
            await source.ack([second])
        server.start()
        (again,) = await _patiently(source)
        assert (again.data, again.delivered) == (b"2", 2)
        await source.ack([again])
        await place.publish(b"3")
        assert bodies(await fetch(source, 1)) == [b"3"]


async def _patiently(source: RedisStreamSource) -> list[SourceMessage]:
    """Fetch while Redis may still be loading what it stored."""
    while True:
        with suppress(Unavailable):
            return await fetch(source, 1)
