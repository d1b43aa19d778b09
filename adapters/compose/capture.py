"""Wiring of the capture of a table."""

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose.event_targets import EventTarget, open_target
from postroom.adapters.compose.outbox import new_cleanup, open_repository
from postroom.adapters.compose.relay import new_relay
from postroom.adapters.compose.tracing import trace_if_used
from postroom.adapters.postgres.capture.settings import CaptureColumns, CaptureSettings
from postroom.adapters.postgres.capture.slot import ReplicationSlot
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.messaging.held_events import PostgresHeldEvents
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.system.clock import SystemClock
from postroom.application.cloudevents.message import NATS
from postroom.application.metrics import Monitor
from postroom.application.outbox.capture import OutboxCapture, capture_monitor
from postroom.application.outbox.formats import SUBJECT, Route, new_format
from postroom.application.outbox.relay import OutboxSettings
from postroom.application.ports.outbox import SlotState
from postroom.application.threads import background_task
from postroom.domain.errors import InvalidRequest

__all__ = [
    "CaptureColumns",
    "CaptureSettings",
    "MessagingSettings",
    "create_slot",
    "get_slot_state",
    "open_capture",
    "open_monitored_capture",
]


async def create_slot(messaging: MessagingSettings, settings: CaptureSettings) -> bool:
    """Create the publication and the replication slot if they are missing; return whether the slot was.

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
    """Open a capture; see `open_monitored_capture`."""
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

    Raises: Unavailable when NATS or the store of a mailbox can't be used, InvalidRequest if the context is no
        token of a subject, the topic can't be filled in, or the table is the outbox table itself.
    """
    settings = settings or OutboxSettings()
    Route(messaging.context, settings.topic or SUBJECT)  # these fail before anything is connected
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
