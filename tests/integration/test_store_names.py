"""One file under several names, of several users, and where nothing can be written (ADR 0100)."""

import asyncio
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from postroom import MailboxOutbox, NewMessage, connect
from postroom.adapters.compose.doctor import run_checks, store_checks
from postroom.adapters.sqlite.database import connect_reader
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.store import SqliteStore
from postroom.domain.errors import PostroomError, UnusableStore
from tests.support.fork_server import popen
from tests.support.waiting import within

MAILBOX = "main@local"
SENDS = 40
POSTROOM = Path(sys.executable).with_name("postroom")
IS_ROOT = os.geteuid() == 0

SEND = f"""
import asyncio, sys
from postroom import NewMessage, connect

async def send():
    async with connect(sys.argv[1]) as mailbox:
        for number in range({SENDS}):
            await mailbox.send_message(NewMessage(topic="orders", payload=b"%d" % number))
        if len(sys.argv) > 2:
            print("sent", flush=True)
            await asyncio.Event().wait()

asyncio.run(send())
"""

COLLECT = """
import gc, os, sys
from contextlib import closing
from pathlib import Path
from postroom.adapters.sqlite.database import connect_reader

path = Path(sys.argv[1])

def read():
    with closing(connect_reader(path)) as connection:
        yield connection

def leave():
    reading = read()
    next(reading)
    garbage = [reading]
    garbage.append(garbage)

gc.disable()
leave()
sys.addaudithook(lambda event, _: gc.collect() if event == "sqlite3.connect" else None)
connect_reader(path).close()
descriptors = Path("/proc/self/fd").iterdir()
print([each.name for each in descriptors if os.path.realpath(each) == str(path)])
"""
"""A reader that was left is closed by the garbage collector while another one opens the same file."""


def can_mount() -> bool:
    tried = subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True) if IS_ROOT else None
    return tried is not None and tried.returncode == 0


MOUNTS = pytest.mark.skipif(not can_mount(), reason="mounting needs the rights of root")


async def run(*command: str | Path, mounts: str = "") -> tuple[int, str]:
    """Run a program, for which other mounts may be visible; return its exit code and what it wrote."""
    words: list[str | Path] = ["unshare", "-m", "sh", "-ec", f'{mounts} exec "$@"', "sh"] if mounts else []
    process = popen([*words, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    output, _ = await asyncio.to_thread(process.communicate)
    return process.returncode, output.decode()


async def send(store: Path, *, mounts: str = "") -> tuple[int, str]:
    return await run(sys.executable, "-c", SEND, store, mounts=mounts)


async def postroom(store: Path, command: str, *, mounts: str = "") -> tuple[int, str]:
    return await run(POSTROOM, "--store", store, *command.split(), mounts=mounts)


async def count(store: Path) -> int:
    async with connect(str(store)) as mailbox:
        return (await mailbox.get_backlog()).ready


async def make_store(path: Path) -> None:
    async with connect(str(path)) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"first"))


# -- one file, two names ---


@MOUNTS
async def test_a_store_that_is_mounted_as_a_single_file_is_refused_and_the_folder_is_shared(
    tmp_path: Path,
) -> None:
    store, container = tmp_path / "host" / "o.db", tmp_path / "container"
    store.parent.mkdir()
    container.mkdir()
    (container / "o.db").touch(0o600)
    async with connect(str(store)) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"first"))
        mount_file = f"mount --bind {store} {container}/o.db;"
        code, errors = await send(container / "o.db", mounts=mount_file)
        assert code != 0
        assert "UnusableStore" in errors
        assert "mount its folder instead" in errors
        code, errors = await send(container / "o.db", mounts=f"mount --bind {store.parent} {container};")
        assert code == 0, errors
        for number in range(SENDS):
            await mailbox.send_message(NewMessage(topic="orders", payload=b"%d" % number))
        assert (await mailbox.get_backlog()).ready == 1 + 2 * SENDS
    assert os.listdir(container) == ["o.db"]


