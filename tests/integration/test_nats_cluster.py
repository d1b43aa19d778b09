"""Three NATS servers that hold a stream together: what is refused for good is told from what passes."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.definitions import ConsumerDefinition, StreamDefinition
from postroom.adapters.nats.plan import apply_plan, make_plan
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.domain.errors import InvalidRequest, Unavailable
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
        while True:
            # The cluster elects its leader, which refuses three replicas until it has heard from all servers.
            with suppress(Unavailable, InvalidRequest):
                await apply_plan(streams, await make_plan(streams, DEFINITIONS))
                break
            await asyncio.sleep(0.1)
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


async def _until_stored(publisher: JetStreamPublisher, id_: str) -> int:
    """Publish until the stream has stored it, and return the place it has there."""
    while True:
        with suppress(Unavailable):
            return (await publisher.publish("sea.event.made.v1", b"", {"Nats-Msg-Id": id_})).sequence
        await asyncio.sleep(0.1)
