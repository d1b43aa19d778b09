"""Sending in the user's own transaction, on every kind of connection that users have."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiosqlite
import django.db
import psycopg
import pytest
import sqlalchemy
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as async_sqlalchemy

from postroom import (
    AsyncMailboxOutbox,
    InvalidRequest,
    MailboxOutbox,
    NewMessage,
    Unavailable,
    connect,
    open_mailbox,
)
from postroom.domain.errors import FrameTooLarge
from postroom.domain.policy import TopicPolicy
from tests.support.outboxes import django_connection

SQLALCHEMY = ["connection sqlite", "connection postgresql", "session sqlite", "session postgresql"]
KINDS = ["sqlite3", "psycopg", *SQLALCHEMY, "django sqlite", "django postgresql"]
ASYNC_KINDS = ["aiosqlite", "psycopg", *SQLALCHEMY]
TOPIC = "orders"


def message(payload: bytes, **fields: Any) -> NewMessage:
    return NewMessage(topic=TOPIC, payload=payload, **fields)


class Shop:
    """A business database, and how to begin transactions in it."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        self._url = address.replace("postgresql://", "postgresql+psycopg://")
        if "://" not in address:
            self._url = f"sqlite:///{address}"

    @contextmanager
    def begin(self) -> Iterator[Any]:
        match self.kind.partition(" ")[0]:
            case "sqlite3":
                with closing(sqlite3.connect(self.address)) as database, database:
                    yield database
            case "psycopg":
                with psycopg.connect(self.address) as connection:
                    yield connection
            case "django":
                with django_connection(self.address), django.db.transaction.atomic():
                    yield django.db.connection
            case kind:
                engine = sqlalchemy.create_engine(self._url)
                try:
                    with engine.begin() if kind == "connection" else orm.Session(engine) as transaction:
                        yield transaction
                        transaction.commit()
                finally:
                    engine.dispose()

    @asynccontextmanager
    async def begin_async(self) -> AsyncIterator[Any]:
        match self.kind.partition(" ")[0]:
            case "aiosqlite":
                async with aiosqlite.connect(self.address) as connection:
                    yield connection
                    await connection.commit()
            case "psycopg":
                async with await psycopg.AsyncConnection.connect(self.address) as connection:
                    yield connection
            case kind:
                url = self._url.replace("sqlite://", "sqlite+aiosqlite://")
                engine = async_sqlalchemy.create_async_engine(url)
                try:
                    begun = engine.begin() if kind == "connection" else async_sqlalchemy.AsyncSession(engine)
                    async with begun as transaction:
                        yield transaction
                        await transaction.commit()
                finally:
                    await engine.dispose()


