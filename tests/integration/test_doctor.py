"""`postroom doctor` finds what is wrong, says what to do, changes nothing, and ends in time."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import msgspec
import nats
import psycopg
import pytest

from postroom import NewMessage, open_mailbox
from postroom.adapters.compose.access import open_key_ring
from postroom.adapters.compose.doctor import (
    Check,
    Finding,
    check_keys,
    database_check,
    host_checks,
    keys_check,
    nats_check,
    run_checks,
    store_checks,
)
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.store import check_file_system, check_modes, file_system
from postroom.application.diagnosis import clock_finding
from postroom.application.mailbox.engine import MailboxEngine
from postroom.domain.capability.token import RootKey
from tests.support.clocks import ManualClock

SECONDS = 240.0
DAY_US = 86_400_000_000
SHORT_SECONDS = 0.5


def check(address: str, seconds: float = SECONDS) -> dict[str, Finding]:
    return {each.check: each for each in run_checks(store_checks(address, "full", seconds), seconds)}


@pytest.fixture
async def store(tmp_path: Path) -> str:
    path = tmp_path / "orders.db"
    async with open_mailbox(str(path)) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"{}"))
    return str(path)


@contextmanager
def silent_server() -> Iterator[int]:
    """Listen at a port and answer nothing, as a server does whose process is paused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def content(folder: Path) -> dict[str, tuple[str, int]]:
    """Return the files; those of SQLite's own that any reader makes are left out."""
    return {
        each.name: (sha256(each.read_bytes()).hexdigest(), each.stat().st_mode)
        for each in folder.iterdir()
        if each.is_file() and not each.name.endswith(("-wal", "-shm"))
    }


def test_an_intact_store_passes_and_nothing_is_changed(store: str, tmp_path: Path) -> None:
    before = content(tmp_path)
    findings = check(store)
    ours = [each for each in findings.values() if each.check not in ("disk", "file system", "socket")]
    assert [each for each in ours if each.status != "ok"] == []
    assert findings["logs"].finding == "1 mailbox, none ahead of this clock"
    assert set(findings) == {"store", "durability", "file modes", "file system", "disk", "socket", "logs"}
    assert content(tmp_path) == before


async def test_a_store_in_use_passes(store: str) -> None:
    async with open_mailbox(store):
        findings = await asyncio.to_thread(check, store)
    assert findings["store"].status == findings["logs"].status == "ok"


def test_a_store_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    assert check(str(tmp_path / "none.db"))["store"].status == "warning"
    assert check(str(tmp_path / "folder" / "none.db"))["store"].status == "failure"
    assert list(tmp_path.iterdir()) == []


def test_files_that_others_can_read_are_named_with_the_command_that_helps(store: str) -> None:
    os.chmod(store, 0o644)
    findings = list(check_modes([Path(store)]))
    assert [(each.status, each.advice) for each in findings] == [("failure", f"Run: chmod 600 {store}")]
    assert check(store)["file modes"].status == "failure"
    assert os.stat(store).st_mode & 0o777 == 0o644


def test_a_file_that_is_no_database_is_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("no database " * 100)
    path.chmod(0o600)
    assert check(str(path))["store"].status == "failure"


async def test_a_record_from_the_future_is_reported_with_how_far_it_is_ahead(tmp_path: Path) -> None:
    path, clock = tmp_path / "orders.db", ManualClock()
    clock.wall_us = 4_000_000_000_000_000
    engine = MailboxEngine(SqliteEventLog(path, "main@local"), clock)
    await engine.open("test")
    await engine.close()
    engine.log.close()
    finding = await asyncio.to_thread(lambda: check(str(path))["logs"])
    assert finding.status == "failure"
    assert "main@local" in finding.finding
    assert "ahead of this clock" in finding.finding


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("ext4", "ok"),
        ("nfs4", "warning"),
        ("fuse.sshfs", "warning"),
        ("tmpfs", "warning"),
        ("overlay", "warning"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, kind: str, status: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 8:1 / / rw,relatime - xfs /dev/sda1 rw\n"
        f"30 22 8:2 / /srv/my\\040data rw shared:1 - {kind} /dev/sdb1 rw\n"
        "31 22 8:3 / /srv/my rw - btrfs /dev/sdc1 rw\n"
    )
    path = Path("/srv/my data/orders.db")
    assert file_system(path, mounts) == kind
    assert file_system(Path("/srv/mydata"), mounts) == "xfs"
    assert [each.status for each in check_file_system(path, mounts)] == [status]


def test_a_long_path_is_told_to_set_the_runtime_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    finding = check(str(tmp_path / ("x" * 120)))["socket"]
    assert (finding.status, "XDG_RUNTIME_DIR" in finding.advice) == ("warning", True)


