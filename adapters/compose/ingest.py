"""Ingestion from the namespaces of brokers: sources, schemas and dead letters."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import msgspec

from postroom.adapters.config.namespaces import find_namespace, load_namespaces
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.adapters.redis.settings import RedisSettings
from postroom.adapters.schemas.validator import SchemaValidator
from postroom.application.extras import explain_missing_extra
from postroom.application.ingest.ingester import Ingester, ingest_monitor
from postroom.application.ingest.namespace import (
    IngestCounts,
    IngestSettings,
    KafkaSource,
    MessageSource,
    Namespace,
    NatsSource,
    RabbitmqSource,
    RedisSource,
)
from postroom.application.ingest.redrive import (
    DEAD_LETTER_ID,
    DeadLetterSubject,
    IngestDeadLetter,
    IngestDeadLetterAdmin,
)
from postroom.application.mailbox.administer import CommandHandlers
from postroom.application.metrics import Metric, Monitor, is_answering
from postroom.application.ports.outbox import Publisher
from postroom.application.ports.source import CountedSource
from postroom.domain.errors import InvalidRequest

__all__ = [
    "RELOADED",
    "IngestCounts",
    "IngestDeadLetter",
    "IngestDeadLetterAdmin",
    "Ingester",
    "KafkaSource",
    "MessageSource",
    "Namespace",
    "NatsSettings",
    "NatsSource",
    "OpenNamespace",
    "RabbitmqSource",
    "RedisSource",
    "find_namespace",
    "has_dead_letters",
    "load_namespaces",
    "nats_settings",
    "open_ingest_dead_letters",
    "open_ingester",
    "open_namespace",
    "reload_namespace",
]


async def open_source(namespace: Namespace) -> CountedSource:
    """Connect to the source of a namespace; see `open_namespace`."""
    match namespace.source:
        case NatsSource() as nats:
            return await _open_nats(nats, namespace.prefetch)
        case RedisSource() as redis:
            return await _open_redis(redis)
        case KafkaSource() as kafka:
            return await _open_kafka(kafka, namespace.prefetch)
        case RabbitmqSource() as rabbitmq:
            return await _open_rabbitmq(rabbitmq)


async def open_dead_letters(source: MessageSource, stack: AsyncExitStack) -> DeadLetterSubject | None:
    """Return the target of messages that can't be stored, or None if the source has no target.

    Arguments:
        stack: closes the connection.
    """
    match source:
        case NatsSource(dead_letter_subject=str(subject)):
            return await _nats_dead_letters(source, subject, stack)
        case RedisSource(dead_letter_stream=str(subject)):
            from postroom.adapters.redis.source import RedisPublisher

            publisher: Publisher = RedisPublisher(_redis_settings(source), source.field)
        case KafkaSource(dead_letter_topic=str(subject)):
            from postroom.adapters.kafka.publisher import KafkaPublisher

            publisher = KafkaPublisher(_kafka_settings(source))
        case RabbitmqSource(dead_letter_routing_key=str(subject)):
            from postroom.adapters.rabbitmq.connection import RabbitmqPublisher

            publisher = RabbitmqPublisher(
                _rabbitmq_settings(source), source.dead_letter_exchange, DEAD_LETTER_ID
            )
        case _:
            return None
    stack.push_async_callback(publisher.close)
    return DeadLetterSubject(publisher, subject, source.consumer_group, id_header=DEAD_LETTER_ID)


def nats_settings(config: NatsSource) -> NatsSettings:
    """Return the address of a source, and the access to it."""
    return msgspec.convert({"url": config.url} | config.access(), NatsSettings)


async def _open_nats(config: NatsSource, prefetch: int) -> CountedSource:
    with explain_missing_extra():
        from postroom.adapters.nats.pull_consumer import PullConsumer
        from postroom.adapters.nats.source import JetStreamSource

    consumer = PullConsumer(
        durable=config.consumer_group,
        stream=config.stream,
        subjects=(config.subject,),
        create=True,
        ack_wait_ms=config.ack_wait_seconds * 1_000,
        max_ack_pending=config.max_ack_pending,
    )
    return await JetStreamSource.open(nats_settings(config), consumer, prefetch=prefetch)


async def _nats_dead_letters(source: NatsSource, subject: str, stack: AsyncExitStack) -> DeadLetterSubject:
    from postroom.adapters.nats.connection import connect
    from postroom.adapters.nats.publisher import JetStreamPublisher

    # A separate connection, because the source replaces the parser of its own.
    client = await stack.enter_async_context(
        connect(nats_settings(source), f"postroom {source.consumer_group} dlq")
    )
    return DeadLetterSubject(JetStreamPublisher(client), subject, source.consumer_group)


async def _open_redis(config: RedisSource) -> CountedSource:
    with explain_missing_extra():
        from postroom.adapters.redis.settings import StreamConsumer
        from postroom.adapters.redis.source import RedisStreamSource

    return await RedisStreamSource.open(
        StreamConsumer(
            **msgspec.structs.asdict(_redis_settings(config)),
            stream=config.stream,
            group=config.consumer_group,
            field=config.field,
            ack_wait_ms=config.ack_wait_seconds * 1_000,
        )
    )


async def _open_kafka(config: KafkaSource, prefetch: int) -> CountedSource:
    settings = _kafka_settings(config)
    with explain_missing_extra():
        from postroom.adapters.kafka.source import KafkaTopicSource, TopicConsumer

    consumer = TopicConsumer(
        topic=config.topic,
        group=config.consumer_group,
        ack_wait_ms=config.ack_wait_seconds * 1_000,
        max_unsettled=config.max_ack_pending,
        prefetch=prefetch,
    )
    return await KafkaTopicSource.open(settings, consumer)


async def _open_rabbitmq(config: RabbitmqSource) -> CountedSource:
    settings = _rabbitmq_settings(config)
    with explain_missing_extra():
        from postroom.adapters.rabbitmq.source import QueueConsumer, RabbitmqQueueSource

    consumer = QueueConsumer(
        queue=config.stream or config.queue or "",
        group=config.consumer_group,
        is_stream=config.stream is not None,
        ack_wait_ms=config.ack_wait_seconds * 1_000,
        prefetch=config.max_ack_pending,
    )
    return await RabbitmqQueueSource.open(settings, consumer)


def _redis_settings(config: RedisSource) -> RedisSettings:
    values = {name: getattr(config, name) for name in RedisSettings.__struct_fields__}
    return msgspec.convert(values, RedisSettings)


def _rabbitmq_settings(config: RabbitmqSource) -> RabbitmqSettings:
    values = {name: getattr(config, name) for name in RabbitmqSettings.__struct_fields__}
    return msgspec.convert(values, RabbitmqSettings)


def _kafka_settings(config: KafkaSource) -> KafkaSettings:
    values = {name: getattr(config, name) for name in KafkaSettings.__struct_fields__}
    return msgspec.convert(values, KafkaSettings)


RELOADED = ("description", "batch_size", "envelope_validation", "max_retries", "payload_schemas")
"""Fields of a namespace that a running ingester takes over."""


class OpenNamespace(NamedTuple):
    """A namespace whose schemas are loaded and whose source is connected."""

    namespace: Namespace
    source: CountedSource
    payloads: SchemaValidator | None
    dead_letters: DeadLetterSubject | None

    def ingester(self, postroom: CommandHandlers) -> Ingester:
        """Return an ingester into a mailbox.

        Arguments:
            postroom: the mailbox that the namespace names, in the mode `archive`.
        """
        return Ingester(
            self.source,
            postroom.send_envelopes,
            _settings(self.namespace),
            payloads=self.payloads,
            dead_letters=self.dead_letters,
        )

    def monitor(self, ingester: Ingester, mailbox: SharedMailbox) -> Monitor:
        """Return the monitor of an ingester into a mailbox."""
        return ingest_monitor(
            ingester,
            self.namespace.name,
            measure_mailbox=mailbox.measure_owned,
            is_mailbox_answering=lambda: is_answering(mailbox),
            count_pending=self.source.count_pending,
            stream_metrics=self._stream_metrics,
        )

    def _stream_metrics(self) -> list[Metric]:
        if not isinstance(self.namespace.source, NatsSource):
            return []
        from postroom.adapters.nats.connection import nats_metrics
        from postroom.adapters.nats.source import JetStreamSource

        assert isinstance(self.source, JetStreamSource)
        return nats_metrics({"source": self.source.client})


@asynccontextmanager
async def open_namespace(namespace: Namespace) -> AsyncIterator[OpenNamespace]:
    """Load the schemas of a namespace and connect to its source, for the length of the context.

    Raises:
        InvalidRequest: schemas can't be read, or the consumer differs from the namespace.
        NotFound: there is no such stream.
        Unavailable: the source can't be reached.
    """
    async with AsyncExitStack() as stack:
        payloads = _validator(namespace)
        source = await open_source(namespace)
        stack.push_async_callback(source.close)
        dead_letters = await open_dead_letters(namespace.source, stack)
        yield OpenNamespace(namespace, source, payloads, dead_letters)


def reload_namespace(ingester: Ingester, namespace: Namespace) -> None:
    """Apply the fields `RELOADED` of a changed namespace to an ingester.

    Raises: InvalidRequest when a schema can't be read; nothing is changed.
    """
    ingester.reconfigure(_settings(namespace), _validator(namespace))


def _settings(namespace: Namespace) -> IngestSettings:
    return IngestSettings(
        namespace.batch_size,
        namespace.envelope_validation,
        namespace.max_retries,
        isinstance(namespace.source, NatsSource),
        namespace.mapping,
        not isinstance(namespace.source, RabbitmqSource) or namespace.source.stream is not None,
    )


def _validator(namespace: Namespace) -> SchemaValidator | None:
    return SchemaValidator(namespace.payload_schemas) if namespace.payload_schemas else None


@asynccontextmanager
async def open_ingester(namespace: Namespace, postroom: CommandHandlers) -> AsyncIterator[Ingester]:
    """Open a namespace and ingest into a mailbox; see `open_namespace`.

    Arguments:
        namespace: source, rules and store.
        postroom: the mailbox of the namespace, in which messages are stored.
    """
    async with open_namespace(namespace) as source:
        yield source.ingester(postroom)


def has_dead_letters(source: MessageSource) -> bool:
    """Return whether `postroom ingest dlq` can read and remove single dead letters of a source."""
    match source:
        case NatsSource(dead_letter_subject=str()) | RedisSource(dead_letter_stream=str()):
            return True
        case _:
            return False


@asynccontextmanager
async def open_ingest_dead_letters(source: MessageSource) -> AsyncIterator[IngestDeadLetterAdmin]:
    """Manage the dead letters of a source for the length of the context.

    Raises: Unavailable when the broker can't be reached, InvalidRequest for a source without such dead
        letters; see `has_dead_letters`.
    """
    match source:
        case NatsSource(dead_letter_subject=str(subject)):
            async with _open_nats_dead_letters(nats_settings(source), subject) as admin:
                yield admin
        case RedisSource(dead_letter_stream=str(subject)):
            async with _open_redis_dead_letters(source, subject) as admin:
                yield admin
        case _:
            raise InvalidRequest(
                "Single dead letters can be read from NATS and Redis, if the source names their subject or "
                "stream; for Kafka and RabbitMQ, use their tools."
            )


@asynccontextmanager
async def _open_redis_dead_letters(source: RedisSource, subject: str) -> AsyncIterator[IngestDeadLetterAdmin]:
    with explain_missing_extra():
        from postroom.adapters.redis.source import RedisDeadLetterQueue, RedisPublisher

    queue = RedisDeadLetterQueue(_redis_settings(source), source.field)
    publisher = RedisPublisher(_redis_settings(source), source.field)
    try:
        yield IngestDeadLetterAdmin(queue, publisher, subject, id_header=None)
    finally:
        await queue.close()
        await publisher.close()


@asynccontextmanager
async def _open_nats_dead_letters(nats: NatsSettings, subject: str) -> AsyncIterator[IngestDeadLetterAdmin]:
    with explain_missing_extra():
        from postroom.adapters.nats.connection import connect
        from postroom.adapters.nats.publisher import JetStreamDeadLetterQueue, JetStreamPublisher

    async with connect(nats, "postroom ingest dlq") as client:
        queue, publisher = JetStreamDeadLetterQueue(client), JetStreamPublisher(client)
        yield IngestDeadLetterAdmin(queue, publisher, subject)
