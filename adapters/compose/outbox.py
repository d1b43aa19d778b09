"""Wire the outbox: what services record with, and what operators do."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.adapters.compose.messaging import MessagingSettings
from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.messaging.tables import Tables
from postroom.adapters.system.clock import SystemClock
from postroom.application.outbox.cleanup import OutboxCleanup
from postroom.application.outbox.new_event import NewEvent
from postroom.application.outbox.operate import (
    DiscardOutboxEvents,
    GetOutboxBacklog,
    ListFailedEvents,
    RetryOutboxEvents,
)
from postroom.application.outbox.relay import RelaySettings
from postroom.domain.outbox import PublishPolicy
from postroom.domain.policy import DAY_MS, SECOND_MS

__all__ = [
    "AsyncOutbox",
    "MessagingSettings",
    "NewEvent",
    "Outbox",
    "OutboxDesk",
    "OutboxSettings",
    "Tables",
    "open_outbox",
    "open_repository",
]


class OutboxSettings(msgspec.Struct, frozen=True):
    """Say how relays and cleanups of an outbox work: `[outbox]` of the settings file; times in ms.

    Arguments:
        batch, concurrency, poll_ms, claim_ms: see `RelaySettings`; a publish may take 5 s of a claim's last
            third.
        max_attempts, backoff_base_ms, backoff_max_ms: see `PublishPolicy`.
        hints: listen for the hints of outboxes that notify.
        retention_ms: how long published events are kept.
        cleanup_every_ms: how often a relay cleans up; 0 leaves that to `postroom outbox cleanup`.
        keep_history: leave the histories of events that are cleaned up in `aggregate_events`.
    """

    batch: Annotated[int, Meta(ge=1, le=10_000)] = 500
    concurrency: Annotated[int, Meta(ge=1)] = 256
    poll_ms: Annotated[int, Meta(ge=10)] = 500
    claim_ms: Annotated[int, Meta(ge=20_000)] = 30_000
    max_attempts: Annotated[int, Meta(ge=1)] = 20
    backoff_base_ms: Annotated[int, Meta(ge=1)] = SECOND_MS
    backoff_max_ms: Annotated[int, Meta(ge=1)] = 300 * SECOND_MS
    hints: bool = True
    retention_ms: Annotated[int, Meta(ge=0)] = 7 * DAY_MS
    cleanup_every_ms: Annotated[int, Meta(ge=0)] = 600 * SECOND_MS
    keep_history: bool = False

    @property
    def relay(self) -> RelaySettings:
        """Return what concerns the relay."""
        policy = PublishPolicy(self.max_attempts, self.backoff_base_ms, self.backoff_max_ms)
        return RelaySettings(self.batch, self.concurrency, self.poll_ms, self.claim_ms, policy)


class OutboxDesk:
    """The queries on one outbox and what operators do to it; each is a plain async callable."""

    def __init__(
        self, repository: PostgresOutboxRepository, messaging: MessagingSettings, settings: OutboxSettings
    ) -> None:
        clock = SystemClock()
        self.get_backlog = GetOutboxBacklog(repository, messaging.context)
        self.list_failed_events = ListFailedEvents(repository)
        self.retry_events = RetryOutboxEvents(repository, clock)
        self.discard_events = DiscardOutboxEvents(repository, clock)
        self.cleanup = OutboxCleanup(repository, clock, random.random, retention_ms=settings.retention_ms)


@asynccontextmanager
async def open_outbox(
    messaging: MessagingSettings, settings: OutboxSettings | None = None
) -> AsyncIterator[OutboxDesk]:
    """Look after the outbox of a context while the context manager lasts.

    The queries and commands raise Unavailable when the database can't be used.
    """
    settings = settings or OutboxSettings()
    repository = open_repository(messaging, settings, "postroom outbox")
    try:
        yield OutboxDesk(repository, messaging, settings)
    finally:
        await repository.close()


def open_repository(
    messaging: MessagingSettings, settings: OutboxSettings, name: str
) -> PostgresOutboxRepository:
    """Return the outbox of a context, for a process of a `name` that the server shows."""
    return PostgresOutboxRepository(
        messaging.database,
        name=name,
        tables=messaging.tables,
        claim_ms=settings.claim_ms,
        keep_history=settings.keep_history,
    )
