"""The servers of the benchmarks, with the durability of their defaults."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer


@contextmanager
def postgres_server(folder: Path) -> Iterator[PostgresServer]:
    """Run the benchmark's PostgreSQL; its data stays in the folder until the benchmark ends."""
    with PostgresServer(folder / "postgres") as server:
        yield server


@contextmanager
def nats_server(folder: Path) -> Iterator[NatsServer]:
    """Run the benchmark's NATS server with JetStream on disk."""
    with NatsServer(folder / "nats") as server:
        yield server
