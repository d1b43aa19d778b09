"""Recording events in the user's own transaction, on every kind of connection that users have."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import django.db
import msgspec
import psycopg
import pytest
import sqlalchemy
from psycopg.rows import dict_row
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as async_sqlalchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from postroom.adapters.compose.outbox import AsyncOutbox, Outbox, Tables
from postroom.adapters.postgres.messaging.aggregate_events import AggregateEvents
from postroom.domain.errors import FutureEvent, InvalidOutboxEvent, InvalidRequest, Rejected, Unavailable
from tests.support.outboxes import column, django_connection, history, names, order_placed

Open = Callable[[], AbstractContextManager[Any]]
OpenAsync = Callable[[], AbstractAsyncContextManager[Any]]


@contextmanager
def disposing(engine: sqlalchemy.Engine) -> Iterator[sqlalchemy.Engine]:
    try:
        yield engine
    finally:
        engine.dispose()


@asynccontextmanager
async def disposing_async(
    engine: async_sqlalchemy.AsyncEngine,
) -> AsyncIterator[async_sqlalchemy.AsyncEngine]:
    try:
        yield engine
    finally:
        await engine.dispose()


@pytest.fixture(params=["psycopg", "psycopg autocommit", "connection", "session", "scoped session", "django"])
def transaction(request: pytest.FixtureRequest, messaging_database: str, engine: sqlalchemy.Engine) -> Open:
    """Begin a transaction that is committed at the end, or rolled back by an error."""

    @contextmanager
    def begin() -> Iterator[Any]:
        match request.param:
            case "psycopg":
                with psycopg.connect(messaging_database) as connection:
                    yield connection
            case "psycopg autocommit":
                with (
                    psycopg.connect(messaging_database, autocommit=True) as connection,
                    connection.transaction(),
                ):
                    yield connection
            case "connection":
                with engine.begin() as begun:
                    yield begun
            case "session":
                with orm.Session(engine) as session, session.begin():
                    yield session
            case "scoped session":
                sessions = orm.scoped_session(orm.sessionmaker(engine))
                with sessions.begin():
                    yield sessions
                sessions.remove()
            case "django":
                with django_connection(messaging_database), django.db.transaction.atomic():
                    yield django.db.connection

    return begin


SQLALCHEMY = ["connection", "session", "scoped session"]
KINDS = [("psycopg", ""), ("psycopg autocommit", "")]
KINDS += [(kind, driver) for kind in SQLALCHEMY for driver in ("psycopg", "asyncpg")]


@pytest.fixture(params=KINDS, ids=" ".join)
def async_transaction(request: pytest.FixtureRequest, messaging_database: str) -> OpenAsync:
    """Begin a transaction of asyncio, on two drivers of SQLAlchemy."""
    kind, driver = request.param
    url = messaging_database.replace("postgresql://", f"postgresql+{driver}://")

    @asynccontextmanager
    async def begin() -> AsyncIterator[Any]:
        if kind.startswith("psycopg"):
            connected = psycopg.AsyncConnection.connect(
                messaging_database, autocommit=kind == "psycopg autocommit"
            )
            async with await connected as connection, connection.transaction():
                yield connection
            return
        async with disposing_async(async_sqlalchemy.create_async_engine(url)) as engine:
            if kind == "connection":
                async with engine.begin() as begun:
                    yield begun
            elif kind == "session":
                async with async_sqlalchemy.AsyncSession(engine) as session, session.begin():
                    yield session
            else:
                sessions = async_sqlalchemy.async_scoped_session(
                    async_sqlalchemy.async_sessionmaker(engine), scopefunc=lambda: 0
                )
                async with sessions.begin():
                    yield sessions
                await sessions.remove()

    return begin


EVENTS = [
    order_placed("o-1", 1, payload={"total": 12.5, "name": "Zoë", "lines": [1, 2]}),
    order_placed("o-1", 2, correlation_id=uuid4(), causation_id=uuid4()),
    order_placed("o-2", 1, occurred_at=datetime(2020, 5, 1, 12, tzinfo=UTC), event_version=2),
]


def check_recorded(url: str, ids: list[UUID]) -> None:
    assert column(url, "id") == ids
    assert column(url, "payload")[0] == {"total": 12.5, "name": "Zoë", "lines": [1, 2]}
    assert column(url, "correlation_id") == [None, EVENTS[1].correlation_id, None]
    assert column(url, "occurred_at")[2] == EVENTS[2].occurred_at
    assert column(url, "event_version") == [1, 1, 2]
    assert all(names(history(url, id_)) == ["OutboxEventRecorded"] for id_ in ids)


def test_events_are_recorded_with_their_histories_when_the_transaction_commits(
    transaction: Open, messaging_database: str
) -> None:
    with transaction() as connection:
        ids = Outbox().record(connection, *EVENTS)
        assert column(messaging_database, "id") == []
    check_recorded(messaging_database, ids)


async def test_events_are_recorded_from_asyncio_too(
    async_transaction: OpenAsync, messaging_database: str
) -> None:
    async with async_transaction() as connection:
        ids = await AsyncOutbox().record(connection, *EVENTS)
        assert column(messaging_database, "id") == []
    check_recorded(messaging_database, ids)


def test_events_of_a_transaction_that_is_rolled_back_are_not_recorded(
    transaction: Open, messaging_database: str
) -> None:
    ids: list[UUID] = []

    def record_and_fail() -> None:
        with transaction() as connection:
            ids.extend(Outbox().record(connection, *EVENTS))
            raise ConnectionError

    with pytest.raises(ConnectionError):
        record_and_fail()
    assert column(messaging_database, "id") == []
    assert history(messaging_database, ids[0]) == []


async def test_events_of_an_asyncio_transaction_that_is_rolled_back_are_not_recorded(
    async_transaction: OpenAsync, messaging_database: str
) -> None:
    async def record_and_fail() -> None:
        async with async_transaction() as connection:
            await AsyncOutbox().record(connection, *EVENTS)
            raise ConnectionError

    with pytest.raises(ConnectionError):
        await record_and_fail()
    assert column(messaging_database, "id") == []


def test_an_event_against_the_policies_keeps_all_of_its_call_out_and_the_transaction_usable(
    transaction: Open, messaging_database: str
) -> None:
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    with transaction() as connection:
        with pytest.raises(FutureEvent):
            Outbox().record(connection, order_placed("o-1", 1), order_placed("o-1", 2, occurred_at=tomorrow))
        with pytest.raises(InvalidOutboxEvent):
            Outbox().record(connection, order_placed("o-1", 1), order_placed("o-1", 2, event_type="a b"))
        (id_,) = Outbox().record(connection, order_placed("o-1", 3))
    assert column(messaging_database, "id") == [id_]


def ahead() -> int:
    return int((datetime.now(UTC) + timedelta(minutes=2)).timestamp() * 1_000_000)


def test_violated_constraints_are_reported_as_violated_policies(transaction: Open) -> None:
    event = order_placed("o-1", 1, id=uuid4())
    with transaction() as connection:
        Outbox().record(connection, event)
    with pytest.raises(InvalidOutboxEvent, match="is already in the outbox"), transaction() as connection:
        Outbox().record(connection, event)
    with pytest.raises(FutureEvent, match="more than a minute ahead"), transaction() as connection:
        Outbox(wall=ahead).record(connection, order_placed("o-1", 1))


async def test_violated_constraints_are_reported_from_asyncio_too(async_transaction: OpenAsync) -> None:
    event = order_placed("o-1", 1, id=uuid4())
    async with async_transaction() as connection:
        await AsyncOutbox().record(connection, event)
    with pytest.raises(InvalidOutboxEvent, match="is already in the outbox"):
        async with async_transaction() as connection:
            await AsyncOutbox().record(connection, event)
    with pytest.raises(FutureEvent, match="more than a minute ahead"):
        async with async_transaction() as connection:
            await AsyncOutbox(wall=ahead).record(connection, order_placed("o-1", 1))


@pytest.mark.parametrize("cursor", [psycopg.ClientCursor, psycopg.RawCursor])
def test_whatever_cursors_and_rows_a_connection_is_set_to_events_are_recorded(
    messaging_database: str, cursor: Any
) -> None:
    with psycopg.connect(messaging_database, cursor_factory=cursor, row_factory=dict_row) as connection:
        ids = Outbox().record(connection, *EVENTS)
        AggregateEvents(connection, lambda: 0).history(ids[0])
    check_recorded(messaging_database, ids)


def test_no_events_are_no_statement(transaction: Open) -> None:
    with transaction() as connection:
        assert Outbox().record(connection) == []


async def test_without_a_transaction_nothing_is_recorded(
    messaging_database: str, engine: sqlalchemy.Engine
) -> None:
    problem = "is in autocommit mode"
    event = order_placed("o-1", 1)
    with (
        psycopg.connect(messaging_database, autocommit=True) as connection,
        pytest.raises(InvalidRequest, match=problem),
    ):
        Outbox().record(connection, event)
    auto = engine.execution_options(isolation_level="AUTOCOMMIT")
    with auto.connect() as connection, pytest.raises(InvalidRequest, match=problem):
        Outbox().record(connection, event)
    with orm.Session(auto) as session, pytest.raises(InvalidRequest, match=problem):
        Outbox().record(session, event)
    async with await psycopg.AsyncConnection.connect(messaging_database, autocommit=True) as connection:
        with pytest.raises(InvalidRequest, match=problem):
            await AsyncOutbox().record(connection, event)
    for driver in ("psycopg", "asyncpg"):
        url = messaging_database.replace("postgresql://", f"postgresql+{driver}://")
        made = async_sqlalchemy.create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with disposing_async(made), made.connect() as connection:
            with pytest.raises(InvalidRequest, match=problem):
                await AsyncOutbox().record(connection, event)
    assert column(messaging_database, "id") == []


async def test_a_connection_of_asyncpg_is_refused_with_the_way_to_use_it(messaging_database: str) -> None:
    async with asyncpg.create_pool(messaging_database, min_size=1, max_size=1) as pool:
        connection = await asyncpg.connect(messaging_database)
        async with pool.acquire() as pooled:
            for each in (connection, pooled):
                with pytest.raises(InvalidRequest, match=r"asyncpg\.\S+\. Use asyncpg through SQLAlchemy"):
                    await AsyncOutbox().record(each, order_placed("o-1", 1))
        await connection.close()


async def test_an_unsupported_connection_is_named(engine: sqlalchemy.Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"it was sqlalchemy\.engine\.base\.Engine"):
        Outbox().record(engine, order_placed("o-1", 1))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=r"it was builtins\.str"):
        await AsyncOutbox().record("postgresql://", order_placed("o-1", 1))  # type: ignore[arg-type]
    with (
        disposing(sqlalchemy.create_engine("sqlite://")) as other,
        other.connect() as connection,
        pytest.raises(InvalidRequest, match="this is a connection to sqlite"),
    ):
        Outbox().record(connection, order_placed("o-1", 1))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[str] = mapped_column(primary_key=True)


def test_what_a_session_holds_back_is_written_before_the_event(engine: sqlalchemy.Engine) -> None:
    Base.metadata.create_all(engine)
    with orm.Session(engine, autoflush=False) as session:
        session.add(Order(id="o-1"))
        Outbox().record(session, order_placed("o-1", 1))
        assert not session.new
        session.commit()
    with engine.connect() as connection:
        rows = connection.execute(sqlalchemy.text("SELECT orders.xmin = e.xmin FROM orders, outbox_events e"))
        assert rows.all() == [(True,)]


MISSING = Tables(outbox_events="outbox_event_s")
MIGRATE = r'relation "outbox_event_s" does not exist.*`postroom migrate --messaging URL`'


def test_missing_tables_are_named_with_the_command_that_creates_them(transaction: Open) -> None:
    with pytest.raises(Unavailable, match=MIGRATE), transaction() as connection:
        Outbox(MISSING).record(connection, order_placed("o-1", 1))


async def test_missing_tables_are_named_from_asyncio_too(async_transaction: OpenAsync) -> None:
    with pytest.raises(Unavailable, match=MIGRATE):
        async with async_transaction() as connection:
            await AsyncOutbox(MISSING).record(connection, order_placed("o-1", 1))


def test_a_table_without_our_columns_is_named_with_the_command_that_adds_them(
    transaction: Open, messaging_database: str
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("ALTER TABLE outbox_events DROP COLUMN correlation_id")
    with (
        pytest.raises(Unavailable, match=r'"correlation_id".*`postroom migrate --messaging URL`'),
        transaction() as connection,
    ):
        Outbox().record(connection, order_placed("o-1", 1))


def test_other_errors_of_the_database_are_not_translated(transaction: Open, messaging_database: str) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("ALTER TABLE outbox_events ADD CHECK (aggregate_id <> 'o-1')")
    with pytest.raises(Exception, match="outbox_events") as error, transaction() as connection:
        Outbox().record(connection, order_placed("o-1", 1))
    assert not isinstance(error.value, Rejected | Unavailable)


@pytest.mark.parametrize(
    ("payload", "size"),
    [
        ({"list": [1] * 1_000}, 3_010),  # PostgreSQL writes a space after every comma and colon
        (msgspec.Raw(b"[" + b",".join([b"1e300"] * 10) + b"]"), 3_030),
    ],
    ids=["spaces", "exponents"],
)
def test_the_payload_is_measured_as_it_will_be_published(
    transaction: Open, messaging_database: str, payload: Any, size: int
) -> None:
    too_large, fitting = Outbox(max_payload_bytes=size - 1), Outbox(max_payload_bytes=size)
    with transaction() as connection:
        with pytest.raises(InvalidOutboxEvent, match=f"{size:,} bytes as published, more than {size - 1:,}"):
            too_large.record(connection, order_placed("o-1", 1), order_placed("o-1", 2, payload=payload))
        (id_,) = fitting.record(connection, order_placed("o-1", 3, payload=payload))
    assert column(messaging_database, "id") == [id_]
    assert column(messaging_database, "octet_length(payload::text)") == [size]


def test_whitespace_and_escapes_that_are_not_published_are_not_measured(
    transaction: Open, messaging_database: str
) -> None:
    raw = msgspec.Raw(b'{"name":' + b" " * 5_000 + b'"Zo\\u00eb"}')
    with transaction() as connection:
        Outbox(max_payload_bytes=50).record(connection, order_placed("o-1", 1, payload=raw))
    assert column(messaging_database, "payload") == [{"name": "Zoë"}]


@pytest.mark.parametrize(("given", "stored"), [(7, "7"), (-1, "-1"), (UUID(int=7), str(UUID(int=7)))])
def test_an_aggregate_id_may_be_an_int_or_a_uuid(
    transaction: Open, messaging_database: str, given: Any, stored: str
) -> None:
    with transaction() as connection:
        Outbox().record(connection, order_placed(given, 1))
    assert column(messaging_database, "aggregate_id") == [stored]
