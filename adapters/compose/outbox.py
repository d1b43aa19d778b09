"""Wiring of the outbox: the recorder of services, and the operations of operators."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from postroom.adapters.postgres.capture.event_rows import read_held_row
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.messaging.tables import Tables
from postroom.adapters.system.clock import SystemClock
from postroom.application.messaging.cleanup import Cleanup
from postroom.application.outbox.new_event import NewEvent
from postroom.application.outbox.operate import (
    DiscardOutboxEvents,
    GetOutboxBacklog,
    ListFailedEvents,
    RetryOutboxEvents,
)
from postroom.application.outbox.relay import OutboxSettings

__all__ = [
    "AsyncOutbox",
    "CaptureSettings",
    "MessagingSettings",
    "NewEvent",
    "Outbox",
    "OutboxAdmin",
    "OutboxSettings",
    "Tables",
    "open_outbox",
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
