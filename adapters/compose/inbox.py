"""Wiring of the inbox: middlewares of services, the worker, and the operations of operators."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from postroom.adapters.compose.process import trace_if_used
from postroom.adapters.http.event_handler import HttpEventHandler
from postroom.adapters.http.signature import read_keys
from postroom.adapters.memory.store import FunctionEventHandler
from postroom.adapters.nats.connection import connect, nats_metrics
from postroom.adapters.nats.definitions import ConsumerDefinition
from postroom.adapters.nats.ordered_stream import JetStreamOrderedStream
from postroom.adapters.nats.publisher import JetStreamDeadLetterQueue, JetStreamPublisher
from postroom.adapters.nats.pull_consumer import InboxConsumer, PullConsumer, ensure_consumer
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.nats.source import JetStreamSource
from postroom.adapters.nats.streams import JetStreamStreams
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.inbox_queue import PostgresInboxQueue
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.system.clock import SystemClock
from postroom.application.inbox.dead_letter_admin import DeadLetterAdmin, InboxDeadLetter
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.inbox.delivery import EventDispatcher, EventHandlers, InboxDelivery, identify
from postroom.application.inbox.metrics import (
    GetInboxBacklog,
    InboxBacklog,
    InboxSettings,
    OrderedQueue,
    inbox_monitor,
    with_queue,
)
from postroom.application.inbox.ordered_source import OrderedSource, sharing
from postroom.application.inbox.worker import InboxWorker
from postroom.application.messaging import Cleanup
from postroom.application.metrics import Monitor
from postroom.application.ports.inbox import EventHandler
from postroom.application.ports.source import Source
from postroom.application.threads import background_task
from postroom.domain.errors import InvalidRequest
from postroom.domain.inbox import DeliveryPolicy
from postroom.domain.subject import check_token

__all__ = [
    "DeadLetterAdmin",
    "InboxAdmin",
    "InboxBacklog",
    "InboxDeadLetter",
    "InboxSettings",
    "MessagingSettings",
    "NatsSettings",
    "open_dead_letters",
    "open_inbox",
    "open_monitored_worker",
    "open_worker",
]


class InboxAdmin:
    """The queries on one inbox and the operations of operators; each is an async callable."""

    def __init__(self, repository: PostgresInbox, context: str, settings: InboxSettings) -> None:
        self.get_backlog = GetInboxBacklog(repository, context)
        self.cleanup = _cleanup(repository, settings)


@asynccontextmanager
async def open_inbox(
    messaging: MessagingSettings, settings: InboxSettings | None = None
) -> AsyncIterator[InboxAdmin]:
    """Open the inbox of a context for operators.

    Arguments:
        messaging: database and context of the service.
        settings: of the inbox; None takes the defaults.
    """
    settings = settings or InboxSettings()
    repository = _repository(messaging, settings)
    try:
        yield InboxAdmin(repository, messaging.context, settings)
    finally:
        await repository.close()


@asynccontextmanager
async def open_worker(
    messaging: MessagingSettings,
    nats: NatsSettings,
    consumer: ConsumerDefinition,
    settings: InboxSettings,
    *,
    handler: EventHandler | EventHandlers | None = None,
) -> AsyncIterator[InboxWorker]:
    """Open a worker, which hands each message of a consumer to a handler once.

    Arguments:
        messaging: database and context of the service.
        nats: address of NATS, and access to it.
        consumer: durable consumer whose messages are handled.
        settings: of the inbox.
        handler: instead of the URL of the settings.
    """
    async with open_monitored_worker(messaging, nats, consumer, settings, handler=handler) as (worker, _):
        yield worker


@asynccontextmanager
async def open_monitored_worker(
    messaging: MessagingSettings,
    nats: NatsSettings,
    consumer: ConsumerDefinition,
    settings: InboxSettings,
    *,
    handler: EventHandler | EventHandlers | None = None,
) -> AsyncIterator[tuple[InboxWorker, Monitor]]:
    """Open a worker that delivers messages of a consumer to their handler, with its monitor.

    The consumer is created if it is missing, without a server limit on deliveries.

    Arguments:
        handler: handles the messages; None posts them to the URLs of the settings.

    Raises:
        InvalidRequest, Forbidden: the settings are invalid.
        NotFound: the stream does not exist, or no stream has the dead-letter subject.
        Unavailable: NATS or the database can't be reached.
    """
    check_token(messaging.context, "The context")
    trace_if_used()
    async with AsyncExitStack() as stack:
        events = _dispatcher(settings, handler)
        stack.push_async_callback(events.close)
        client = await stack.enter_async_context(connect(nats, f"postroom inbox {consumer.durable}"))
        await JetStreamDeadLetterQueue(client).check(f"{messaging.context}.dlq.>")
        actual = await ensure_consumer(JetStreamStreams(client), consumer)
        policy = DeliveryPolicy(
            actual.max_deliver,
            settings.backoff_base_ms,
            settings.backoff_max_ms,
            None if settings.ordered else actual.server_limit,
        )
        repository = _repository(messaging, settings)
        stack.push_async_callback(repository.close)
        await repository.backlog()  # fails now rather than at the first message
        clock = SystemClock()
        stream = await JetStreamSource.open(nats, PullConsumer(durable=actual.durable, stream=actual.stream))
        stack.push_async_callback(stream.close)
        source = await _open_source(stack, messaging, settings, stream, actual)
        if settings.cleanup_every_ms:
            connection = _repository(messaging, settings)
            stack.push_async_callback(connection.close)
            cleanup = _cleanup(connection, settings)
            await stack.enter_async_context(background_task(cleanup.run(settings.cleanup_every_ms)))
        dead_letters = DeadLetterPublisher(
            JetStreamPublisher(client), messaging.context, actual.stream, actual.durable
        )
        worker = InboxWorker(
            source,
            InboxDelivery(
                repository,
                events,
                dead_letters,
                clock,
                policy,
                stream=actual.stream,
                busy_ms=stream.ack_wait_ms,
            ),
            clock,
            policy,
            concurrency=(
                settings.concurrency
                if settings.ordered
                else min(settings.concurrency, actual.max_ack_pending)
            ),
            ack_wait_ms=stream.ack_wait_ms,
        )
        counting = _repository(messaging, settings)
        stack.push_async_callback(counting.close)
        clients = {"source": stream.client, "publisher": client}
        monitor = inbox_monitor(
            worker,
            messaging.context,
            events,
            counting.backlog,
            clock.wall,
            lambda: nats_metrics(clients),
            lambda: all(each.is_connected for each in clients.values()),
        )
        if isinstance(source, OrderedSource):
            name = f"{actual.stream}/{actual.durable}"
            queue = OrderedQueue(name, partial(counting.queue_backlog, name), source)
            monitor = with_queue(monitor, messaging.context, queue, clock.wall)
        yield worker, monitor


@asynccontextmanager
async def open_dead_letters(
    messaging: MessagingSettings,
    nats: NatsSettings,
    settings: InboxSettings,
    *,
    can_redrive: bool = True,
    handler: EventHandler | EventHandlers | None = None,
) -> AsyncIterator[DeadLetterAdmin]:
    """Open the dead letters of a context for operators.

    Arguments:
        messaging: database and context of the service.
        nats: address of NATS, to which dead letters are redriven.
        settings: of the inbox.
        can_redrive: whether to connect to a handler; without one, dead letters can only be listed and
            discarded.
        handler: instead of the URL of the settings.
    """
    async with AsyncExitStack() as stack:
        events = _dispatcher(settings, handler) if can_redrive else None
        if events is not None:
            stack.push_async_callback(events.close)
        client = await stack.enter_async_context(connect(nats, "postroom inbox dlq"))
        repository = _repository(messaging, settings)
        stack.push_async_callback(repository.close)
        queue = JetStreamDeadLetterQueue(client)
        yield DeadLetterAdmin(queue, repository, events, SystemClock(), messaging.context)


async def _open_source(
    stack: AsyncExitStack,
    messaging: MessagingSettings,
    settings: InboxSettings,
    stream: JetStreamSource,
    consumer: InboxConsumer,
) -> Source:
    """Return the source of a worker: the stream itself, or a share of the queue of ordered workers.

    Raises: InvalidRequest for an unordered worker while ordered workers share the consumer.
    """
    queue = PostgresInboxQueue(messaging.database, f"{consumer.stream}/{consumer.durable}", messaging.tables)
    stack.push_async_callback(queue.close)
    if not settings.ordered:
        await _refuse_beside_ordered(queue, consumer.durable)
        return stream
    source = OrderedSource(
        queue,
        JetStreamOrderedStream(stream, consumer.stream, consumer.durable),
        lambda message: identify(message, consumer.stream),
        SystemClock(),
        lease_ms=settings.lease_ms,
        ack_wait_ms=stream.ack_wait_ms,
    )
    await stack.enter_async_context(sharing(source, queue))
    return source


async def _refuse_beside_ordered(queue: PostgresInboxQueue, consumer: str) -> None:
    """Raise InvalidRequest if the consumer's messages are in a queue, which only ordered workers deliver."""
    messages, workers = await queue.use()
    if messages or workers:
        raise InvalidRequest(
            f"Consumer {consumer} is read in order: {workers} workers share its queue of {messages:,} "
            "messages. Set ordered = true under [inbox]; or run ordered workers until the queue is empty, "
            "and stop them."
        )