def test_a_migrated_database_passes(postgres_store: str) -> None:
    findings = check(postgres_store)
    ours = {"database", "database tables", "database rights", "database clock", "owners", "logs"}
    assert {findings[name].status for name in ours} == {"ok"}
    assert findings["database durability"].status in ("ok", "failure")  # servers of tests may not sync


def test_a_database_without_tables_is_told_the_command(empty_database: str) -> None:
    finding = check(empty_database)["database tables"]
    assert finding.status == "failure"
    assert "postroom migrate --store" in finding.advice


def test_a_user_without_rights_is_told_to_be_granted_them(postgres_store: str) -> None:
    with psycopg.connect(postgres_store, autocommit=True) as connection:
        connection.execute("CREATE ROLE doctor_test")
        try:
            connection.execute("GRANT USAGE ON SCHEMA postroom TO doctor_test")
            connection.execute("GRANT SELECT ON ALL TABLES IN SCHEMA postroom TO doctor_test")
            finding = check(f"{postgres_store}?options=-crole%3Ddoctor_test")["database rights"]
        finally:
            connection.execute("DROP OWNED BY doctor_test")
            connection.execute("DROP ROLE doctor_test")
    assert finding.status == "failure"
    assert "--grant-to doctor_test" in finding.advice


def test_a_nats_server_passes(nats_url: str) -> None:
    async def add_stream() -> None:
        client = await nats.connect(nats_url)
        await client.jetstream().add_stream(name="EVENTS", subjects=["events.>"])
        await client.close()

    asyncio.run(add_stream())
    findings = run_checks([nats_check(NatsSettings(url=nats_url), SECONDS)], SECONDS)
    assert [(each.check, each.status) for each in findings] == [
        ("nats", "ok"),
        ("jetstream", "ok"),
        ("nats clock", "ok"),
    ]


def test_paused_servers_and_checks_that_fail_keep_no_other_check_from_its_answer() -> None:
    def fail() -> Iterator[Finding]:
        raise RuntimeError("boom")

    with silent_server() as port:
        findings = run_checks(
            [
                database_check(f"postgresql://a:secret@127.0.0.1:{port}/b", "store", "database", SECONDS),
                nats_check(NatsSettings(url=f"nats://a:secret@127.0.0.1:{port}"), SECONDS),
                Check("own", lambda: [Finding("own", "ok", "fine")]),
                Check("broken", fail),
            ],
            SHORT_SECONDS,
        )
    assert [each.check for each in findings] == ["database", "nats", "own", "broken"]
    assert [each.status for each in findings] == ["failure", "failure", "ok", "failure"]
    assert "no answer within 0.5 s" in findings[0].finding
    assert "boom" in findings[3].finding
    assert "secret" not in str(findings)


def test_keys_are_reported_with_their_age_and_never_with_their_secrets(tmp_path: Path) -> None:
    store = str(tmp_path / "orders.db")

    def check_ring() -> Finding:
        (finding,) = run_checks([keys_check(store, None)], SECONDS)
        return finding

    assert check_ring().advice.startswith("Make one with postroom token rotate")
    now = time.time_ns() // 1_000
    key = RootKey(b"i" * 8, b"s" * 32, now - 3 * DAY_US, None)
    open_key_ring(store).rotate(key, now)
    assert check_ring() == Finding("keys", "ok", "1, of which 0 retired; the newest is 3 days old")
    assert check_keys([key], now + 90 * DAY_US).status == "warning"
    assert check_keys([msgspec.structs.replace(key, retire_at=now)], now).status == "failure"
    (tmp_path / "orders.db.keys").chmod(0o640)
    refused = check_ring()
    assert refused.status == "failure"
    assert "chmod 600" in refused.finding


def test_the_clocks_of_two_machines_agree_within_the_time_that_asking_took() -> None:
    now = 1_800_000_000_000_000
    assert clock_finding("x", now, now + 5_000_000, now + 6_000_000).status == "ok"
    ahead = clock_finding("x", now, now + 9_000_000, now + 1_000)
    behind = clock_finding("x", now, now - 9_000_000, now + 1_000)
    assert (ahead.finding, behind.finding) == ("8,999 ms ahead of ours", "9,000 ms behind ours")
    assert ahead.status == behind.status == "warning"


def test_this_machine_is_checked() -> None:
    findings = {each.check: each.status for each in run_checks(host_checks(), SECONDS)}
    assert set(findings) == {"versions", "extras", "java", "open files", "clock"}
    assert findings["versions"] == "ok"
    json.dumps(findings)
