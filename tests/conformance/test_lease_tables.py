"""RFC-049's tables `mailbox_leases` and `mailbox_routes`, folded from the log of leases."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.postgres.lease_store import PostgresLeaseTables
from postroom.adapters.sqlite.lease_store import SqliteLeaseTables
from postroom.application.leases.leases import LeaseProjection, Leases
from postroom.application.ports.lease_store import LeaseTables
from postroom.domain.lease.lease import AcquireLease, ExpireLease, ReleaseLease, RenewLease
from postroom.domain.lease.partitions import partition_of
from postroom.domain.lease.routing import RegisterProxy
from tests.support.clocks import ManualClock

MAILBOX = "$admin@proxy-01"
PARTITION = partition_of(MAILBOX)
ACQUIRE = AcquireLease(
    MAILBOX,
    "runner-01",
    "proxy-01",
    "proxy-01.prism.local:8982",
    "018f0000-0000-7000-8000-000000000001",
    0,
    300_000,
    60_000,
)
START = ManualClock().wall_us // 1_000
LEASES = "SELECT * FROM mailbox_leases ORDER BY mailbox_id"
ROUTES = "SELECT * FROM mailbox_routes ORDER BY mailbox_id"
RFC_049 = """
CREATE TABLE IF NOT EXISTS mailbox_leases (
mailbox_id TEXT PRIMARY KEY,
runner_id TEXT NOT NULL,
proxy_id TEXT NOT NULL,
partition INTEGER NOT NULL,
lease_expires INTEGER NOT NULL,
last_heartbeat INTEGER NOT NULL,
address TEXT NOT NULL,
status TEXT NOT NULL,
created_at INTEGER NOT NULL,
updated_at INTEGER NOT NULL
);

CREATE INDEX idx_lease_expires ON mailbox_leases(lease_expires);
CREATE INDEX idx_status ON mailbox_leases(status);
CREATE INDEX idx_proxy_partition ON mailbox_leases(proxy_id, partition);

CREATE TABLE IF NOT EXISTS mailbox_routes (
mailbox_id TEXT PRIMARY KEY,
proxy_id TEXT NOT NULL,
runner_id TEXT NOT NULL,
address TEXT NOT NULL,
partition INTEGER NOT NULL,
created_at INTEGER NOT NULL,
updated_at INTEGER NOT NULL,

FOREIGN KEY (mailbox_id) REFERENCES mailbox_leases(mailbox_id)
);

