"""The `eventsourcing` library's own test case of aggregate recorders, run against the table of histories."""

from collections.abc import Iterator
from uuid import UUID, uuid4

import psycopg
import pytest
import sqlalchemy
from eventsourcing.persistence import IntegrityError, ProgrammingError, StoredEvent
from eventsourcing.tests.persistence import AggregateRecorderTestCase
from sqlalchemy.orm import Session

from postroom.adapters.postgres.messaging.aggregate_events import AggregateEvents
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.adapters.system.clock import SystemClock
from postroom.application.messaging import CODEC
from postroom.domain.errors import InvalidRequest
from postroom.domain.outbox_events import OutboxEventPublished, OutboxEventRetried

CLOCK = SystemClock()


class RecorderCase(AggregateRecorderTestCase):
    connection: psycopg.Connection | Session

    def create_recorder(self) -> AggregateEvents:
        return AggregateEvents(self.connection, CLOCK.wall)

    def new_originator_id(self) -> UUID:
        return uuid4()


class TestRecorderOverPsycopg(RecorderCase):
    @pytest.fixture(autouse=True)
    def _connect(self, messaging_database: str) -> Iterator[None]:
        with psycopg.connect(messaging_database) as self.connection:
            yield


class TestRecorderOverSqlAlchemy(RecorderCase):
    @pytest.fixture(autouse=True)
    def _connect(self, engine: sqlalchemy.Engine) -> Iterator[None]:
        with Session(engine) as self.connection:
            yield


# The library's base class is a test case itself, but can't be made: only ours run.
del RecorderCase, AggregateRecorderTestCase


@pytest.fixture
def connection(messaging_database: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(messaging_database) as opened:
        yield opened


def test_our_events_and_the_librarys_are_one_history(connection: psycopg.Connection) -> None:
    events = AggregateEvents(connection, lambda: 5)
    id_ = uuid4()
    ours = [
        OutboxEventRetried(id_.bytes, 1, 5),
        OutboxEventPublished(id_.bytes, 2, 5, "order_placed", "sea.event.order_placed.v1"),
    ]
    events.insert_events([StoredEvent(id_, event.version, *CODEC.to_row(event)) for event in ours])
    assert events.history(id_) == ours


def test_what_is_rolled_back_was_never_there(messaging_database: str) -> None:
    id_ = uuid4()
    with psycopg.connect(messaging_database) as connection:
        AggregateEvents(connection, CLOCK.wall).insert_events([StoredEvent(id_, 1, "A.1", b"")])
        connection.rollback()
        assert AggregateEvents(connection, CLOCK.wall).select_events(id_) == []


def test_a_refused_insert_leaves_the_users_transaction_intact(connection: psycopg.Connection) -> None:
    events = AggregateEvents(connection, CLOCK.wall)
    connection.execute("CREATE TEMPORARY TABLE orders (id INT)")
    event = StoredEvent(uuid4(), 1, "A.1", b"")
    events.insert_events([event])
    with pytest.raises(IntegrityError, match="already has an event of the same version"):
        events.insert_events([event])
    assert connection.execute("SELECT count(*) FROM orders").fetchone() == (0,)


def test_an_originator_id_that_is_no_uuid_is_refused(connection: psycopg.Connection) -> None:
    with pytest.raises(ProgrammingError, match="must be UUIDs, not 'order-1'"):
        AggregateEvents(connection, CLOCK.wall).select_events("order-1")


def test_the_tables_may_have_other_names(connection: psycopg.Connection) -> None:
    connection.execute("CREATE SCHEMA shop")
    connection.execute("ALTER TABLE aggregate_events SET SCHEMA shop")
    connection.execute('ALTER TABLE shop.aggregate_events RENAME TO "History"')
    events = AggregateEvents(connection, CLOCK.wall, Tables(aggregate_events="shop.History"))
    event = StoredEvent(uuid4(), 1, "A.1", b"")
    events.insert_events([event])
    assert events.select_events(event.originator_id) == [event]
    with pytest.raises(InvalidRequest, match="is not a valid name for the table aggregate_events"):
        Tables(aggregate_events='x"; DROP TABLE orders; --')
