"""Middlewares on a real PostgreSQL, over every kind of connection a service may use."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine

from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.middleware import (
    acknowledge,
    current_transaction,
    inbox,
    outbox,
    pipeline,
    transaction,
)
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.outbox.new_event import NewEvent
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.waiting import within

SUBJECT = "shop.event.order_placed.v1"
KINDS = ["sessionmaker", "engine", "engine-asyncpg", "psycopg", "pool"]


@pytest.fixture
def url(messaging_database: str) -> str:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (number int)")
    return messaging_database


@pytest.fixture(params=KINDS)
async def database(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Any]:
    driver = "asyncpg" if request.param == "engine-asyncpg" else "psycopg"
    engine = create_async_engine(url.replace("postgresql://", f"postgresql+{driver}://"))
    match request.param:
        case "sessionmaker":
            yield async_sessionmaker(engine)
        case "psycopg":
            yield lambda: psycopg.AsyncConnection.connect(url)
        case "pool":
            async with AsyncConnectionPool(url, min_size=1, max_size=5, open=False) as pool:
                yield pool
        case _:
            yield engine
    await engine.dispose()


async def insert_order(number: int) -> None:
    """Write as a repository does: it knows of the transaction, whoever calls it does not."""
    opened = current_transaction()
    if isinstance(opened, psycopg.AsyncConnection):
        await opened.execute("INSERT INTO orders VALUES (%s)", (number,))
    else:
        assert isinstance(opened, AsyncSession | AsyncConnection)
        await opened.execute(text("INSERT INTO orders VALUES (:number)"), {"number": number})


async def place_order(request: HandlerRequest) -> list[NewEvent]:
    number = request.payload["number"]
    await insert_order(number)
    if request.payload.get("fails"):
        raise RuntimeError("after the business state was written")
    return [
        NewEvent(
            aggregate_type="order",
            aggregate_id=str(number),
            event_type="order_confirmed",
            payload={"number": number},
        )
    ]


def event(number: int = 1, message_id: str | None = None, **payload: Any) -> HandlerRequest:
    return HandlerRequest(
        message_id=str(uuid4()) if message_id is None else message_id,
        subject=SUBJECT,
        event_type="order_placed",
        event_version=1,
        occurred_at=None,
        correlation_id=None,
        causation_id=None,
        payload={"number": number} | payload,
    )


def rows(url: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(query.encode()).fetchall()


def counts(url: str) -> tuple[int, int, int]:
    """Return how many orders, processed inbox rows and outbox rows there are."""
    query = (
        "SELECT (SELECT count(*) FROM orders), "
        "(SELECT count(*) FROM inbox_messages WHERE processed_at IS NOT NULL), "
        "(SELECT count(*) FROM outbox_events)"
    )
    one, two, three = rows(url, query)[0]
    return one, two, three


async def test_all_three_commit_together(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), inbox(), outbox(), place_order)
    assert await handle(event()) is None
    assert counts(url) == (1, 1, 1)


async def test_a_duplicate_does_not_reach_the_handler(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), inbox(), outbox(), place_order)
    request = event()
    for _ in range(3):
        assert await handle(request) is None
    assert counts(url) == (1, 1, 1)


async def test_a_handler_that_fails_leaves_nothing_and_may_be_tried_again(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), inbox(), outbox(), place_order)
    id_ = str(uuid4())
    with pytest.raises(RuntimeError, match="after the business state"):
        await handle(event(1, id_, fails=True))
    assert counts(url) == (0, 0, 0)
    await handle(event(1, id_))
    assert counts(url) == (1, 1, 1)


async def test_of_concurrent_deliveries_one_has_an_effect(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), inbox(), outbox(), place_order)
    request = event()
    await asyncio.gather(*(handle(request) for _ in range(4)))
    assert counts(url) == (1, 1, 1)


async def test_a_transaction_stands_alone(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), place_order)
    (confirmed,) = await handle(event())
    assert isinstance(confirmed, NewEvent)
    assert counts(url) == (1, 0, 0)


async def test_a_transaction_and_an_inbox_stand_without_an_outbox(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), inbox(), place_order)
    request = event()
    assert len(await handle(request)) == 1
    assert await handle(request) is None
    assert counts(url) == (1, 1, 0)


async def test_a_transaction_and_an_outbox_stand_without_an_inbox(database: Any, url: str) -> None:
    handle = pipeline(transaction(database), outbox(), place_order)
    assert await handle(event()) is None
    assert counts(url) == (1, 0, 1)


async def test_the_worker_and_the_handler_may_share_the_table(database: Any, url: str) -> None:
    worker, request = PostgresInbox(url), event()
    received = await worker.insert(UUID(request.message_id), SUBJECT, 1)
    await pipeline(transaction(database), inbox(), outbox(), place_order)(request)
    settled = await worker.mark_processed(UUID(request.message_id), 2)
    await worker.close()
    assert settled.processed_at is not None
    assert (received.version, settled.version, settled.attempts) == (1, 2, 1)
    assert counts(url) == (1, 1, 1)
    types = rows(url, "SELECT type FROM aggregate_events ORDER BY type")
    assert types == [("InboxMessageProcessed.1",), ("InboxMessageReceived.1",), ("OutboxEventRecorded.3",)]


# -- what doesn't depend on the kind of connection ---


@pytest.fixture
def connect(url: str) -> Callable[[], Awaitable[Any]]:
    return lambda: psycopg.AsyncConnection.connect(url)


async def test_of_two_deliveries_at_once_the_second_waits_and_is_then_a_duplicate(
    connect: Any, url: str
) -> None:
    calls = 0
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: HandlerRequest) -> None:
        nonlocal calls
        calls += 1
        entered.set()
        await within(go_on.wait())
        await insert_order(1)

    handle = pipeline(transaction(connect), inbox(), handler)
    request = event()
    first = asyncio.create_task(handle(request))
    await within(entered.wait())
    second = asyncio.create_task(handle(request))
    go_on.set()
    await asyncio.gather(first, second)
    assert calls == 1
    assert counts(url) == (1, 1, 0)


async def test_when_the_first_of_two_deliveries_fails_the_second_takes_over(connect: Any, url: str) -> None:
    entered, go_on = asyncio.Event(), asyncio.Event()
    calls = 0

    async def handler(request: HandlerRequest) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            entered.set()
            await within(go_on.wait())
            raise RuntimeError("the first one")
        await insert_order(1)

    handle = pipeline(transaction(connect), inbox(), handler)
    request = event()
    first = asyncio.create_task(handle(request))
    await within(entered.wait())
    second = asyncio.create_task(handle(request))
    go_on.set()
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert isinstance(outcomes[0], RuntimeError)
    assert outcomes[1] is None
    assert counts(url) == (1, 1, 0)


async def test_events_say_what_caused_them(connect: Any, url: str) -> None:
    handle = pipeline(transaction(connect), inbox(), outbox(), place_order)
    request = event()
    await handle(request)
    caused = rows(url, "SELECT causation_id, correlation_id FROM outbox_events")
    assert caused == [(UUID(request.message_id), UUID(request.message_id))]


async def test_an_event_that_names_its_cause_keeps_it(connect: Any, url: str) -> None:
    cause, conversation = uuid4(), uuid4()

    async def handler(request: HandlerRequest) -> list[NewEvent]:
        return [
            NewEvent(
                aggregate_type="order",
                aggregate_id="1",
                event_type="order_confirmed",
                payload={},
                causation_id=cause,
                correlation_id=conversation,
            )
        ]

    await pipeline(transaction(connect), inbox(), outbox(), handler)(event())
    assert rows(url, "SELECT causation_id, correlation_id FROM outbox_events") == [(cause, conversation)]


async def test_an_id_that_is_no_uuid_is_deduplicated_too(connect: Any, url: str) -> None:
    handle = pipeline(transaction(connect), inbox(), outbox(), place_order)
    for _ in range(2):
        await handle(event(1, "order-1/placed"))
    assert counts(url) == (1, 1, 1)


async def test_an_inbox_in_another_table_deduplicates_apart(connect: Any, url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE billing_inbox (LIKE inbox_messages INCLUDING ALL)")
    request = event()
    for tables in (Tables(), Tables(inbox_messages="billing_inbox")):
        for _ in range(2):
            await pipeline(transaction(connect), inbox(tables), place_order)(request)
    assert rows(url, "SELECT count(*) FROM orders") == [(2,)]


async def test_the_row_is_the_first_thing_written(connect: Any, url: str) -> None:
    seen: list[Any] = []

    async def handler(request: HandlerRequest) -> None:
        cursor = await current_transaction().execute("SELECT message_id FROM inbox_messages")
        seen.extend(await cursor.fetchall())

    request = event()
    await pipeline(transaction(connect), inbox(), handler)(request)
    assert seen == [(UUID(request.message_id),)]


# -- mistakes ---


async def test_without_a_transaction_there_is_a_clear_error() -> None:
    for middleware in (inbox(), outbox()):
        with pytest.raises(InvalidRequest, match="No transaction is open; wrap the handler"):
            await pipeline(middleware, place_order)(event())
    with pytest.raises(InvalidRequest, match="No transaction is open"):
        current_transaction()


async def test_without_a_message_id_there_is_a_clear_error(connect: Any, url: str) -> None:
    with pytest.raises(InvalidRequest, match="has no id"):
        await pipeline(transaction(connect), inbox(), place_order)(event(1, ""))
    assert counts(url) == (0, 0, 0)


def test_a_wrong_order_is_a_clear_error(connect: Any) -> None:
    ways: list[Sequence[Any]] = [
        (inbox(), transaction(connect)),
        (outbox(), inbox()),
        (outbox(), transaction(connect)),
        (transaction(connect), transaction(connect)),
        (inbox(), inbox()),
        (transaction(connect), acknowledge(_Source())),
    ]
    for way in ways:
        with pytest.raises(InvalidRequest, match="nest them as acknowledge, transaction, inbox, outbox"):
            pipeline(*way, place_order)


async def test_a_transaction_within_a_transaction_is_a_clear_error(connect: Any) -> None:
    inner = pipeline(transaction(connect), place_order)

    async def handler(request: HandlerRequest) -> None:
        await inner(request)

    with pytest.raises(InvalidRequest, match="A transaction is already open"):
        await pipeline(transaction(connect), handler)(event())


async def test_a_return_value_that_is_no_event_is_refused(connect: Any, url: str) -> None:
    async def handler(request: HandlerRequest) -> list[Any]:
        await insert_order(1)
        return ["order_confirmed"]

    with pytest.raises(InvalidRequest, match="returned str; return a list of NewEvent"):
        await pipeline(transaction(connect), outbox(), handler)(event())
    assert counts(url) == (0, 0, 0)


def test_an_unsupported_database_is_refused(url: str) -> None:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    for wrong in (engine, url, None):
        with pytest.raises(InvalidRequest, match="Pass `transaction` an async_sessionmaker"):
            transaction(wrong)


# -- acknowledging ---


class _Source:
    """Note what is settled; a real one is under the worker's tests."""

    def __init__(self, *, fails: bool = False) -> None:
        self.settled: list[tuple[str, str]] = []
        self._fails = fails

    async def fetch(self, limit: int, wait_ms: int) -> Sequence[SourceMessage]:
        return []

    async def ack(self, messages: Sequence[SourceMessage]) -> None:
        if self._fails:
            raise Unavailable("The stream is gone; it comes back.")
        self.settled += [("ack", message.sequence) for message in messages]

    async def nack(self, messages: Sequence[SourceMessage], delay_ms: int) -> None:
        self.settled += [("nack", message.sequence) for message in messages]

    async def extend(self, messages: Sequence[SourceMessage]) -> None:
        return

    async def close(self) -> None:
        return


