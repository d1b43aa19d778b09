"""The first call after a server ended all idle connections is made on a new one, once, by who still may."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, closing
from uuid import UUID, uuid4

import psycopg
import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.postgres.lease_store import PostgresLeaseStore, PostgresLeaseTables
from postroom.adapters.postgres.messaging.aggregate_events import PostgresHeldEvents
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.inbox_queue import PostgresInboxQueue
from postroom.adapters.postgres.messaging.message_outbox import PostgresMessageOutbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.adapters.sql.mailbox_outbox import MailboxOutbox
from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys, create_subject_keys
from postroom.application.mailbox.codec import to_records
from postroom.application.messages import Sent
from postroom.application.ports.event_log import StoredSnapshot
from postroom.application.ports.source import StreamState
from postroom.domain.commit import GENESIS, verify_chain
from postroom.domain.errors import Fenced, MailboxOwned, Unavailable, WrongPosition
from tests.conformance import lease_store
from tests.conformance.log_store import ONE
from tests.conformance.outbox_repository import publish, unpublished
from tests.conformance.records import after, append
from tests.conformance.test_subject_keys import MASTER
from tests.integration.postgres.event_logs import sents
from tests.support import outboxes
from tests.support.captures import LOGICAL, ServiceDatabase
from tests.support.messages import message
from tests.support.outboxes import order_placed
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.postgres_proxy import Proxy
from tests.support.waiting import until_answer

TEMPLATE = "template_all"
NOW, LONG_MS = 1_700_000_000_000_000, 600_000
User = Callable[[ServiceDatabase], AbstractAsyncContextManager[None]]
"""Uses its connections, yields while they are ended, and makes its first call afterwards."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        with psycopg.connect(server.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {TEMPLATE}".encode())
        for schema in ("store", "messaging", "leases", "keys"):
            migrate(server.url(TEMPLATE), schema)
        yield server


@pytest.fixture
def database(server: PostgresServer) -> Iterator[ServiceDatabase]:
    database = ServiceDatabase(server.create_database(TEMPLATE))
    yield database
    database.drop_slot()


