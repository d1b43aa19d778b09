from collections.abc import AsyncIterator
from typing import Any

import nats
import pytest
from nats.aio.client import Client
from redis.asyncio import Redis

from postroom.adapters.nats.publisher import JetStreamDeadLetterQueue
from postroom.adapters.redis.settings import RedisSettings
from postroom.adapters.redis.source import RedisDeadLetterQueue
from postroom.application.ports.dead_letters import DeadLetterQueue
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable
from tests.conformance.dead_letter_queue import DeadLetterQueueConformance, Letterbox


class _Stream(Letterbox):
    missing = "4"

    def __init__(self, client: Client) -> None:
        self.client = client

    def queue(self) -> DeadLetterQueue:
        return JetStreamDeadLetterQueue(self.client)

    async def put(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        await self.client.jetstream().publish(subject, data, headers=headers)


@pytest.fixture
async def client(nats_url: str) -> AsyncIterator[Client]:
    connected = await nats.connect(nats_url)
    await connected.jetstream().add_stream(name="SEA_DLQ", subjects=["sea.dlq.>"])
    yield connected
    await connected.close()


class TestJetStreamDeadLetterQueue(DeadLetterQueueConformance):
    @pytest.fixture
    def letterbox(self, client: Client) -> Letterbox:
        return _Stream(client)

    async def test_subjects_may_have_wildcards(self, letterbox: Letterbox, queue: DeadLetterQueue) -> None:
        for subject in ("sea.dlq.a.x", "sea.dlq.b.x", "sea.dlq.a.y"):
            await letterbox.put(subject, subject.encode())
        assert [each.data for each in await queue.read("sea.dlq.a.*", 10)] == [b"sea.dlq.a.x", b"sea.dlq.a.y"]
        assert [each.data for each in await queue.read("sea.dlq.*.x", 10)] == [b"sea.dlq.a.x", b"sea.dlq.b.x"]
        _, second, _ = await queue.read("sea.dlq.>", 10)
        assert await queue.find("sea.dlq.>", second.sequence) == second
        assert await queue.find("sea.dlq.a.*", second.sequence) is None

    async def test_without_a_stream_there_is_a_clear_error(self, queue: DeadLetterQueue) -> None:
        with pytest.raises(NotFound, match="No stream has the subject other"):
            await queue.read("other.dlq.>", 10)


class _Entries(Letterbox):
    missing = "4-0"

    def __init__(self, url: str) -> None:
        self._settings = RedisSettings(url=url)
        self.client = Redis.from_url(url)
        self.opened: list[RedisDeadLetterQueue] = []

    def queue(self) -> DeadLetterQueue:
        self.opened.append(RedisDeadLetterQueue(self._settings))
        return self.opened[-1]

    async def put(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        fields: dict[Any, Any] = {"data": data} | (headers or {})
        await self.client.xadd(subject, fields)


class TestRedisDeadLetterQueue(DeadLetterQueueConformance):
    @pytest.fixture
    async def letterbox(self, redis_url: str) -> AsyncIterator[Letterbox]:
        entries = _Entries(redis_url)
        await entries.client.delete("sea.dlq.a", "sea.dlq.b")
        yield entries
        for each in entries.opened:
            await each.close()
        await entries.client.aclose()

    async def test_a_key_of_another_kind_and_a_server_that_is_down_are_told(
        self, letterbox: _Entries, queue: DeadLetterQueue
    ) -> None:
        await letterbox.client.set("sea.dlq.a", "text")
        with pytest.raises(InvalidRequest, match=r"Redis stream sea\.dlq\.a of .* can't be used: WRONGTYPE"):
            await queue.read("sea.dlq.a", 1)
        gone = RedisDeadLetterQueue(RedisSettings(url="redis://127.0.0.1:1"))
        with pytest.raises(Unavailable, match="Try again when Redis is available"):
            await gone.find("sea.dlq.a", "1-0")
        await gone.close()


async def test_a_stream_that_denies_deletes_is_told(client: Client) -> None:
    stream = client.jetstream()
    await stream.delete_stream("SEA_DLQ")
    await stream.add_stream(name="SEA_DLQ", subjects=["sea.dlq.>"], deny_delete=True)
    await stream.publish("sea.dlq.a", b"{}")
    queue = JetStreamDeadLetterQueue(client)
    (message,) = await queue.read("sea.dlq.>", 1)
    with pytest.raises(InvalidRequest, match="allow deletes in its configuration"):
        await queue.remove(message)
