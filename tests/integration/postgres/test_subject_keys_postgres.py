"""Key stores in PostgreSQL, which owners on several hosts share."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

import psycopg
import pytest

from postroom.adapters.compose import OwnerSettings, open_mailbox
from postroom.adapters.compose.erasures import Erasures
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.subject_keys import postgres
from postroom.adapters.subject_keys.master_key import LocalMasterKey
from postroom.adapters.subject_keys.postgres import PostgresSubjectKeys, create_subject_keys
from postroom.application.erasure.erase_subject import ErasureRecord, ErasureSettings
from postroom.application.messages import NewMessage
from postroom.domain.errors import IntegrityFailure, InvalidRequest, NotFound, Saturated, Unavailable
from tests.conformance.subject_keys import NOW
from tests.support.erasure import contains, files_with, new_erasure
from tests.support.servers.postgres_proxy import Proxy

MASTER, OTHER = LocalMasterKey(bytes(range(32))), LocalMasterKey(bytes(32))
MAILBOX = "acme@one"
NAMES = [f"subject-{number}" for number in range(50)]


def open_keys(url: str) -> PostgresSubjectKeys:
    return PostgresSubjectKeys(url, MASTER, lambda: NOW)


@pytest.fixture
def url(keys_database: str) -> str:
    create_subject_keys(keys_database, MASTER)
    return keys_database


@pytest.fixture
def proxy(keys_database: str) -> Iterator[Proxy]:
    with Proxy(keys_database) as opened:
        yield opened


def erase(settings: ErasureSettings, store: str, subject: str | None) -> list[ErasureRecord]:
    """Erase a subject, or complete the erasures that are pending."""
    erasures = Erasures(store, [MAILBOX], settings, OwnerSettings(erasure=settings))
    subjects = erasures.list_pending() if subject is None else [erasures.preview(subject).subject]
    return [asyncio.run(erasures.erase(each)) for each in subjects]


def test_processes_that_meet_new_subjects_at_once_agree_on_their_keys(url: str) -> None:
    with ThreadPoolExecutor(4) as pool:  # each in another order
        results = list(
            pool.map(lambda n: open_keys(url).get_or_create(NAMES[n:] + NAMES[:n]), range(0, 40, 10))
        )
    assert len({tuple(result[name].pseudonym for name in NAMES) for result in results}) == 1


def test_a_key_destroyed_by_one_process_is_in_use_by_none_and_others_are_read_meanwhile(url: str) -> None:
    keys, other = open_keys(url), open_keys(url)
    pseudonyms = {name: key.pseudonym for name, key in keys.get_or_create(NAMES).items()}
    last, is_over = pseudonyms[NAMES[-1]], Event()

    def read() -> int:
        reader, count = open_keys(url), 0
        while not is_over.is_set():
            count += reader.resolve([last])[last] is not None
            assert len(reader.get_or_create(NAMES[-1:])) == 1
        return count

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        try:
            for name in NAMES[:20]:
                keys.destroy(pseudonyms[name], NOW)
                assert other.resolve([pseudonyms[name]]) == {pseudonyms[name]: None}
                keys.mark_recorded(pseudonyms[name])
        finally:
            is_over.set()
        assert all(each.result(30) for each in readers)
    assert [each.pseudonym for each in other.list_subjects()] == list(pseudonyms.values())
    assert other.get_or_create(NAMES[:1])[NAMES[0]].pseudonym not in pseudonyms.values()


def test_a_destroyed_key_is_in_no_table_file_whatever_transactions_are_open(url: str) -> None:
    keys = open_keys(url)
    pseudonym = keys.get_or_create(["alice", *NAMES])["alice"].pseudonym
    with psycopg.connect(url) as older, psycopg.connect(url, autocommit=True) as connection:
        folder = Path((connection.execute("SHOW data_directory").fetchone() or ("",))[0])
        if not os.access(folder, os.R_OK):
            pytest.skip("The files of this PostgreSQL server can't be read.")
        older.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        older.execute("SELECT count(*) FROM postroom_keys.master_key")
        (wrapped,) = connection.execute(
            "SELECT data_key FROM postroom_keys.subjects WHERE pseudonym = %s", [pseudonym]
        ).fetchone() or (b"",)
        connection.execute("CHECKPOINT")
        assert _files_with(folder, wrapped)
        assert _files_with(folder, MASTER.index("alice"))
        keys.destroy(pseudonym, NOW)
        keys.mark_recorded(pseudonym)
        connection.execute("CHECKPOINT")
        assert _files_with(folder, wrapped) == []
        assert _files_with(folder, MASTER.index("alice")) == []
    assert len(keys.get(NAMES)) == len(NAMES)


def _files_with(folder: Path, content: bytes) -> list[str]:
    """Return the files with a content, other than those of the write-ahead log."""
    return [str(path) for path, data in _read_files(folder / "base") if content in data]


def _read_files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield each file under a folder of a running server, which may remove a file at any moment."""
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError, IsADirectoryError):
            yield path, path.read_bytes()


