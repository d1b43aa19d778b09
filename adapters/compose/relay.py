"""Wiring of the relay of an outbox."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose.event_targets import EventTarget, MailboxTarget, OpenTarget, open_target
from postroom.adapters.compose.outbox import new_cleanup, open_repository
from postroom.adapters.compose.tracing import trace_if_used
from postroom.adapters.kafka.settings import KafkaSettings
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.hints import PostgresHints
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.rabbitmq.settings import RabbitmqSettings
from postroom.adapters.system.clock import SystemClock
from postroom.application.cloudevents.message import NATS
from postroom.application.metrics import Monitor
from postroom.application.outbox.formats import SUBJECT, Route, new_format
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings, relay_monitor
from postroom.application.ports.event_log import Clock
from postroom.application.threads import background_task

__all__ = [
    "EventTarget",
    "KafkaSettings",
    "MailboxTarget",
    "MessagingSettings",
    "NatsSettings",
    "OutboxSettings",
    "RabbitmqSettings",
    "open_monitored_relay",
    "open_relay",
]


@asynccontextmanager
async def open_relay(
    messaging: MessagingSettings, target: EventTarget, settings: OutboxSettings | None = None
) -> AsyncIterator[OutboxRelay]:
    """Open a relay; see `open_monitored_relay`."""
    async with open_monitored_relay(messaging, target, settings) as (relay, _):
        yield relay


@asynccontextmanager
async def open_monitored_relay(
    messaging: MessagingSettings, target: EventTarget, settings: OutboxSettings | None = None
) -> AsyncIterator[tuple[OutboxRelay, Monitor]]:
    """Open a relay that publishes the events of a context, and a cleanup if configured; with its monitor.

    Arguments:
        target: where events are published; `topic` and `exchange` of the settings say at which name.

    Raises: Unavailable when NATS or the store of a mailbox can't be used, InvalidRequest if the context is no
        token of a subject, or the topic can't be filled in.
    """
    settings = settings or OutboxSettings()
    Route(messaging.context, settings.topic or SUBJECT)  # these fail before anything is connected
    new_format(settings.format, messaging.context, NATS, source=settings.source)
    trace_if_used()
    async with AsyncExitStack() as stack:
        events = await open_target(target, messaging.context, settings, stack)
        repository = open_repository(messaging, settings, "postroom outbox relay")
        stack.push_async_callback(repository.close)
        hints = None
        if settings.hints:
            await PostgresHints.check(messaging.database)
            hints = PostgresHints(messaging.database)
            stack.push_async_callback(hints.close)
        if settings.cleanup_every_ms:
            connection = open_repository(messaging, settings, "postroom outbox cleanup")
            stack.push_async_callback(connection.close)
            cleanup = new_cleanup(connection, settings)
            await stack.enter_async_context(background_task(cleanup.run(settings.cleanup_every_ms)))
        counting = open_repository(messaging, settings, "postroom outbox metrics")
        stack.push_async_callback(counting.close)
        yield new_relay(messaging.context, settings, events, repository, counting, SystemClock(), hints)


def new_relay(
    context: str,
    settings: OutboxSettings,
    events: OpenTarget,
    repository: PostgresOutboxRepository,
    counting: PostgresOutboxRepository,
    clock: Clock,
    hints: PostgresHints | None = None,
) -> tuple[OutboxRelay, Monitor]:
    """Return a relay to an open target, and its monitor.

    Arguments:
        context: the bounded context whose events are published.
        counting: counts the unpublished events over a connection of its own.
    """
    relay = OutboxRelay(
        repository,
        events.publisher,
        clock,
        random.random,
        context,
        hints=hints,
        settings=settings,
        route=events.route,
        format_=events.format,
    )
    return relay, relay_monitor(
        relay, context, counting.backlog, clock.wall, events.metrics, events.is_connected
    )
