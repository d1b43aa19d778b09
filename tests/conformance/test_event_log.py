"""The event log conformance suite on every adapter, and what only SQLite can promise.

What only PostgreSQL can promise is in `tests/integration/postgres/`.
"""

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.postgres.event_log import PARTITION_POSITIONS, PostgresEventLog
from postroom.adapters.sqlite.database import Durability, connect, create
from postroom.adapters.sqlite.event_log import SqliteEventLog, mailbox_names
from postroom.application.ports.event_log import EventLog
from postroom.domain.errors import NotFound, Unavailable
from tests.conformance.event_log import EventLogConformance
from tests.conformance.log_store import ONE, TWO, Store
from tests.conformance.records import append, append_each, mixed, sent


class MemoryStore(Store):
    is_durable = False
    durability = "nothing"

    def __init__(self) -> None:
        self._logs: dict[str, MemoryEventLog] = {}

    def open(self, mailbox: str = ONE) -> EventLog:
        return self._logs.setdefault(mailbox, MemoryEventLog(mailbox))

    open_reader = open


class SqliteStore(Store):
    is_durable = True
    durability = "power-cut"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[EventLog] = []

    def open(self, mailbox: str = ONE) -> EventLog:
        self._opened.append(SqliteEventLog(self.path, mailbox))
        return self._opened[-1]

    def open_reader(self, mailbox: str = ONE) -> EventLog:
        self._opened.append(SqliteEventLog(self.path, mailbox, create_missing=False))
        return self._opened[-1]

    def close(self) -> None:
        for log in self._opened:
            log.close()


class PostgresStore(Store):
    is_durable = True
    durability = "power-cut"

    def __init__(self, url: str, partition_positions: int) -> None:
        self.url = url
        self._positions = partition_positions
        self._opened: list[EventLog] = []

    def open(self, mailbox: str = ONE) -> EventLog:
        self._opened.append(PostgresEventLog(self.url, mailbox, partition_positions=self._positions))
        return self._opened[-1]

    def open_reader(self, mailbox: str = ONE) -> EventLog:
        self._opened.append(PostgresEventLog(self.url, mailbox, create_missing=False))
        return self._opened[-1]

    def close(self) -> None:
        for log in self._opened:
            log.close()


@pytest.fixture
def sqlite_store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "store.db")
    yield store
    store.close()


class TestMemoryEventLog(EventLogConformance):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


class TestSqliteEventLog(EventLogConformance):
    @pytest.fixture
    def store(self, sqlite_store: SqliteStore) -> SqliteStore:
        return sqlite_store


class TestPostgresEventLog(EventLogConformance):
    @pytest.fixture
    def store(self, postgres_store: str) -> Iterator[PostgresStore]:
        store = PostgresStore(postgres_store, PARTITION_POSITIONS)
        yield store
        store.close()


class TestPostgresEventLogOverManyPartitions(EventLogConformance):
    @pytest.fixture
    def store(self, postgres_store: str) -> Iterator[PostgresStore]:
        store = PostgresStore(postgres_store, partition_positions=1_000)
        yield store
        store.close()


# -- SQLite only ---


def test_the_store_and_its_side_files_are_for_their_owner_only(sqlite_store: SqliteStore) -> None:
    append(sqlite_store.open(), [sent(1)])
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in sqlite_store.path.parent.iterdir()}
    assert files == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}


