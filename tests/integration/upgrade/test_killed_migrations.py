"""A migration that is killed at any line is completed by the next process, and has changed nothing before."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres import migrate
from postroom.application.mailbox.codec import FORMAT
from postroom.application.queries.verify import VerifyLog
from tests.integration.test_frozen_stores import MAILBOXES, frozen_file, load_database
from tests.support.fork_server import popen
from tests.support.waiting import SECONDS

PROGRAM = Path(__file__).with_name("killed_migration.py")
FORMER = f"format-{FORMAT - 1}"
EVERY = 23
"""Of so many lines one is tried by `make test`, and all by `make test-extended`."""


def killed_at(store: str, set_: str, line: int) -> bool:
    """Migrate in a process that is killed at a line, and return whether it was."""
    command: list[str | Path] = [sys.executable, PROGRAM, store, set_, str(line)]
    process = popen(command, env=os.environ, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode in (0, -signal.SIGKILL), errors.decode()
    return process.returncode != 0


def lines(start: int, step: int) -> Iterator[int]:
    """Yield numbers of lines, without end."""
    while True:
        yield start
        start += step


def verify(store: str) -> None:
    """Compute every hash of the logs again."""
    for mailbox in MAILBOXES:
        with closing(open_store(store).existing_log(mailbox)) as log:
            assert VerifyLog(log)().last > 0


@pytest.mark.parametrize("step", [EVERY, pytest.param(1, marks=pytest.mark.extended)])
def test_a_sqlite_store_whose_migration_was_killed_is_intact_and_migrated_by_the_next_process(
    step: int, tmp_path: Path
) -> None:
    tried = 0
    for line in lines(1, step):
        folder = tmp_path / str(line)
        folder.mkdir()
        store = frozen_file(FORMER, folder)
        was_killed = killed_at(str(store), "store", line)
        verify(str(store))
        assert not killed_at(str(store), "store", 10**9)
        verify(str(store))
        assert format_of(store) == FORMAT
        files = {each.name for each in folder.iterdir()}
        assert files - {"store.db-wal", "store.db-shm"} == {"store.db", f"store.db-{FORMER}"}
        if not was_killed:
            break
        tried += 1
    assert tried > 40 // step


@pytest.mark.parametrize("step", [EVERY, pytest.param(1, marks=pytest.mark.extended)])
@pytest.mark.parametrize("set_", ["store", "messaging"])
def test_a_database_whose_migration_was_killed_is_migrated_by_the_next_process(
    set_: str, step: int, create_database: Callable[[str | None], str]
) -> None:
    former = create_database(None)
    if set_ == "store":
        load_database(FORMER, former)
    else:
        migrate.migrate(former, set_, target=len(migrate.migrations(set_)) - 1)
    known = applied(former)
    tried = 0
    for line in lines(1, step):
        store = create_database(former)
        was_killed = killed_at(store, set_, line)
        assert applied(store)[: len(known)] == known
        assert not killed_at(store, set_, 10**9)
        migrate.check(store, set_)
        if set_ == "store":
            verify(store)
        if not was_killed:
            break
        tried += 1
    assert tried > 40 // step


def applied(url: str) -> list[tuple[object, ...]]:
    """Return the migrations that a database has."""
    schema = "postroom." if has_schema(url) else ""
    statement = (
        f"SELECT set, number, checksum FROM {schema}postroom_migrations WHERE set <> 'format' ORDER BY 1, 2"
    )
    with psycopg.connect(url) as connection:
        return connection.execute(statement.encode()).fetchall()


def has_schema(url: str) -> bool:
    """Return whether a database is a store."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT to_regclass('postroom.postroom_migrations')").fetchone()
    return row is not None and row[0] is not None


def format_of(store: Path) -> int:
    """Return the format of a file."""
    with closing(sqlite3.connect(store)) as connection:
        return int(connection.execute("SELECT format FROM store_format").fetchone()[0])
