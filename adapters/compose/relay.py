"""Wiring of the relay of an outbox; a module of its own, because the NATS client is slow to import."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose.outbox import new_cleanup, open_repository
from postroom.adapters.compose.tracing import trace_if_used
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.metrics import nats_metrics
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.messaging.hints import PostgresHints
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.system.clock import SystemClock
from postroom.application.background import background_task
from postroom.application.monitor import Monitor
from postroom.application.outbox.metrics import relay_monitor
from postroom.application.outbox.relay import OutboxRelay
from postroom.application.outbox.settings import OutboxSettings
from postroom.domain.subject import check_token

__all__ = ["MessagingSettings", "NatsSettings", "OutboxSettings", "open_monitored_relay", "open_relay"]


@asynccontextmanager
async def open_relay(
    messaging: MessagingSettings, nats: NatsSettings, settings: OutboxSettings | None = None
) -> AsyncIterator[OutboxRelay]:
    """Open a relay; see `open_monitored_relay`."""
    async with open_monitored_relay(messaging, nats, settings) as (relay, _):
        yield relay


@asynccontextmanager
async def open_monitored_relay(
    messaging: MessagingSettings, nats: NatsSettings, settings: OutboxSettings | None = None
) -> AsyncIterator[tuple[OutboxRelay, Monitor]]:
    """Open a relay that publishes the events of a context, and a cleanup if configured; with its monitor.

    Raises: Unavailable when NATS can't be reached, InvalidRequest if the context is no token of a subject.
    """
    settings = settings or OutboxSettings()
    check_token(messaging.context, "The context")
    trace_if_used()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(nats, "postroom outbox relay"))
        repository = open_repository(messaging, settings, "postroom outbox relay")
        stack.push_async_callback(repository.close)
        hints = None
        if settings.hints:
            hints = PostgresHints(messaging.database)
            stack.push_async_callback(hints.close)
        if settings.cleanup_every_ms:
            connection = open_repository(messaging, settings, "postroom outbox cleanup")
            stack.push_async_callback(connection.close)
            cleanup = new_cleanup(connection, settings)
            await stack.enter_async_context(background_task(cleanup.run(settings.cleanup_every_ms)))
        clock = SystemClock()
        relay = OutboxRelay(
            repository,
            JetStreamPublisher(client),
            clock,
            random.random,
            messaging.context,
            hints=hints,
            settings=settings,
        )
        counting = open_repository(messaging, settings, "postroom outbox metrics")
        stack.push_async_callback(counting.close)
        yield (
            relay,
            relay_monitor(
                relay,
                messaging.context,
                counting.backlog,
                clock.wall,
                lambda: nats_metrics({"publisher": client}),
                lambda: client.is_connected,
            ),
        )
