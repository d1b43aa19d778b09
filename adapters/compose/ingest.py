"""Wire ingestion: the source and the schemas of a namespace, and the mailbox they are stored in."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose import Postroom
from postroom.adapters.config.namespaces import find_namespace, load_namespaces
from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.source import JetStreamSource, PullConsumer
from postroom.adapters.schemas.validator import SchemaValidator
from postroom.application.ingest.batch import IngestSettings
from postroom.application.ingest.counts import Ingested
from postroom.application.ingest.dead_letters import DeadLetterSubject
from postroom.application.ingest.ingester import Ingester
from postroom.application.ingest.namespace import Namespace, NatsSource, RedisSource
from postroom.application.ports.source import Source
from postroom.application.telemetry import logger
from postroom.domain.errors import Unavailable

__all__ = [
    "Ingested",
    "Ingester",
    "Namespace",
    "NatsSettings",
    "NatsSource",
    "RedisSource",
    "find_namespace",
    "load_namespaces",
    "open_ingester",
]

ACK_WAIT_SECONDS = 30
MAX_ACK_PENDING = 10_000
MIN_PREFETCH = 1_000
"""Messages asked for ahead at least: what arrives while one batch is prepared."""


@asynccontextmanager
async def open_ingester(namespace: Namespace, postroom: Postroom) -> AsyncIterator[Ingester]:
    """Be ready to ingest what a namespace says, into a mailbox that is owned, while the context lasts.

    Arguments:
        postroom: owns the mailbox that the namespace names, in the mode `archive`.

    Raises:
        InvalidRequest: schemas can't be read, or the consumer is not what the namespace says.
        NotFound: there is no such stream.
        Unavailable: the source can't be reached.
    """
    async with AsyncExitStack() as opened:
        payloads = SchemaValidator(namespace.payload_schemas) if namespace.payload_schemas else None
        source = await _open_source(namespace)
        opened.push_async_callback(source.close)
        yield Ingester(
            source,
            postroom.send_envelopes,
            IngestSettings(namespace.batch_size, namespace.envelope_validation, namespace.max_retries),
            payloads=payloads,
            dead_letters=await _dead_letters(namespace.source, opened),
        )


async def _open_source(namespace: Namespace) -> Source:
    config = namespace.source
    if isinstance(config, RedisSource):
        try:
            from postroom.adapters.redis.source import RedisStreamSource, StreamConsumer
        except ImportError:
            raise Unavailable(
                "Ingesting from Redis needs redis-py, which is not installed; run: "
                "pip install 'postroom[redis]'."
            ) from None
        return await RedisStreamSource.open(
            StreamConsumer(
                url=config.url,
                stream=config.stream,
                group=config.consumer_group,
                field=config.field,
                ack_wait_ms=(config.ack_wait_seconds or ACK_WAIT_SECONDS) * 1_000,
            )
        )
    consumer = PullConsumer(
        durable=config.consumer_group,
        stream=config.stream,
        subjects=(config.subject,),
        create=True,
        ack_wait_ms=(config.ack_wait_seconds or ACK_WAIT_SECONDS) * 1_000,
        max_ack_pending=config.max_ack_pending or MAX_ACK_PENDING,
    )
    source = await JetStreamSource.open(
        _nats(config), consumer, prefetch=max(MIN_PREFETCH, 2 * namespace.batch_size)
    )
    if source.max_deliver is not None:
        logger().warning(
            "ingest.deliveries_are_limited",
            consumer=config.consumer_group,
            max_deliver=source.max_deliver,
            hint="while the store is away the server may give messages up; set max_deliver to -1",
        )
    return source


async def _dead_letters(config: NatsSource | RedisSource, opened: AsyncExitStack) -> DeadLetterSubject | None:
    if isinstance(config, RedisSource) or config.dead_letter_subject is None:
        return None
    # A connection of its own: that of the source takes a short way for messages, and waits for nothing else.
    client = await opened.enter_async_context(connect(_nats(config), f"postroom {config.consumer_group} dlq"))
    return DeadLetterSubject(JetStreamPublisher(client), config.dead_letter_subject, config.consumer_group)


def _nats(config: NatsSource) -> NatsSettings:
    return NatsSettings(url=config.url, credentials=config.credentials)
