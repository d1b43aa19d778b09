"""Wire the relay of an outbox; apart, because the client of NATS takes long to load."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose.messaging import MessagingSettings
from postroom.adapters.compose.outbox import OutboxSettings, open_repository
from postroom.adapters.nats.connection import NatsSettings, connect
from postroom.adapters.nats.publisher import JetStreamPublisher
from postroom.adapters.postgres.messaging.hints import PostgresHints
from postroom.adapters.system.clock import SystemClock
from postroom.application.background import beside
from postroom.application.outbox.cleanup import OutboxCleanup
from postroom.application.outbox.relay import OutboxRelay
from postroom.domain.subject import check_token

__all__ = ["MessagingSettings", "NatsSettings", "OutboxSettings", "open_relay"]


@asynccontextmanager
async def open_relay(
    messaging: MessagingSettings, nats: NatsSettings, settings: OutboxSettings | None = None
) -> AsyncIterator[OutboxRelay]:
    """Have a relay that publishes the events of a context, and cleans up, while the context manager lasts.

    Raises: Unavailable when NATS can't be reached, InvalidRequest when the context is no word of a subject.
    """
    settings = settings or OutboxSettings()
    check_token(messaging.context, "The context")
    async with AsyncExitStack() as opened:
        client = await opened.enter_async_context(connect(nats, "postroom outbox relay"))
        repository = open_repository(messaging, settings, "postroom outbox relay")
        opened.push_async_callback(repository.close)
        hints = None
        if settings.hints:
            hints = PostgresHints(messaging.database)
            opened.push_async_callback(hints.close)
        if settings.cleanup_every_ms:
            await opened.enter_async_context(_cleaning(messaging, settings))
        yield OutboxRelay(
            repository,
            JetStreamPublisher(client),
            SystemClock(),
            random.random,
            messaging.context,
            hints=hints,
            settings=settings.relay,
        )


@asynccontextmanager
async def _cleaning(messaging: MessagingSettings, settings: OutboxSettings) -> AsyncIterator[None]:
    repository = open_repository(messaging, settings, "postroom outbox cleanup")
    cleanup = OutboxCleanup(repository, SystemClock(), random.random, retention_ms=settings.retention_ms)
    try:
        async with beside(cleanup.keep_cleaning(settings.cleanup_every_ms)):
            yield
    finally:
        await repository.close()