async def test_a_store_with_a_hard_link_is_refused_under_both_names_until_one_is_removed(
    tmp_path: Path,
) -> None:
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    await make_store(one)
    os.link(one, two)
    for name in (one, two):
        with pytest.raises(UnusableStore, match="2 names"):
            async with connect(str(name)):
                pytest.fail("opened")
        with pytest.raises(UnusableStore, match="2 names"):
            SqliteStore(str(name)).existing_log(MAILBOX)
        code, output = await postroom(name, "backlog")
        assert (code, "symbolic links" in output) == (2, True), output
    two.unlink()
    assert await count(one) == 1


async def test_a_store_that_is_renamed_has_no_second_owner_while_the_first_runs(tmp_path: Path) -> None:
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SEND, str(one), "stay", stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await owner.stdout.readline() == b"sent\n"
    one.rename(two)
    with pytest.raises(UnusableStore, match="another name"):
        SqliteEventLog(two, MAILBOX)
    owner.kill()
    await within(owner.wait())
    os.rename(f"{one}-wal", f"{two}-wal")
    assert await count(two) == SENDS


async def test_a_process_uses_a_file_under_one_name_at_a_time(tmp_path: Path) -> None:
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    log = SqliteEventLog(one, MAILBOX)
    one.rename(two)
    with pytest.raises(UnusableStore, match="another name"):
        connect_reader(two)
    log.close()
    connect_reader(two).close()


@pytest.mark.extended
async def test_symbolic_links_share_owner_messages_and_read_models(tmp_path: Path) -> None:
    store, link = tmp_path / "store.db", tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(store)
    async with connect(str(store)) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"first"))
        code, errors = await send(link)
        assert code == 0, errors
        assert (await mailbox.get_backlog()).ready == 1 + SENDS
    code, output = await postroom(link, "views rebuild")
    assert code == 0, output
    code, output = await postroom(store, "search --json")
    assert (code, output.count('"topic"')) == (0, 1 + SENDS), output
    assert os.listdir(link.parent) == ["link.db"]


def test_descriptors_of_names_are_closed_with_the_last_connection(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        log = SqliteEventLog(tmp_path / f"{number}.db", MAILBOX)
        connect_reader(tmp_path / f"{number}.db").close()
        log.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- users and modes ---


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
async def test_a_file_that_other_users_may_write_is_refused(tmp_path: Path, suffix: str) -> None:
    store = tmp_path / "store.db"
    file = f"{store}{suffix}"
    os.close(os.open(file, os.O_CREAT))
    os.chmod(file, 0o666)
    with pytest.raises(UnusableStore, match=r"mode is 0666; run chmod 600"):
        async with connect(str(store)):
            pytest.fail("opened")
    assert os.stat(file).st_size == 0
    os.chmod(file, 0o600)
    await make_store(store)


async def test_the_database_of_an_application_that_others_may_read_is_used(tmp_path: Path) -> None:
    store = tmp_path / "shop.db"
    with sqlite3.connect(store) as connection:
        connection.execute("CREATE TABLE orders (id INTEGER)")
        MailboxOutbox().record(connection, NewMessage(topic="orders.placed", payload=b"1"))
    connection.close()
    store.chmod(0o644)
    async with connect(str(store)) as mailbox:
        (received,) = await mailbox.receive_messages("orders.placed", wait_ms=60_000)
        assert received.payload == b"1"


@pytest.mark.skipif(not IS_ROOT, reason="makes a file of another user")
async def test_a_store_that_another_user_made_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    store.touch(0o600)
    os.chown(store, 65_534, 65_534)
    with pytest.raises(UnusableStore, match="belongs to user 65534, not to user 0"):
        async with connect(str(store)):
            pytest.fail("opened")
    code, output = await postroom(store, "send orders 1")
    assert code == 2, output


AS_NOBODY = """
import os, sys
from postroom.adapters.cli.main import invoke

def run(store, command):
    return invoke(["--store", store, *command.split()])

own, other, *commands = sys.argv[1:]
for command in commands:  # imports what an installation of this user may not read
    run(own, command)
os.chdir("/")
os.setgid(65534); os.setuid(65534)
for command in commands:
    print("AS NOBODY", command, flush=True)
    print("EXIT", run(other, command), flush=True)
"""


@pytest.mark.skipif(not IS_ROOT, reason="becomes another user")
@pytest.mark.parametrize("folder_mode", [0o755, 0o700])
async def test_a_process_of_another_user_is_told_so(tmp_path: Path, folder_mode: int) -> None:
    folder = tmp_path / "shared"
    for each in (tmp_path, *list(tmp_path.parents)[:-2]):
        each.chmod(each.stat().st_mode | 0o055)  # of /dev/shm nothing is taken away
    await asyncio.to_thread(folder.mkdir)
    commands = ["send orders 1", "backlog", "verify", "topic list", "log show", "doctor"]
    async with connect(str(folder / "store.db")) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"first"))
        folder.chmod(folder_mode)
        _, output = await run(
            sys.executable, "-c", AS_NOBODY, tmp_path / "own.db", folder / "store.db", *commands
        )
    expected = "may not search" if folder_mode == 0o700 else "may not read"
    answers = output.split("AS NOBODY ")[1:]
    assert [each.partition("\n")[0] for each in answers] == commands, output
    for answer in answers:
        code = 1 if answer.startswith("doctor") else 2  # of which the tables are narrow
        assert (f"EXIT {code}" in answer, expected in " ".join(answer.split())) == (True, True), answer


