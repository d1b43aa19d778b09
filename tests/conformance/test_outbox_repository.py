"""The outbox repository suite on PostgreSQL, and what only a database does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from uuid import UUID, uuid4

import psycopg
import pytest

from postroom.adapters.postgres.messaging.outbox import Outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.outbox.new_event import NewEvent
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.record import Event
from tests.conformance.outbox_repository import (
    ALL,
    LATER,
    NOW,
    PUBLISHED,
    History,
    OutboxRepositoryConformance,
    Record,
    all_decided,
    claimed,
    ids,
    publish,
    refuse,
    unpublished,
)
from tests.support import outboxes
from tests.support.outboxes import names, order_placed
from tests.support.waiting import until_answer


@pytest.fixture
def record(messaging_database: str) -> Record:
    def record(*events: NewEvent) -> list[UUID]:
        return outboxes.record(messaging_database, *events)

    return record


@pytest.fixture
def history(messaging_database: str) -> History:
    def history(id_: UUID) -> list[Event]:
        return outboxes.history(messaging_database, id_)

    return history


@pytest.fixture
async def repository(messaging_database: str) -> AsyncIterator[PostgresOutboxRepository]:
    opened = PostgresOutboxRepository(messaging_database)
    yield opened
    await opened.close()


@pytest.fixture
async def other(messaging_database: str) -> AsyncIterator[PostgresOutboxRepository]:
    opened = PostgresOutboxRepository(messaging_database)
    yield opened
    await opened.close()


class TestPostgresOutboxRepository(OutboxRepositoryConformance):
    pass


def insert_plainly(url: str, id_: UUID) -> None:
    """Insert an event as a program that knows nothing but SDS-047 would."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload)"
            " VALUES (%s, 'order', 'o-1', 'order_placed', '{}')",
            (id_,),
        )


async def test_an_event_inserted_by_plain_sql_gets_its_history_when_it_is_published(
    repository: PostgresOutboxRepository, messaging_database: str, history: History
) -> None:
    id_ = uuid4()
    insert_plainly(messaging_database, id_)
    (found,) = await unpublished(repository)
    assert (found.event.id, found.event.event_version, history(id_)) == (id_, 1, [])
    await publish(repository)
    assert names(history(id_)) == ["OutboxEventRecorded", "OutboxEventPublished"]


@pytest.mark.parametrize(
    "by_hand", ["UPDATE outbox_events SET published_at = now()", "DELETE FROM outbox_events"]
)
async def test_an_event_published_or_deleted_by_plain_sql_holds_nothing_back(
    repository: PostgresOutboxRepository, messaging_database: str, record: Record, by_hand: str
) -> None:
    first, second = record(order_placed("o-1", 1), order_placed("o-1", 2))
    await refuse(repository, limit=1, attempts=1)
    with psycopg.connect(messaging_database) as connection:
        connection.execute(f"{by_hand} WHERE id = %s", (first,))
    assert ids(await unpublished(repository)) == [second]


async def test_large_payloads_are_read_a_few_at_a_time(messaging_database: str, record: Record) -> None:
    expected = record(*(order_placed("o-1", n, payload="x" * 998) for n in range(5)))
    repository = PostgresOutboxRepository(messaging_database, batch_bytes=1_001)
    assert ids(await unpublished(repository)) == expected[:2]
    await repository.close()
    repository = PostgresOutboxRepository(messaging_database, batch_bytes=1)
    assert ids(await unpublished(repository)) == expected[:1]
    await repository.close()


async def test_an_event_committed_late_is_not_held_back_by_a_later_one(
    repository: PostgresOutboxRepository, messaging_database: str, record: Record
) -> None:
    with psycopg.connect(messaging_database) as slow:
        (earlier,) = Outbox().record(slow, order_placed("o-1", 1))
        record(order_placed("o-1", 2))
        await refuse(repository, attempts=1)
    assert ids(await unpublished(repository)) == [earlier]


async def test_events_whose_retries_were_deleted_by_plain_sql_are_due(
    repository: PostgresOutboxRepository, messaging_database: str, record: Record, history: History
) -> None:
    (id_,) = record(order_placed("o-1", 1))
    await refuse(repository, attempts=1)
    with psycopg.connect(messaging_database) as connection:
        connection.execute("DELETE FROM outbox_retries")
    await publish(repository)
    assert [event.version for event in history(id_)] == [1, 2, 3, 4]


