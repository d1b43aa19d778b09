import asyncio
from collections.abc import AsyncIterator
from uuid import UUID, uuid4

import psycopg
import pytest

from postroom.adapters.postgres.messaging.aggregate_events import AggregateEvents
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.settings import Tables
from postroom.application.ports.inbox import InboxRepository
from postroom.domain.errors import DuplicateInboxMessage, Unavailable
from postroom.domain.inbox import (
    InboxEvent,
    InboxMessage,
    InboxMessageDeadLettered,
    InboxMessageFailed,
    InboxMessageProcessed,
    InboxMessageReceived,
    evolve,
    inbox_stream,
)
from tests.conformance.inbox_repository import NOW, SUBJECT, Inboxes, InboxRepositoryConformance


@pytest.fixture
async def inboxes(messaging_database: str) -> AsyncIterator[Inboxes]:
    opened: list[PostgresInbox] = []

    def open_inbox(tables: Tables | None = None) -> PostgresInbox:
        opened.append(PostgresInbox(messaging_database, tables))
        return opened[-1]

    yield open_inbox
    for inbox in opened:
        await inbox.close()


class TestPostgresInbox(InboxRepositoryConformance):
    pass


def history(url: str, id_: UUID, table: str = "inbox_messages") -> list[InboxEvent]:
    with psycopg.connect(url) as connection:
        stream = UUID(bytes=inbox_stream(id_, table))
        return AggregateEvents(connection, lambda: 0).history(stream)  # type: ignore[return-value]


async def test_the_row_is_the_fold_of_its_history(inboxes: Inboxes, messaging_database: str) -> None:
    inbox, id_ = inboxes(), uuid4()
    await inbox.insert(id_, SUBJECT, NOW)
    await inbox.record_error(id_, "HTTP 503", NOW + 1)
    await inbox.insert(id_, SUBJECT, NOW + 2)
    await inbox.mark_dead_lettered(id_, "poison: no total", NOW + 3)
    await inbox.insert(id_, SUBJECT, NOW + 4, redrive=True)
    row = await inbox.mark_processed(id_, NOW + 5)
    events = history(messaging_database, id_)
    assert [type(event) for event in events] == [
        InboxMessageReceived,
        InboxMessageFailed,
        InboxMessageReceived,
        InboxMessageDeadLettered,
        InboxMessageReceived,
        InboxMessageProcessed,
    ]
    folded = None
    for event in events:
        folded = evolve(folded, event)
    assert folded == row


async def test_forgetting_a_message_forgets_its_history(inboxes: Inboxes, messaging_database: str) -> None:
    inbox, id_ = inboxes(), uuid4()
    await inbox.insert(id_, SUBJECT, NOW)
    await inbox.mark_processed(id_, NOW)
    assert await inbox.delete_processed(NOW + 1, 10) == 1
    assert history(messaging_database, id_) == []


async def test_a_message_that_a_transaction_holds_is_not_waited_for(
    inboxes: Inboxes, messaging_database: str
) -> None:
    inbox, held, free = inboxes(), uuid4(), uuid4()
    await inbox.insert(held, SUBJECT, NOW)
    async with await psycopg.AsyncConnection.connect(messaging_database) as handler:
        await handler.execute("SELECT FROM inbox_messages WHERE message_id = %s FOR UPDATE", (held,))
        outcomes = await asyncio.gather(
            inbox.insert(held, SUBJECT, NOW), inbox.insert(free, SUBJECT, NOW), return_exceptions=True
        )
        assert isinstance(outcomes[0], Unavailable)
        assert not isinstance(outcomes[1], BaseException)
    assert (await inbox.insert(held, SUBJECT, NOW)).attempts == 2


async def test_two_workers_that_receive_the_same_messages_at_once_count_each_delivery(
    inboxes: Inboxes, messaging_database: str
) -> None:
    ids = [uuid4() for _ in range(200)]

    async def receive(worker: InboxRepository, ids: list[UUID]) -> int:
        outcomes = await asyncio.gather(
            *(worker.insert(id_, SUBJECT, NOW) for id_ in ids), return_exceptions=True
        )
        assert {type(each) for each in outcomes if isinstance(each, BaseException)} <= {Unavailable}
        return sum(isinstance(each, InboxMessage) for each in outcomes)

    counts = await asyncio.gather(receive(inboxes(), ids), receive(inboxes(), ids[::-1]))
    messages = await asyncio.gather(*(inboxes().insert(id_, SUBJECT, NOW) for id_ in ids[:5]))
    assert all(message.attempts == message.version for message in messages)
    histories = [history(messaging_database, id_) for id_ in ids]
    assert sum(map(len, histories)) == sum(counts) + len(messages)
    assert all([event.version for event in each] == list(range(1, len(each) + 1)) for each in histories)


