from collections.abc import AsyncIterator

import nats
import pytest
from nats.aio.client import Client

from postroom.adapters.nats.publisher import JetStreamDeadLetterQueue
from postroom.application.ports.dead_letters import DeadLetterQueue
from postroom.domain.errors import InvalidRequest
from tests.conformance.dead_letter_queue import DeadLetterQueueConformance, Letterbox


class _Stream(Letterbox):
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


async def test_a_stream_that_denies_deletes_is_told(client: Client) -> None:
    stream = client.jetstream()
    await stream.delete_stream("SEA_DLQ")
    await stream.add_stream(name="SEA_DLQ", subjects=["sea.dlq.>"], deny_delete=True)
    await stream.publish("sea.dlq.a", b"{}")
    queue = JetStreamDeadLetterQueue(client)
    (message,) = await queue.read("sea.dlq.>", 1)
    with pytest.raises(InvalidRequest, match="allow deletes in its configuration"):
        await queue.remove(message)