CREATE INDEX idx_proxy_id ON mailbox_routes(proxy_id);
CREATE INDEX idx_partition ON mailbox_routes(partition);
"""
Query = Callable[[str], list[tuple[Any, ...]]]


class Opened:
    """Tables of one kind, and SQL over them as a user runs it."""

    def __init__(self, tables: LeaseTables, open_again: Callable[[], LeaseTables], query: Query) -> None:
        self.tables = tables
        self.open_again = open_again
        self.query = query


@pytest.fixture(params=["sqlite", "postgres"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    if request.param == "sqlite":
        path = tmp_path / "leases.db"
        with closing(SqliteLeaseTables(path)) as file, closing(sqlite3.connect(path)) as sqlite:
            yield Opened(file, lambda: SqliteLeaseTables(path), lambda sql: sqlite.execute(sql).fetchall())
        return
    url = request.getfixturevalue("lease_database")
    with (
        closing(PostgresLeaseTables(url)) as tables,
        psycopg.connect(url, autocommit=True, options="-c search_path=postroom") as connection,
    ):
        yield Opened(
            tables,
            lambda: PostgresLeaseTables(url),
            lambda sql: connection.execute(sql.encode()).fetchall(),
        )


class World:
    """A log of leases, and a projection to the tables."""

    def __init__(self, tables: LeaseTables) -> None:
        self.clock = ManualClock()
        self.store = MemoryLeaseStore()
        self.leases = Leases(self.store.recorder, self.clock.wall)
        self.projection = LeaseProjection(self.leases, tables, self.clock.wall)


@pytest.fixture
def world(opened: Opened) -> World:
    return World(opened.tables)


def test_a_lease_and_its_route_are_rows_of_the_tables(world: World, opened: Opened) -> None:
    assert world.projection.update() == 0
    world.leases.acquire(ACQUIRE)
    world.clock.advance(60_000)
    world.leases.renew(RenewLease(MAILBOX, "runner-01", 1))
    world.leases.register_proxy(RegisterProxy("proxy-01", "h:1", 5_000))
    assert world.projection.update() == 3
    assert opened.query(LEASES) == [
        (
            MAILBOX,
            "runner-01",
            "proxy-01",
            PARTITION,
            START + 360_000,
            START + 60_000,
            "proxy-01.prism.local:8982",
            "active",
            START,
            START + 60_000,
        )
    ]
    assert opened.query(ROUTES) == [
        (MAILBOX, "proxy-01", "runner-01", "proxy-01.prism.local:8982", PARTITION, START, START)
    ]


def test_a_lease_is_active_then_expiring_then_expired_without_a_route(world: World, opened: Opened) -> None:
    def status() -> list[tuple[Any, ...]]:
        world.projection.update()
        return opened.query("SELECT status FROM mailbox_leases")

    world.leases.acquire(ACQUIRE)
    world.clock.advance(299_999)
    assert status() == [("active",)]
    world.clock.advance(1)
    assert status() == [("expiring",)]
    world.leases.renew(RenewLease(MAILBOX, "runner-01", 1))
    assert status() == [("active",)]
    world.clock.advance(300_000)
    assert status() == [("expiring",)]
    assert len(opened.query(ROUTES)) == 1
    world.leases.expire(ExpireLease(MAILBOX, 2))
    assert status() == [("expired",)]
    assert opened.query(ROUTES) == []
    world.leases.acquire(replace(ACQUIRE, runner="runner-02"))
    assert status() == [("active",)]
    assert opened.query("SELECT runner_id, created_at, updated_at FROM mailbox_routes") == [
        ("runner-02", START + 600_000, START + 600_000)
    ]
    assert opened.query("SELECT created_at FROM mailbox_leases") == [(START,)]


def test_a_released_lease_has_no_rows(world: World, opened: Opened) -> None:
    world.leases.acquire(ACQUIRE)
    world.projection.update()
    world.leases.release(ReleaseLease(MAILBOX, "runner-01", 1))
    world.projection.update()
    assert opened.query(LEASES) == opened.query(ROUTES) == []


def test_the_tables_are_folded_on_where_another_process_stopped(world: World, opened: Opened) -> None:
    world.leases.acquire(ACQUIRE)
    world.projection.update()
    with closing(opened.open_again()) as tables:
        other = LeaseProjection(world.leases, tables, world.clock.wall)
        assert tables.position() == 1
        world.leases.release(ReleaseLease(MAILBOX, "runner-01", 1))
        assert other.update() == 2
    assert not opened.tables.apply(1, 2, [], [])
    assert world.projection.update() == 2
    assert opened.query(LEASES) == []


def test_the_tables_of_a_log_that_was_replaced_are_folded_again(world: World, opened: Opened) -> None:
    for number in range(3):
        acquisition = f"018f0000-0000-7000-8000-00000000000{number}"
        world.leases.acquire(replace(ACQUIRE, mailbox=f"m{number}@p", acquisition=acquisition))
    world.projection.update()
    replaced = World(opened.tables)
    replaced.leases.acquire(ACQUIRE)
    assert replaced.projection.update() == 1
    assert opened.query("SELECT mailbox_id FROM mailbox_leases") == [(MAILBOX,)]
    assert opened.query("SELECT mailbox_id FROM mailbox_routes") == [(MAILBOX,)]


def test_the_tables_of_a_file_are_those_of_the_specification(tmp_path: Path) -> None:
    def describe(connection: sqlite3.Connection) -> list[object]:
        tables = ("mailbox_leases", "mailbox_routes")
        pragmas = ("table_info", "foreign_key_list")
        found: list[object] = [
            connection.execute(f"PRAGMA {pragma}({table})").fetchall()
            for table in tables
            for pragma in pragmas
        ]
        for table in tables:
            names = connection.execute(
                "SELECT name FROM sqlite_schema "
                "WHERE type = 'index' AND sql IS NOT NULL AND tbl_name = ? ORDER BY 1",
                [table],
            ).fetchall()
            found += [
                (name, connection.execute(f"PRAGMA index_info({name})").fetchall()) for (name,) in names
            ]
        return found

    SqliteLeaseTables(tmp_path / "leases.db").close()
    with (
        closing(sqlite3.connect(tmp_path / "leases.db")) as connection,
        closing(sqlite3.connect(":memory:")) as expected,
    ):
        expected.executescript(RFC_049)
        assert describe(connection) == describe(expected)
        connection.executescript(RFC_049.replace("CREATE INDEX", "CREATE INDEX IF NOT EXISTS"))


def test_the_tables_of_a_database_have_the_columns_and_indexes_of_the_specification(
    lease_database: str,
) -> None:
    columns = "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 ORDER BY attnum"
    indexes = "SELECT indexname FROM pg_indexes WHERE schemaname = 'postroom' AND tablename = %s ORDER BY 1"
    with closing(sqlite3.connect(":memory:")) as expected, psycopg.connect(lease_database) as connection:
        expected.executescript(RFC_049)
        for table in ("mailbox_leases", "mailbox_routes"):
            names = [(row[1],) for row in expected.execute(f"PRAGMA table_info({table})")]
            assert connection.execute(columns, [f"postroom.{table}"]).fetchall() == names
        leases = ["idx_lease_expires", "idx_proxy_partition", "idx_status", "mailbox_leases_pkey"]
        assert connection.execute(indexes, ["mailbox_leases"]).fetchall() == [(name,) for name in leases]
        routes = ["idx_partition", "idx_proxy_id", "mailbox_routes_pkey"]
        assert connection.execute(indexes, ["mailbox_routes"]).fetchall() == [(name,) for name in routes]
