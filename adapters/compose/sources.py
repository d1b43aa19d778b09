"""Wiring of message sources and of the targets of their dead letters, one of each broker."""

from contextlib import AsyncExitStack

import msgspec

from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.adapters.redis.settings import RedisSettings
from postroom.application.extras import explain_missing_extra
from postroom.application.ingest.namespace import (
    KafkaSource,
    MessageSource,
    Namespace,
    NatsSource,
    RabbitmqSource,
    RedisSource,
)
from postroom.application.ingest.redrive import DEAD_LETTER_ID, DeadLetterSubject
from postroom.application.ports.outbox import Publisher
from postroom.application.ports.source import CountedSource


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
            from postroom.adapters.redis.publisher import RedisPublisher

            publisher: Publisher = RedisPublisher(_redis_settings(source), source.field)
        case KafkaSource(dead_letter_topic=str(subject)):
            from postroom.adapters.kafka.publisher import KafkaPublisher

            publisher = KafkaPublisher(_kafka_settings(source))
        case RabbitmqSource(dead_letter_routing_key=str(subject)):
            from postroom.adapters.rabbitmq.publisher import RabbitmqPublisher

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
        from postroom.adapters.redis.source import RedisStreamSource, StreamConsumer

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