def end_all(database: ServiceDatabase) -> None:
    """End all connections to a database but this one, and wait until they are."""
    database.execute(
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


# -- who keeps a connection ---


@asynccontextmanager
async def event_log_that_appends(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresEventLog(database.url, ONE)) as log:
        records = append(log, sents(3))
        late = after(log, sents(2, 10))
        yield
        log.append(late)
        assert list(log.read()) == records + [record for commit in late for record in to_records(commit)]


@asynccontextmanager
async def event_log_that_makes_partitions(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresEventLog(database.url, ONE, partition_positions=8)) as log:
        append(log, sents(3))
        late = after(log, sents(40, 10))
        yield
        log.append(late)
        assert verify_chain(log.commits(), GENESIS, 1)[0] == 43


@asynccontextmanager
async def event_log_that_saves_snapshots(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresEventLog(database.url, ONE)) as log:
        append(log, sents(3))
        late = after(log, sents(2, 10))
        yield
        snapshot = StoredSnapshot(3, GENESIS, b"state")
        log.save_snapshot(snapshot)
        assert list(log.snapshots()) == [snapshot]
        log.append(late)
        assert verify_chain(log.commits(), GENESIS, 1)[0] == 5


@asynccontextmanager
async def lease_store_that_appends(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresLeaseStore(database.url)) as store:
        id_ = uuid4()
        store.recorder.insert_events([lease_store.stored(id_, 1)])
        yield
        assert store.recorder.insert_events([lease_store.stored(id_, 2)]) == [2]
        assert [event.originator_version for event in store.recorder.select_events(id_)] == [1, 2]


@asynccontextmanager
async def lease_store_that_removes(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresLeaseStore(database.url)) as store:
        id_ = uuid4()
        store.recorder.insert_events([lease_store.stored(id_, number) for number in (1, 2)])
        yield
        assert store.remove_old_events() == 1


@asynccontextmanager
async def lease_tables(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(PostgresLeaseTables(database.url)) as tables:
        assert tables.position() == 0
        yield
        assert tables.apply(0, 7, [], [])
        assert tables.position() == 7


@asynccontextmanager
async def message_outbox(database: ServiceDatabase) -> AsyncIterator[None]:
    outbox = PostgresMessageOutbox(database.url, ONE)
    with psycopg.connect(database.url) as connection:
        MailboxOutbox(ONE).record(connection, message(), message())
    first, second = await outbox.find(10)
    yield
    await outbox.settle([first], [])
    assert await outbox.find(10) == [second]
    await outbox.close()


@asynccontextmanager
async def outbox_repository(database: ServiceDatabase) -> AsyncIterator[None]:
    repository = PostgresOutboxRepository(database.url)
    (id_,) = outboxes.record(database.url, order_placed("o-1", 1))
    assert len(await unpublished(repository)) == 1
    yield
    await publish(repository)
    published = outboxes.names(outboxes.history(database.url, id_))
    assert published == ["OutboxEventRecorded", "OutboxEventPublished"]
    await repository.close()


@asynccontextmanager
async def inbox(database: ServiceDatabase) -> AsyncIterator[None]:
    inbox, id_ = PostgresInbox(database.url), uuid4()
    await inbox.insert(id_, "sea.events", NOW)
    yield
    assert (await inbox.mark_processed(id_, NOW)).version == 2
    await inbox.close()


@asynccontextmanager
async def inbox_queue(database: ServiceDatabase) -> AsyncIterator[None]:
    queue = PostgresInboxQueue(database.url, "SHOP/sea")
    await queue.open(StreamState("first", 0, 0))
    await queue.renew(LONG_MS)
    yield
    assert (await queue.claim()).epochs
    await queue.close()


@asynccontextmanager
async def held_events(database: ServiceDatabase) -> AsyncIterator[None]:
    held = PostgresHeldEvents(database.url)
    outboxes.record(database.url, order_placed("o-2", 1))
    order = ("order", "o-2")
    assert await held.find_waiting([order]) == {order}
    yield
    assert await held.find_waiting([order]) == {order}
    await held.close()


@asynccontextmanager
async def capture_metrics(database: ServiceDatabase) -> AsyncIterator[None]:
    await database.create_slot()
    source = PostgresCaptureSource(database.url, database.settings, LONG_MS)
    assert not (await source.state()).active
    yield
    assert not (await source.state()).active
    await source.close()


@asynccontextmanager
async def subject_keys(database: ServiceDatabase) -> AsyncIterator[None]:
    create_subject_keys(database.url, MASTER)
    keys = PostgresSubjectKeys(database.url, MASTER, lambda: NOW)
    keys.get_or_create(["alice"])
    yield
    keys.get_or_create(["bob"])
    assert len(keys.list_subjects()) == 2


@asynccontextmanager
async def read_model_updater(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(open_store(database.url).read_model_updater()) as updater:
        assert updater.active() is None
        yield
        assert updater.active() is None


@asynccontextmanager
async def read_models(database: ServiceDatabase) -> AsyncIterator[None]:
    with closing(open_store(database.url).read_models()) as models:
        assert not models.is_following()
        yield
        assert not models.is_following()


@asynccontextmanager
async def owner_that_admits_other_hosts(database: ServiceDatabase) -> AsyncIterator[None]:
    ownership = PostgresOwnership(database.url)
    async with ownership.acquire(ONE, "first", 0):
        yield
        assert await ownership.redeem_ticket(ONE, await ownership.issue_ticket(ONE))
        with pytest.raises(MailboxOwned, match="owned by first"):
            async with PostgresOwnership(database.url).acquire(ONE, "second", 0):
                pytest.fail("owned twice")


@asynccontextmanager
async def mailbox_owner(database: ServiceDatabase) -> AsyncIterator[None]:
    ownership = PostgresOwnership(database.url)

    async def has_lock() -> bool:
        return await ownership.owner("acme@two") == "first"

    async with open_mailbox(database.url, "acme@two", owner="first") as mailbox:
        first = await mailbox.send_message(message())
        yield
        second = await mailbox.send_message(message())
        assert isinstance(second, Sent)
        assert [each.message_id for each in await mailbox.receive_messages("orders", max_messages=9)] == [
            first.message_id,
            second.message_id,
        ]
        await until_answer(has_lock)
    assert sent_ids(database.url, "acme@two") == [first.message_id, second.message_id]


USERS: list[User] = [
    event_log_that_appends,
    event_log_that_makes_partitions,
    event_log_that_saves_snapshots,
    lease_store_that_appends,
    lease_store_that_removes,
    lease_tables,
    message_outbox,
    outbox_repository,
    inbox,
    inbox_queue,
    held_events,
    capture_metrics,
    subject_keys,
    read_model_updater,
    read_models,
    owner_that_admits_other_hosts,
    mailbox_owner,
]


def sent_ids(url: str, mailbox: str) -> list[str]:
    with read_mailbox(url, mailbox) as reader:
        sent = [record.stream for record in reader.log.read() if record.type.startswith("MessageSent")]
    return [str(UUID(bytes=stream)) for stream in sent]


@pytest.mark.parametrize("user", USERS)
async def test_the_first_call_after_idle_connections_were_ended_succeeds_once(
    database: ServiceDatabase, user: User
) -> None:
    async with user(database):
        await asyncio.to_thread(end_all, database)


async def test_the_first_calls_after_the_server_was_restarted_succeed_once(
    server: PostgresServer, database: ServiceDatabase
) -> None:
    databases = {user: ServiceDatabase(server.create_database(TEMPLATE)) for user in USERS}
    async with AsyncExitStack() as users:
        for user, own in databases.items():
            await users.enter_async_context(user(own))
        await asyncio.to_thread(server.stop)
        server.start()  # it ends with the thread that starts it
    databases[capture_metrics].drop_slot()


# -- who may not any more ---


async def test_an_owner_whose_mailbox_another_process_took_meanwhile_is_refused_and_appends_nothing(
    database: ServiceDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", LONG_MS)
    async with open_mailbox(database.url, ONE, owner="first") as first:
        await first.send_message(message())
        await asyncio.to_thread(end_all, database)
        async with open_mailbox(database.url, ONE, owner="second") as second:
            with pytest.raises(Fenced, match="was taken over by epoch 2 while this process held epoch 1"):
                await first.send_message(message())
            await second.send_message(message())
        with pytest.raises(Unavailable, match="taken over by epoch 2"):
            await first.send_message(message())
        assert await PostgresOwnership(database.url).owner(ONE) is None
    assert len(sent_ids(database.url, ONE)) == 2


async def test_a_lock_that_another_process_took_is_left_to_it_by_the_first_call(
    database: ServiceDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", LONG_MS)
    first, second = PostgresOwnership(database.url), PostgresOwnership(database.url)
    async with first.acquire(ONE, "first", 0):
        ticket = await first.issue_ticket(ONE)
        await asyncio.to_thread(end_all, database)
        async with second.acquire(ONE, "second", 0):
            with pytest.raises(Unavailable, match="does not own mailbox acme@one any more"):
                await first.redeem_ticket(ONE, ticket)
            assert await second.owner(ONE) == "second"
            assert await second.redeem_ticket(ONE, ticket)


@pytest.mark.parametrize("is_append_first", [True, False])
def test_nothing_is_appended_to_the_log_of_another_server_that_lacks_the_last_commit(
    database: ServiceDatabase, is_append_first: bool
) -> None:
    with closing(PostgresEventLog(database.url, ONE)) as log:
        records = append(log, sents(3)) + append(log, sents(2, 10))
        late = after(log, sents(1, 20))
        database.execute("DELETE FROM postroom.log WHERE last = 5")  # as after a failover to a late standby
        end_all(database)
        if not is_append_first:
            log.save_snapshot(StoredSnapshot(3, GENESIS, b"state"))
        with pytest.raises(WrongPosition, match="expected position 5, but its log ends at 3"):
            log.append(late)
        assert list(log.read()) == records[:3]


def test_nothing_is_appended_after_a_newer_owner_though_the_position_is_the_expected_one(
    database: ServiceDatabase,
) -> None:
    with closing(PostgresEventLog(database.url, ONE)) as log:
        append(log, sents(3))
        late = after(log, sents(1, 20))
        database.execute("UPDATE postroom.log SET epoch = 2")
        end_all(database)
        with pytest.raises(Fenced, match="taken over by epoch 2"):
            log.append(late)
        assert len(list(log.read())) == 3


async def test_a_process_that_waits_for_a_mailbox_waits_on_when_its_connection_was_ended(
    database: ServiceDatabase,
) -> None:
    first, second = PostgresOwnership(database.url), PostgresOwnership(database.url)
    sessions = "SELECT pid FROM pg_stat_activity WHERE application_name = 'second'"

    async def wait() -> None:
        async with second.acquire(ONE, "second", LONG_MS):
            pass

    async def is_connected(former: Sequence[object]) -> bool:
        return await asyncio.to_thread(database.execute, sessions) not in ([], former)

    async with asyncio.TaskGroup() as waiting, first.acquire(ONE, "first", 0):
        waiting.create_task(wait())
        await until_answer(lambda: is_connected([]))
        former = database.execute(sessions)
        database.execute(f"SELECT pg_terminate_backend(pid, 60000) FROM ({sessions}) AS waiting")
        await until_answer(lambda: is_connected(former))
        assert await first.owner(ONE) == "first"


async def test_a_connection_that_is_ended_while_it_is_opened_is_opened_again(
    database: ServiceDatabase,
) -> None:
    with Proxy(database.url) as proxy:
        ownership = PostgresOwnership(proxy.url)

        async def own() -> str | None:
            async with ownership.acquire(ONE, "first", 0):
                return await ownership.owner(ONE)

        async def is_connecting() -> bool:
            return proxy.connections > 0

        proxy.hold_requests()
        owner = asyncio.create_task(own())
        await until_answer(is_connecting)
        proxy.cut()
        assert await owner == "first"