async def test_a_message_that_changed_behind_the_workers_back_is_settled_by_what_it_is_now(
    inboxes: Inboxes, messaging_database: str
) -> None:
    one, other, id_ = inboxes(), inboxes(), uuid4()
    await one.insert(id_, SUBJECT, NOW)
    await other.record_error(id_, "HTTP 503", NOW + 1)
    await other.insert(id_, SUBJECT, NOW + 2)
    message = await one.mark_processed(id_, NOW + 3)
    assert (message.attempts, message.version, message.last_error) == (2, 4, "HTTP 503")
    assert (await other.record_error(id_, "too late", NOW + 4)).processed_at == NOW + 3
    assert len(history(messaging_database, id_)) == 4


async def test_a_row_inserted_by_plain_sql_is_received_like_a_new_message(
    inboxes: Inboxes, messaging_database: str
) -> None:
    id_ = uuid4()
    with psycopg.connect(messaging_database) as connection:
        connection.execute("INSERT INTO inbox_messages (message_id, subject) VALUES (%s, 'a')", (id_,))
    message = await inboxes().insert(id_, SUBJECT, NOW)
    assert (message.attempts, message.version) == (1, 1)
    assert len(history(messaging_database, id_)) == 1
    assert (await inboxes().insert(id_, SUBJECT, NOW)).version == 2


async def test_a_lost_connection_is_made_again(inboxes: Inboxes, messaging_database: str) -> None:
    inbox = inboxes()
    await inbox.insert(uuid4(), SUBJECT, NOW)
    async with await psycopg.AsyncConnection.connect(messaging_database) as admin:
        await admin.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'postroom inbox'"
        )
    await inbox.insert(uuid4(), SUBJECT, NOW)


async def test_inboxes_of_two_subscribers_in_one_database_know_nothing_of_each_other(
    inboxes: Inboxes, messaging_database: str
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE SCHEMA billing")
        connection.execute("CREATE TABLE billing.inbox (LIKE public.inbox_messages INCLUDING ALL)")
    sales = PostgresInbox(messaging_database)
    billing = PostgresInbox(messaging_database, Tables(inbox_messages="billing.inbox"))
    id_ = uuid4()
    for inbox in (sales, billing):
        assert (await inbox.insert(id_, SUBJECT, NOW)).attempts == 1
        await inbox.mark_processed(id_, NOW)
        with pytest.raises(DuplicateInboxMessage):
            await inbox.insert(id_, SUBJECT, NOW)
        await inbox.close()
    assert (
        len(history(messaging_database, id_)) == len(history(messaging_database, id_, "billing.inbox")) == 2
    )


async def test_without_its_tables_a_database_is_refused_with_a_reason(empty_database: str) -> None:
    inbox = PostgresInbox(empty_database)
    with pytest.raises(Unavailable, match="inbox_messages"):
        await inbox.insert(uuid4(), SUBJECT, NOW)
    await inbox.close()


@pytest.mark.parametrize("column", ["received_at = '-infinity'", "attempts = 2147483647"])
async def test_a_row_that_cannot_be_read_fails_no_other_message(
    inboxes: Inboxes, messaging_database: str, column: str
) -> None:
    inbox, bad, good = inboxes(), uuid4(), [uuid4() for _ in range(20)]
    await inboxes().insert(bad, SUBJECT, NOW)  # by another worker, so this one reads the row
    with psycopg.connect(messaging_database) as connection:
        connection.execute(f"UPDATE inbox_messages SET {column} WHERE message_id = %s", (bad,))
    ids = [*good[:10], bad, *good[10:]]
    outcomes = await asyncio.gather(*(inbox.insert(id_, SUBJECT, NOW) for id_ in ids), return_exceptions=True)
    failed = {id_: each for id_, each in zip(ids, outcomes, strict=True) if isinstance(each, BaseException)}
    assert list(failed) == [bad]
    assert isinstance(failed[bad], Unavailable)
    assert (await inbox.backlog()).count == 21
