"""Durable pull consumers of JetStream: lookup, creation and requests."""

from typing import Literal, NamedTuple

import msgspec
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.application.inbox.metrics import CONCURRENCY
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest, NotFound, Unavailable

STREAM_NOT_FOUND = 10059
CREATED = "created by postroom"
"""Description of the consumers that `find_or_create` creates."""


class PullConsumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable pull consumer.

    Arguments:
        stream: None selects the stream that stores the first of `subjects`.
        subjects: its filter, `*` and `>` allowed; empty accepts any filter of an existing consumer.
        create: create it if it is missing, with the fields below; an existing one is not changed.
        ack_wait_ms: how long a delivery may stay unsettled before the message is redelivered.
        max_deliver: maximum number of deliveries of a message; -1 is unlimited.
        max_ack_pending: deliveries that may be unsettled at once.
        deliver: start of a new consumer: `all` messages of the stream, or only `new` ones.
    """

    durable: str
    stream: str | None = None
    subjects: tuple[str, ...] = ()
    create: bool = False
    ack_wait_ms: int = 30_000
    max_deliver: int = -1
    max_ack_pending: int = 10_000
    deliver: Literal["all", "new"] = "all"


async def find_or_create(stream: JetStreamContext, consumer: PullConsumer) -> tuple[str, ConsumerConfig]:
    """Return the stream's name and the consumer's configuration; if `create` is set, create a missing one."""
    name = consumer.stream or await _stream_of(stream, consumer.subjects)
    try:
        config = (await stream.consumer_info(name, consumer.durable)).config
    except NotFoundError as error:
        if not consumer.create or error.err_code == STREAM_NOT_FOUND:
            raise missing_error(name, consumer.durable, error) from error
        return name, await create_consumer(stream, name, consumer)
    _check_config(name, consumer, config)
    if consumer.create and consumer.max_deliver < 0 < (config.max_deliver or 0):
        logger().warning(
            "source.deliveries_are_limited",
            consumer=consumer.durable,
            stream=name,
            max_deliver=config.max_deliver,
            hint="while the store is down the server may drop messages; set max_deliver to -1",
        )
    return name, config


async def _stream_of(stream: JetStreamContext, subjects: tuple[str, ...]) -> str:
    if not subjects:
        raise InvalidRequest("The consumer has neither a stream nor a subject; name one of them.")
    try:
        return await stream.find_stream_name_by_subject(subjects[0])
    except NotFoundError:
        raise NotFound(
            f"No stream of this NATS server has the subject {subjects[0]}; define one under [streams] in "
            "the settings file and run postroom streams apply."
        ) from None


async def create_consumer(stream: JetStreamContext, name: str, consumer: PullConsumer) -> ConsumerConfig:
    """Create a consumer; raise InvalidRequest if the stream refuses it."""
    config = ConsumerConfig(
        durable_name=consumer.durable,
        description=CREATED,
        deliver_policy=DeliverPolicy(consumer.deliver),
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=consumer.ack_wait_ms / 1_000,
        max_deliver=consumer.max_deliver,
        max_ack_pending=consumer.max_ack_pending,
        filter_subject=consumer.subjects[0] if len(consumer.subjects) == 1 else None,
        filter_subjects=list(consumer.subjects) if len(consumer.subjects) > 1 else None,
    )
    try:
        created = (await stream.add_consumer(name, config)).config
    except ServiceUnavailableError:
        raise
    except APIError as error:
        raise InvalidRequest(
            f"Stream {name} refuses a consumer {consumer.durable} of "
            f"{', '.join(consumer.subjects) or 'all subjects'}: {error.description}. "
            "Check the subjects and names in the settings."
        ) from error
    logger().info(
        "source.consumer_created", consumer=consumer.durable, stream=name, subjects=consumer.subjects
    )
    return created


def _check_config(stream: str, consumer: PullConsumer, config: ConsumerConfig) -> None:
    """Raise `InvalidRequest` if a consumer is of an unsupported kind, or reads other subjects."""
    label = f"Consumer {consumer.durable} of stream {stream}"
    if config.deliver_subject is not None:
        raise InvalidRequest(f"{label} is a push consumer; define a pull consumer, or choose another name.")
    if config.ack_policy != AckPolicy.EXPLICIT:
        raise InvalidRequest(
            f"{label} has the ack policy {config.ack_policy}, which can lose messages; "
            "define it with explicit, or choose another name."
        )
    subjects = config.filter_subjects or ([config.filter_subject] if config.filter_subject else [])
    if consumer.subjects and set(subjects) != set(consumer.subjects):
        raise InvalidRequest(
            f"{label} reads {', '.join(subjects) or 'all subjects'}, but the settings name "
            f"{', '.join(consumer.subjects)}; change one of them, or choose another name."
        )


def missing_error(stream: str, durable: str, error: NotFoundError) -> NotFound:
    """Return the error for a missing stream or consumer."""
    missing = (
        f"stream {stream}" if error.err_code == STREAM_NOT_FOUND else f"consumer {durable} of stream {stream}"
    )
    return NotFound(
        f"This NATS server has no {missing}; define it in the settings file and run postroom streams apply."
    )


ACK_WAIT_MS = 120_000
CONSUMER_MAX_DELIVER = 20
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
        definition.max_deliver or consumer.max_deliver or CONSUMER_MAX_DELIVER,
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
        "max_deliver": definition.max_deliver or CONSUMER_MAX_DELIVER,
        "max_ack_pending": definition.max_ack_pending or MAX_ACK_PENDING,
    }
    await streams.create_consumer(msgspec.structs.replace(definition, **defaults))
    consumer = await streams.find_consumer(definition.stream, definition.durable)
    if consumer is None:
        raise Unavailable(f"Consumer {definition.durable} was deleted right after its creation; try again.")
    return consumer