def make_shop(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> Shop:
    is_sqlite = "sqlite" in kind
    address = str(tmp_path / "shop.db") if is_sqlite else request.getfixturevalue("messaging_database")
    if kind.startswith("django"):  # these tests await while they hold the connection
        request.getfixturevalue("monkeypatch").setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    return Shop(kind, address)


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return make_shop(request.param, tmp_path, request)


@pytest.fixture(params=ASYNC_KINDS)
def async_shop(request: pytest.FixtureRequest, tmp_path: Path) -> Shop:
    return make_shop(request.param, tmp_path, request)


async def receive(store: str, outbox: str, count: int) -> list[bytes]:
    """Return the payloads of the messages in the mailbox, once there are `count`."""
    async with open_mailbox(store, outboxes=[outbox]) as mailbox:
        found: list[bytes] = []
        while len(found) < count:
            found += [each.payload for each in await mailbox.receive_messages(TOPIC, wait_ms=60_000)]
        return found + [each.payload for each in await mailbox.receive_messages(TOPIC, wait_ms=300)]


async def test_a_committed_message_is_received_and_one_rolled_back_is_not(shop: Shop, tmp_path: Path) -> None:
    outbox = MailboxOutbox()
    with suppress(ZeroDivisionError), shop.begin() as connection:
        outbox.record(connection, message(b"rolled back"))
        raise ZeroDivisionError
    with shop.begin() as connection:
        assert outbox.record(connection) == []
        ids = outbox.record(connection, message(b"1", message_id="one"), message(b"2"))
        ids += outbox.record(connection, message(b"3"))
    assert ids[0] == "one"
    assert await receive(str(tmp_path / "store.db"), shop.address, 3) == [b"1", b"2", b"3"]


async def test_asyncio_connections_record_too(async_shop: Shop, tmp_path: Path) -> None:
    outbox = AsyncMailboxOutbox()
    with suppress(ZeroDivisionError):
        async with async_shop.begin_async() as connection:
            await outbox.record(connection, message(b"rolled back"))
            raise ZeroDivisionError
    async with async_shop.begin_async() as connection:
        await outbox.record(connection, message(b"1"), message(b"2"))
    assert await receive(str(tmp_path / "store.db"), async_shop.address, 2) == [b"1", b"2"]


async def test_an_invalid_message_is_refused_and_the_transaction_remains_usable(
    shop: Shop, tmp_path: Path
) -> None:
    outbox = MailboxOutbox()
    with shop.begin() as connection:
        outbox.record(connection, message(b"1"))
        with pytest.raises(InvalidRequest, match="priority"):
            outbox.record(connection, message(b"2"), message(b"3", priority=11))
        with pytest.raises(FrameTooLarge, match="1048576"):
            outbox.record(connection, message(bytes(1 << 20)))
        with pytest.raises(InvalidRequest, match="NewMessage"):
            outbox.record(connection, {"topic": TOPIC})  # type: ignore[arg-type]
        outbox.record(connection, message(b"4"))
    assert await receive(str(tmp_path / "store.db"), shop.address, 2) == [b"1", b"4"]


def test_a_connection_in_autocommit_mode_is_refused(messaging_database: str, tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", isolation_level="AUTOCOMMIT")
    with (
        closing(sqlite3.connect(path, isolation_level=None)) as file,
        psycopg.connect(messaging_database, autocommit=True) as server,
        engine.connect() as alchemy,
    ):
        for connection in (file, server, alchemy):
            with pytest.raises(InvalidRequest, match="autocommit"):
                MailboxOutbox().record(connection, message(b"1"))
        file.execute("BEGIN")
        assert len(MailboxOutbox().record(file, message(b"1"))) == 1
        file.execute("ROLLBACK")
    engine.dispose()


@pytest.mark.parametrize("kind", ["django sqlite", "django postgresql"])
async def test_a_connection_of_django_keeps_its_rules(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shop = make_shop(kind, tmp_path, request)
    atomic = django.db.transaction.atomic
    outbox = MailboxOutbox()
    with django_connection(shop.address) as connection:
        with pytest.raises(InvalidRequest, match=r"autocommit.*atomic\(\)"):
            outbox.record(connection, message(b"in autocommit"))
        with atomic():
            outbox.record(connection, message(b"1 %s %(x)s"))
            with suppress(ZeroDivisionError), atomic():
                outbox.record(connection, message(b"in a savepoint that is rolled back"))
                raise ZeroDivisionError
            with atomic():
                outbox.record(connection, message(b"2"))
        with atomic():
            outbox.record(connection, message(b"marked for rollback"))
            connection.set_rollback(True)
            with pytest.raises(django.db.transaction.TransactionManagementError):
                outbox.record(connection, message(b"in a broken block"))
        django.db.transaction.set_autocommit(False)
        outbox.record(connection, message(b"rolled back"))
        django.db.transaction.rollback()
        outbox.record(connection, message(b"3"))
        django.db.transaction.commit()
        django.db.transaction.set_autocommit(True)
        with pytest.raises(InvalidRequest, match="sync_to_async"):
            await AsyncMailboxOutbox().record(connection, message(b"asynchronous"))
    assert await receive(str(tmp_path / "store.db"), shop.address, 3) == [b"1 %s %(x)s", b"2", b"3"]


@pytest.mark.parametrize("value", [None, "shop.db", object()])
def test_what_is_no_connection_is_refused(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="Pass a sqlite3 or psycopg Connection"):
        MailboxOutbox().record(value, message(b"1"))


def test_the_users_row_factory_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.row_factory = lambda *_: 1 / 0
        connection.text_factory = bytes
        MailboxOutbox().record(connection, message(b"1"))


async def test_a_table_of_an_attached_or_temporary_database_is_not_taken_for_that_of_the_file(
    tmp_path: Path,
) -> None:
    shop, other = str(tmp_path / "shop.db"), str(tmp_path / "other.db")
    with closing(sqlite3.connect(other)) as connection, connection:
        MailboxOutbox().record(connection, message(b"other"))
    with closing(sqlite3.connect(shop)) as connection:
        connection.execute("ATTACH ? AS other", [other])
        connection.execute("CREATE TEMP TABLE outbox_messages AS SELECT * FROM other.outbox_messages")
        with connection:
            MailboxOutbox().record(connection, message(b"1"))
    assert await receive(str(tmp_path / "store.db"), shop, 1) == [b"1"]


async def test_a_database_without_the_table_names_the_command(
    create_database: Callable[[str | None], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    url = create_database(None)
    with (
        psycopg.connect(url) as connection,
        pytest.raises(Unavailable, match="postroom migrate --messaging"),
    ):
        MailboxOutbox().record(connection, message(b"1"))
    with (
        django_connection(url) as connection,
        django.db.transaction.atomic(),
        pytest.raises(Unavailable, match="postroom migrate --messaging"),
    ):
        MailboxOutbox().record(connection, message(b"1"))
    with pytest.raises(Unavailable, match="has no table outbox_messages; run `postroom migrate --messaging"):
        async with open_mailbox(str(tmp_path / "store.db"), outboxes=[url]):
            pass


async def test_the_file_of_the_store_may_have_the_outbox(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as mailbox:
        with closing(sqlite3.connect(store)) as connection, connection:
            connection.execute("CREATE TABLE orders (id)")
            MailboxOutbox().record(connection, message(b"1"))
        (received,) = await mailbox.receive_messages(TOPIC, wait_ms=60_000)
    assert received.payload == b"1"


async def test_whoever_owns_a_shared_mailbox_sends_what_was_recorded(shop: Shop, tmp_path: Path) -> None:
    store, outboxes = str(tmp_path / "store.db"), [shop.address]
    async with connect(store, outboxes=outboxes) as first:
        async with connect(store, outboxes=outboxes) as second:
            with shop.begin() as connection:
                MailboxOutbox().record(connection, message(b"1"))
            (received,) = await second.receive_messages(TOPIC, wait_ms=60_000)
            await received.ack()
        assert received.payload == b"1"
        assert (await first.get_message(received.message_id)).status == "acked"
    async with AsyncExitStack() as owner:
        await owner.enter_async_context(open_mailbox(store))
        async with connect(store, outboxes=outboxes) as successor:
            await owner.aclose()
            with shop.begin() as connection:
                MailboxOutbox().record(connection, message(b"2"))
            (received,) = await successor.receive_messages(TOPIC, wait_ms=60_000)
            assert received.payload == b"2"


async def test_the_owner_sends_from_an_outbox_that_only_another_process_names(
    shop: Shop, tmp_path: Path
) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as owner:
        async with connect(store, outboxes=[shop.address]):
            with shop.begin() as connection:
                MailboxOutbox().record(connection, message(b"1"))
            (received,) = await owner.receive_messages(TOPIC, wait_ms=60_000)
        assert received.payload == b"1"


async def test_the_next_owner_is_told_of_the_outboxes_that_others_name(tmp_path: Path) -> None:
    store, shop = str(tmp_path / "store.db"), str(tmp_path / "shop.db")
    async with AsyncExitStack() as first:
        await first.enter_async_context(open_mailbox(store))
        async with connect(store) as second, connect(store, outboxes=[shop]):
            await first.aclose()
            with closing(sqlite3.connect(shop)) as connection, connection:
                MailboxOutbox().record(connection, message(b"1"))
            (received,) = await second.receive_messages(TOPIC, wait_ms=60_000)
        assert received.payload == b"1"


async def test_an_outbox_that_can_not_be_used_holds_up_no_call(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    missing = "postgresql://nobody@127.0.0.1:1/nothing"
    (tmp_path / "text.db").write_text("no database " * 100)
    unusable = [missing, str(tmp_path / "text.db")]
    async with open_mailbox(store), connect(store, outboxes=unusable) as mailbox:
        await mailbox.send_message(message(b"1"))
    async with connect(store, outboxes=[missing]) as mailbox:
        assert (await mailbox.get_backlog()).ready == 1


async def test_an_idempotency_key_makes_two_transactions_send_one_message(tmp_path: Path) -> None:
    shop = str(tmp_path / "shop.db")
    for _ in range(2):
        with closing(sqlite3.connect(shop)) as connection, connection:
            MailboxOutbox().record(connection, message(b"1", idem_key="order-1"))
    assert await receive(str(tmp_path / "store.db"), shop, 1) == [b"1"]


async def test_a_refused_message_stays_with_its_error_and_holds_back_no_other(tmp_path: Path) -> None:
    shop = str(tmp_path / "shop.db")
    with closing(sqlite3.connect(shop)) as connection:
        with connection:
            outbox = MailboxOutbox()
            outbox.record(connection, message(b"1", idem_key="same"), message(b"2", idem_key="same"))
            connection.execute(
                "INSERT INTO outbox_messages (id, mailbox, topic, message)"
                " VALUES ('x', 'main@local', 'a', '{')"
            )
            outbox.record(connection, message(b"altered"))
            connection.execute(
                "UPDATE outbox_messages SET id = 'altered' WHERE position = last_insert_rowid()"
            )
            outbox.record(connection, message(b"3"))
        assert await receive(str(tmp_path / "store.db"), shop, 2) == [b"1", b"3"]
        errors = connection.execute("SELECT error FROM outbox_messages ORDER BY position").fetchall()
    assert len(errors) == 3
    assert "was used for another payload" in errors[0][0]
    assert "not a message that this version can read" in errors[1][0]
    assert "'altered' was altered" in errors[2][0]


async def test_a_full_topic_holds_back_only_itself_and_keeps_its_order(tmp_path: Path) -> None:
    shop = str(tmp_path / "shop.db")
    policy = TopicPolicy(shards=1, shard_capacity=2)
    async with open_mailbox(str(tmp_path / "store.db"), outboxes=[shop], default_policy=policy) as mailbox:
        with closing(sqlite3.connect(shop)) as connection, connection:
            MailboxOutbox().record(
                connection,
                *(message(b"%d" % n) for n in range(7)),
                NewMessage(topic="other", payload=b"not held back"),
            )
        (other,) = await mailbox.receive_messages("other", wait_ms=60_000)
        assert other.payload == b"not held back"
        found: list[bytes] = []
        while len(found) < 7:
            received = await mailbox.receive_messages(TOPIC, wait_ms=60_000)
            found += [each.payload for each in received]
            await mailbox.ack_messages([each.receipt for each in received])
    assert found == [b"%d" % n for n in range(7)]