async def test_a_store_in_postgres_never_contains_what_is_encrypted_and_its_key_is_gone_after_an_erasure(
    postgres_store: str, keys_database: str, tmp_path: Path
) -> None:
    settings = new_erasure(tmp_path, keys=keys_database)
    message = NewMessage(
        topic="orders",
        payload=b"order-of-alice",
        principal="Alice-Quentin",
        attrs={"email": "alice@example.org"},
    )
    plain = NewMessage(topic="others", payload=b"text-in-the-clear", principal="principal-in-the-clear")
    async with open_mailbox(postgres_store, MAILBOX, erasure=settings) as mailbox:
        await mailbox.send_batch([message] * 3 + [plain])
        await mailbox.ack_messages([each.receipt for each in await mailbox.receive_messages("orders")][:1])
        await mailbox.engine.take_snapshot(whole=True)
        await asyncio.to_thread(rebuild_projections, postgres_store, runner=LocalTaskRunner())
    with psycopg.connect(keys_database) as connection:
        (wrapped,) = connection.execute("SELECT data_key FROM postroom_keys.subjects").fetchone() or (b"",)
    texts = ["Alice-Quentin", "order-of-alice", "alice@example.org"]
    erasures = Erasures(postgres_store, [MAILBOX], settings, OwnerSettings(erasure=settings))
    for is_erased in (False, True):
        if is_erased:
            await erasures.erase(erasures.preview("Alice-Quentin").subject)
        for url in (postgres_store, keys_database):
            content = _content_of(url)
            assert not any(contains(content, text) for text in texts)
            assert contains(content, "principal-in-the-clear") == (url == postgres_store)
            assert (wrapped in content) == (url == keys_database and not is_erased)


