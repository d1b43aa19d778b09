"""The durable consumer of an inbox."""

from typing import NamedTuple

import msgspec

from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.application.inbox.metrics import CONCURRENCY
from postroom.application.telemetry import logger
from postroom.domain.errors import NotFound, Unavailable

ACK_WAIT_MS = 120_000
MAX_DELIVER = 20
MAX_ACK_PENDING = CONCURRENCY
"""Defaults of a consumer (SDS-047 section 10)."""


class InboxConsumer(NamedTuple):
    """An existing consumer of an inbox.

    Arguments:
        max_deliver: attempts after which the worker dead-letters a message.
        server_limit: deliveries after which the server stops delivering a message; None if it never does.
    """

    stream: str
    durable: str
    max_deliver: int
    server_limit: int | None
    max_ack_pending: int


async def ensure_consumer(streams: JetStreamStreams, definition: ConsumerDefinition) -> InboxConsumer:
    """Return a consumer; if it is missing, create it, without a server limit on deliveries.

    Raises: NotFound when its stream does not exist, Unavailable when NATS can't be reached.
    """
    consumer = await streams.find_consumer(definition.stream, definition.durable)
    if consumer is None:
        consumer = await _create(streams, definition)
    if consumer.server_max_deliver is not None:
        logger().warning(
            "inbox.server_limit",
            consumer=consumer.durable,
            stream=consumer.stream,
            max_deliver=consumer.server_max_deliver,
            why="NATS drops a message whose worker is killed during its last delivery; move the limit to the "
            "worker with postroom streams apply",
        )
    return InboxConsumer(
        consumer.stream,
        consumer.durable,
        definition.max_deliver or consumer.max_deliver or MAX_DELIVER,
        consumer.server_max_deliver,
        consumer.max_ack_pending or MAX_ACK_PENDING,
    )


async def _create(streams: JetStreamStreams, definition: ConsumerDefinition) -> ConsumerDefinition:
    if await streams.find_stream(definition.stream) is None:
        raise NotFound(
            f"This NATS server has no stream {definition.stream}; define it under [streams] in the settings "
            "file and run postroom streams apply."
        )
    defaults: dict[str, object] = {
        "ack_policy": "explicit",
        "ack_wait_ms": definition.ack_wait_ms or ACK_WAIT_MS,
        "max_deliver": definition.max_deliver or MAX_DELIVER,
        "max_ack_pending": definition.max_ack_pending or MAX_ACK_PENDING,
    }
    await streams.create_consumer(msgspec.structs.replace(definition, **defaults))
    consumer = await streams.find_consumer(definition.stream, definition.durable)
    if consumer is None:
        raise Unavailable(f"Consumer {definition.durable} was deleted right after its creation; try again.")
    return consumer
