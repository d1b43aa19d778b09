"""What the last release writes besides the log, this version reads: backups, archives, keys and tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postroom import connect
from postroom.adapters.postgres.migrate import migrate
from tests.integration.upgrade.conftest import WORKS, Version, outcome, refused
from tests.integration.upgrade.test_beside import running

pytestmark = pytest.mark.extended

WORKER = """
from postroom import ReceivedMessage, Worker

worker = Worker("shop")


@worker.consumer("orders", timeout="30s")
async def charge(message: ReceivedMessage) -> None:
    print("charged", message.payload, flush=True)
"""


def done(version: Version, *arguments: object, folder: Path | None = None) -> str:
    """Return what a command of a version prints; it must succeed."""
    code, printed = version.command(*arguments, folder=folder)
    assert code == 0, printed
    return printed


def test_backups_are_restored_by_later_versions(former: Version, present: Version, tmp_path: Path) -> None:
    store, restored, backup, later = (tmp_path / name for name in ("a.db", "b.db", "backup", "later"))
    done(former, "--store", store, "send", "orders", "1")
    done(former, "--store", store, "backup", backup)
    done(present, "restore", backup, "--into", restored)
    assert "attempt  1" in done(present, "--store", restored, "recv", "orders", "--ack")
    assert "intact" in done(present, "--store", restored, "verify")
    assert outcome("backup", "made it", "restores it") == WORKS
    done(present, "--store", restored, "backup", later)
    code, printed = former.command("backup", "verify", later)
    assert (code, outcome("backup", "verifies it", "made it")) == (2, refused(printed, later / "store.db"))


def test_read_models_archive_and_keys_are_those_of_the_last_release(
    former: Version, present: Version, tmp_path: Path
) -> None:
    (tmp_path / "postroom.toml").write_text(
        f'store = "{tmp_path}/shop.db"\n[archive]\nfolder = "{tmp_path}/archive"\n[erasure]\n'
        f'keys = "{tmp_path}/keys.db"\nmaster_key_file = "{tmp_path}/master.key"\n'
        '[erasure.topics."orders"]\nsubject = "principal"\n'
    )
    settings = ("--config", tmp_path / "postroom.toml")
    done(former, *settings, "erasure", "init")
    done(former, *settings, "send", "orders", "secret", "--principal", "alice")
    done(former, *settings, "views", "rebuild")
    done(former, *settings, "segments", "build", "--all")
    assert "1 found" in done(present, *settings, "search", "--topic", "orders")
    assert outcome("read models", "built them", "searches them") == WORKS
    done(present, *settings, "segments", "verify")
    assert outcome("log archive", "wrote it", "verifies it") == WORKS
    assert "secret" in done(present, *settings, "recv", "orders", "--ack")
    assert outcome("key store of erasures", "created it", "decrypts") == WORKS


def test_tokens_of_the_last_release_are_accepted(former: Version, present: Version, tmp_path: Path) -> None:
    store, token = tmp_path / "shop.db", tmp_path / "shop.token"
    done(former, "--store", store, "token", "rotate")
    done(former, "--store", store, "token", "mint", "shop", "--operation", "send,recv,ack", "--out", token)
    done(former, "--store", store, "send", "orders", "1")
    options = ("--json", "--store", store, "--http", "127.0.0.1:0")
    with running(present, tmp_path / "server.log", "serve", *options) as report:
        (address,) = report["addresses"]
        for version in (present, former):
            done(version, "--store", address, "--token-file", token, "send", "orders", "2")
            done(version, "--store", address, "--token-file", token, "recv", "orders", "--ack")
    assert outcome("token", "minted it, or uses it", "accepts it") == WORKS


@pytest.mark.parametrize(("first", "second"), [("worker", "owner"), ("owner", "worker")])
def test_workers_handle_messages_of_an_owner_of_the_other_version(
    first: str, second: str, former: Version, present: Version, tmp_path: Path
) -> None:
    worker, owner = (former, present) if first == "worker" else (present, former)
    (tmp_path / "shop.py").write_text(WORKER)
    store = tmp_path / "shop.db"
    with running(
        owner, tmp_path / "server.log", "serve", "--dev", "--json", "--store", store, "--http", "127.0.0.1:0"
    ):
        done(worker, "--store", store, "send", "orders", "1")
        printed = done(worker, "--store", store, "work", "shop:worker", "--once", folder=tmp_path)
    assert "1 handled, 0 failed" in printed
    assert outcome("worker", first, second) == WORKS


def test_messages_that_the_last_release_records_are_sent_by_an_owner_of_this_version(
    former: Version, present: Version, create_database: Callable[[str | None], str]
) -> None:
    store = create_database(None)
    done(former, "migrate", "--messaging", store)
    migrate(store, "store")
    for meeting in (
        "`outbox_messages` without the migrations of 0.2.0",
        "`outbox_messages` with the migrations of 0.2.0",
    ):
        topic = meeting.split()[1]
        if topic == "with":
            migrate(store, "messaging")
        with connect(store, timeout_ms=120_000) as mailbox:
            sent = former.run("record", store, {"topic": topic})
            (message,) = mailbox.receive_messages(topic, wait_ms=60_000)
            assert message.message_id == sent
            message.ack()
        assert outcome(meeting, "records", "sends") == WORKS