def _dispatcher(settings: InboxSettings, handler: EventHandler | EventHandlers | None) -> EventDispatcher:
    """Return the dispatcher to functions, to one handler of all events, or else to URLs of the settings."""
    if isinstance(handler, EventHandlers):
        return EventDispatcher(
            {
                event_type: FunctionEventHandler(function, timeout_ms=settings.timeout_ms)
                for event_type, function in handler.functions.items()
            },
            unhandled=handler.unhandled,
        )
    if handler is not None:
        return EventDispatcher({"*": handler})
    urls = settings.urls
    by_url = {url: _http_handler(settings, url) for url in urls.values()}
    handlers = {event_type: by_url[url] for event_type, url in urls.items()}
    return EventDispatcher(handlers, unhandled=settings.unhandled)


def _http_handler(settings: InboxSettings, url: str) -> HttpEventHandler:
    return HttpEventHandler(
        url,
        allow=settings.allowed,
        keys=read_keys(settings),
        timeout_ms=settings.timeout_ms,
        max_connections=settings.concurrency,
        batch=settings.batch,
    )


def _repository(messaging: MessagingSettings, settings: InboxSettings) -> PostgresInbox:
    return PostgresInbox(messaging.database, messaging.tables, keep_history=settings.keep_history)


def _cleanup(repository: PostgresInbox, settings: InboxSettings) -> Cleanup:
    delete, retention_ms = repository.delete_processed, settings.retention_ms
    return Cleanup("inbox", delete, SystemClock(), random.random, retention_ms=retention_ms)
