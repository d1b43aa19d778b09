"""Restores of backups into JetStream: the same log, whole or not at all, and only into an empty store."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import nats
import pytest

from postroom import MailboxOutbox
from postroom.adapters.compose import list_mailboxes, open_mailbox
from postroom.adapters.compose.access import open_audit_log, read_audit_log
from postroom.adapters.compose.backup import back_up, verify_backup
from postroom.adapters.compose.doctor import run_checks, store_checks
from postroom.adapters.compose.maintenance import import_store
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.restore import restore
from postroom.adapters.compose.store import open_store
from postroom.adapters.jetstream import log_index
from postroom.adapters.jetstream.client import StreamClient
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.application.access.audit import ALLOWED, AuditEntry
from postroom.application.access.audit_log import AuditFilter
from postroom.application.backup.manifest import Manifest
from postroom.application.mailbox import records
from postroom.domain.errors import InvalidRequest, MailboxOwned, StaleReceipt, UnusableStore
from postroom.domain.names import AUDIT_LOG
from tests.support.stores import MAILBOX, live, message, receive_one
from tests.support.waiting import SECONDS

BACKUP = Path("backup")
LARGE = Random(1).randbytes(700_000)
"""Two are in one commit, which is larger than a message of NATS may be."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def set_small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the index have the last events of many messages, and be saved several times."""
    monkeypatch.setattr(records, "SCAN_POSITIONS", 5)
    monkeypatch.setattr(log_index, "RUN_ENTRIES", 30)


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_runs(monkeypatch)


