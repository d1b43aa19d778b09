"""The subject keys conformance suite on every adapter, and what is particular to files and master keys."""

import os
import shlex
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from time import sleep

import pytest

from postroom.adapters.subject_keys import master_key, postgres
from postroom.adapters.subject_keys.master_key import (
    LocalMasterKey,
    create_master_key,
    master_key_of,
    read_master_key,
    run_master_key_command,
)
from postroom.adapters.subject_keys.memory import MemorySubjectKeys
from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys
from postroom.adapters.subject_keys.sqlite import SqliteSubjectKeys, create_subject_keys
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound, PostroomError, Unavailable
from tests.conformance.subject_keys import NOW, SubjectKeysConformance

MASTER = LocalMasterKey(bytes(range(32)))
OTHER = LocalMasterKey(bytes(32))


class TestMemorySubjectKeys(SubjectKeysConformance):
    @pytest.fixture
    def keys(self) -> MemorySubjectKeys:
        return MemorySubjectKeys(MASTER, lambda: NOW)


class TestSqliteSubjectKeys(SubjectKeysConformance):
    @pytest.fixture
    def keys(self, tmp_path: Path) -> SqliteSubjectKeys:
        return create(tmp_path / "keys.db")


class TestPostgresSubjectKeys(SubjectKeysConformance):
    @pytest.fixture
    def keys(self, keys_database: str) -> PostgresSubjectKeys:
        postgres.create_subject_keys(keys_database, MASTER)
        return PostgresSubjectKeys(keys_database, MASTER, lambda: NOW)


def create(path: Path) -> SqliteSubjectKeys:
    create_subject_keys(path, MASTER)
    return SqliteSubjectKeys(path, MASTER, lambda: NOW)


def data_key(path: Path) -> bytes:
    with closing(sqlite3.connect(path)) as connection:
        key: bytes = connection.execute("SELECT data_key FROM subjects").fetchone()[0]
    return key


def test_the_file_of_a_key_store_is_its_owners_and_is_never_overwritten(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        create(tmp_path / "keys.db").get_or_create(["alice"])
    finally:
        os.umask(umask)
    assert (tmp_path / "keys.db").stat().st_mode & 0o7777 == 0o600
    with pytest.raises(InvalidRequest, match="never overwritten"):
        create_subject_keys(tmp_path / "keys.db", MASTER)
    assert [each.name for each in tmp_path.iterdir()] == ["keys.db"]


def test_a_destroyed_key_is_in_no_byte_of_the_folder(tmp_path: Path) -> None:
    keys = create(tmp_path / "keys.db")
    names = [f"subject-{number}" for number in range(200)]  # of several pages
    pseudonym = keys.get_or_create(["alice"])["alice"].pseudonym
    keys.get_or_create(names)
    wrapped, index = data_key(tmp_path / "keys.db"), MASTER.index("alice")
    content = (tmp_path / "keys.db").read_bytes()
    assert wrapped in content
    assert index in content
    assert b"alice" not in content
    keys.destroy(pseudonym, NOW)
    keys.mark_recorded(pseudonym)
    after = b"".join(each.read_bytes() for each in tmp_path.iterdir())
    assert wrapped not in after
    assert index not in after
    assert len(keys.get(names)) == len(names)


def test_another_master_key_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    create(tmp_path / "keys.db").get_or_create(["alice"])
    before = (tmp_path / "keys.db").read_bytes()
    other = SqliteSubjectKeys(tmp_path / "keys.db", OTHER, lambda: NOW)
    for use in (
        lambda: other.get_or_create(["bob"]),
        lambda: other.find("alice"),
        lambda: other.destroy("subject:1", NOW),
    ):
        with pytest.raises(InvalidRequest, match=f"{MASTER.key_id}, not by {OTHER.key_id}"):
            use()
    assert (tmp_path / "keys.db").read_bytes() == before


def test_an_altered_key_is_reported(tmp_path: Path) -> None:
    keys = create(tmp_path / "keys.db")
    keys.get_or_create(["alice"])
    with closing(sqlite3.connect(tmp_path / "keys.db")) as connection, connection:
        connection.execute("UPDATE subjects SET data_key = zeroblob(124)")
    with pytest.raises(IntegrityFailure, match="was altered in the key store"):
        keys.get_or_create(["alice"])


@pytest.mark.parametrize("damage", ["missing", "garbage", "empty", "folder", "locked"])
def test_a_key_store_that_cannot_be_used_is_reported(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.db"
    keys = create(path)
    monkeypatch.setattr("postroom.adapters.subject_keys.sqlite.BUSY_TIMEOUT_SECONDS", 0.05)
    lock = sqlite3.connect(path, isolation_level=None)
    try:
        if damage == "locked":
            lock.execute("BEGIN EXCLUSIVE")
        else:
            path.unlink()
        if damage == "folder":
            path.mkdir()
        elif damage in ("garbage", "empty"):
            path.write_bytes(b"x" * 10_000 if damage == "garbage" else b"")
        with pytest.raises(NotFound if damage == "missing" else Unavailable, match=r"keys\.db"):
            keys.get_or_create(["alice"])
    finally:
        lock.close()


def test_processes_that_meet_a_new_subject_at_once_agree_on_its_key(tmp_path: Path) -> None:
    keys = create(tmp_path / "keys.db")
    names = [f"subject-{number}" for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: keys.get_or_create(names), range(4)))
    assert len({tuple(each.pseudonym for each in result.values()) for result in results}) == 1


def test_a_process_killed_while_it_adds_subjects_leaves_a_store_that_works(tmp_path: Path) -> None:
    create(tmp_path / "keys.db")
    program = (
        "import sys; from pathlib import Path; from tests.conformance.test_subject_keys import *\n"
        "keys = SqliteSubjectKeys(Path(sys.argv[1]), MASTER, lambda: NOW)\n"
        "for n in range(10_000): keys.get_or_create([str(n)]); print(n, flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "keys.db")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        added = [process.stdout.readline().strip() for _ in range(5)]
        process.kill()
    keys = SqliteSubjectKeys(tmp_path / "keys.db", MASTER, lambda: NOW)
    assert sorted(keys.get(added)) == added
    keys.get_or_create(["another"])


def test_a_master_key_is_read_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "master"
    key = create_master_key(path)
    assert read_master_key(path).key_id == key.key_id
    with pytest.raises(InvalidRequest, match="never overwritten"):
        create_master_key(path)
    for mode in (0o640, 0o604):
        path.chmod(mode)
        with pytest.raises(InvalidRequest, match="chmod 600"):
            read_master_key(path)


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "g" * 64, "\ud83d"], ids=repr)
def test_a_malformed_master_key_is_refused_without_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "master"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    path.chmod(0o600)
    for use in (lambda: read_master_key(path), lambda: master_key_of({"KEY": text}, "KEY")):
        with pytest.raises(InvalidRequest, match="64 hexadecimal digits") as error:
            use()
        assert not text or text not in str(error.value)


