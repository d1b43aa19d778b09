"""Outboxes of applications: record events, relay them, and capture them from PostgreSQL's log."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from postroom.adapters.compose.brokers import EventTarget, MailboxTarget, OpenTarget, open_target
from postroom.adapters.compose.process import trace_if_used
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.capture.event_rows import read_held_row
from postroom.adapters.postgres.capture.settings import CaptureColumns, CaptureSettings
from postroom.adapters.postgres.capture.slot import ReplicationSlot
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.hints import PostgresHints
from postroom.adapters.postgres.messaging.aggregate_events import PostgresHeldEvents
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.messaging.settings import MessagingSettings, Tables
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.adapters.system.clock import SystemClock
from postroom.application.cloudevents import NATS
from postroom.application.messaging import Cleanup
from postroom.application.metrics import Monitor
from postroom.application.outbox.capture import OutboxCapture, capture_monitor
from postroom.application.outbox.formats import SUBJECT, EventRoute, new_format
from postroom.application.outbox.new_event import NewEvent
from postroom.application.outbox.operate import (
    DiscardOutboxEvents,
    GetOutboxBacklog,
    ListFailedEvents,
    RetryOutboxEvents,
    relay_monitor,
)
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings
from postroom.application.ports.event_log import Clock
from postroom.application.ports.outbox import SlotState
from postroom.application.threads import background_task
from postroom.domain.errors import InvalidRequest

__all__ = [
    "AsyncOutbox",
    "CaptureColumns",
    "CaptureSettings",
    "EventTarget",
    "KafkaSettings",
    "MailboxTarget",
    "MessagingSettings",
    "NatsSettings",
    "NewEvent",
    "Outbox",
    "OutboxAdmin",
    "OutboxSettings",
    "RabbitmqSettings",
    "Tables",
    "create_slot",
    "get_slot_state",
    "open_capture",
    "open_monitored_capture",
    "open_monitored_relay",
    "open_outbox",
    "open_relay",
    "open_repository",
]


class OutboxAdmin:
    """The queries on one outbox and the operations of operators; each is an async callable."""

    def __init__(
        self,
        repository: PostgresOutboxRepository,
        messaging: MessagingSettings,
        settings: OutboxSettings,
        capture: CaptureSettings | None,
    ) -> None:
        clock = SystemClock()
        self.get_backlog = GetOutboxBacklog(repository, messaging.context)
        self.list_failed_events = ListFailedEvents(repository)
        read_row = None if capture is None else partial(read_held_row, capture)
        self.retry_events = RetryOutboxEvents(repository, clock, read_row)
        self.discard_events = DiscardOutboxEvents(repository, clock)
        self.cleanup = new_cleanup(repository, settings)


@asynccontextmanager
async def open_outbox(
    messaging: MessagingSettings,
    settings: OutboxSettings | None = None,
    capture: CaptureSettings | None = None,
) -> AsyncIterator[OutboxAdmin]:
    """Open the outbox of a context for operators.

    Arguments:
        messaging: database and context of the service.
        settings: of the outbox; None takes the defaults.
        capture: settings with which `retry_events` reads rows that the capture of a table could not read.

    The queries and commands raise Unavailable when the database can't be used.
    """
    settings = settings or OutboxSettings()
    repository = open_repository(messaging, settings, "postroom outbox")
    try:
        yield OutboxAdmin(repository, messaging, settings, capture)
    finally:
        await repository.close()


def new_cleanup(repository: PostgresOutboxRepository, settings: OutboxSettings) -> Cleanup:
    """Return the cleanup of an outbox."""
    delete, retention_ms = repository.delete_published, settings.retention_ms
    return Cleanup("outbox", delete, SystemClock(), random.random, retention_ms=retention_ms)


def open_repository(
    messaging: MessagingSettings, settings: OutboxSettings, name: str
) -> PostgresOutboxRepository:
    """Return the outbox of a context; `name` is the application name of its connection."""
    return PostgresOutboxRepository(
        messaging.database,
        name=name,
        tables=messaging.tables,
        claim_ms=settings.claim_ms,
        keep_history=settings.keep_history,
    )


@asynccontextmanager
async def open_relay(
    messaging: MessagingSettings, target: EventTarget, settings: OutboxSettings | None = None
) -> AsyncIterator[OutboxRelay]:
    """Open a relay, which publishes the events of an outbox in the order of each aggregate.

    Arguments:
        messaging: database and context of the service.
        target: NATS, Kafka, RabbitMQ or a mailbox.
        settings: of the outbox; None takes the defaults.
    """
    async with open_monitored_relay(messaging, target, settings) as (relay, _):
        yield relay


@asynccontextmanager
async def open_monitored_relay(
    messaging: MessagingSettings, target: EventTarget, settings: OutboxSettings | None = None
) -> AsyncIterator[tuple[OutboxRelay, Monitor]]:
    """Open a relay that publishes the events of a context, and a cleanup if configured; with its monitor.

    Arguments:
        target: where events are published; `topic` and `exchange` of the settings say at which name.

    Raises: Unavailable when NATS or the store of a mailbox can't be used, InvalidRequest if the context can't
        be a token of a subject, or a placeholder of the topic can't be filled in.
    """
    settings = settings or OutboxSettings()
    # Invalid settings fail before anything is connected.
    EventRoute(messaging.context, settings.topic or SUBJECT)
    new_format(settings.format, messaging.context, NATS, source=settings.source)
    trace_if_used()
    async with AsyncExitStack() as stack:
        events = await open_target(target, messaging.context, settings, stack)
        repository = open_repository(messaging, settings, "postroom outbox relay")
        stack.push_async_callback(repository.close)
        second = open_repository(messaging, settings, "postroom outbox relay")
        stack.push_async_callback(second.close)
        hints = None
        if settings.hints:
            await PostgresHints.check(messaging.database)
            hints = PostgresHints(messaging.database, table=messaging.tables.quoted("outbox_events"))
            stack.push_async_callback(hints.close)
        if settings.cleanup_every_ms:
            connection = open_repository(messaging, settings, "postroom outbox cleanup")
            stack.push_async_callback(connection.close)
            cleanup = new_cleanup(connection, settings)
            await stack.enter_async_context(background_task(cleanup.run(settings.cleanup_every_ms)))
        counting = open_repository(messaging, settings, "postroom outbox metrics")
        stack.push_async_callback(counting.close)
        yield new_relay(
            messaging.context, settings, events, repository, counting, SystemClock(), hints, second
        )


def new_relay(
    context: str,
    settings: OutboxSettings,
    events: OpenTarget,
    repository: PostgresOutboxRepository,
    counting: PostgresOutboxRepository,
    clock: Clock,
    hints: PostgresHints | None = None,
    second: PostgresOutboxRepository | None = None,
) -> tuple[OutboxRelay, Monitor]:
    """Return a relay to an open target, and its monitor.

    Arguments:
        context: the bounded context whose events are published.
        counting: counts the unpublished events over a connection of its own.
        hints, second: see `OutboxRelay`.
    """
    relay = OutboxRelay(
        repository,
        events.publisher,
        clock,
        random.random,
        context,
        second=second,
        hints=hints,
        settings=settings,
        route=events.route,
        format_=events.format,
    )
    return relay, relay_monitor(
        relay, context, counting.backlog, clock.wall, events.metrics, events.is_connected
    )


async def create_slot(messaging: MessagingSettings, settings: CaptureSettings) -> bool:
    """Create the publication and the replication slot if they are missing; return whether the slot is new.

    Raises: InvalidRequest if the database can't be used as configured, Unavailable when it can't be used.
    """
    slot = _slot(messaging, settings, "postroom outbox capture")
    try:
        return await slot.create()
    finally:
        await slot.close()


async def get_slot_state(messaging: MessagingSettings, settings: CaptureSettings) -> SlotState:
    """Return the state of the replication slot of a capture.

    Raises: NotFound if there is no slot, InvalidRequest if it lost rows, Unavailable when the database can't
        be used.
    """
    slot = _slot(messaging, settings, "postroom outbox backlog")
    try:
        return await slot.state()
    finally:
        await slot.close()


@asynccontextmanager
async def open_capture(
    messaging: MessagingSettings,
    capture: CaptureSettings,
    target: EventTarget,
    settings: OutboxSettings | None = None,
) -> AsyncIterator[OutboxCapture]:
    """Open a capture, which publishes the rows of a table that any service writes.

    Arguments:
        messaging: database and context of the service.
        capture: the table whose rows are published.
        target: NATS, Kafka, RabbitMQ or a mailbox.
        settings: of the outbox; None takes the defaults.
    """
    async with open_monitored_capture(messaging, capture, target, settings) as (opened, _):
        yield opened


@asynccontextmanager
async def open_monitored_capture(
    messaging: MessagingSettings,
    capture: CaptureSettings,
    target: EventTarget,
    settings: OutboxSettings | None = None,
) -> AsyncIterator[tuple[OutboxCapture, Monitor]]:
    """Open a capture that publishes the rows of a table; with its monitor.

    Arguments:
        messaging: the database with the outbox table, in which events that can't be published are held.
        capture: the table, and its slot and publication.
        target: where events are published; `topic` and `exchange` of the settings say at which name.

    Raises: Unavailable when NATS or the store of a mailbox can't be used, InvalidRequest if the context can't
        be a token of a subject, a placeholder of the topic can't be filled in, or the table is the outbox
        table itself.
    """
    settings = settings or OutboxSettings()
    # Invalid settings fail before anything is connected.
    EventRoute(messaging.context, settings.topic or SUBJECT)
    new_format(settings.format, messaging.context, NATS, source=settings.source)
    _check_table(messaging, capture)
    trace_if_used()
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        events = await open_target(target, messaging.context, settings, stack)
        repository = open_repository(messaging, settings, "postroom outbox capture relay")
        stack.push_async_callback(repository.close)
        counting = open_repository(messaging, settings, "postroom outbox metrics")
        stack.push_async_callback(counting.close)
        if settings.cleanup_every_ms:
            cleanup = new_cleanup(counting, settings)
            await stack.enter_async_context(background_task(cleanup.run(settings.cleanup_every_ms)))
        held = PostgresHeldEvents(messaging.database, messaging.tables)
        stack.push_async_callback(held.close)
        source = PostgresCaptureSource(_url(messaging, capture), capture, settings.claim_ms)
        stack.push_async_callback(source.close)
        relay, monitor = new_relay(messaging.context, settings, events, repository, counting, clock)
        opened = OutboxCapture(
            source, held, relay, events.publisher, events.route, events.format, clock, random.random, settings
        )
        yield opened, capture_monitor(opened, messaging.context, source, monitor)


def _check_table(messaging: MessagingSettings, capture: CaptureSettings) -> None:
    outbox = messaging.tables.outbox_events
    if capture.schema_and_name == CaptureSettings(table=outbox).schema_and_name:
        raise InvalidRequest(
            f"The table {capture.table} is the outbox table, whose events `postroom outbox relay` publishes; "
            "set table under [capture] to another one."
        )


def _slot(messaging: MessagingSettings, settings: CaptureSettings, name: str) -> ReplicationSlot:
    return ReplicationSlot(_url(messaging, settings), settings, name)


def _url(messaging: MessagingSettings, settings: CaptureSettings) -> str:
    return settings.database or messaging.database
