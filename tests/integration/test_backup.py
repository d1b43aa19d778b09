"""Backup and restore of SQLite stores: under load, after crashes, against damage and against loss."""

import asyncio
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from postroom import MailboxOutbox
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_audit_log, read_audit_log
from postroom.adapters.compose.backup import back_up, verify_backup
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.restore import restore
from postroom.adapters.compose.store import open_store
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.access.audit import ALLOWED, AuditEntry
from postroom.application.access.audit_log import AuditFilter
from postroom.application.backup.manifest import Manifest
from postroom.domain.errors import (
    IntegrityFailure,
    InvalidRequest,
    MailboxOwned,
    NotFound,
    Rejected,
    StaleReceipt,
    Unavailable,
    UnusableStore,
)
from postroom.domain.names import AUDIT_LOG
from postroom.domain.policy import DAY_MS, MailboxLimits
from tests.support.servers.process import pause
from tests.support.stores import MAILBOX, message, receive_one, sqlite_place
from tests.support.waiting import SECONDS

OWNER = """
import asyncio, sys
from postroom.adapters.compose import open_mailbox

async def main():
    async with open_mailbox("store.db", "acme@one", durability="relaxed"):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "store.db"


@pytest.fixture
def paused_owner(store: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that owns the mailbox and is stopped."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        pause(process.pid)
        try:
            yield process
        finally:
            process.kill()


async def send(store: str, *payloads: bytes, mailbox: str = MAILBOX) -> None:
    async with open_mailbox(store, mailbox, durability="relaxed") as opened:
        await opened.send_batch([message(payload) for payload in payloads])


def check_head(store: str, manifest: Manifest) -> None:
    """Check that each log of a store is that of the backup, up to the head that the manifest names."""
    for head in manifest.mailboxes:
        with read_mailbox(store, head.mailbox) as reader:
            verification = reader.verify_log(expected_last=head.position, expected_chain=head.chain)
            assert verification.first == head.first


def files(folder: str = ".") -> list[str]:
    return sorted(os.listdir(folder))


def write(name: str, content: bytes) -> None:
    Path(name).write_bytes(content)


def read(name: str) -> bytes:
    return Path(name).read_bytes()


# -- backing up ---


async def test_a_backup_under_load_is_a_whole_past_of_the_store(store: str) -> None:
    accepted: list[str] = []
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:

        async def load() -> None:
            while True:
                sent = await mailbox.send_batch([message(b"x" * 500, topic="busy") for _ in range(50)])
                accepted.extend(each.message_id for each in sent if not isinstance(each, Rejected))

        senders = [asyncio.create_task(load()) for _ in range(4)]
        while len(accepted) < 1_000:
            await asyncio.sleep(0)
        before = list(accepted)
        manifest = await asyncio.to_thread(back_up, store, Path("backup"))
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)
        verified, (verification,) = verify_backup(Path("backup"))
    await restore(Path("backup"), "restored.db")

    assert verified == manifest
    assert verification.last == manifest.mailboxes[0].position
    check_head(store, manifest)
    check_head("restored.db", manifest)
    with read_mailbox("restored.db", MAILBOX) as reader:
        assert reader.get_message(before[-1]).intact
        assert reader.get_backlog("busy").ready >= len(before)


async def test_a_backup_of_a_store_whose_owner_is_paused_is_complete(
    store: str, paused_owner: "subprocess.Popen[bytes]"
) -> None:
    back_up(store, Path("backup"))

    manifest, _ = verify_backup(Path("backup"))
    assert [head.mailbox for head in manifest.mailboxes] == [MAILBOX]


async def test_two_backups_at_once_are_both_complete(store: str) -> None:
    await send(store, b"one")
    results = await asyncio.gather(
        *(asyncio.to_thread(back_up, store, Path(name)) for name in ("first", "second"))
    )

    assert results[0].mailboxes == results[1].mailboxes
    assert [verify_backup(Path(name))[0] for name in ("first", "second")] == results


async def test_a_backup_never_replaces_what_is_there(store: str) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    write("file", b"mine")

    for name in ("backup", "file"):
        with pytest.raises(InvalidRequest, match=f"{name} exists already; name a folder"):
            back_up(store, Path(name))
    verify_backup(Path("backup"))
    assert read("file") == b"mine"


async def test_a_store_that_does_not_exist_is_not_backed_up(store: str) -> None:
    with pytest.raises(NotFound, match=r"There is no store at .*store\.db"):
        back_up(store, Path("backup"))
    sqlite3.connect("other.db").close()
    with pytest.raises(NotFound, match="has no mailboxes"):
        back_up("other.db", Path("backup"))
    assert files() == ["other.db"]


async def test_a_backup_contains_the_messages_and_tables_of_the_callers_database(store: str) -> None:
    await send(store, b"one")
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("CREATE TABLE invoices (number INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO invoices VALUES (7)")
    back_up(store, Path("backup"))
    await restore(Path("backup"), "restored.db")

    with closing(sqlite3.connect("restored.db")) as connection:
        assert connection.execute("SELECT number FROM invoices").fetchall() == [(7,)]


async def test_the_capabilities_and_the_audit_log_are_part_of_a_backup(store: str) -> None:
    entry = AuditEntry(1, "alice", "00", "read-payload", MAILBOX, (), "", 1, ALLOWED, "c")
    async with open_audit_log(open_store(store)) as audit:
        await audit.record([entry])
    await send(store, b"one")
    manifest = back_up(store, Path("backup"))
    await restore(Path("backup"), "restored.db")

    assert [head.mailbox for head in manifest.mailboxes] == [AUDIT_LOG, MAILBOX]
    with read_audit_log("restored.db") as audit_log:
        assert audit_log is not None
        assert [each.principal for each in audit_log.read(AuditFilter()).items] == ["alice"]
    async with open_audit_log(open_store("restored.db")) as audit:
        await audit.record([entry])


async def test_segments_of_the_archive_are_named_and_verified_with_a_backup(tmp_path: Path) -> None:
    archive = ParquetLogArchive(tmp_path / "archive")
    place = sqlite_place(tmp_path)
    async with place.open(limits=MailboxLimits(history_retention_ms=DAY_MS), archive=archive) as mailbox:
        for _ in range(2):
            await mailbox.send_batch([message() for _ in range(9)])
            received = await mailbox.receive_messages("orders", max_messages=9)
            await mailbox.ack_messages([each.receipt for each in received])
            place.clock.advance(2 * DAY_MS)
            await mailbox.retention.enforce_age()
    backup, folder = tmp_path / "backup", tmp_path / "archive" / MAILBOX
    manifest = await asyncio.to_thread(
        back_up, str(tmp_path / "store.db"), backup, archive=tmp_path / "archive"
    )

    assert manifest.archive
    assert manifest.archive[-1].last == manifest.mailboxes[0].first - 1
    verify_backup(backup, archive=tmp_path / "archive")
    assert archive.compact(MAILBOX) == len(manifest.archive)
    verify_backup(backup, archive=tmp_path / "archive")
    for file in folder.glob("*.parquet"):
        file.unlink()
    with pytest.raises(IntegrityFailure, match="lacks positions 1 to"):
        verify_backup(backup, archive=tmp_path / "archive")
    verify_backup(backup)


# -- verifying ---


async def test_every_altered_byte_of_a_backup_is_detected(store: str) -> None:
    await send(store, b"hello")
    back_up(store, Path("backup"))
    names = files("backup")
    assert names == ["manifest.json", "store.db"]
    for name in names:
        path = f"backup/{name}"
        original = read(path)
        for at in range(0, len(original), max(1, len(original) // 97)):
            altered = bytearray(original)
            altered[at] ^= 1 << at % 8
            write(path, bytes(altered))
            with pytest.raises((IntegrityFailure, InvalidRequest)):
                verify_backup(Path("backup"))
        write(path, original[:-1])
        with pytest.raises(IntegrityFailure):
            verify_backup(Path("backup"))
        os.unlink(path)
        with pytest.raises((IntegrityFailure, NotFound)):
            await restore(Path("backup"), "restored.db")
        write(path, original)
    verify_backup(Path("backup"))
    assert "restored.db" not in files()


# -- restoring ---


async def test_a_restore_that_goes_back_behind_acknowledged_sends_says_so(store: str) -> None:
    await send(store, b"old")
    manifest = back_up(store, Path("backup"))
    await send(store, b"new", b"newer")
    head = manifest.mailboxes[0].position

    with pytest.raises(InvalidRequest, match=r"store\.db is not empty \(it has acme@one\); .* --replace"):
        await restore(Path("backup"), store)
    for number in (0, 2, 4):
        with pytest.raises(
            InvalidRequest,
            match=rf"acme@one has 3 records with 2 messages after position {head}\. .* --discard-newer 3",
        ):
            await restore(Path("backup"), store, replace=True, discard_newer=number)
    restoration = await restore(Path("backup"), store, replace=True, discard_newer=3)

    assert [(loss.records, loss.messages) for loss in restoration.losses] == [(3, 2)]
    check_head(store, manifest)
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        assert (await receive_one(mailbox)).payload == b"old"


async def test_messages_in_the_outbox_of_a_replaced_file_are_not_lost_unnoticed(store: str) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    with closing(sqlite3.connect(store)) as connection, connection:
        MailboxOutbox("acme@two").record(connection, message(b"recorded"))

    with pytest.raises(InvalidRequest, match=r"the outbox has 1 unsent message\. .* --discard-newer 1"):
        await restore(Path("backup"), store, replace=True)
    await restore(Path("backup"), store, replace=True, discard_newer=1)


async def test_a_restore_over_another_history_says_where_it_diverges(store: str) -> None:
    await send(store, b"same")
    back_up(store, Path("backup"))
    await restore(Path("backup"), "other.db")
    await send(store, b"ours")
    back_up(store, Path("newer"))
    await send("other.db", b"theirs")
    await send("other.db", b"alone", mailbox="acme@two")

    with pytest.raises(InvalidRequest, match=r"other records; mailbox acme@two has 3 records") as refusal:
        await restore(Path("newer"), "other.db", replace=True)
    assert "where the backup goes on with other records" in str(refusal.value)
    with pytest.raises(InvalidRequest, match="no records that the backup lacks"):
        await restore(Path("backup"), "third.db", discard_newer=1)


async def test_receipts_from_after_the_backup_are_stale_and_those_before_are_honoured(store: str) -> None:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_batch([message(b"one"), message(b"two")])
        earlier = await receive_one(mailbox)
        await asyncio.to_thread(back_up, store, Path("backup"))
        later = await receive_one(mailbox)
    await restore(Path("backup"), "restored.db")

    async with open_mailbox("restored.db", MAILBOX, durability="relaxed") as mailbox:
        again = await receive_one(mailbox)
        assert again.message_id == later.message_id
        (refusal,) = await mailbox.ack_messages([later.receipt])
        assert isinstance(refusal, StaleReceipt)
        assert await mailbox.ack_messages([earlier.receipt, again.receipt]) == [None, None]


async def test_each_restore_begins_epochs_above_those_of_every_other(store: str) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    first = (await restore(Path("backup"), "first.db")).epochs[MAILBOX]
    async with open_mailbox("first.db", MAILBOX, durability="relaxed") as mailbox:
        assert mailbox.engine.state.epoch == first + 1
    await asyncio.sleep(0.01)
    second = await restore(Path("backup"), "first.db", replace=True, discard_newer=2)

    assert second.epochs[MAILBOX] > first + 1


async def test_a_store_in_use_is_not_replaced(store: str, paused_owner: "subprocess.Popen[bytes]") -> None:
    manifest = back_up(store, Path("backup"))
    with pytest.raises(MailboxOwned, match=f"owned by process {paused_owner.pid} "):
        await restore(Path("backup"), store, replace=True)
    os.unlink(f"store.db-owner-{MAILBOX}")  # as an eviction does
    with pytest.raises(Unavailable, match=r"Another process has the store .* open; stop the processes"):
        await restore(Path("backup"), store, replace=True)
    check_head(store, manifest)
    paused_owner.kill()
    paused_owner.wait(SECONDS)
    await restore(Path("backup"), store, replace=True)

    check_head(store, manifest)


async def test_a_process_that_opened_the_old_file_while_it_was_replaced_does_not_write_to_it(
    store: str,
) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    late = os.open(store, os.O_RDONLY)
    try:
        await restore(Path("backup"), store, replace=True)
        assert not os.pread(late, 16, 0).startswith(b"SQLite format 3")
    finally:
        os.close(late)


async def test_a_store_with_a_hard_link_is_not_replaced(store: str) -> None:
    await send(store, b"one")
    manifest = back_up(store, Path("backup"))
    os.link(store, "kept.db")
    with pytest.raises(UnusableStore, match="2 names"):
        await restore(Path("backup"), store, replace=True)

    os.unlink("kept.db")
    check_head(store, manifest)


async def test_the_write_ahead_log_of_a_removed_store_is_not_applied_to_the_next(store: str) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    write("restored.db-wal", b"frames")

    with pytest.raises(InvalidRequest, match=r"restored\.db-wal is left of a store that was removed"):
        await restore(Path("backup"), "restored.db")


async def test_a_restored_store_has_no_read_models_of_other_records(store: str) -> None:
    await send(store, b"one")
    back_up(store, Path("backup"))
    write(f"{store}-views", b"")
    await restore(Path("backup"), store, replace=True)

    assert f"{store}-views" not in files()


# -- crashes and full disks ---


def run_crashes(action: str, *arguments: str) -> list[str]:
    """Run an action until it is complete, interrupted at one step after another; return what each left."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.integration.backup_crash_worker", action, *arguments],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return process.stdout.split()


@pytest.mark.parametrize("action", ["kill", "full"])
async def test_a_backup_that_was_interrupted_is_not_there_and_one_that_is_there_is_whole(
    store: str, action: str
) -> None:
    await send(store, *(os.urandom(1_000) for _ in range(100)))
    outcomes = run_crashes(action, "backup", store, "backup")

    assert outcomes[-1] == "done"
    assert len(outcomes) > 5
    assert set(outcomes[:-1]) <= {"absent", "whole"}
    manifest, _ = verify_backup(Path("backup"))
    check_head(store, manifest)
    assert [name for name in files() if "unfinished" in name] == []


@pytest.mark.parametrize("action", ["kill", "full"])
async def test_a_restore_that_was_interrupted_leaves_the_old_store_or_the_new_one(
    store: str, action: str
) -> None:
    await send(store, *(os.urandom(1_000) for _ in range(100)))
    back_up(store, Path("backup"))
    await send(store, b"newer")
    outcomes = run_crashes(action, "restore", store, "backup")

    assert outcomes[-1] == "done"
    assert len(outcomes) > 5
    assert set(outcomes[:-1]) <= {"old", "new"}
    check_head(store, verify_backup(Path("backup"))[0])
    assert [name for name in files() if "unfinished" in name] == []