def _content_of(url: str) -> bytes:
    """Return the files of a database, and the rows of all tables, as these may be compressed."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CHECKPOINT")
        (folder,) = connection.execute(
            "SELECT current_setting('data_directory') || '/base/' || oid FROM pg_database "
            "WHERE datname = current_database()"
        ).fetchone() or ("",)
        if not os.access(folder, os.R_OK):
            pytest.skip("The files of this PostgreSQL server can't be read.")
        tables = connection.execute(
            "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname LIKE 'postroom%'"
        ).fetchall()
        rows = [
            str(row).encode()
            for (table,) in tables
            for row in connection.execute(f"SELECT each::text FROM {table} AS each").fetchall()
        ]
    return b"\n".join([*(data for _, data in _read_files(Path(folder))), *rows])


def test_a_database_that_is_no_key_store_or_has_another_master_key_is_refused(
    empty_database: str, keys_database: str
) -> None:
    secret = keys_database.replace("postgres@", "postgres:hidden@")
    with pytest.raises(Unavailable, match="postroom migrate --keys URL"):
        create_subject_keys(empty_database, MASTER)
    with pytest.raises(NotFound, match="postroom erasure init") as error:
        open_keys(secret).get(["alice"])
    assert "hidden" not in str(error.value) + repr(open_keys(secret))
    create_subject_keys(keys_database, MASTER)
    with pytest.raises(InvalidRequest, match="never overwritten"):
        create_subject_keys(keys_database, OTHER)
    other = PostgresSubjectKeys(keys_database, OTHER, lambda: NOW)
    with pytest.raises(InvalidRequest, match=f"{MASTER.key_id}, not by {OTHER.key_id}"):
        other.get_or_create(["alice"])
    assert open_keys(keys_database).list_subjects() == []


def test_an_altered_key_is_reported(url: str) -> None:
    keys = open_keys(url)
    keys.get_or_create(["alice"])
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE postroom_keys.subjects SET data_key = decode(repeat('00', 124), 'hex')")
    with pytest.raises(IntegrityFailure, match="was altered in the key store"):
        keys.get_or_create(["alice"])


def test_a_lost_connection_is_opened_again_and_a_missing_server_is_reported(proxy: Proxy) -> None:
    create_subject_keys(proxy.url, MASTER)
    keys = open_keys(proxy.url)
    pseudonym = keys.get_or_create(["alice"])["alice"].pseudonym
    for use in (
        lambda: keys.get_or_create(["bob"]),
        lambda: keys.destroy(pseudonym, NOW),
        lambda: keys.mark_recorded(pseudonym),
    ):
        proxy.cut()
        use()
    assert keys.find("alice") is None
    with Proxy(proxy.url) as gone:
        pass
    with pytest.raises(Unavailable, match="can't be reached"):
        open_keys(gone.url).get(["alice"])


async def test_a_server_that_does_not_answer_is_reported_in_time_and_nothing_is_stored_meanwhile(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(postgres, "PAUSE_SECONDS", 0.2)
    (tmp_path / "secrets").mkdir()
    erasure = new_erasure(tmp_path / "secrets", keys=f"{proxy.url}?connect_timeout=2")
    store = tmp_path / "store.db"
    async with asyncio.timeout(25), open_mailbox(str(store), erasure=erasure) as mailbox:
        await mailbox.send_message(
            NewMessage(topic="orders", payload=b"first-order", principal="Alice-Quentin")
        )
        proxy.hold_requests()
        for _ in range(3):  # an open connection, a new one, and none, shortly after a failure
            with pytest.raises(Unavailable, match=r"does not answer|did not answer|can't be reached"):
                await mailbox.send_message(
                    NewMessage(topic="orders", payload=b"second-order", principal="Alice-Quentin")
                )
        with pytest.raises(Saturated, match=r"answer|can't be reached"):
            await mailbox.receive_messages("orders")
        await mailbox.send_message(NewMessage(topic="others", payload=b"in the clear"))
        assert (await mailbox.get_backlog()).ready == 2
        proxy.release()
        monkeypatch.setattr(postgres, "TIMEOUT_SECONDS", 5.0)
        await asyncio.sleep(postgres.PAUSE_SECONDS)
        (received,) = await mailbox.receive_messages("orders")
        assert (received.payload, received.principal) == (b"first-order", "Alice-Quentin")
    assert files_with(tmp_path, ["Alice-Quentin", "first-order", "second-order"]) == {}


def test_an_erasure_is_completed_after_a_kill_and_after_the_key_store_was_restored(
    keys_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secrets").mkdir()
    settings, store = new_erasure(tmp_path / "secrets", keys=keys_database), str(tmp_path / "store.db")

    async def send() -> None:
        async with open_mailbox(store, MAILBOX, erasure=settings) as mailbox:
            await mailbox.send_batch(
                [NewMessage(topic="orders", payload=b"x", principal=name) for name in ("alice", "bob")]
            )

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(send())
    with psycopg.connect(keys_database) as connection:
        connection.execute("CREATE TABLE backup AS TABLE postroom_keys.subjects")
    process = os.fork()
    if process == 0:  # dies by its own signal, after the key was destroyed
        monkeypatch.setattr(Erasures, "_remove", kill)
        erase(settings, store, "alice")
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(process, 0)[1]) == signal.SIGKILL
    (record,) = erase(settings, store, None)
    assert record.removed == 1
    erasures = Erasures(store, [MAILBOX], settings, OwnerSettings(erasure=settings))
    assert (erasures.verify().records, erasures.verify().erased) == (1, 1)
    with psycopg.connect(keys_database) as connection:
        connection.execute("DELETE FROM postroom_keys.subjects")
        connection.execute("INSERT INTO postroom_keys.subjects OVERRIDING SYSTEM VALUE TABLE backup")
    with pytest.raises(IntegrityFailure, match="erase --pending"):
        erasures.verify()
    assert erase(settings, store, None) == [record]
    assert (erasures.verify().records, erasures.list_pending()) == (1, [])
