"""Stores of former formats, which `frozen_stores/make_store.py` made with former versions (ADR 0101)."""

import lzma
import os
import sqlite3
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import msgspec
import psycopg
import pytest

from postroom import connect
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.maintenance import import_store
from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.sql import statements
from postroom.adapters.sql.statements import Migration
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.store_file import APPLICATION_ID
from postroom.application.mailbox.codec import FORMAT
from postroom.application.mailbox.event_columns import AnyRun
from postroom.application.queries.verify import VerifyLog
from postroom.domain.errors import (
    BrokenLog,
    InvalidRequest,
    PostroomError,
    Unavailable,
    UnusableServer,
    UnusableStore,
)
from tests.integration.frozen_stores.make_store import MESSAGES
from tests.support.fork_server import shared_server
from tests.support.waiting import SECONDS

FOLDER = Path(__file__).with_name("frozen_stores")
POSTROOM = Path(sys.executable).with_name("postroom")
MAILBOXES = ["archive@local", "main@local"]
FORMATS = [f"format-{number}" for number in range(1, FORMAT + 1)]
RECORDS = ["records-1", "records-2"]
MESSAGE_EVENTS = {
    *("MessageSent.1", "MessageReceived.1", "MessageVisibilityExtended.1", "MessageAcked.1"),
    *("MessageRequeued.1", "MessageDeadLettered.1", "MessageRedriven.1", "MessageExpired.1"),
}
MAILBOX_EVENTS = {
    *("MailboxCreated.1", "OwnershipTaken.1", "TopicPolicySet.1", "TopicPaused.1", "TopicResumed.1"),
    *("LogTruncated.1", "StoredEvent.1", "RedriveStarted.1", "RedriveAdvanced.1", "RedriveSkipped.1"),
    *("RedrivePaused.1", "RedriveResumed.1", "RedriveCancelled.1", "RedriveCompleted.1"),
    *("RedriveUndoStarted.1", "RedriveUndoAdvanced.1", "RedriveUndone.1"),
}
EVENTS = {
    1: MESSAGE_EVENTS | MAILBOX_EVENTS,
    2: MESSAGE_EVENTS | MAILBOX_EVENTS | {"MailboxCreated.2", "MailboxSettingsChanged.1"},
    3: MESSAGE_EVENTS
    | MAILBOX_EVENTS
    | {"MailboxCreated.2", "MailboxSettingsChanged.1", "MessageRescheduled.1"}
    | {f"Schedule{each}.1" for each in ("Set", "Paused", "Resumed", "Ran", "Deleted")}
    | {f"Subscription{each}.1" for each in ("Set", "Rewound", "Advanced", "Deleted")},
}
EVENTS[4] = EVENTS[3]
"""Types and versions of the events that a version may write, by its format."""


def frozen_file(name: str, folder: Path) -> Path:
    store = folder / "store.db"
    store.touch(0o600)
    store.write_bytes(lzma.decompress((FOLDER / f"{name}.db.xz").read_bytes()))
    return store


def load_database(name: str, url: str) -> str:
    """Load a frozen database into an empty one, of a server that may be older than that which was dumped."""
    dump = lzma.decompress((FOLDER / f"{name}.sql.xz").read_bytes()).decode()
    lines = [line for line in dump.splitlines() if not line.startswith(("\\", "SET ", "SELECT pg_catalog."))]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET check_function_bodies = off")
        connection.execute("\n".join(lines).encode())
    return url


def verify(store: str) -> None:
    for mailbox in MAILBOXES:
        with closing(open_store(store).existing_log(mailbox)) as log:
            assert VerifyLog(log)().last > 0


async def use(store: str) -> None:
    """Use all that a frozen store has: what was sent is received, what was known is known."""
    verify(store)
    async with open_mailbox(store, accept_clock=True) as mailbox:
        shards = (await mailbox.get_backlog()).shards
        dead = (await mailbox.list_dead_letters("orders")).items  # an hour later also the one in flight
        assert sum(each.ready + each.in_flight for each in shards) + len(dead) == 11
        assert await mailbox.redrive_dead_letters("orders") == len(dead)
        sent = [await mailbox.send_message(message) for message in MESSAGES]
        assert [(each.message_id, each.duplicate) for each in sent] == [
            (message.message_id, True) for message in MESSAGES
        ]
        received = await mailbox.receive_messages("orders", max_messages=20)
        known = {message.message_id: (message.payload, message.attrs["region"]) for message in MESSAGES}
        for each in received:
            assert known[each.message_id] == (each.payload, each.attrs["region"])
        assert len(received) in (9, 10)  # one was in flight
        assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * len(received)
        (invoice,) = await mailbox.receive_messages("invoices")
        assert (invoice.payload, invoice.correlation_id) == (b"\x00\xff", "trace")
    async with open_mailbox(store, "archive@local", mode="archive", accept_clock=True) as archive:
        assert (await archive.get_backlog()).archived == 3
    verify(store)


