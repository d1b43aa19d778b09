"""Tables of services that write their own outbox, and captures of them."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from secrets import token_hex
from typing import Any
from uuid import UUID

import psycopg

from postroom.adapters.compose.outbox import CaptureColumns, CaptureSettings, MessagingSettings, create_slot
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.messaging.aggregate_events import PostgresHeldEvents
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.system.clock import SystemClock
from postroom.application.outbox.capture import OutboxCapture
from postroom.application.outbox.formats import EventRoute, PostroomFormat
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings
from postroom.application.ports.outbox import Publisher
from tests.support.outboxes import CONTEXT
from tests.support.servers.postgres import PostgresServer

LOGICAL = {"wal_level": "logical", "max_replication_slots": "40", "max_wal_senders": "40"}
COLUMNS = CaptureColumns(occurred_at="occurred_at", event_version="version", headers="headers")
TABLE = """
CREATE TABLE events (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregate_type text DEFAULT 'order', aggregate_id text,
    event_type text DEFAULT 'order_placed', payload jsonb, occurred_at timestamptz DEFAULT now(),
    version int DEFAULT 1, headers jsonb
)
"""


class ServiceDatabase:
    """The database of a service with a table `events`, its slot and the outbox tables.

    Arguments:
        create_table: the statement that creates `events`.
    """

    def __init__(self, url: str, columns: CaptureColumns = COLUMNS, create_table: str = TABLE) -> None:
        self.url = url
        self.messaging = MessagingSettings(url, CONTEXT)
        self.settings = CaptureSettings(table="events", slot=f"s_{token_hex(6)}", columns=columns)
        self.execute(create_table)

    async def create_slot(self) -> bool:
        return await create_slot(self.messaging, self.settings)

    def execute(self, statement: str, parameters: Any = None) -> list[Any]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(statement.encode(), parameters)
            return cursor.fetchall() if cursor.description else []

    def insert(self, aggregate: str, *numbers: int) -> None:
        """Insert events of an order in a transaction of their own."""
        with psycopg.connect(self.url) as connection:
            for n in numbers:
                connection.execute(
                    "INSERT INTO events (aggregate_id, payload) VALUES (%s, %s)",
                    (aggregate, f'{{"n": {n}, "order": "{aggregate}"}}'),
                )

    def drop_slot(self) -> None:
        self.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE slot_name = %s AND NOT active",
            (self.settings.slot,),
        )


@contextmanager
def service_database(server: PostgresServer, template: str, **options: Any) -> Iterator[ServiceDatabase]:
    """Create a database on a server with logical decoding; its slot is dropped at the end."""
    database = ServiceDatabase(server.create_database(template), **options)
    try:
        yield database
    finally:
        database.drop_slot()


@asynccontextmanager
async def capturing(
    database: ServiceDatabase,
    publisher: Publisher,
    settings: OutboxSettings | None = None,
    random: Callable[[], float] = lambda: 0.0,
) -> AsyncIterator[OutboxCapture]:
    """Yield a capture of the database's table; by default its random numbers are all 0."""
    settings = settings or OutboxSettings(poll_ms=10)
    clock, url = SystemClock(), database.url
    repository = PostgresOutboxRepository(url)
    source = PostgresCaptureSource(url, database.settings, settings.claim_ms)
    held = PostgresHeldEvents(url)
    relay = OutboxRelay(repository, publisher, clock, random, CONTEXT, settings=settings)
    try:
        yield OutboxCapture(
            source, held, relay, publisher, EventRoute(CONTEXT), PostroomFormat(), clock, random, settings
        )
    finally:
        await source.close()
        await held.close()
        await repository.close()


def ids(database: ServiceDatabase) -> list[UUID]:
    """Return the ids of the rows that the table has."""
    return [id_ for (id_,) in database.execute("SELECT id FROM events")]
