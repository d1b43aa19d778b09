"""Reading a log is in nobody's way: senders never wait for it, and between statements it holds nothing.

Nothing here is timed. Senders are made to fail where they would have to wait; what a reader holds is asked of
the store, by another connection, while the reader stands still.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from pathlib import Path
from random import Random
from typing import NamedTuple

import psycopg
import pyarrow as pa
import pytest

from postroom.adapters.compose.store import open_store
from postroom.adapters.postgres import log_reader as postgres
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.adapters.sql.log_reader import Driver
from postroom.adapters.sqlite import log_reader as sqlite
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.ports.event_log import EventLog
from postroom.projections import commit_columns
from postroom.projections.log_reader import Range
from tests.conformance.records import append, sent
from tests.support.waiting import wait_until

pytestmark = pytest.mark.extended

MAILBOX = "acme@one"
COUNT, PER_STATEMENT, PER_BATCH = 60, 30, 6
ROOT = Path(__file__).parents[2]
ENVELOPE = Random(1).randbytes(1_000_000)
"""Large and incompressible: a statement's rows don't fit into what ADBC and the network buffer."""


@pytest.fixture(autouse=True)
def small_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read takes several statements, and each of them several batches."""
    monkeypatch.setattr(commit_columns, "POSITIONS_PER_READ", PER_STATEMENT)
    monkeypatch.setattr(commit_columns, "ROWS_PER_BATCH", PER_BATCH)
    monkeypatch.setattr(sqlite, "COMMITS_PER_BATCH", 2)
    monkeypatch.setattr(postgres, "COMMITS_PER_CHUNK", 2)
    monkeypatch.setattr(postgres, "BYTES_PER_BATCH", 2 * len(ENVELOPE))


