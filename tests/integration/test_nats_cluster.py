"""Three NATS servers that hold a stream together: what is refused for good is told from what passes."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from postroom.adapters.compose.outbox import MessagingSettings, OutboxSettings, open_outbox
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.definitions import ConsumerDefinition, Definition, StreamDefinition
from postroom.adapters.nats.plan import apply_plan, make_plan
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.outboxes import column, order_placed, record, relaying
from tests.support.servers.nats import nats_binary
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.waiting import SECONDS

DEFINITIONS = (
    StreamDefinition(name="SEA_EVENTS", subjects=("sea.event.>",), replicas=3),
    ConsumerDefinition(stream="SEA_EVENTS", durable="reader", max_deliver=20),
)


class Cluster:
    def __init__(self, folder: Path) -> None:
        ports = [(free_port(), free_port()) for _ in range(3)]
        self.servers = []
        for n, (port, route) in enumerate(ports):
            settings = {
                "host": LOOPBACK,
                "port": port,
                "server_name": f"n{n}",
                "jetstream": {"store_dir": str(folder / f"n{n}")},
                "cluster": {
                    "name": "sea",
                    "host": LOOPBACK,
                    "port": route,
                    "routes": [f"nats://{LOOPBACK}:{other}" for _, other in ports if other != route],
                },
            }
            config = folder / f"n{n}.conf"
            config.write_text(json.dumps(settings))
            self.servers.append(
                (ServerProcess("nats-server", [nats_binary(), "-c", config], folder / f"n{n}.log"), port)
            )
        self.url = ",".join(f"nats://{LOOPBACK}:{port}" for port, _ in ports)

    def start(self, n: int) -> None:
        server, port = self.servers[n]
        server.start(lambda: listens(port))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    for n in range(3):
        cluster.start(n)
    yield cluster
    for server, _ in cluster.servers:
        server.kill()


async def test_a_stream_without_a_majority_of_its_servers_is_unavailable_and_not_absent(
    cluster: Cluster,
) -> None:
    async with asyncio.timeout(SECONDS), connect(NatsSettings(cluster.url), "test") as client:
        streams, publisher = JetStreamStreams(client), JetStreamPublisher(client, timeout_ms=2_000)
        await _apply(streams, DEFINITIONS)
        assert (await make_plan(streams, DEFINITIONS)).differences == []
        published = await _until_stored(publisher, "1")
        assert published == 1
        with pytest.raises(InvalidRequest, match="No stream has the subject other"):
            await publisher.publish("other", b"", {})
        for server, _ in cluster.servers[1:]:
            server.kill()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await publisher.publish("sea.event.made.v1", b"2", {"Nats-Msg-Id": "2"})
        cluster.start(1)
        cluster.start(2)
        assert await _until_stored(publisher, "2") == 2
        assert await _until_stored(publisher, "1") == 1


@pytest.mark.extended
async def test_a_stream_without_a_leader_holds_back_its_own_events_only_and_they_are_parked(
    cluster: Cluster, messaging_database: str
) -> None:
    definitions = (
        StreamDefinition(name="LOST", subjects=("sea.event.order_lost.>",), replicas=3),
        StreamDefinition(name="GOOD", subjects=("sea.event.order_placed.>",)),
    )
    async with asyncio.timeout(SECONDS), connect(NatsSettings(cluster.url), "test") as client:
        await _apply(JetStreamStreams(client), definitions)
        good = (await client.jetstream().stream_info("GOOD")).cluster
        # The events of the stream that loses its leader come first, in every partition, for several batches.
        lost = [order_placed(f"l-{n}", n, event_type="order_lost") for n in range(80)]
        record(messaging_database, *lost, *(order_placed(f"o-{n}", n) for n in range(40)))
        others = [n for n in range(3) if good is None or good.leader != f"n{n}"]
        for n in others:
            cluster.servers[n][0].kill()
        publisher = JetStreamPublisher(client, timeout_ms=1_000)
        settings = OutboxSettings(max_attempts=2, batch=8, concurrency=8)
        async with relaying(messaging_database, publisher, settings=settings) as relay:
            while relay.counts.published < 40:
                with suppress(Unavailable):
                    await relay.relay_once()
            while relay.counts.parked < 80:
                # Events that are recorded now and then prove that the target is there.
                first = relay.counts.published
                record(messaging_database, *(order_placed(f"o-{first + n}", n) for n in range(40)))
                with suppress(Unavailable):
                    await relay.relay_once()
        assert column(messaging_database, "published_at")[:80] == [None] * 80
        for n in others:
            cluster.start(n)
        async with open_outbox(MessagingSettings(messaging_database, "sea")) as desk:
            await desk.retry_events.all()
        # By default an event that failed while the stream elects its leader may wait for minutes.
        patient = OutboxSettings(max_attempts=1_000, backoff_max_ms=1_000)
        async with relaying(messaging_database, publisher, settings=patient) as relay:
            while None in column(messaging_database, "published_at"):
                with suppress(Unavailable):
                    await relay.relay_once()


async def _apply(streams: JetStreamStreams, definitions: Sequence[Definition]) -> None:
    """Create streams once the cluster can."""
    while True:
        # The cluster elects its leader, which refuses three replicas until it has heard from all servers.
        with suppress(Unavailable, InvalidRequest):
            await apply_plan(streams, await make_plan(streams, definitions))
            return
        await asyncio.sleep(0.1)


async def _until_stored(publisher: JetStreamPublisher, id_: str) -> int:
    """Publish until the stream has stored it, and return the place it has there."""
    while True:
        with suppress(Unavailable):
            return (await publisher.publish("sea.event.made.v1", b"", {"Nats-Msg-Id": id_})).sequence
        await asyncio.sleep(0.1)
