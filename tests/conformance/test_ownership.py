"""The ownership conformance suite on every adapter, and what only locks beyond a process can promise."""

import asyncio
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import LiteralString, NamedTuple

import psycopg
import pytest

from postroom.adapters.jetstream.store import JetStreamStore
from postroom.adapters.memory.store import MemoryOwnership
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.application.ports.lease_store import OwnerAddress, Ownership
from postroom.domain.errors import MailboxOwned
from tests.conformance.ownership import ONE, PATIENT_MS, OwnershipConformance
from tests.support.servers.postgres_proxy import Proxy
from tests.support.waiting import within

DEADLINE_SECONDS = 120


class TestMemoryOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self) -> MemoryOwnership:
        return MemoryOwnership()


class TestFileOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self, tmp_path: Path) -> FileOwnership:
        return FileOwnership(tmp_path / "store.db")


class TestPostgresOwnership(OwnershipConformance):
    @pytest.fixture
    def ownership(self, empty_database: str) -> PostgresOwnership:
        return PostgresOwnership(empty_database)


OWN_UNTIL_KILLED = """
import asyncio, sys
from postroom.adapters.jetstream.store import JetStreamStore
from postroom.adapters.postgres.ownership import PostgresOwnership
from postroom.adapters.sqlite.ownership import FileOwnership

kind, store = sys.argv[1:]

def jetstream(store):
    return JetStreamStore(store).ownership()

async def own():
    kinds = {"file": FileOwnership, "postgres": PostgresOwnership, "jetstream": jetstream}
    async with kinds[kind](store).acquire(
        "acme@one", "the other process", 0
    ):
        print("owned", flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""


class Shared(NamedTuple):
    """An ownership, and another process that has the mailbox."""

    ownership: Ownership
    other_process: "subprocess.Popen[str]"


@pytest.fixture(params=["file", "postgres", "jetstream"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Shared]:
    ownership: Ownership
    if request.param == "file":
        store = str(tmp_path / "store.db")
        ownership = FileOwnership(store)
    elif request.param == "jetstream":
        store = request.getfixturevalue("jetstream_store")
        ownership = JetStreamStore(store).ownership()
    else:
        store = request.getfixturevalue("empty_database")
        ownership = PostgresOwnership(store)
    command = [sys.executable, "-c", OWN_UNTIL_KILLED, request.param, store]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        yield Shared(ownership, process)
        process.kill()


async def test_another_process_is_turned_away_until_the_owner_is_killed(shared: Shared) -> None:
    with pytest.raises(MailboxOwned, match="owned by the other process"):
        async with shared.ownership.acquire(ONE, "this process", 0):
            pytest.fail("owned twice")
    shared.other_process.kill()
    async with shared.ownership.acquire(ONE, "this process", PATIENT_MS):
        pass


# -- PostgreSQL only ---


async def end_connections(url: str, name: str) -> None:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(
            "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = %s",
            (name,),
        )


async def fetch(url: str, query: LiteralString) -> object:
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        row = await (await connection.execute(query)).fetchone()
    return row and row[0]


async def owner_of(ownership: Ownership, mailbox: str) -> str:
    try:
        async with ownership.acquire(mailbox, "somebody who asks", 0):
            return ""
    except MailboxOwned as owned:
        return owned.owner


async def test_an_owner_whose_connection_was_lost_takes_its_lock_again(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", 0.005)
    ownership = PostgresOwnership(empty_database)
    holder: LiteralString = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
    async with asyncio.timeout(DEADLINE_SECONDS), ownership.acquire(ONE, "first", 0):
        lost = await fetch(empty_database, holder)
        await end_connections(empty_database, "first")
        # `owner_of` would take the lock itself if it came before the first owner.
        while await fetch(empty_database, holder) in (None, lost):
            await asyncio.sleep(0.01)
        assert await owner_of(ownership, ONE) == "first"
    assert await owner_of(ownership, ONE) == ""


async def test_an_owner_that_takes_its_lock_again_is_found_at_its_address_from_then_on(
    postgres_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", 0.005)
    ownership, address = PostgresOwnership(postgres_store), OwnerAddress("127.0.0.1:1", "certificate")
    holder: LiteralString = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
    async with asyncio.timeout(DEADLINE_SECONDS), ownership.acquire(ONE, "first", 0):
        await ownership.announce(ONE, address)
        lost = await fetch(postgres_store, holder)
        await end_connections(postgres_store, "first")
        while await fetch(postgres_store, holder) in (None, lost):
            await asyncio.sleep(0.01)
        assert await ownership.find(ONE) == address


async def test_an_owner_takes_its_lock_again_though_the_server_has_not_noticed_that_its_connection_was_lost(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", 0.005)
    holder: LiteralString = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted"
    with Proxy(empty_database) as proxy:
        ownership = PostgresOwnership(proxy.url)
        async with asyncio.timeout(DEADLINE_SECONDS), ownership.acquire(ONE, "first", 0):
            lost = await fetch(empty_database, holder)
            proxy.cut()
            while await fetch(empty_database, holder) in (lost, None):
                await asyncio.sleep(0.01)
            assert await owner_of(ownership, ONE) == "first"
        assert await owner_of(ownership, ONE) == ""


async def test_a_lock_that_somebody_else_took_meanwhile_is_left_to_them(
    empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.adapters.postgres.ownership.CHECK_SECONDS", 0.5)
    ownership = PostgresOwnership(empty_database)
    has_seen_it: LiteralString = (
        "SELECT count(*) = 1 FROM pg_stat_activity "
        "WHERE application_name = 'first' AND query LIKE '%pg_locks%'"
    )
    taken, released = asyncio.Event(), asyncio.Event()

    async def take_over() -> None:
        async with ownership.acquire(ONE, "second", PATIENT_MS):
            taken.set()
            await within(released.wait())

    async with (
        asyncio.timeout(DEADLINE_SECONDS),
        ownership.acquire(ONE, "first", 0),
        asyncio.TaskGroup() as tasks,
    ):
        tasks.create_task(take_over())
        while not taken.is_set():  # the first is sometimes quicker, though the second asks far more often
            await end_connections(empty_database, "first")
            await asyncio.sleep(0.1)
        while not await fetch(empty_database, has_seen_it):
            await asyncio.sleep(0.01)
        assert await owner_of(ownership, ONE) == "second"
        released.set()
    assert await owner_of(ownership, ONE) == ""


async def test_a_long_name_of_an_owner_is_cut_between_characters(empty_database: str) -> None:
    ownership = PostgresOwnership(empty_database)
    async with ownership.acquire(ONE, "process 1 on " + "x" * 100, 0):
        assert await owner_of(ownership, ONE) == "process 1 on " + "x" * 50


# -- files only ---


async def test_a_long_name_of_an_owner_before_leaves_no_trace_in_the_next(tmp_path: Path) -> None:
    ownership = FileOwnership(tmp_path / "store.db")
    async with ownership.acquire(ONE, "a name that is quite long", 0):
        pass
    async with ownership.acquire(ONE, "short", 0):
        with pytest.raises(MailboxOwned) as refused:
            async with ownership.acquire(ONE, "third", 0):
                pytest.fail("owned twice")
    assert refused.value.owner == "short"


async def test_the_lock_file_is_for_its_owner_only(tmp_path: Path) -> None:
    async with FileOwnership(tmp_path / "store.db").acquire(ONE, "first", 0):
        pass
    (file,) = list(tmp_path.iterdir())  # noqa: ASYNC240  nothing else runs in this loop
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