async def test_a_claim_that_is_silent_for_too_long_ends_and_notes_nothing(
    messaging_database: str, other: PostgresOutboxRepository, record: Record
) -> None:
    (id_,) = record(order_placed("o-1", 1))
    stopped = PostgresOutboxRepository(messaging_database, claim_ms=500)

    async def publish_again() -> bool:
        """Publish, unless this machine is so busy that the claim ends between two statements."""
        with suppress(Unavailable):
            await publish(stopped)
            return True
        return False

    async def stop_and_go_on() -> None:
        async with stopped.claim(ALL) as claim:
            found = await claim.find([id_])
            # as if this process had been stopped
            await until_answer(lambda: claimed(other, ALL))
            await claim.mark_published(all_decided(found, PUBLISHED))

    with pytest.raises(Unavailable, match="idle"):
        await stop_and_go_on()
    assert ids(await unpublished(other)) == [id_]
    await until_answer(publish_again)  # it connects again
    assert await unpublished(other) == []
    await stopped.close()


async def test_an_operator_waits_for_the_relays_to_finish_their_batches(
    repository: PostgresOutboxRepository, other: PostgresOutboxRepository, record: Record
) -> None:
    (id_,) = record(order_placed("o-1", 1))

    async def look() -> str:
        async with other.claim(ALL, wait=True) as claim:
            (found,) = await claim.find([id_])
            return found.event.status

    async with repository.claim(ALL) as claim:
        looking = asyncio.create_task(look())
        await asyncio.sleep(0.05)
        assert not looking.done()
        await claim.mark_published(all_decided(await claim.find([id_]), PUBLISHED))
    assert await looking == "published"


async def test_of_two_cleanups_one_works_and_the_other_leaves_it_to_that(
    repository: PostgresOutboxRepository, messaging_database: str, record: Record
) -> None:
    record(order_placed("o-1", 1))
    await publish(repository)
    with psycopg.connect(messaging_database) as connection:
        connection.execute("SELECT pg_advisory_xact_lock('outbox_events'::regclass::oid::int, -1)")
        assert await repository.delete_published(LATER, 10) is None
    assert await repository.delete_published(LATER, 10) == 1


async def test_histories_may_outlive_their_rows(
    messaging_database: str, record: Record, history: History
) -> None:
    (id_,) = record(order_placed("o-1", 1))
    keeping = PostgresOutboxRepository(messaging_database, keep_history=True)
    await publish(keeping)
    assert await keeping.delete_published(LATER, 10) == 1
    await keeping.close()
    assert names(history(id_)) == ["OutboxEventRecorded", "OutboxEventPublished"]


async def test_tables_of_other_names_are_an_outbox_of_their_own(messaging_database: str) -> None:
    tables = Tables(*(f"shop.{table}" for table in Tables.__struct_fields__))
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE SCHEMA shop")
        for table in Tables.__struct_fields__:
            connection.execute(f"CREATE TABLE shop.{table} (LIKE public.{table} INCLUDING ALL)")
        Outbox(tables).record(connection, order_placed("o-1", 1))
    shop = PostgresOutboxRepository(messaging_database, tables=tables)
    usual = PostgresOutboxRepository(messaging_database)
    async with shop.claim(ALL) as mine, usual.claim(ALL) as others:
        assert list(mine.partitions) == list(others.partitions) == list(ALL)
        assert len(await mine.find_unpublished(NOW, 10)) == 1
        assert await others.find_unpublished(NOW, 10) == []
    await shop.close()
    await usual.close()


async def test_a_database_without_an_outbox_says_how_to_get_one(empty_database: str) -> None:
    repository = PostgresOutboxRepository(empty_database)
    with pytest.raises(
        Unavailable, match=r'has no outbox: .*"outbox_events" does not exist.*postroom migrate'
    ):
        await repository.backlog()
    await repository.close()


async def test_a_database_that_is_not_there_is_named_without_its_password() -> None:
    repository = PostgresOutboxRepository("postgresql://me:secret@127.0.0.1:9/shop")
    with pytest.raises(Unavailable, match=r"postgresql://me@127\.0\.0\.1:9/shop can't be reached"):
        await repository.backlog()
    with pytest.raises(InvalidRequest, match="The PostgreSQL URL is malformed"):
        await PostgresOutboxRepository("shop").backlog()
