"""Wire the definitions of streams and consumers to a NATS server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.application.ports.streams import Streams

__all__ = ["NatsSettings", "open_streams"]


@asynccontextmanager
async def open_streams(nats: NatsSettings) -> AsyncIterator[Streams]:
    """Manage the streams of a NATS server while the context lasts.

    Raises: Unavailable when it can't be reached.
    """
    async with connect(nats, "postroom streams") as client:
        yield JetStreamStreams(client)
