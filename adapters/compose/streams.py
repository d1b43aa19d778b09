"""Wire the definitions of streams and consumers to a NATS server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from postroom.adapters.nats.definitions import (
    ConsumerDefinition,
    Definition,
    Difference,
    StreamDefinition,
    StreamStatus,
    Value,
)
from postroom.adapters.nats.plan import Plan, apply_plan, make_plan
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.extras import explain_missing_extra

if TYPE_CHECKING:
    from postroom.adapters.nats.streams import JetStreamStreams

__all__ = [
    "ConsumerDefinition",
    "Definition",
    "Difference",
    "NatsSettings",
    "Plan",
    "StreamDefinition",
    "StreamStatus",
    "Value",
    "apply_plan",
    "make_plan",
    "open_streams",
]


@asynccontextmanager
async def open_streams(nats: NatsSettings) -> AsyncIterator["JetStreamStreams"]:
    """Manage the streams of a NATS server for the length of the context.

    Raises: Unavailable when it can't be reached.
    """
    with explain_missing_extra():
        from postroom.adapters.nats.connection import connect
        from postroom.adapters.nats.streams import JetStreamStreams

    async with connect(nats, "postroom streams") as client:
        yield JetStreamStreams(client)
