"""The message outbox conformance suite on SQLite and on PostgreSQL."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom.adapters.files import FileChanges
from postroom.adapters.postgres import hints
from postroom.adapters.postgres.messaging import message_outbox as postgres_outbox
from postroom.adapters.postgres.messaging.message_outbox import PostgresMessageOutbox
from postroom.adapters.sql.mailbox_outbox import MailboxOutbox
from postroom.adapters.sqlite import message_outbox
from postroom.adapters.sqlite.message_outbox import SqliteMessageOutbox
from postroom.application.messages import NewMessage
from postroom.application.outbox.events import read_message
from postroom.application.ports.outbox import MessageOutbox
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.conformance.message_outbox import WAIT_SECONDS, MessageOutboxConformance, Record
from tests.support.stores import MAILBOX
from tests.support.waiting import until, within


def recorder(connect: Callable[[], AbstractContextManager[Any]], *, notify: bool = False) -> Record:
    """Return a function that records messages, each time in a transaction of a new connection."""

    def record(*messages: NewMessage, mailbox: str = MAILBOX) -> list[str]:
        with connect() as connection:
            return MailboxOutbox(mailbox, notify=notify).record(connection, *messages)

    return record


@contextmanager
def open_file(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as connection, connection:
        yield connection


async def find_while_it_waits(outbox: MessageOutbox, record: Record, begins: Awaitable[object]) -> None:
    """Check that an outbox that waits finds a message that is recorded meanwhile.

    Arguments:
        begins: returns when it has begun to wait.
    """
    assert await outbox.find(1) == []
    waiting = asyncio.create_task(wait_for_row(outbox))
    await begins
    (id_,) = await asyncio.to_thread(record, NewMessage("orders", b"1"))
    assert await within(waiting) == id_


async def wait_for_row(outbox: MessageOutbox) -> str:
    while not (rows := await outbox.find(1)):
        await outbox.wait()
    return rows[0].id


class TestSqlite(MessageOutboxConformance):
    @pytest.fixture(params=["wal", "delete"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            connection.execute(f"PRAGMA journal_mode = {request.param}")
        return tmp_path / "shop.db"

    @pytest.fixture
    def record(self, path: Path) -> Record:
        return recorder(lambda: open_file(path))

    @pytest.fixture
    async def outbox(self, path: Path) -> AsyncIterator[MessageOutbox]:
        outbox = SqliteMessageOutbox(path, MAILBOX)
        yield outbox
        await outbox.close()

    async def test_the_file_may_be_created_later(self, tmp_path: Path) -> None:
        path = tmp_path / "later.db"
        outbox = SqliteMessageOutbox(path, MAILBOX)
        assert await outbox.find(1) == []
        assert not path.exists()
        with closing(sqlite3.connect(path)) as connection, connection:
            ids = MailboxOutbox(MAILBOX).record(connection, NewMessage(topic="a", payload=b""))
        await within(outbox.wait())
        assert [row.id for row in await outbox.find(1)] == ids
        await outbox.close()

    @pytest.mark.parametrize("column", ["id", "topic", "message"])
    @pytest.mark.parametrize("value", ["x'ff'", "CAST(x'ff' AS TEXT)"])
    async def test_a_row_that_is_not_utf_8_can_be_refused(
        self, outbox: MessageOutbox, record: Record, path: Path, column: str, value: str
    ) -> None:
        record(NewMessage(topic="a", payload=b"1"), NewMessage(topic="a", payload=b"2"))
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(f"UPDATE outbox_messages SET {column} = {value} WHERE position = 1")
        altered, intact = await outbox.find(10)
        assert read_message(intact).payload == b"2"
        with pytest.raises(InvalidRequest, match=r"altered|can read"):
            read_message(altered)
        await outbox.settle([], [(altered, "altered")])
        assert list(await outbox.find(10)) == [intact]

    @pytest.mark.parametrize("is_removed_first", [True, False])
    async def test_a_file_that_replaces_another_is_read(
        self, outbox: MessageOutbox, record: Record, path: Path, tmp_path: Path, is_removed_first: bool
    ) -> None:
        record(NewMessage(topic="a", payload=b""))
        assert len(await outbox.find(10)) == 1
        if is_removed_first:
            await asyncio.to_thread(path.unlink)
            assert await outbox.find(10) == []
        with closing(sqlite3.connect(tmp_path / "backup.db")) as connection, connection:
            (restored,) = MailboxOutbox(MAILBOX).record(connection, NewMessage(topic="a", payload=b""))
        await asyncio.to_thread((tmp_path / "backup.db").rename, path)
        async with asyncio.timeout(WAIT_SECONDS):
            await outbox.wait()
        assert [row.id for row in await outbox.find(10)] == [restored]

    @pytest.mark.parametrize("told", ["by the kernel", "of nothing", "of too little"])
    async def test_a_message_is_found_in_a_file_that_was_quiet(
        self, outbox: MessageOutbox, record: Record, monkeypatch: pytest.MonkeyPatch, told: str
    ) -> None:
        monkeypatch.setattr(message_outbox, "QUIET_SECONDS", 0)
        monkeypatch.setattr(message_outbox, "LOST_SECONDS", 0.05 if told == "of too little" else 3_600)
        if told != "by the kernel":
            monkeypatch.setattr(FileChanges, "watch", lambda self, files: told == "of too little")
        record(NewMessage("other", b""), mailbox="acme@two")
        watched = count_calls(monkeypatch, SqliteMessageOutbox, "_watch")
        await find_while_it_waits(outbox, record, until(lambda: watched))

    async def test_a_message_is_found_in_a_quiet_file_that_a_link_names(
        self, path: Path, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(message_outbox, "QUIET_SECONDS", 0)
        monkeypatch.setattr(message_outbox, "LOST_SECONDS", 3_600)
        record(NewMessage("other", b""), mailbox="acme@two")
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
        link = tmp_path / "links" / "outbox.db"
        link.parent.mkdir()
        link.symlink_to(path)
        outbox = SqliteMessageOutbox(link, MAILBOX)
        watched = count_calls(monkeypatch, SqliteMessageOutbox, "_watch")
        await find_while_it_waits(outbox, record, until(lambda: watched))
        await outbox.close()

    async def test_a_file_that_has_no_messages_is_not_searched_at_each_commit(
        self, outbox: MessageOutbox, path: Path
    ) -> None:
        assert await outbox.find(1) == []
        waiting = asyncio.create_task(outbox.wait())
        for number in range(20):
            with closing(sqlite3.connect(path)) as connection, connection:
                connection.execute(f"CREATE TABLE others_{number} (name)")
            await asyncio.sleep(0.01)
        assert not waiting.done()
        await cancel_and_wait(waiting)

    async def test_a_file_that_is_no_database_is_reported(self, tmp_path: Path) -> None:
        path = tmp_path / "text.db"
        path.write_text("no database " * 100)
        outbox = SqliteMessageOutbox(path, MAILBOX)
        with pytest.raises(Unavailable, match=r"text\.db can't be used: file is not a database"):
            await outbox.find(1)
        await outbox.close()


def count_calls(patch: pytest.MonkeyPatch, owner: type, name: str) -> list[object]:
    """Return a list that gets an item at each call of a method."""
    calls: list[object] = []
    method = getattr(owner, name)

    def call(self: object) -> object:
        calls.append(self)
        return method(self)

    patch.setattr(owner, name, call)
    return calls


WATCHED = """
    SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database
    WHERE datname = current_database() AND locktype = 'advisory' AND objid = 100 AND mode = 'ExclusiveLock'
