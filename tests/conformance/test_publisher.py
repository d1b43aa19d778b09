"""The publisher conformance suite on JetStream and on the tests' stream in memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import nats
import pytest

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.ports.outbox import NotStored, Publisher
from postroom.domain.errors import InvalidRequest
from tests.conformance.publisher import ORDERS, Stored, StreamConformance
from tests.support.memory_stream import MemoryStream
from tests.support.servers.nats import NatsServer

PATIENT_MS, IMPATIENT_MS = 60_000, 500


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own: it is stalled, killed and started again."""
    with NatsServer(tmp_path / "nats") as server:
        yield server


class ServerStream:
    def __init__(self, server: NatsServer) -> None:
        self._server = server

    async def messages(self) -> list[Stored]:
        async with connect(NatsSettings(self._server.url), "test") as client:
            stream = client.jetstream()
            last = (await stream.stream_info("SEA_EVENTS")).state.last_seq
            found = [await stream.get_msg("SEA_EVENTS", seq=n, direct=True) for n in range(1, last + 1)]
        return [Stored(each.subject or "", each.data or b"", _own(each.headers)) for each in found]

    async def pause(self) -> None:
        self._server.pause()

    async def resume(self) -> None:
        self._server.resume()

    async def stall(self) -> None:
        self._server.pause()

    async def crash(self) -> None:
        self._server.kill()

    async def restart(self) -> None:
        self._server.start()


def _own(headers: dict[str, str] | None) -> dict[str, str]:
    """Return the headers without those that the server adds when a message is asked for directly."""
    added = {"Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"}
    return {name: value for name, value in (headers or {}).items() if name not in added}


class TestJetStreamPublisher(StreamConformance):
    @pytest.fixture
    async def stream(self, server: NatsServer) -> ServerStream:
        async with connect(NatsSettings(server.url), "test") as client:
            await client.jetstream().add_stream(
                name="SEA_EVENTS", subjects=["sea.event.>"], allow_direct=True
            )
        return ServerStream(server)

    @pytest.fixture
    async def publisher(self, server: NatsServer, stream: ServerStream) -> AsyncIterator[Publisher]:
        async with connect(NatsSettings(server.url), "test") as client:
            yield JetStreamPublisher(client, timeout_ms=PATIENT_MS)

    @pytest.fixture
    async def impatient(self, server: NatsServer, stream: ServerStream) -> AsyncIterator[Publisher]:
        async with connect(NatsSettings(server.url), "test") as client:
            yield JetStreamPublisher(client, timeout_ms=IMPATIENT_MS)


class InMemory:
    def __init__(self, fake: MemoryStream) -> None:
        self._fake = fake

    async def messages(self) -> list[Stored]:
        return [Stored(*message) for message in self._fake.messages]

    async def pause(self) -> None:
        self._fake.crash()

    async def resume(self) -> None:
        self._fake.restart()

    async def stall(self) -> None:
        self._fake.stall()

    async def crash(self) -> None:
        self._fake.crash()

    async def restart(self) -> None:
        self._fake.restart()


class TestMemoryStream(StreamConformance):
    @pytest.fixture
    def publisher(self) -> MemoryStream:
        return MemoryStream()

    @pytest.fixture
    def impatient(self, publisher: MemoryStream) -> MemoryStream:
        return publisher

    @pytest.fixture
    def stream(self, publisher: MemoryStream) -> InMemory:
        return InMemory(publisher)


async def test_a_full_stream_takes_messages_again_when_there_is_room(nats_url: str) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        await client.jetstream().add_stream(
            name="SMALL", subjects=["small.>"], max_msgs=1, discard=nats.js.api.DiscardPolicy.NEW
        )
        publisher = JetStreamPublisher(client)
        await publisher.publish("small.a", b"1", {})
        with pytest.raises(NotStored, match="maximum messages exceeded"):
            await publisher.publish("small.a", b"2", {})
        await client.jetstream().purge_stream("SMALL")
        assert (await publisher.publish("small.a", b"2", {})).sequence == 2


async def test_a_message_above_the_streams_own_limit_is_refused_for_good(nats_url: str) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        await client.jetstream().add_stream(name="SMALL", subjects=["small.>"], max_msg_size=10)
        with pytest.raises(InvalidRequest, match="message size exceeds maximum allowed"):
            await JetStreamPublisher(client).publish("small.a", b"x" * 11, {})


async def test_a_bounded_number_is_in_flight_and_the_others_wait(nats_url: str) -> None:
    async with connect(NatsSettings(nats_url), "test") as client:
        await client.jetstream().add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])
        publisher = JetStreamPublisher(client, max_pending=2)
        published = await asyncio.gather(*(publisher.publish(ORDERS, b"", {}) for _ in range(50)))
    assert [each.sequence for each in published] == list(range(1, 51))
