"""Two stores in one database, each in the schema that its URL names."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, closing
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import quote, urlsplit
from uuid import uuid4

import psycopg
import pytest
from msgspec.structs import replace
from psycopg import sql

from postroom import MailboxOutbox, NewEvent, NewMessage, Outbox, ReceivedMessage
from postroom.adapters.cli.main import invoke
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.backup import back_up
from postroom.adapters.compose.control_plane import open_lease_store
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections, verify_projections
from postroom.adapters.compose.restore import restore
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.postgres.hints import PostgresHints
from postroom.adapters.postgres.lease_store import PostgresLeaseTables
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.subject_keys.master_key import LocalMasterKey
from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys, create_subject_keys
from postroom.application.leases.leases import LeaseProjection, Leases
from postroom.application.ports.subject_keys import UnknownPseudonym
from postroom.domain.errors import InvalidRequest, LeaseHeld, MailboxOwned, UnusableServer
from tests.conformance.lease_store import ACQUIRE
from tests.conformance.records import append
from tests.integration.postgres.event_logs import sents
from tests.support.fixtures import CreateDatabase
from tests.support.stores import MAILBOX, message, receive_one

SCHEMAS = ("order", "billing")
"""The first is a reserved word."""
SETS = ("store", "messaging", "leases", "keys")
OBJECTS = """
    SELECT nspname, relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace
    WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
    UNION ALL SELECT nspname, proname FROM pg_proc JOIN pg_namespace AS n ON n.oid = pronamespace
    WHERE prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql')