async def fill(store: str = "store.db") -> Manifest:
    """Fill a store from which retention has removed something, and back it up."""
    entry = AuditEntry(1, "alice", "00", "read-payload", MAILBOX, (), "", 1, ALLOWED, "c")
    async with open_audit_log(open_store(store)) as audit:
        await audit.record([entry])
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_message(message(b"to be removed"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        await mailbox.delete_old_events(mailbox.engine.now() + 1)
        await mailbox.send_batch([message(LARGE, "large"), message(LARGE, "large")])
        await live(mailbox, 60)
    return await asyncio.to_thread(back_up, store, BACKUP)


async def send(store: str, payload: bytes = b"one") -> None:
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_message(message(payload))


async def test_a_restored_store_has_the_logs_of_the_backup_and_goes_on(jetstream_store: str) -> None:
    manifest = await fill()
    restoration = await restore(BACKUP, jetstream_store)

    heads = {head.mailbox: head for head in manifest.mailboxes}
    assert heads.keys() == {AUDIT_LOG, MAILBOX}
    assert heads[MAILBOX].first > 1
    with read_mailbox("store.db", MAILBOX) as one, read_mailbox(jetstream_store, MAILBOX) as other:
        head = heads[MAILBOX]
        assert other.verify_log(expected_last=head.position, expected_chain=head.chain).first == head.first
        commits = list(one.log.commits())
        assert list(other.log.commits())[: len(commits)] == commits
        streams = [record.stream for record in one.log.read()]
        entries = one.log.index_of(streams)
        assert [each for each in other.log.index_of(streams) if each.position <= head.position] == entries
        assert any(entry.last is not None for entry in entries)
        assert [each.position for each in other.log.snapshots()] == [
            each.position for each in one.log.snapshots()
        ]
    async with open_audit_log(open_store(jetstream_store)) as audit:
        await audit.record([AuditEntry(2, "bob", "00", "peek", MAILBOX, (), "", 1, ALLOWED, "c")])
    with read_audit_log(jetstream_store) as audit_log:
        assert audit_log is not None
        assert [each.principal for each in audit_log.read(AuditFilter()).items] == ["bob", "alice"]
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        assert mailbox.engine.state.epoch == restoration.epochs[MAILBOX] + 1
        assert (await receive_one(mailbox, "large")).payload == LARGE


async def test_a_backup_of_a_restored_store_is_restored_into_a_file(jetstream_store: str) -> None:
    manifest = await fill()
    await restore(BACKUP, jetstream_store)
    again = await asyncio.to_thread(back_up, jetstream_store, Path("again"))
    await restore(Path("again"), "restored.db")

    verify_backup(Path("again"))
    assert [head.first for head in again.mailboxes] == [head.first for head in manifest.mailboxes]
    head = next(each for each in manifest.mailboxes if each.mailbox == MAILBOX)
    with read_mailbox("restored.db", MAILBOX) as reader:
        reader.verify_log(expected_last=head.position, expected_chain=head.chain)


async def test_receipts_from_after_the_backup_are_stale_and_those_before_are_honoured(
    jetstream_store: str,
) -> None:
    async with open_mailbox("store.db", MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_batch([message(b"one"), message(b"two")])
        earlier = await receive_one(mailbox)
        await asyncio.to_thread(back_up, "store.db", BACKUP)
        later = await receive_one(mailbox)
    await restore(BACKUP, jetstream_store)

    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        again = await receive_one(mailbox)
        (refusal,) = await mailbox.ack_messages([later.receipt])
        assert isinstance(refusal, StaleReceipt)
        assert await mailbox.ack_messages([earlier.receipt, again.receipt]) == [None, None]


async def test_a_store_that_is_not_empty_is_refused(jetstream_store: str) -> None:
    await send("store.db")
    back_up("store.db", BACKUP)
    await send(jetstream_store, b"mine")
    says = (
        r"is not empty \(it has acme@one\), and streams can't be replaced at once; restore into another one"
    )
    for replace in (False, True):
        with pytest.raises(InvalidRequest, match=says):
            await restore(BACKUP, jetstream_store, replace=replace)

    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        assert (await receive_one(mailbox)).payload == b"mine"


async def test_a_store_that_lost_its_second_stream_is_not_taken_for_an_empty_one(
    jetstream_store: str,
) -> None:
    await send("store.db")
    back_up("store.db", BACKUP)
    await send(jetstream_store, b"mine")
    settings = parse_store_url(jetstream_store)
    client = await nats.connect(settings.nats.url)
    await client.jetstream().delete_stream(settings.state_stream)
    await client.close()
    with pytest.raises(InvalidRequest, match="is not empty; restore into another one"):
        await restore(BACKUP, jetstream_store)


async def test_rows_that_only_a_database_can_hold_are_refused(jetstream_store: str) -> None:
    await send("store.db")
    with closing(sqlite3.connect("store.db")) as connection, connection:
        MailboxOutbox("acme@two").record(connection, message(b"recorded"))
    back_up("store.db", BACKUP)
    with pytest.raises(InvalidRequest, match="has messages that transactions recorded"):
        await restore(BACKUP, jetstream_store)
    with closing(sqlite3.connect("store.db")) as connection, connection:
        connection.execute("CREATE TABLE invoices (number INTEGER PRIMARY KEY)")
    back_up("store.db", Path("other"))
    with pytest.raises(InvalidRequest, match=r"not Postroom's \(invoices\)"):
        await restore(Path("other"), jetstream_store)
    await send(jetstream_store)  # it is still empty


def test_a_store_of_a_former_format_is_imported_into_a_file_first(jetstream_store: str) -> None:
    with pytest.raises(InvalidRequest, match="import it into a new file, and restore a backup of that"):
        import_store("store.db", jetstream_store)


# -- interruptions ---


class Interrupted(BaseException):
    """A restore ends at this step."""


def interrupt_at(step: int, monkeypatch: pytest.MonkeyPatch, interrupt: Callable[[], None]) -> None:
    """Call a function before the nth change of a stream, except those of the records of owners."""
    count = 0

    def before(name: str) -> None:
        change = getattr(StreamClient, name)

        async def changing(self: StreamClient, subject: str, *arguments: Any) -> Any:
            nonlocal count
            if ".owner." not in subject:
                if count == step:
                    interrupt()
                count += 1
            return await change(self, subject, *arguments)

        monkeypatch.setattr(StreamClient, name, changing)

    for name in ("append", "purge"):
        before(name)


def fail() -> None:
    raise Interrupted


async def test_a_restore_that_ended_at_any_step_leaves_nothing_that_opens_and_is_done_again(
    jetstream_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill()
    step, is_interrupted = 0, True
    while is_interrupted:
        with monkeypatch.context() as patch:
            interrupt_at(step, patch, fail)
            try:
                await restore(BACKUP, jetstream_store)
                is_interrupted = False
            except Interrupted:
                step += 1
        if is_interrupted and step > 1:  # else it is empty
            with pytest.raises(
                UnusableStore, match=r"restore was interrupted; .* run postroom restore again"
            ):
                list_mailboxes(jetstream_store)
            with pytest.raises(UnusableStore):
                await send(jetstream_store)
    assert step > 15
    assert list_mailboxes(jetstream_store) == [MAILBOX]
    await send(jetstream_store)


RESTORE = """
import asyncio, os, signal, sys
from pathlib import Path

import pytest

from postroom.adapters.compose.restore import restore
from tests.integration.jetstream.test_backup_jetstream import BACKUP, interrupt_at, set_small_runs

patch = pytest.MonkeyPatch()
set_small_runs(patch)
interrupt_at(int(sys.argv[2]), patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
asyncio.run(restore(BACKUP, sys.argv[1]))
"""


@pytest.mark.parametrize(
    "step", [10, *(pytest.param(step, marks=pytest.mark.extended) for step in (1, 4, 7, 14, 19))]
)
async def test_a_restore_that_was_killed_is_told_by_every_command_and_done_again(
    jetstream_store: str, step: int
) -> None:
    manifest = await fill()
    command = [sys.executable, "-c", RESTORE, jetstream_store, str(step)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    process = await asyncio.to_thread(subprocess.run, command, env=environment, timeout=SECONDS)
    assert process.returncode == -signal.SIGKILL

    says = "is being restored from a backup, or a restore was interrupted"
    for call in (
        lambda: open_store(jetstream_store).event_log(MAILBOX),
        lambda: open_store(jetstream_store).existing_log(MAILBOX),
        lambda: open_store(jetstream_store).log_reader().extents(),
        lambda: back_up(jetstream_store, Path("again")),
    ):
        with pytest.raises(UnusableStore, match=says):
            await asyncio.to_thread(call)
    checks = store_checks(jetstream_store, "full", 5)
    findings = {each.check: each for each in await asyncio.to_thread(run_checks, checks, SECONDS)}
    assert findings["logs"].status == "failure"
    assert says in findings["logs"].finding
    restoration = await restore(BACKUP, jetstream_store)
    assert restoration.manifest == manifest
    await send(jetstream_store)


async def test_two_restores_at_once_are_refused(
    jetstream_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.compose.restore.KILLED_OWNER_MS", 0)
    await send("store.db")
    back_up("store.db", BACKUP)
    async with open_store(jetstream_store).ownership().acquire(MAILBOX, "the other restore", 0):
        with pytest.raises(MailboxOwned, match="the other restore"):
            await restore(BACKUP, jetstream_store)