def test_a_master_key_that_is_missing_is_reported(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for use, problem in (
        (lambda: read_master_key(tmp_path / "none"), "no master key"),
        (lambda: read_master_key(tmp_path), "not a file|can't be read"),
        (lambda: read_master_key(tmp_path / "pipe"), "not a file"),
        (lambda: master_key_of({}, "POSTROOM_KEY"), "POSTROOM_KEY"),
    ):
        with pytest.raises(PostroomError, match=problem):
            use()


def test_the_environment_and_a_file_of_one_key_are_the_same_key(tmp_path: Path) -> None:
    key = create_master_key(tmp_path / "master")
    text = (tmp_path / "master").read_text()
    same = master_key_of({"KEY": f" {text.upper()} "}, "KEY")
    assert (same.key_id, same.public_key, same.index("alice")) == (
        key.key_id,
        key.public_key,
        key.index("alice"),
    )
    assert text.strip() not in repr(key)


def command_of(program: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", program])


def test_a_command_prints_the_same_key_as_a_file(tmp_path: Path) -> None:
    key = create_master_key(tmp_path / "master key")
    assert run_master_key_command(shlex.join(["cat", str(tmp_path / "master key")])).key_id == key.key_id


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", "is empty"),
        ("echo 'a", "is malformed"),
        ("/nowhere/vault --token=hidden", "/nowhere/vault can't be run: No such file"),
        ("echo a\0b", "can't be run"),
        ("false --token=hidden", "false failed with exit status 1"),
        (command_of("print('hidden' * 100_000)"), "64 hexadecimal digits|exit status"),
        (command_of("print('hidden')"), "64 hexadecimal digits"),
        (command_of("import os; os.close(1); os.kill(os.getpid(), 9)"), "exit status -9"),
    ],
)
def test_a_command_that_prints_no_key_is_reported_without_its_output_and_arguments(
    command: str, problem: str
) -> None:
    with pytest.raises((InvalidRequest, Unavailable), match=problem) as error:
        run_master_key_command(command)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize("program", ["sleep 60", "sleep 60 & sleep 60", "exec >&-; sleep 60"])
def test_a_command_that_does_not_end_is_killed_with_its_children(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(master_key, "COMMAND_SECONDS", 0.2)
    groups: list[int] = []
    pool = ThreadPoolExecutor(1)
    kill = os.killpg

    def record_and_kill(group: int, how: int) -> None:
        groups.append(group)
        kill(group, how)

    monkeypatch.setattr(os, "killpg", record_and_kill)
    with pytest.raises(Unavailable, match=r"did not end within 0\.2 s"):
        pool.submit(run_master_key_command, shlex.join(["sh", "-c", program])).result(20)
    pool.shutdown()
    for group in groups:
        for _ in range(1_000):  # until the killed processes are reaped
            with suppress(ProcessLookupError):
                kill(group, 0)
                sleep(0.01)
                continue
            break
        with pytest.raises(ProcessLookupError):
            kill(group, 0)
