"""A server of ClickHouse's HTTP interface over chdb, as no package registry has a current server."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens

SCRIPT = Path(__file__).with_name("clickhouse_http.py")


class ClickHouseServer(ServerProcess):
    """A server of a folder, at the same port after each start."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self.url = f"clickhouse://{LOOPBACK}:{self._port}/postroom"
        command: list[str | Path] = [sys.executable, "-P", SCRIPT, folder, str(self._port)]
        super().__init__("ClickHouse", command, folder.with_name(f"{folder.name}.log"))

    def serve(self) -> None:
        """Start the server."""
        self.start(lambda: listens(self._port))


@contextmanager
def clickhouse_server(folder: Path) -> Iterator[ClickHouseServer]:
    """Run a server while the context lasts."""
    server = ClickHouseServer(folder)
    server.serve()
    try:
        yield server
    finally:
        server.kill()
