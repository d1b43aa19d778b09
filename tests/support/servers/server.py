"""What the servers on a loopback port have in common."""

import shutil
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from postroom.domain.errors import Unavailable
from tests.support.servers.process import ServerProcess, listens


class LoopbackServer:
    """A server process on a loopback port, which keeps its port and data when restarted."""

    def __init__(self, process: ServerProcess, port: int) -> None:
        self._process = process
        self._port = port

    @property
    def pid(self) -> int:
        """Return the id of the running process."""
        return self._process.pid

    def start(self) -> None:
        """Start the server, or restart it with the data it stored."""
        self._process.start(lambda: listens(self._port))

    def stop(self) -> None:
        """Shut the server down."""
        self._process.stop()

    def kill(self) -> None:
        """Kill the server without a shutdown, as in a crash."""
        self._process.kill()

    def pause(self) -> None:
        """Suspend the server: it keeps its connections and answers nothing."""
        self._process.pause()

    def resume(self) -> None:
        """Resume a paused server."""
        self._process.resume()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def find_binary(name: str, advice: str) -> Path:
    """Return the path of a server installed by a package, or found on the PATH.

    Raises: Unavailable with `advice` when there is none.
    """
    packaged = Path(sys.executable).with_name(name)
    binary = packaged if packaged.exists() else shutil.which(name)
    if binary is None:
        raise Unavailable(f"{name} was not found; {advice}.")
    return Path(binary)