def code_of(*command: str) -> tuple[int, str]:
    result = shared_server().run([str(POSTROOM), *command], Path.cwd(), os.environ, b"", SECONDS)
    return result.returncode, result.stderr.decode()


# -- SQLite ---


@pytest.mark.parametrize("name", FORMATS)
async def test_a_frozen_file_is_read_as_it_is_and_migrated_after_a_copy(name: str, tmp_path: Path) -> None:
    store = frozen_file(name, tmp_path)
    before = store.read_bytes()
    verify(str(store))
    assert store.read_bytes() == before
    await use(str(store))
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("SELECT format FROM store_format").fetchall() == [(FORMAT,)]
        assert connection.execute("PRAGMA application_id").fetchone() == (APPLICATION_ID,)
    copies = [each for each in os.listdir(tmp_path) if each.startswith("store.db-format")]
    assert copies == ([] if name == f"format-{FORMAT}" else [f"store.db-{name}"])
    for copy in copies:
        assert os.stat(tmp_path / copy).st_mode & 0o777 == 0o600
        verify(str(tmp_path / copy))


@pytest.mark.parametrize("name", FORMATS[:-1])
def test_migrate_brings_a_file_to_the_format_of_this_version(name: str, tmp_path: Path) -> None:
    store = frozen_file(name, tmp_path)
    before = store.read_bytes()
    assert code_of("--store", str(store), "migrate", "--dry-run")[0] == 0
    assert store.read_bytes() == before
    assert code_of("--store", str(store), "migrate")[0] == 0
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("SELECT format FROM store_format").fetchall() == [(FORMAT,)]


def test_processes_that_migrate_a_file_at_once_migrate_it_once(tmp_path: Path) -> None:
    store = frozen_file("format-1", tmp_path)
    with ThreadPoolExecutor(6) as pool:
        logs = list(pool.map(lambda _: SqliteEventLog(store, "main@local"), range(6)))
    for log in logs:
        log.close()
    verify(str(store))


async def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = frozen_file("format-1", tmp_path)
    text = "CREATE TABLE later (value);\nDROP TABLE log;\nSELECT * FROM nowhere;\n"

    def broken(package: str, set_: str) -> tuple[Migration, ...]:
        return (Migration(set_, 2, "broken", "", text),)

    with monkeypatch.context() as patch:
        patch.setattr("postroom.adapters.sqlite.store_file.read_migrations", broken)
        with pytest.raises(PostroomError, match="no such table: nowhere"):
            SqliteEventLog(store, "main@local")
    with closing(sqlite3.connect(store)) as connection:
        assert connection.execute("SELECT name FROM sqlite_schema WHERE name = 'later'").fetchall() == []
    await use(str(store))


async def test_a_file_of_a_newer_format_is_refused_by_name_and_version(tmp_path: Path) -> None:
    store = frozen_file(f"format-{FORMAT}", tmp_path)
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("UPDATE store_format SET format = 9, version = '3.1.0'")
        connection.commit()
    before = store.read_bytes()
    expected = r"store.db has the format 9 of Postroom 3.1.0, and this version, .* install Postroom 3.1.0"
    with pytest.raises(UnusableStore, match=expected):
        async with connect(str(store)):
            pytest.fail("connected")
    with pytest.raises(UnusableStore, match=expected):
        open_store(str(store)).mailboxes()
    with pytest.raises(UnusableStore, match=expected):
        open_store(str(store)).log_reader().heads()
    for command in ("send orders 1", "verify", "backlog", "migrate"):
        code, errors = code_of("--store", str(store), *command.split())
        assert (code, "3.1.0" in errors) == (2, True), (command, errors)
    assert store.read_bytes() == before


@pytest.mark.parametrize("name", RECORDS)
async def test_a_file_of_records_is_refused_untouched_and_imported(name: str, tmp_path: Path) -> None:
    store, new = frozen_file(name, tmp_path), tmp_path / "new.db"
    before = store.read_bytes()
    with pytest.raises(UnusableStore, match=r"run `postroom import-store .*store\.db NEW`"):
        async with connect(str(store)):
            pytest.fail("connected")
    code, errors = code_of("import-store", str(store), str(new))
    assert code == 0, errors
    assert store.read_bytes() == before
    assert new.stat().st_mode & 0o777 == 0o600
    await use(str(new))
    with pytest.raises(InvalidRequest, match="is not empty"):
        import_store(str(store), str(new))
    with pytest.raises(InvalidRequest, match="does not have the format of before"):
        import_store(str(new), str(tmp_path / "third.db"))
    (tmp_path / "notes.txt").write_text("no store\n" * 100)
    with pytest.raises(Unavailable, match=r"notes\.txt can't be read: file is not a database"):
        import_store(str(tmp_path / "notes.txt"), str(tmp_path / "third.db"))


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE log SET topic = 'another' WHERE place & 0xFFFFFFFFFF = 5",
        "UPDATE log SET envelope = x'00' WHERE place & 0xFFFFFFFFFF = 5",
        "DELETE FROM log WHERE place & 0xFFFFFFFFFF = 5",
        "DELETE FROM log WHERE place & 0xFFFFFFFFFF < 5",
        "UPDATE log SET state = x'00' WHERE place & 0xFFFFFFFFFF = 5",
    ],
)
def test_records_that_were_altered_are_not_imported(change: str, tmp_path: Path) -> None:
    store, new = frozen_file("records-2", tmp_path), tmp_path / "new.db"
    with closing(sqlite3.connect(store)) as connection:
        connection.execute(change)
        connection.commit()
    with pytest.raises(BrokenLog):
        import_store(str(store), str(new))
    assert not any("new.db" in each.name for each in tmp_path.iterdir())


