"""The message outbox conformance suite on SQLite and on PostgreSQL."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from postroom.adapters.files.changes import FileChanges
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


class TestSqlite(MessageOutboxConformance):
    @pytest.fixture(params=["wal", "delete"])
    def path(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
            connection.execute(f"PRAGMA journal_mode = {request.param}")
        return tmp_path / "shop.db"

    @pytest.fixture
    def record(self, path: Path) -> Record:
        def record(*messages: NewMessage, mailbox: str = MAILBOX) -> list[str]:
            with closing(sqlite3.connect(path)) as connection, connection:
                return MailboxOutbox(mailbox).record(connection, *messages)

        return record

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
        await outbox.wait()
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
        assert await outbox.find(1) == []
        waiting = asyncio.create_task(outbox.wait())
        await asyncio.sleep(0.1)  # in which it begins to wait
        (id_,) = await asyncio.to_thread(record, NewMessage("orders", b"1"))
        async with asyncio.timeout(WAIT_SECONDS):
            await waiting
        assert [row.id for row in await outbox.find(1)] == [id_]

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
        assert await outbox.find(1) == []
        waiting = asyncio.create_task(outbox.wait())
        await asyncio.sleep(0.1)  # in which it begins to wait
        (id_,) = await asyncio.to_thread(record, NewMessage("orders", b"1"))
        async with asyncio.timeout(WAIT_SECONDS):
            await waiting
        assert [row.id for row in await outbox.find(1)] == [id_]
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


class TestPostgres(MessageOutboxConformance):
    @pytest.fixture(params=[True, False], ids=["notify", "poll"])
    def record(self, request: pytest.FixtureRequest, messaging_database: str) -> Record:
        def record(*messages: NewMessage, mailbox: str = MAILBOX) -> list[str]:
            with psycopg.connect(messaging_database) as connection:
                return MailboxOutbox(mailbox, notify=request.param).record(connection, *messages)

        return record

    @pytest.fixture
    async def outbox(self, messaging_database: str) -> AsyncIterator[MessageOutbox]:
        outbox = PostgresMessageOutbox(messaging_database, MAILBOX)
        yield outbox
        await outbox.close()
