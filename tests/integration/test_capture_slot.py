"""`postroom doctor` finds what is wrong with the replication slot of a capture."""

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import psycopg
import pytest

from postroom.adapters.compose.doctor import Finding, capture_check, run_checks
from postroom.adapters.compose.outbox import CaptureSettings, MessagingSettings
from postroom.adapters.postgres.capture.slot import MAX_RETAINED_BYTES, MIN_SAFE_BYTES, describe_slot
from postroom.application.ports.outbox import SlotState
from tests.support.captures import LOGICAL, ServiceDatabase, capturing
from tests.support.memory_stream import MemoryStream
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.waiting import SECONDS

ACTIVE = SlotState("s", True, 10, 1_000, 2 * MIN_SAFE_BYTES)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        yield server


@pytest.fixture
def database(server: PostgresServer) -> Iterator[ServiceDatabase]:
    database = ServiceDatabase(server.create_database())
    yield database
    database.drop_slot()


def check(database: ServiceDatabase, seconds: float = SECONDS) -> Finding:
    (finding,) = run_checks([capture_check(database.messaging, database.settings, seconds)], 2 * SECONDS)
    return finding


def test_a_missing_slot_is_a_failure_with_the_command_that_creates_it(database: ServiceDatabase) -> None:
    finding = check(database)
    assert finding.status == "failure"
    assert "`postroom outbox capture --create`" in finding.finding


async def test_a_slot_that_no_process_reads_is_a_warning_and_one_that_is_read_is_fine(
    database: ServiceDatabase,
) -> None:
    await database.create_slot()
    finding = await asyncio.to_thread(check, database)
    assert finding.status == "warning"
    assert "no process reads it, keeps " in finding.finding
    assert f"pg_drop_replication_slot('{database.settings.slot}')" in finding.advice
    async with capturing(database, MemoryStream()) as capture, asyncio.timeout(SECONDS):
        running = asyncio.create_task(capture.run())
        while (finding := await asyncio.to_thread(check, database)).status != "ok":
            await asyncio.sleep(0.05)
        capture.stop()
        await running
    assert "active" in finding.finding
    assert "max_slot_wal_keep_size" in finding.advice


def test_a_slot_whose_log_the_server_removed_is_a_failure_and_one_near_that_too(
    database: ServiceDatabase,
) -> None:
    asyncio.run(database.create_slot())
    limit_log(database, "100MB")
    try:
        near = check(database)
        assert near.status == "failure"
        assert "rows are lost when" in near.finding
        assert "Raise max_slot_wal_keep_size" in near.advice
        limit_log(database, "1MB")
        while check(database).finding.startswith(database.settings.slot):
            database.execute("INSERT INTO events (aggregate_id) VALUES ('o')")
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("SELECT pg_switch_wal()")
                connection.execute("CHECKPOINT")
        lost = check(database)
    finally:
        limit_log(database, "-1")
    assert lost.status == "failure"
    assert "are not published" in lost.finding
    assert "--create" in lost.finding


def test_a_server_that_does_not_answer_is_reported_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        messaging = MessagingSettings(f"postgresql://shop@127.0.0.1:{silent.getsockname()[1]}/shop")
        (finding,) = run_checks([capture_check(messaging, CaptureSettings(table="events"), 0.5)], SECONDS)
    assert finding.status == "failure"
    assert "did not answer within 0.5 s" in finding.finding


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, "ok"),
        ({"retained_bytes": MAX_RETAINED_BYTES}, "ok"),
        ({"retained_bytes": MAX_RETAINED_BYTES + 1}, "warning"),
        ({"active": False}, "warning"),
        ({"safe_bytes": MIN_SAFE_BYTES}, "ok"),
        ({"safe_bytes": MIN_SAFE_BYTES - 1}, "failure"),
        ({"safe_bytes": -1, "active": False}, "failure"),
        ({"safe_bytes": None, "retained_bytes": MAX_RETAINED_BYTES + 1}, "warning"),
    ],
)
def test_the_status_of_a_slot_follows_from_its_state(changes: dict[str, object], status: str) -> None:
    finding = describe_slot(msgspec.structs.replace(ACTIVE, **changes))
    assert finding.status == status
    assert bool(finding.advice) == (status != "ok")


def limit_log(database: ServiceDatabase, size: str) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(f"ALTER SYSTEM SET max_slot_wal_keep_size = '{size}'".encode())
        connection.execute("SELECT pg_reload_conf()")