# -- PostgreSQL ---


@pytest.mark.parametrize("name", FORMATS)
async def test_a_frozen_database_is_used_after_it_was_migrated(name: str, empty_database: str) -> None:
    store = load_database(name, empty_database)
    if name != f"format-{FORMAT}":
        with pytest.raises(UnusableServer, match="run `postroom migrate --store URL`"):
            async with connect(store):
                pytest.fail("connected")
    migrate(store, "store")
    await use(store)


def test_a_database_of_a_newer_format_is_refused_by_name_and_version(postgres_store: str) -> None:
    with psycopg.connect(postgres_store, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO postroom.postroom_migrations (set, number, name, checksum) "
            "VALUES ('format', 9, '3.1.0', '')"
        )
    uses: list[Callable[[], object]] = [
        lambda: open_store(postgres_store).mailboxes(),
        lambda: open_store(postgres_store).event_log("main@local"),
        lambda: migrate(postgres_store, "store"),
    ]
    for each in uses:
        with pytest.raises(UnusableStore, match=r"has the format 9 of Postroom 3\.1\.0, and this version"):
            each()
    code, errors = code_of("--store", postgres_store, "backlog")
    assert (code, "3.1.0" in errors) == (2, True), errors


@pytest.mark.parametrize("name", RECORDS)
async def test_a_database_of_records_is_refused_and_imported(
    name: str, create_database: Callable[[str | None], str], postgres_store: str, tmp_path: Path
) -> None:
    old = load_database(name, create_database(None))
    for use_it in (lambda: migrate(old, "store"), lambda: open_store(old).mailboxes()):
        with pytest.raises(UnusableStore, match="run `postroom import-store"):
            use_it()
    assert import_store(old, postgres_store) == MAILBOXES
    await use(postgres_store)
    assert import_store(old, str(tmp_path / "new.db")) == MAILBOXES
    await use(str(tmp_path / "new.db"))


# -- the format grows with what is written ---


def test_an_event_that_former_versions_can_not_read_grows_the_format() -> None:
    tags = {run.__struct_config__.tag for run in AnyRun.__args__}
    assert tags <= EVENTS[FORMAT], "Grow FORMAT, and freeze a store (frozen_stores/make_store.py)."


def test_a_field_of_an_event_that_former_versions_do_not_know_grows_the_format() -> None:
    fields = {
        name: " ".join(sorted(each["properties"])) if "properties" in each else str(len(each["prefixItems"]))
        for name, each in msgspec.json.schema(AnyRun)["$defs"].items()
    }
    lines = (FOLDER / f"format-{FORMAT}.txt").read_text("utf-8").splitlines()
    frozen = dict(line.split(": ") for line in lines)
    assert fields == frozen, "Grow FORMAT, or correct the file if no release has this format yet."


def test_each_format_has_frozen_stores_and_a_migration() -> None:
    frozen = {each.name for each in FOLDER.iterdir() if each.suffix == ".xz"}
    assert frozen == {f"{name}.{kind}.xz" for name in (*FORMATS, *RECORDS) for kind in ("db", "sql")}
    steps = statements.read_migrations("postroom.adapters.sqlite", "store")
    assert [step.number for step in steps] == list(range(2, FORMAT + 1))
    assert sorted(EVENTS) == list(range(1, FORMAT + 1))


def test_the_tables_of_a_new_file_are_those_of_a_migrated_one(tmp_path: Path) -> None:
    store = frozen_file("format-1", tmp_path)
    for path in (store, tmp_path / "new.db"):
        SqliteEventLog(path, "main@local").close()

    def columns(path: Path) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(path)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_schema ORDER BY name").fetchall()
            return [
                (table, *column)
                for (table,) in tables
                for column in connection.execute(f"PRAGMA table_info({table})")
            ]

    assert columns(store) == columns(tmp_path / "new.db")
