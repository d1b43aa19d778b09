"""PostgreSQL behind PgBouncer: reads leave nothing in its sessions, and what needs a session is refused."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from postroom import MailboxOutbox, NewEvent, Outbox, ReceivedMessage, Sent, Worker, connect
from postroom.adapters.cli.main import invoke
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.outbox import MailboxTarget, open_relay
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections, verify_projections
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.capture.source import PostgresCaptureSource
from postroom.adapters.postgres.database import connect as connect_database
from postroom.adapters.postgres.database import is_pooled
from postroom.adapters.postgres.messaging.inbox import PostgresInbox
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.postgres.read_model_writer import PostgresReadModelUpdater
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.policy import TopicPolicy
from tests.support.fixtures import CreateDatabase
from tests.support.servers.pgbouncer import PgBouncer
from tests.support.stores import message

MAILBOX = "main@local"
WRITES = 20
IN_SESSION = """
    SELECT 'setting ' || name || ' = ' || setting FROM pg_settings
    WHERE source = 'session'
        AND name NOT IN ('application_name', 'client_encoding', 'DateStyle', 'TimeZone',
            'standard_conforming_strings')
    UNION ALL SELECT 'lock' FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()
    UNION ALL SELECT 'statement ' || name FROM pg_prepared_statements
    UNION ALL SELECT 'cursor ' || name FROM pg_cursors WHERE name <> ''
    UNION ALL SELECT 'channel ' || name FROM pg_listening_channels() AS name
"""
"""What PostgreSQL keeps in a session; the settings named here PgBouncer sets for each client itself."""
READS = (
    "peek orders",
    "show {id}",
    "show {id} --why",
    "show {id} --payload",
    "backlog",
    "backlog --at 1h",
    "search order",
    "export json {folder}/export",
    "stats",
    "activity",
    "verify",
    "anchor {folder}/anchors",
    "audit",
    "audit verify",
    "dlq list",
    "dlq groups",
    "dlq show {dead}",
    "mailbox list",
    "topic list",
    "topic policy orders",
    "doctor",
    "config show",
    "views status",
    "views contexts",
    "views simulate --max-attempts 9",
    "views verify --engine local",
    "report latency --engine local",
    "report retries --engine local",
    "report traffic --engine local",
    "report sla --engine local",
    "report whatif --engine local --attempts 1,9",
    "log show",
    "log tail",
    "backup create {folder}/backup",
    "migrate --dry-run",
    "outbox backlog",
    "outbox list",
    "outbox retry --all",
    "outbox cleanup",
    "inbox backlog",
    "inbox cleanup",
)
"""Commands that need no owner, and write no log."""


@pytest.fixture(scope="module")
def pgbouncer(postgres_admin_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PgBouncer]:
    """A pooler with one server connection for each database, which all clients share."""
    try:
        pooler = PgBouncer(tmp_path_factory.mktemp("pgbouncer"), postgres_admin_url, default_pool_size="1")
    except Unavailable as error:
        pytest.skip(str(error))
    with pooler:
        yield pooler


class Filled(NamedTuple):
    """A store with messages, a dead letter and read models, and an outbox in the same database.

    Arguments:
        server: its URL at the server.
        pooled: its URL at the pooler.
        names: ids that commands name.
    """

    server: str
    pooled: str
    names: dict[str, str]


@pytest.fixture(scope="module")
def filled(
    pgbouncer: PgBouncer, create_shared_database: CreateDatabase, postgres_store_template: str
) -> Filled:
    url = create_shared_database(postgres_store_template)
    migrate(url, "messaging")
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE of_another_program (number INT)")
        event = NewEvent(aggregate_type="order", aggregate_id=1, event_type="placed", payload={})
        Outbox().record(connection, event)

    async def fill() -> dict[str, str]:
        async with open_mailbox(url, MAILBOX) as mailbox:
            await mailbox.set_topic_policy("orders", TopicPolicy(shards=1, max_attempts=1))
            sent = await mailbox.send_batch([message(topic="orders"), message(topic="orders")])
            (received,) = await mailbox.receive_messages("orders", max_messages=1)
            await mailbox.nack_messages([received.receipt], reason="card refused")
            dead, live = [each.message_id for each in sent if isinstance(each, Sent)]
            return {"id": live, "dead": dead}

    names = asyncio.run(fill())
    rebuild_projections(url, runner=LocalTaskRunner())
    return Filled(url, pgbouncer.url(url), names)


def run(command: str, filled: Filled, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a command of the command line on the store behind the pooler, and return its exit code."""
    words = [word.format(folder=folder, **filled.names) for word in command.split()]
    monkeypatch.chdir(folder)
    for name, value in {
        "POSTROOM_STORE": filled.pooled,
        "POSTROOM_MAILBOX": MAILBOX,
        "POSTROOM_MESSAGING__DATABASE": filled.pooled,
        "POSTROOM_MESSAGING__CONTEXT": "sea",
    }.items():
        monkeypatch.setenv(name, value)
    return invoke(words)