"""


class TestPostgres(MessageOutboxConformance):
    @pytest.fixture(params=[True, False], ids=["notify", "poll"])
    def record(self, request: pytest.FixtureRequest, messaging_database: str) -> Record:
        return recorder(lambda: psycopg.connect(messaging_database), notify=request.param)

    @pytest.fixture
    async def outbox(self, messaging_database: str) -> AsyncIterator[MessageOutbox]:
        outbox = PostgresMessageOutbox(messaging_database, MAILBOX)
        yield outbox
        await outbox.close()

    @pytest.fixture
    def is_quiet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """An outbox waits to be notified from the beginning, and does not look by itself."""
        for module in (postgres_outbox, hints):
            monkeypatch.setattr(module, "QUIET_SECONDS", 0.1)
        monkeypatch.setattr(postgres_outbox, "MAX_POLL_SECONDS", 0.1)
        monkeypatch.setattr(postgres_outbox, "LOST_SECONDS", 3_600)

    @pytest.mark.usefixtures("is_quiet")
    async def test_a_message_is_found_by_an_outbox_that_was_quiet(
        self, outbox: MessageOutbox, messaging_database: str
    ) -> None:
        record = recorder(lambda: psycopg.connect(messaging_database))
        for _ in range(3):
            await find_while_it_waits(outbox, record, until(lambda: is_watched(messaging_database)))
            await outbox.settle(await outbox.find(1), [])

    @pytest.mark.usefixtures("is_quiet")
    async def test_a_message_whose_notification_is_lost_is_found_later(
        self, outbox: MessageOutbox, messaging_database: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(postgres_outbox, "LOST_SECONDS", 0.05)
        with psycopg.connect(messaging_database) as connection:
            connection.execute(
                "CREATE OR REPLACE FUNCTION outbox_notify_listeners() RETURNS trigger LANGUAGE plpgsql"
                " AS 'BEGIN RETURN NULL; END'"
            )
        record = recorder(lambda: psycopg.connect(messaging_database))
        await find_while_it_waits(outbox, record, until(lambda: is_watched(messaging_database)))

    @pytest.mark.usefixtures("is_quiet")
    async def test_a_table_without_the_trigger_is_polled(
        self, outbox: MessageOutbox, messaging_database: str
    ) -> None:
        with psycopg.connect(messaging_database) as connection:
            connection.execute("ALTER TABLE outbox_messages DISABLE TRIGGER notify_listeners")
        record = recorder(lambda: psycopg.connect(messaging_database))
        await find_while_it_waits(outbox, record, asyncio.sleep(0))
        assert not is_watched(messaging_database)

    @pytest.mark.usefixtures("is_quiet")
    async def test_a_message_of_a_transaction_that_began_before_its_outbox_waited_is_found(
        self, outbox: MessageOutbox, messaging_database: str
    ) -> None:
        assert await outbox.find(1) == []
        with psycopg.connect(messaging_database) as connection:
            (id_,) = MailboxOutbox(MAILBOX).record(connection, NewMessage("orders", b"1"))
            waiting = asyncio.create_task(wait_for_row(outbox))
            await until(lambda: listens(messaging_database))
            assert not is_watched(messaging_database)
            connection.commit()
        assert await within(waiting) == id_

    @pytest.mark.usefixtures("is_quiet")
    async def test_of_two_owners_that_wait_for_a_table_both_are_notified_and_one_waits_on(
        self, outbox: MessageOutbox, messaging_database: str
    ) -> None:
        other = PostgresMessageOutbox(messaging_database, "acme@two")
        record = recorder(lambda: psycopg.connect(messaging_database))
        tasks = [asyncio.create_task(wait_for_row(each)) for each in (outbox, other)]
        await until(lambda: is_watched(messaging_database))
        record(NewMessage("orders", b"1"))
        await within(tasks[0])
        await outbox.close()
        await until(lambda: is_watched(messaging_database))
        record(NewMessage("orders", b"2"), mailbox="acme@two")
        await within(tasks[1])
        await other.close()

    async def test_writers_notify_only_while_somebody_waits(self, messaging_database: str) -> None:
        record = recorder(lambda: psycopg.connect(messaging_database))
        waiting = hints.PostgresHints(
            messaging_database, "test", "postroom_outbox_messages", "outbox_messages"
        )
        with psycopg.connect(messaging_database, autocommit=True) as listener:
            listener.execute("LISTEN postroom_outbox_messages")
            record(NewMessage("orders", b"1"))
            assert [*listener.notifies(timeout=0.1)] == []
            await until(waiting.watch)
            record(NewMessage("orders", b"2"))
            await until(lambda: not is_watched(messaging_database))
            assert {each.payload for each in listener.notifies(timeout=0.1)} == {"public"}
            record(NewMessage("orders", b"3"))
            assert [*listener.notifies(timeout=0.1)] == []
        await waiting.close()


def is_watched(url: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute(WATCHED).fetchone() == (1,)


def listens(url: str) -> bool:
    with psycopg.connect(url) as connection:
        query = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'postroom message outbox hints'"
        )
        return connection.execute(query).fetchone() == (1,)
