"""The owner of a mailbox in a process of its own, with the surface that the load calls."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from postroom.adapters.compose import socket_path
from postroom.adapters.compose.store import open_store
from postroom.domain.names import DEFAULT_MAILBOX
from tests.benchmarks.load.owner import READY
from tests.benchmarks.throughput import LIMITS, POLICY
from tests.support.servers.http import PostroomServer
from tests.support.servers.process import ServerProcess

_TICKS = os.sysconf("SC_CLK_TCK")
MAX_CONNECTIONS = 512


class Owner(NamedTuple):
    """A running owner.

    Arguments:
        address: what the lean callers connect to.
        own_address: what our own client connects to.
    """

    pid: int
    address: str
    own_address: str

    def cpu_seconds(self) -> float:
        """Return the CPU time that its process has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory_mib(self) -> float:
        """Return the resident memory of its process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1_024


@contextmanager
def served(store: str, folder: Path, surface: str, *, dev: bool = True) -> Iterator[Owner]:
    """Run `postroom serve` with one network surface.

    Arguments:
        surface: `http` or `grpc`.
        dev: ask for no tokens.
    """
    address = "127.0.0.1:0"
    settings: dict[str, Any] = {"http": address, "max_connections": MAX_CONNECTIONS}
    if surface == "grpc":
        settings = {"http": "", "grpc": address}
    policy = {name: getattr(POLICY, name) for name in ("shard_capacity", "replay_capacity", "visibility_ms")}
    limits = {"in_flight_ceiling": LIMITS.in_flight_ceiling}
    with PostroomServer(
        folder / "serve", store, log_level="warning", policy=policy, limits=limits, dev=dev, **settings
    ) as server:
        yield Owner(server.process.pid, server.addresses[0], server.addresses[0])


@contextmanager
def owned(store: str, folder: Path) -> Iterator[Owner]:
    """Run a process that owns the mailbox by `connect` and does nothing else."""
    log = folder / "owner.log"
    log.write_bytes(b"")
    process = ServerProcess("owner", [sys.executable, "-m", "tests.benchmarks.load.owner", store], log)
    process.start(lambda: READY in log.read_text())
    try:
        yield Owner(process.pid, str(socket_path(open_store(store), DEFAULT_MAILBOX)), store)
    finally:
        process.stop()