def message(data: bytes, sequence: str = "1", id_: str = "m1") -> SourceMessage:
    return SourceMessage(SUBJECT, data, {"Nats-Msg-Id": id_}, 1, sequence, None)


async def test_success_and_duplicates_are_acked_and_failures_asked_for_again(connect: Any, url: str) -> None:
    source = _Source()
    handle = pipeline(acknowledge(source), transaction(connect), inbox(), outbox(), place_order)
    await handle(message(b'{"number": 1}', "1"))
    await handle(message(b'{"number": 1}', "2"))
    await handle(message(b'{"number": 1, "fails": true}', "3", "m3"))
    await handle(message(b"no json", "4", "m4"))
    assert source.settled == [("ack", "1"), ("ack", "2"), ("nack", "3"), ("nack", "4")]
    assert counts(url) == (1, 1, 1)


async def test_an_ack_that_is_lost_costs_only_another_delivery(connect: Any, url: str) -> None:
    chain = (transaction(connect), inbox(), outbox(), place_order)
    with pytest.raises(Unavailable):
        await pipeline(acknowledge(_Source(fails=True)), *chain)(message(b'{"number": 1}'))
    source = _Source()
    await pipeline(acknowledge(source), *chain)(message(b'{"number": 1}'))
    assert source.settled == [("ack", "1")]
    assert counts(url) == (1, 1, 1)