"""
READS = (
    "backlog",
    "search order",
    "stats",
    "activity",
    "peek orders",
    "export json {folder}/{schema}",
    "log show",
    "verify",
    "anchor {folder}/{schema}-anchors",
    "mailbox list",
    "topic list",
    "views status",
    "views verify --engine local",
    "report traffic --engine local",
    "outbox backlog",
    "outbox list",
    "inbox backlog",
    "migrate --dry-run",
    "doctor",
    "backup create {folder}/{schema}-backup",
)


def in_schema(url: str, schema: str) -> str:
    return f"{url}?schema={schema}"


@pytest.fixture(scope="module")
def database(create_shared_database: CreateDatabase) -> str:
    """A database in which each schema has all tables."""
    url = create_shared_database(None)
    for schema in SCHEMAS:
        for set_ in SETS:
            assert migrate(in_schema(url, schema), set_)
    return url


@pytest.fixture(scope="module")
def stores(database: str) -> list[str]:
    return [in_schema(database, schema) for schema in SCHEMAS]


def record(database: str, schema: str, name: str, mailbox: str = MAILBOX) -> None:
    """Record a message and an event in a transaction of a service."""
    with psycopg.connect(database) as connection:
        new = NewMessage(topic="recorded", payload=b"", message_id=name)
        assert MailboxOutbox(mailbox, notify=True, schema=schema).record(connection, new) == [name]
        connection.execute(f'SET LOCAL search_path = "{schema}"')
        Outbox().record(
            connection, NewEvent(aggregate_type=name, aggregate_id=1, event_type="placed", payload={})
        )


def test_every_object_is_in_the_schema_of_its_store(database: str) -> None:
    with psycopg.connect(database) as connection:
        objects = connection.execute(OBJECTS).fetchall()
    by_schema = {schema: sorted(name for where, name in objects if where == schema) for schema in SCHEMAS}
    assert {where for where, _ in objects} == set(SCHEMAS)
    assert by_schema["order"] == by_schema["billing"]


async def test_owners_of_one_mailbox_work_side_by_side_and_see_only_what_is_theirs(
    database: str, stores: list[str]
) -> None:
    async with AsyncExitStack() as stack, asyncio.timeout(240):
        mailboxes = [await stack.enter_async_context(open_mailbox(url, "both@local")) for url in stores]
        for url in stores:
            with pytest.raises(MailboxOwned):
                await stack.enter_async_context(open_mailbox(url, "both@local"))
        for schema, mailbox in zip(SCHEMAS, mailboxes, strict=True):
            await mailbox.send_message(message(topic="recorded", message_id=f"sent-{schema}"))
            record(database, schema, f"recorded-{schema}", "both@local")
        for schema, mailbox in zip(SCHEMAS, mailboxes, strict=True):
            received: list[ReceivedMessage] = []
            while len(received) < 2:
                received += await mailbox.receive_messages("recorded", max_messages=9, wait_ms=1_000)
            assert {each.message_id for each in received} == {f"sent-{schema}", f"recorded-{schema}"}
            assert await mailbox.receive_messages("recorded", max_messages=9) == []


async def test_a_hint_wakes_the_owner_of_its_schema(database: str, stores: list[str]) -> None:
    channel = "postroom_outbox_messages"
    hints = [PostgresHints(url, "test", channel) for url in stores]
    async with asyncio.timeout(240):
        for each in hints:
            await each.wait()  # each is listening
        ours = asyncio.create_task(hints[0].wait())
        record(database, "billing", "hint-billing", "unread@local")
        await hints[1].wait()
        record(database, "order", "hint-order", "unread@local")
        await ours
        theirs = asyncio.create_task(hints[1].wait())
        record(database, "order", "hint-again", "unread@local")
        await hints[0].wait()
        assert not theirs.done()
        theirs.cancel()
    for each in hints:
        await each.close()


async def test_retention_is_of_one_store(stores: list[str]) -> None:
    async with AsyncExitStack() as stack:
        mailboxes = [await stack.enter_async_context(open_mailbox(url, "kept@local")) for url in stores]
        for mailbox in mailboxes:
            await mailbox.send_message(message())
            await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        before = [list(mailbox.engine.log.read()) for mailbox in mailboxes]
        assert await mailboxes[0].delete_old_events(mailboxes[0].engine.now() + 1)
        after = [list(mailbox.engine.log.read()) for mailbox in mailboxes]
        assert (len(after[0]) < len(before[0]), after[1]) == (True, before[1])


def test_leases_and_keys_are_of_one_store(stores: list[str]) -> None:
    key_stores, pseudonyms = [], []
    for number, url in enumerate(stores):
        tables = PostgresLeaseTables(url)
        with closing(open_lease_store(url)) as store, closing(tables):
            leases = Leases(store.recorder, lambda: 0)
            assert leases.acquire(ACQUIRE).mailbox == ACQUIRE.mailbox
            assert LeaseProjection(leases, tables, lambda: 0).update() == 1
            with pytest.raises(LeaseHeld):
                leases.acquire(replace(ACQUIRE, runner="other", acquisition=str(uuid4())))
        master = LocalMasterKey(bytes([number] * 32))
        create_subject_keys(url, master)
        keys = PostgresSubjectKeys(url, master, lambda: 1)
        assert keys.list_subjects() == []
        pseudonyms.append(keys.get_or_create(["ada"])["ada"].pseudonym)
        keys.destroy(pseudonyms[-1], 2)
        assert keys.resolve(pseudonyms[-1:]) == {pseudonyms[-1]: None}
        key_stores.append(keys)
    for keys, other in zip(key_stores, reversed(pseudonyms), strict=True):
        with pytest.raises(UnknownPseudonym):
            keys.resolve([other])


def test_tasks_of_one_store_do_not_wait_for_those_of_the_other(stores: list[str]) -> None:
    with ExitStack() as stack:
        updaters = [stack.enter_context(closing(open_store(url).read_model_updater())) for url in stores]
        assert stack.enter_context(updaters[0].leader_lock())
        following = [open_store(url).read_models() for url in stores]
        assert [models.is_following() for models in following] == [True, False]
        assert stack.enter_context(updaters[1].leader_lock())
        with updaters[0].leader_lock() as is_leader:
            assert not is_leader
        for models in following:
            models.close()


async def test_inboxes_and_outboxes_are_of_one_store(database: str, stores: list[str]) -> None:
    record(database, "order", "event-order", "unread@local")
    id_ = uuid4()
    async with AsyncExitStack() as stack:
        inboxes = [PostgresInbox(url) for url in stores]
        assert [await stack.enter_async_context(each.exclusive("redrive")) for each in inboxes] == [True] * 2
        async with inboxes[0].exclusive("redrive") as is_free:
            assert not is_free
        await inboxes[0].insert(id_, "sea.event.order_placed.v1", 1)
        assert [(await each.backlog()).count for each in inboxes] == [1, 0]
        assert [await each.delete_processed(1, 9) for each in inboxes] == [0, 0]
        for each in inboxes:
            await each.close()
    for url in stores:
        outbox = PostgresOutboxRepository(url)
        with psycopg.connect(database) as connection:
            schema = url.partition("=")[2]
            rows = connection.execute(f'SELECT count(*) FROM "{schema}".outbox_events').fetchall()
        assert [((await outbox.backlog()).count,)] == rows
        await outbox.close()


@pytest.fixture(scope="module")
def filled(database: str, stores: list[str]) -> list[str]:
    """The stores with read models of a message each, and one sent later."""

    async def send(url: str, *ids: str) -> None:
        async with open_mailbox(url, MAILBOX) as mailbox:
            for id_ in ids:
                await mailbox.send_message(message(topic="orders", message_id=id_))

    for schema, url in zip(SCHEMAS, stores, strict=True):
        asyncio.run(send(url, f"early-{schema}"))
        rebuild_projections(url, runner=LocalTaskRunner())
        asyncio.run(send(url, f"late-{schema}"))
    return stores


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command on a store, and return what it prints."""

    def run(command: str, url: str, code: int = 0) -> str:
        schema = url.partition("=")[2]
        monkeypatch.chdir(tmp_path)
        for name, value in {
            "POSTROOM_STORE": url,
            "POSTROOM_MAILBOX": MAILBOX,
            "POSTROOM_MESSAGING__DATABASE": url,
            "POSTROOM_MESSAGING__CONTEXT": "sea",
        }.items():
            monkeypatch.setenv(name, value)
        ended = invoke(command.format(folder=tmp_path, schema=schema).split())
        printed = capsys.readouterr()
        assert ended == code, (command, printed)
        return printed.out + printed.err

    return run