async def test_the_lock_of_an_owner_is_not_taken_through_a_symbolic_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / f"store.db-owner-{MAILBOX}").symlink_to(precious)
    with pytest.raises(PostroomError, match="symbolic link"):
        async with connect(str(tmp_path / "store.db")):
            pytest.fail("opened")
    assert precious.read_text() == "content"


# -- read-only media ---


def read_only(folder: Path) -> str:
    return f"mount --bind {folder} {folder}; mount -o remount,ro,bind {folder};"


@pytest.mark.extended
@MOUNTS
@pytest.mark.parametrize("is_just_closed", [True, False])
async def test_a_closed_store_on_a_read_only_file_system_is_read(
    tmp_path: Path, is_just_closed: bool
) -> None:
    store = tmp_path / "store.db"
    await make_store(store)
    code, output = await postroom(store, "views rebuild")
    assert code == 0, output
    if not is_just_closed:  # readers leave an empty write-ahead log and its index
        for suffix in ("-wal", "-shm"):
            (tmp_path / f"store.db{suffix}").unlink()
    before = sorted(os.listdir(tmp_path))
    for command, expected in {
        "verify": 0,
        "search --json": 0,
        "log show": 0,
        "stats": 0,
        "send orders 1": 2,
    }.items():
        code, output = await postroom(store, command, mounts=read_only(tmp_path))
        assert code == expected, (command, output)
    assert sorted(os.listdir(tmp_path)) == before


@MOUNTS
async def test_a_store_that_was_not_closed_is_not_read_on_a_read_only_file_system(tmp_path: Path) -> None:
    live, store = tmp_path / "live.db", tmp_path / "copy" / "store.db"
    await asyncio.to_thread(store.parent.mkdir)
    async with connect(str(live)) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"first"))
        shutil.copy(live, store)
        shutil.copy(f"{live}-wal", f"{store}-wal")
    code, output = await postroom(store, "verify", mounts=read_only(store.parent))
    assert (code, "was not closed" in output) == (2, True), output


async def test_a_read_only_store_that_another_process_changes_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store.db"
    await make_store(store)
    with monkeypatch.context() as patch:  # as on a mount that is read-only here and writable elsewhere
        patch.setattr("postroom.adapters.sqlite.database.is_frozen", lambda _: True)
        reader = SqliteEventLog(store, MAILBOX, create_missing=False)
    assert len(list(reader.commits())) > 0
    await make_store(store)
    with pytest.raises(PostroomError, match="another process has changed the file"):
        list(reader.commits())
    reader.close()


# -- doctor ---


async def test_doctor_names_a_store_with_two_names(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    await make_store(store)
    os.link(store, tmp_path / "two.db")
    findings = run_checks(store_checks(str(store), "full", 10.0), 60.0)
    (name,) = [each for each in findings if each.check == "store"]
    assert (name.status, "2 names" in name.finding, "symbolic links" in name.advice) == (
        "failure",
        True,
        True,
    )
    assert stat.S_IMODE(store.stat().st_mode) == 0o600


async def test_a_reader_may_be_collected_while_another_one_opens_the_file(tmp_path: Path) -> None:
    store = tmp_path / "orders.db"
    assert await send(store) == (0, "")
    assert await asyncio.wait_for(run(sys.executable, "-c", COLLECT, store), 60) == (0, "[]\n")