def failed_writes(pooled: str) -> list[str]:
    """Write as an unrelated program does through the same server connection, and return the errors."""
    errors = []
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as connection:
        for number in range(WRITES):
            try:
                connection.execute("INSERT INTO of_another_program VALUES (%s)", [number])
            except psycopg.Error as error:
                errors.append(str(error))
    return errors


def left_in_session(pooled: str) -> list[str]:
    with psycopg.connect(pooled, autocommit=True, prepare_threshold=None) as connection:
        return [row[0] for row in connection.execute(IN_SESSION)]


@pytest.mark.parametrize("command", READS)
def test_a_command_that_reads_leaves_nothing_in_the_connections_of_a_pooler(
    command: str,
    filled: Filled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(command, filled, tmp_path, monkeypatch)
    assert (code, capsys.readouterr().err.partition(":")[0] == "postroom") == (0, False)
    assert failed_writes(filled.pooled) == []
    assert left_in_session(filled.pooled) == []


def test_a_schema_is_not_left_in_the_connections_of_a_pooler(
    filled: Filled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = filled._replace(server=f"{filled.server}?schema=other", pooled=f"{filled.pooled}?schema=other")
    for set_ in ("store", "messaging"):
        migrate(other.pooled, set_)
    with psycopg.connect(filled.pooled, prepare_threshold=None) as connection:
        MailboxOutbox(MAILBOX, schema="other").record(connection, message())
    for command, expected in (
        ("mailbox list", 3),  # it has none
        ("outbox backlog", 0),
        ("inbox backlog", 0),
        ("backup create {folder}/other", 0),
        ("doctor", 0),
    ):
        assert (run(command, other, tmp_path, monkeypatch), failed_writes(filled.pooled)) == (expected, [])
        assert left_in_session(filled.pooled) == []
    assert "?schema=other has no mailbox" in capsys.readouterr().err
    with closing(connect_database(other.pooled, "test")) as connection:
        assert connection.execute("SELECT count(*) FROM outbox_messages").fetchall() == [(1,)]
        with connection.transaction():
            assert connection.execute("SELECT current_schemas(false)").fetchall() == [(["other"],)]
    assert left_in_session(filled.pooled) == []


@pytest.mark.parametrize("ignored", ["", "options"])
def test_settings_hold_for_a_transaction_through_a_pooler_and_for_a_session_of_a_server(
    filled: Filled, postgres_admin_url: str, tmp_path: Path, ignored: str
) -> None:
    with PgBouncer(tmp_path, postgres_admin_url, ignore_startup_parameters=ignored) as pooler:
        for url in (filled.server, pooler.url(filled.server)):
            settings = {"jit": "off", "default_transaction_read_only": "on"}
            with closing(connect_database(f"{url}?options=", "test", settings)) as connection:
                query = "SELECT current_setting('jit'), current_setting('transaction_read_only')"
                assert connection.execute(query).fetchall() == [("off", "on")]
                with connection.transaction():
                    assert connection.execute(query).fetchall() == [("off", "on")]
                assert is_pooled(connection) is (url != filled.server)
        assert left_in_session(pooler.url(filled.server)) == []


def test_a_relaxed_server_commits_what_needs_it_before_it_answers(create_database: CreateDatabase) -> None:
    url = create_database(None)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET synchronous_commit = off")
    with closing(connect_database(url, "test", sync="local")) as connection:
        assert connection.execute("SHOW synchronous_commit").fetchall() == [("local",)]


@pytest.mark.parametrize("style", ["German", "SQL, DMY", "Postgres, YMD"])
async def test_no_setting_of_a_role_changes_the_text_of_values(
    style: str, create_database: CreateDatabase, postgres_store_template: str
) -> None:
    url = create_database(postgres_store_template)
    name = url.rpartition("/")[2]
    with psycopg.connect(url, autocommit=True) as connection:
        for setting, value in {
            "DateStyle": style,
            "IntervalStyle": "sql_standard",
            "TimeZone": "Asia/Kathmandu",
            "bytea_output": "escape",
            "extra_float_digits": "-15",
            "standard_conforming_strings": "off",
        }.items():
            connection.execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")
    migrate(url, "messaging")
    with psycopg.connect(url) as connection:
        connection.execute("SET DateStyle = ISO")
        event = NewEvent(aggregate_type="order", aggregate_id=1, event_type="placed", payload={})
        Outbox().record(connection, event)
    async with open_mailbox(url, MAILBOX) as mailbox:
        await mailbox.send_message(message())
    rebuild_projections(url, runner=LocalTaskRunner())
    assert verify_projections(url, runner=LocalTaskRunner()).is_intact


def test_events_and_messages_are_recorded_through_a_pooler(filled: Filled) -> None:
    with psycopg.connect(filled.pooled, prepare_threshold=None) as connection:
        for number in range(12):
            with connection.transaction():
                event = NewEvent(aggregate_type="o", aggregate_id=number, event_type="placed", payload={})
                Outbox(notify=True).record(connection, event)
                MailboxOutbox(MAILBOX, notify=True).record(connection, message(topic="recorded"))
    assert failed_writes(filled.pooled) == []
    assert left_in_session(filled.pooled) == []

    async def receive() -> list[ReceivedMessage]:
        async with open_mailbox(filled.server, MAILBOX) as mailbox, asyncio.timeout(60):
            received: list[ReceivedMessage] = []
            while len(received) < 12:
                received += await mailbox.receive_messages("recorded", max_messages=12, wait_ms=1_000)
            await mailbox.ack_messages([each.receipt for each in received])
            return received

    assert len(asyncio.run(receive())) == 12


async def _own(url: str) -> None:
    async with open_mailbox(url, MAILBOX):
        pass


async def _connect(url: str) -> None:
    async with connect(url, MAILBOX) as mailbox:
        await mailbox.send_message(message())


async def _work(url: str) -> None:
    async with connect(url, MAILBOX) as mailbox:
        await Worker().run(mailbox)


async def _relay(url: str) -> None:
    async with open_relay(MessagingSettings(url, "sea"), MailboxTarget(address=url, mailbox=MAILBOX)):
        pass


async def _follow(url: str) -> None:
    with PostgresReadModelUpdater(url).leader_lock():
        pass


async def _rebuild(url: str) -> None:
    rebuild_projections(url, runner=LocalTaskRunner())


async def _capture(url: str) -> None:
    source = PostgresCaptureSource(url, CaptureSettings("of_another_program"), 1_000)
    await source.read(1, 1)


async def _redrive_inbox(url: str) -> None:
    async with PostgresInbox(url).exclusive("redrive"):
        pass


@pytest.mark.parametrize("use", [_own, _connect, _work, _relay, _follow, _rebuild, _capture, _redrive_inbox])
async def test_what_needs_a_session_is_refused_at_a_pooler_by_its_name(
    use: Callable[[str], Awaitable[None]], filled: Filled
) -> None:
    with pytest.raises(InvalidRequest, match=r"//.* is a transaction pooler; name the server itself"):
        await use(filled.pooled)
    assert left_in_session(filled.pooled) == []


@pytest.mark.parametrize("command", ["send orders x", "recv orders", "token list", "redrive list"])
def test_a_command_that_calls_an_owner_names_the_pooler_and_leaves_nothing_in_it(
    command: str,
    filled: Filled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(command, filled, tmp_path, monkeypatch) != 0
    assert "is a transaction pooler; name the server itself" in capsys.readouterr().err
    assert failed_writes(filled.pooled) == left_in_session(filled.pooled) == []


async def test_the_doctor_names_a_pooler(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("doctor", filled, tmp_path, monkeypatch) == 0
    assert "a transaction pooler" in capsys.readouterr().out


def test_a_database_is_migrated_through_a_pooler(pgbouncer: PgBouncer, empty_database: str) -> None:
    pooled = pgbouncer.url(empty_database)
    for set_ in ("store", "messaging", "leases", "keys"):
        assert migrate(pooled, set_)
        assert migrate(pooled, set_) == []
    assert left_in_session(pooled) == []