@pytest.mark.extended
def test_commands_read_the_store_that_is_named(filled: list[str], run: Run, tmp_path: Path) -> None:
    for url in filled:
        run("views follow --once", url)
    for schema, other, url in zip(SCHEMAS, reversed(SCHEMAS), filled, strict=True):
        printed = "".join(run(command, url) for command in READS)
        printed += "".join(file.read_text() for file in (tmp_path / schema).rglob("*") if file.is_file())
        assert f"late-{schema}" in printed
        assert f"-{other}" not in printed
        assert f"?schema={other}" not in printed
        assert verify_projections(url, runner=LocalTaskRunner()).is_intact


async def test_a_backup_holds_one_store_and_is_restored_into_any_schema(
    filled: list[str], create_database: CreateDatabase, tmp_path: Path
) -> None:
    back_up(filled[0], tmp_path / "backup")
    other = in_schema(create_database(None), "restored")
    for set_ in ("store", "messaging"):
        migrate(other, set_)
    await restore(tmp_path / "backup", other)
    logs = [open_store(url).existing_log(MAILBOX) for url in (filled[0], other)]
    with closing(logs[0]), closing(logs[1]):
        before = list(logs[0].read())
        assert list(logs[1].read())[: len(before)] == before
    assert open_store(other).mailboxes() == open_store(filled[0]).mailboxes()


@pytest.fixture
def role(database: str) -> Iterator[str]:
    """A role without rights, whose name must not be taken for the qualifier of one."""
    name = f"a postroom.{token_hex(4)}"
    with closing(psycopg.connect(database, autocommit=True)) as connection:
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD 'hush'").format(sql.Identifier(name)))
        yield name
        connection.execute(sql.SQL("DROP OWNED BY {0} CASCADE").format(sql.Identifier(name)))
        connection.execute(sql.SQL("DROP ROLE {0}").format(sql.Identifier(name)))


def as_role(role: str, url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=f"{quote(role)}:hush@{parts.hostname}:{parts.port}").geturl()


def test_a_role_that_was_granted_one_store_can_use_no_other(stores: list[str], role: str) -> None:
    theirs = [as_role(role, url) for url in stores]
    migrate(stores[1], "store", grant_to=[role])
    with closing(PostgresEventLog(theirs[1], "granted")) as log:
        assert len(append(log, sents(2))) == 2
    with pytest.raises(UnusableServer, match="permission denied for schema order"):
        PostgresEventLog(theirs[0], "granted")


def test_a_role_that_was_given_a_schema_migrates_it(database: str, role: str) -> None:
    with closing(psycopg.connect(database, autocommit=True)) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA given AUTHORIZATION {}").format(sql.Identifier(role)))
    theirs = as_role(role, in_schema(database, "given"))
    for set_ in SETS:
        assert migrate(theirs, set_)
    with closing(PostgresEventLog(theirs, "given")) as log:
        assert len(append(log, sents(2))) == 2


@pytest.mark.parametrize("set_", ["store", "leases", "keys"])
def test_a_schema_with_tables_of_others_is_refused_as_roles_would_be_granted_them(
    database: str, role: str, set_: str
) -> None:
    name = f"shared_{set_}"
    url = in_schema(database, name)
    migrated = sql.SQL("SELECT FROM {}.postroom_migrations WHERE set = {}").format(
        sql.Identifier(name), sql.Literal(set_)
    )
    with closing(psycopg.connect(database, autocommit=True)) as connection:
        migrate(url, "messaging")
        connection.execute(f"CREATE TABLE {name}.salaries ()".encode())
        for options in ({}, {"dry_run": True}, {"grant_to": [role]}):
            with pytest.raises(InvalidRequest, match=rf"schema {name} of .* not Postroom's \(salaries\)"):
                migrate(url, set_, **options)
        assert connection.execute(migrated).fetchall() == []
        connection.execute(f"DROP TABLE {name}.salaries".encode())
        assert migrate(url, set_, grant_to=[role])
        assert migrate(url, "store" if set_ != "store" else "keys")  # whose tables are Postroom's, too