@pytest.mark.parametrize(
    ("durability", "synchronous", "said"), [("full", 2, "power-cut"), ("relaxed", 1, "process-crash")]
)
def test_commits_are_synced_unless_the_operator_relaxes_that(
    tmp_path: Path, durability: Durability, synchronous: int, said: str
) -> None:
    create(tmp_path / "store.db")
    connection = connect(tmp_path / "store.db", durability)
    assert connection.execute("PRAGMA synchronous").fetchone() == (synchronous,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
    log = SqliteEventLog(tmp_path / "store.db", ONE, durability=durability)
    assert log.durability == said
    log.close()


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    text = "Dear diary, this is not a database. " * 100
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(Unavailable, match=r"notes.txt can't be opened: file is not a database"):
        SqliteEventLog(path, ONE)
    with pytest.raises(Unavailable, match=r"notes.txt can't be read: file is not a database"):
        SqliteEventLog(path, ONE, create_missing=False)
    with pytest.raises(Unavailable, match="Name a file that Postroom created"):
        mailbox_names(path)
    assert path.read_text() == text
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_database_of_somebody_else_is_not_read_as_a_store(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE accounts (id INTEGER)")
    connection.close()
    with pytest.raises(Unavailable, match=r"other.db can't be read: no such table"):
        SqliteEventLog(path, ONE, create_missing=False)


@pytest.mark.parametrize("place", ["/proc/store.db", "missing/store.db", "file/store.db"])
def test_a_place_that_can_not_be_written_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / place  # an absolute place replaces the temporary folder
    with pytest.raises(Unavailable, match=f"The store {path} can't be opened: .* Check the path"):
        SqliteEventLog(path, ONE)


def test_opening_for_reading_creates_nothing(tmp_path: Path, sqlite_store: SqliteStore) -> None:
    missing = tmp_path / "missing.db"
    with pytest.raises(NotFound, match=r"There is no store at .*missing.db"):
        SqliteEventLog(missing, ONE, create_missing=False)
    assert mailbox_names(missing) == []
    assert list(tmp_path.iterdir()) == []

    missing.touch()  # as does the process that creates a store, before it makes the tables
    with pytest.raises(NotFound, match=f"has no mailbox {ONE}"):
        SqliteEventLog(missing, ONE, create_missing=False)
    assert mailbox_names(missing) == []

    sqlite_store.open(ONE)
    with pytest.raises(NotFound, match=f"has no mailbox {TWO}"):
        sqlite_store.open_reader(TWO)
    assert mailbox_names(sqlite_store.path) == [ONE]


def test_a_log_opened_for_reading_refuses_to_write(sqlite_store: SqliteStore) -> None:
    append(sqlite_store.open(), [sent(1)])
    reader = sqlite_store.open_reader()
    with pytest.raises(Unavailable, match="opened read-only"):
        append(reader, [sent(2)])
    with pytest.raises(Unavailable, match="opened read-only"):
        reader.truncate(1, 1)


def test_a_reader_that_stays_open_does_not_keep_the_write_ahead_log_growing(
    sqlite_store: SqliteStore,
) -> None:
    log = sqlite_store.open()
    append(log, mixed(100, ONE))
    records = sqlite_store.open_reader().read()
    next(records)  # a reader in the middle of the log
    for _ in range(3):
        append(
            log,
            [sent(10**7 + n) for n in range(log.position_before(10**15), log.position_before(10**15) + 500)],
        )
        other = connect(sqlite_store.path)
        busy, pages, moved = other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        other.close()
        assert busy == 0
        assert pages == moved


def test_mailbox_names_are_sorted(sqlite_store: SqliteStore) -> None:
    sqlite_store.open(TWO)
    sqlite_store.open(ONE)
    assert mailbox_names(sqlite_store.path) == [ONE, TWO]


def test_a_sqlite_file_that_can_shrink_gives_back_what_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    log = SqliteEventLog(path, ONE, can_shrink=True)
    append_each(log, [sent(n, envelope=bytes(10_000)) for n in range(1, 401)])
    full = log.size()
    log.truncate(through=300, limit=1_000)
    assert log.size().disk == full.disk
    given = log.reclaim_space(1 << 20)
    assert 0 < given < 1_100_000
    assert log.size().disk == full.disk - given
    while gone := log.reclaim_space(1 << 20):
        given += gone
    assert log.size().disk == full.disk - given < full.disk / 2
    left = list(log.read())
    log.close()
    assert path.stat().st_size == full.disk - given
    again = SqliteEventLog(path, ONE)
    assert list(again.read()) == left
    again.close()


def test_a_sqlite_file_that_cannot_shrink_uses_again_what_was_removed(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    SqliteEventLog(path, ONE).close()
    log = SqliteEventLog(path, ONE, can_shrink=True)  # too late for this file
    append_each(log, [sent(n, envelope=bytes(10_000)) for n in range(1, 401)])
    full = log.size()
    log.truncate(through=300, limit=1_000)
    assert log.reclaim_space(1 << 20) == 0
    append_each(log, [sent(n, envelope=bytes(10_000)) for n in range(401, 601)])
    assert log.size().disk == full.disk
    log.close()


def test_of_a_postgresql_log_whole_partitions_go_but_for_the_newest(postgres_store: str) -> None:
    log = PostgresEventLog(postgres_store, ONE, partition_positions=100)
    append_each(log, [sent(n) for n in range(1, 251)])
    size = log.size()
    assert log.position_at_size(1_000) == 100
    log.truncate(through=100, limit=1_000)
    assert log.size().disk < size.disk
    assert log.first_position() == 101
    log.truncate(through=200, limit=1_000)
    assert 201 < log.position_at_size(1_000) < 210
    log.close()