@pytest.fixture(params=["adbc", "python"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return request.param  # type: ignore[no-any-return]


def fill(log: EventLog) -> None:
    for number in range(1, COUNT + 1):
        append(log, [sent(number, envelope=ENVELOPE)])


def batches(store: str, driver: Driver) -> Iterator[pa.RecordBatch]:
    log = open_store(store).log_reader(driver)
    (extent,) = log.extents()
    return log.read([Range(extent, 1, COUNT)], ["position", "envelope"])


def ends_a_statement(batch: pa.RecordBatch) -> bool:
    return bool(batch["position"][-1].as_py() % PER_STATEMENT == 0)


# -- SQLite ---

SEND = """
import sqlite3, sys
from postroom.adapters.sqlite import database
from postroom.adapters.sqlite import log_reader as sqlite
from postroom.adapters.sqlite.event_log import SqliteEventLog
from tests.conformance.records import append, sent

database.BUSY_TIMEOUT_MS = 0  # who would have to wait fails
log = SqliteEventLog(sys.argv[1], sys.argv[2], durability="relaxed")
append(log, [sent(10**6 + int(sys.argv[3]))])
log.close()
connection = sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None)
print(connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
"""


def send(store: Path, number: int) -> bool:
    """Send, as another process; tell whether a reader keeps the write-ahead log from being emptied."""
    script = [sys.executable, "-c", SEND, str(store), MAILBOX, str(number)]
    sent = subprocess.run(script, capture_output=True, check=False, cwd=ROOT)
    assert sent.returncode == 0, sent.stderr.decode()
    return bool(int(sent.stdout))


def test_senders_commit_while_a_reader_of_sqlite_stands_still_which_holds_nothing_between_statements(
    tmp_path: Path, driver: Driver
) -> None:
    store = tmp_path / "store.db"
    with closing(SqliteEventLog(store, MAILBOX, durability="relaxed")) as log:
        fill(log)
    within = between = committed = 0
    for batch in batches(str(store), driver):
        committed += 1
        is_held = send(store, committed)
        if ends_a_statement(batch):
            between += 1
            assert not is_held, f"after position {batch['position'][-1]}"
        else:
            within += is_held
    assert between == COUNT // PER_STATEMENT
    assert within  # a statement that is under way is seen
    with closing(SqliteEventLog(store, MAILBOX, create_missing=False)) as log:
        head = log.head()
        assert head is not None
        assert head.position == COUNT + committed


# -- PostgreSQL ---


SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name = 'postroom, reading the log'"
)


class Session(NamedTuple):
    """What the server says of the reader's connection."""

    state: str
    holds_snapshot: bool
    transaction_began: datetime | None


@pytest.fixture
def session(postgres_store: str) -> Iterator[Callable[[], Session]]:
    """Ask the server about the one connection that reads the log."""
    with closing(psycopg.connect(postgres_store, autocommit=True)) as connection:

        def ask() -> Session:
            (row,) = connection.execute(
                "SELECT state, coalesce(backend_xmin, backend_xid) IS NOT NULL, xact_start"
                " FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'postroom, reading the log'"
            ).fetchall()
            return Session(*row)

        yield ask


def test_senders_commit_while_a_reader_of_postgresql_stands_still(
    postgres_store: str, driver: Driver
) -> None:
    with closing(PostgresEventLog(postgres_store, MAILBOX, partition_positions=50)) as log:
        fill(log)
    # Who would have to wait for a lock fails; partitions are made and left, too.
    impatient = f"{postgres_store}?options=-c%20lock_timeout%3D1ms"
    with closing(PostgresEventLog(impatient, MAILBOX)) as log:
        read = committed = 0
        for batch in batches(postgres_store, driver):
            read += batch.num_rows
            append(log, [sent(10**6 + 100 * committed + number) for number in range(30)])
            committed += 1
        assert read == COUNT
        head = log.head()
        assert head is not None
        assert head.position == COUNT + 30 * committed


def test_a_connected_reader_of_postgresql_keeps_a_connection_that_holds_nothing_and_replaces_a_lost_one(
    postgres_store: str, driver: Driver, session: Callable[[], Session]
) -> None:
    with closing(PostgresEventLog(postgres_store, MAILBOX)) as log:
        append(log, [sent(number) for number in range(1, 4)])
    with (
        open_store(postgres_store).log_reader(driver).connected() as reader,
        closing(psycopg.connect(postgres_store, autocommit=True)) as server,
    ):
        (extent,) = reader.extents()

        def read() -> int:
            batches = list(reader.read([Range(extent, 1, 3)], ["position"]))
            assert sum(batch.num_rows for batch in batches) == 3
            # The session of an earlier connection may still be ending.
            wait_until(lambda: len(server.execute(SESSIONS).fetchall()) == 1)
            (pid,) = server.execute(SESSIONS).fetchone() or (0,)
            return int(pid)

        first = read()
        assert session() == Session("idle", False, None)
        assert read() == first
        server.execute("SELECT pg_terminate_backend(%s, 10_000)", [first])
        assert read() != first
        assert session() == Session("idle", False, None)
        next(iter(reader.read([Range(extent, 1, 3)], ["position"])))  # a read that does not end
        read()
    with closing(psycopg.connect(postgres_store, autocommit=True)) as server:
        wait_until(lambda: server.execute(SESSIONS).fetchone() is None)


def test_a_reader_of_postgresql_holds_no_snapshot_between_two_statements(
    postgres_store: str, driver: Driver, session: Callable[[], Session]
) -> None:
    with closing(PostgresEventLog(postgres_store, MAILBOX)) as log:
        fill(log)
    seen = [(ends_a_statement(batch), session()) for batch in batches(postgres_store, driver)]
    between = [each for is_between, each in seen if is_between]
    within = [each for is_between, each in seen if not is_between]
    assert between == [Session("idle", False, None)] * (COUNT // PER_STATEMENT)
    # Each statement was seen under way, in a transaction of its own.
    assert len({each.transaction_began for each in within if each.holds_snapshot}) == COUNT // PER_STATEMENT