async def test_dropping_a_schema_leaves_the_other_store(create_database: CreateDatabase) -> None:
    url = create_database(None)
    for schema in SCHEMAS:
        for set_ in SETS:
            migrate(in_schema(url, schema), set_)
        async with open_mailbox(in_schema(url, schema), MAILBOX) as mailbox:
            await mailbox.send_message(message(topic="orders", message_id="order-1"))
        rebuild_projections(in_schema(url, schema), runner=LocalTaskRunner())
    left = in_schema(url, "billing")
    indexes = "SELECT indexdef FROM pg_indexes WHERE schemaname = 'billing' ORDER BY 1"
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        before = connection.execute(indexes).fetchall()
        if connection.execute("SELECT FROM pg_extension WHERE extname = 'pg_trgm'").rowcount:
            connection.execute("ALTER EXTENSION pg_trgm SET SCHEMA public")
        connection.execute('DROP SCHEMA "order" CASCADE')
        after = connection.execute(indexes).fetchall()
    assert len(before) == len(after)
    async with open_mailbox(left, MAILBOX) as mailbox:
        await mailbox.send_message(message(topic="orders", message_id="order-2"))
    assert verify_projections(left, runner=LocalTaskRunner()).is_intact


def test_a_schema_that_does_not_exist_names_the_command_that_makes_it(database: str, run: Run) -> None:
    url = in_schema(database, "missing")
    advice = r"/postroom_test_\w+\?schema=missing .*run `postroom migrate --store URL`"
    for use in (
        lambda: open_store(url).mailboxes(),
        lambda: open_store(url).event_log(MAILBOX),
        lambda: rebuild_projections(url, runner=LocalTaskRunner()),
        lambda: open_store(url).read_models().is_following(),
    ):
        with pytest.raises(UnusableServer, match=advice):
            use()
    with psycopg.connect(database) as connection, pytest.raises(UnusableServer, match="migrate --messaging"):
        MailboxOutbox(schema="missing").record(connection, message())
    assert "migrate --store" in run("doctor", url, 1)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Orders",
        "1st",
        "a-b",
        "a.b",
        'a"b',
        "a b",
        "$user",
        "pg_orders",
        "information_schema",
        "ä",
        "a" * 64,
    ],
)
def test_a_name_that_no_schema_may_have_is_refused(name: str) -> None:
    for use in (
        lambda: open_store(in_schema("postgresql://host/db", name)),
        lambda: migrate(f"postgresql://host/db?sslmode=disable&schema={name}", "store"),
        lambda: MailboxOutbox(schema=name),
    ):
        with pytest.raises(InvalidRequest, match="can't be the schema of a store; name it by 1 to 63"):
            use()
    with pytest.raises(InvalidRequest, match="names more than one schema"):
        open_store("postgresql://host/db?schema=a&schema=b")


def test_the_schema_is_one_of_the_parameters_of_a_url(database: str, stores: list[str]) -> None:
    path = database.rpartition("/")[2]
    port = database.rpartition(":")[2].partition("/")[0]
    for parameters in (
        "schema=billing",
        "schema=%62illing&application_name=x",
        "connect_timeout=9&schema=billing",
        f"port={port}&schema=billing&user=postgres",
        "schema=billing&options=-c%20search_path%3Dpublic",
    ):
        with closing(
            connect(f"postgresql://postgres@127.0.0.1:{port}/{path}?{parameters}", "test")
        ) as connection:
            assert connection.execute("SELECT current_schema()").fetchall() == [("billing",)]
    identities = {open_store(url).identity for url in (database, *stores)}
    assert len(identities) == 3
    assert [open_store(url).where for url in stores] == stores


def test_statements_of_any_kind_are_those_of_the_schema(stores: list[str]) -> None:
    async def read(url: str) -> Any:
        from postroom.adapters.postgres.database import connect_async

        async with await connect_async(url, "test") as connection:
            return await (await connection.execute("SELECT 'postroom.log'::regclass::oid")).fetchall()

    oids = []
    for url in stores:
        with closing(connect(url, "test")) as connection, connection.transaction():
            query = "SELECT 'postroom.log'::regclass::oid"
            found = [connection.execute(each).fetchall() for each in (query, query.encode(), sql.SQL(query))]
            with connection.cursor() as cursor:
                found.append(list(cursor.stream(query)))
                cursor.executemany(query, [()], returning=True)
                found.append(cursor.fetchall())
                with cursor.copy(f"COPY ({query}) TO STDOUT") as copy:
                    copy.set_types(["oid"])
                    found.append(list(copy.rows()))
            with connection.cursor(name="test") as server_cursor:
                found.append(server_cursor.execute(query).fetchall())
            assert connection.execute("SELECT %s", ["postroom.log"]).fetchall() == [("postroom.log",)]
        found.append(asyncio.run(read(url)))
        assert found == [found[0]] * len(found)
        oids.append(found[0])
    assert oids[0] != oids[1]
