"""Real servers for demos and benchmarks (extra `demo`)."""

from postroom.adapters.embedded.nats import NatsServer
from postroom.adapters.embedded.postgres import PostgresServer

__all__ = ["NatsServer", "PostgresServer"]
