"""Events, outboxes and relays for tests of the outbox."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from uuid import UUID

import django.db
import psycopg

from postroom.adapters.postgres.messaging.aggregate_events import AggregateEvents
from postroom.adapters.postgres.messaging.outbox import Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.system.clock import SystemClock
from postroom.application.outbox.new_event import NewEvent
from postroom.application.outbox.relay import OutboxRelay, OutboxSettings
from postroom.application.ports.event_log import Hints
from postroom.application.ports.outbox import Publisher
from postroom.domain.record import Event
from tests.support.django_site import databases

CONTEXT = "sea"
SUBJECT = "sea.event.order_placed.v1"


def order_placed(aggregate: str, n: int, **fields: Any) -> NewEvent:
    """Return the n-th event of an order."""
    about = {"aggregate_type": "order", "aggregate_id": aggregate, "event_type": "order_placed"}
    return NewEvent(**(about | {"payload": {"order": aggregate, "n": n}} | fields))


def record(url: str, *events: NewEvent) -> list[UUID]:
    """Record events in a transaction of their own."""
    with psycopg.connect(url) as connection:
        return Outbox().record(connection, *events)


def history(url: str, id_: UUID) -> list[Event]:
    """Return all that happened to an event."""
    with psycopg.connect(url) as connection:
        return AggregateEvents(connection, SystemClock().wall).history(id_)


def names(events: list[Event]) -> list[str]:
    return [type(event).__name__ for event in events]


def column(url: str, name: str) -> list[Any]:
    """Return a column of the outbox, in the order of recording."""
    with psycopg.connect(url) as connection:
        rows = connection.execute(f"SELECT {name} FROM outbox_events ORDER BY position").fetchall()
    return [value for (value,) in rows]


@asynccontextmanager
async def relaying(
    url: str,
    publisher: Publisher,
    *,
    hints: Hints | None = None,
    settings: OutboxSettings | None = None,
    clock: SystemClock | None = None,
    random: Callable[[], float] = lambda: 0.0,
    **repository_options: Any,
) -> AsyncIterator[OutboxRelay]:
    """Yield a relay of the outbox; by default its random numbers are all 0."""
    repository = PostgresOutboxRepository(url, **repository_options)
    second = PostgresOutboxRepository(url, **repository_options)
    try:
        yield OutboxRelay(
            repository,
            publisher,
            clock or SystemClock(),
            random,
            CONTEXT,
            second=second,
            hints=hints,
            settings=settings,
        )
    finally:
        await repository.close()
        await second.close()


def numbers(payloads: list[bytes], aggregate: str) -> list[int]:
    """Return the numbers of an order's events, in their order on the stream."""
    prefix = b'{"n": '
    matching = [payload for payload in payloads if b'"%s"' % aggregate.encode() in payload]
    return [int(payload.removeprefix(prefix).partition(b",")[0]) for payload in matching]


@contextmanager
def django_connection(address: str) -> Iterator[Any]:
    """Have Django use a database, as the settings of a site do."""
    with databases(default=address):
        yield django.db.connections["default"]
