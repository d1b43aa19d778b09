"""A capture loses nothing and keeps the order of aggregates when it, NATS or PostgreSQL end or pause."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest

from postroom.adapters.compose.outbox import NatsSettings
from postroom.adapters.nats.connection import connect
from postroom.adapters.postgres.migrate import migrate
from tests.support.captures import LOGICAL, ServiceDatabase
from tests.support.fork_server import popen, shared_server
from tests.support.outboxes import SUBJECT, column, numbers
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import pause
from tests.support.waiting import SECONDS, wait_until

pytestmark = pytest.mark.extended

SCRIPT = Path(sys.executable).with_name("postroom")
ORDERS = 5
ROUNDS = 4


async def make_stream(url: str) -> None:
    async with connect(NatsSettings(url), "test") as client:
        await client.jetstream().add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])


async def messages(url: str) -> list[tuple[str, bytes]]:
    """Return ids and payloads of the messages on the stream."""
    async with connect(NatsSettings(url), "test") as client:
        stream = client.jetstream()
        count = (await stream.stream_info("SEA_EVENTS")).state.messages
        subscription = await stream.subscribe(SUBJECT, stream="SEA_EVENTS", ordered_consumer=True)
        answers = [await subscription.next_msg(timeout=10) for _ in range(count)]
        return [((each.headers or {})["Nats-Msg-Id"], each.data) for each in answers]


async def count_messages(url: str) -> int:
    async with connect(NatsSettings(url), "test") as client:
        return int((await client.jetstream().stream_info("SEA_EVENTS")).state.messages)


class Captures:
    """Capture processes of one table, with a settings file of their own."""

    def __init__(self, folder: Path, database: ServiceDatabase, nats_url: str) -> None:
        self._folder = folder
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        (folder / "postroom.toml").write_text(
            f'[messaging]\ndatabase = "{database.url}"\ncontext = "sea"\n[nats]\nurl = "{nats_url}"\n'
            f'[outbox]\npoll = "20ms"\nbatch = 50\nclaim = "20s"\n'
            f'[capture]\ntable = "events"\nslot = "{database.settings.slot}"\n'
        )

    def run(self, *arguments: str) -> bytes:
        """Return what a command prints."""
        command = [str(SCRIPT), *arguments]
        done = shared_server().run(command, self._folder, self._environment, b"", 240)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    @contextmanager
    def start(self, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a capture for as long as the context lasts, unless it ends earlier."""
        process = popen(
            [SCRIPT, "outbox", "capture", "--json", "--log-level", "error", *arguments],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            process.communicate()


def insert_round(database: ServiceDatabase, n: int) -> None:
    """Insert 50 events of each order, in 10 transactions of 25 rows, of which two are rolled back."""
    for first in range(n * 50, n * 50 + 50, 5):
        with psycopg.connect(database.url) as connection, connection.cursor() as cursor:
            cursor.executemany(
                "INSERT INTO events (aggregate_id, payload) VALUES (%s, %s)",
                [
                    (f"o-{order}", f'{{"n": {k}, "order": "o-{order}"}}')
                    for k in range(first, first + 5)
                    for order in range(ORDERS)
                ],
            )
        with psycopg.connect(database.url) as connection:
            connection.execute("INSERT INTO events (aggregate_id, payload) VALUES ('o-0', '{\"n\": -1}')")
            connection.rollback()


def check(database: ServiceDatabase, nats_url: str, rounds: int) -> None:
    """See that the stream has each committed row once, under its id, in the order of its aggregate."""
    total = rounds * 50 * ORDERS
    wait_until(lambda: asyncio.run(count_messages(nats_url)) >= total)
    stored = asyncio.run(messages(nats_url))
    assert sorted(id_ for id_, _ in stored) == sorted(
        str(id_) for (id_,) in database.execute("SELECT id FROM events")
    )
    for order in range(ORDERS):
        assert numbers([payload for _, payload in stored], f"o-{order}") == list(range(rounds * 50))
    assert column(database.url, "id") == []


def is_available(database: ServiceDatabase) -> bool:
    try:
        database.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True


@pytest.fixture
def database() -> Iterator[tuple[PostgresServer, ServiceDatabase]]:
    with postgres_folder() as folder, PostgresServer(folder, LOGICAL) as server:
        url = server.create_database()
        migrate(url, "messaging")
        yield server, ServiceDatabase(url)


def test_captures_nats_and_postgresql_that_are_killed_and_paused_lose_and_reorder_nothing(
    database: tuple[PostgresServer, ServiceDatabase], tmp_path: Path
) -> None:
    server, service = database
    with NatsServer(tmp_path / "nats", sync_always=True) as nats:
        asyncio.run(make_stream(nats.url))
        captures = Captures(tmp_path, service, nats.url)
        with captures.start("--create") as creating:
            out, _ = creating.communicate(timeout=240)
        assert out == b'{"slot":"%s","created":true}\n' % service.settings.slot.encode()
        with captures.start() as first, captures.start() as second:
            insert_round(service, 0)
            wait_until(lambda: asyncio.run(count_messages(nats.url)) > 20)
            for process in (first, second):  # one reads, the other waits
                process.kill()
                process.wait(SECONDS)
        with captures.start() as first, captures.start() as second:
            insert_round(service, 1)
            nats.kill()
            time.sleep(0.3)
            nats.start()
            insert_round(service, 2)
            server.kill()
            server.start()
            insert_round(service, 3)
            check(service, nats.url, 4)
            (pid,) = (pid for (pid,) in service.execute("SELECT pid FROM pg_stat_replication"))
            os.kill(pid, signal.SIGKILL)  # the server ends all connections and recovers
            wait_until(lambda: is_available(service))
            insert_round(service, 4)
            check(service, nats.url, 5)
            assert (first.poll(), second.poll()) == (None, None)


def test_a_paused_capture_is_replaced_and_reorders_nothing_when_it_resumes(
    database: tuple[PostgresServer, ServiceDatabase], tmp_path: Path
) -> None:
    _, service = database
    with NatsServer(tmp_path / "nats") as nats:
        asyncio.run(make_stream(nats.url))
        captures = Captures(tmp_path, service, nats.url)
        captures.run("outbox", "capture", "--create")
        with captures.start() as first:
            insert_round(service, 0)
            wait_until(lambda: asyncio.run(count_messages(nats.url)) > 20)
            pause(first.pid)
            with captures.start():
                insert_round(service, 1)
                wait_until(lambda: asyncio.run(count_messages(nats.url)) == 2 * 50 * ORDERS)
                first.send_signal(signal.SIGCONT)
                insert_round(service, 2)
                check(service, nats.url, 3)


def test_a_capture_that_gets_sigterm_ends_at_once_and_reports_its_counts(
    database: tuple[PostgresServer, ServiceDatabase], tmp_path: Path
) -> None:
    _, service = database
    with NatsServer(tmp_path / "nats") as nats:
        asyncio.run(make_stream(nats.url))
        captures = Captures(tmp_path, service, nats.url)
        captures.run("outbox", "capture", "--create")
        with captures.start() as process:
            insert_round(service, 0)
            wait_until(lambda: asyncio.run(count_messages(nats.url)) == 50 * ORDERS)
            process.terminate()
            out, _ = process.communicate(timeout=240)
        assert (process.returncode, out) == (0, b'{"published":250,"held":0}\n')
        insert_round(service, 1)
        with captures.start("--once") as process:
            out, _ = process.communicate(timeout=240)
        assert (process.returncode, out) == (0, b'{"published":250,"held":0}\n')
        check(service, nats.url, 2)
        backlog = msgspec.json.decode(captures.run("outbox", "backlog", "--json"))
        slot = backlog.pop("slot")
        assert backlog == {"context": "sea", "count": 0, "oldest_at": None}
        assert slot.keys() == {"slot", "active", "lag_bytes", "retained_bytes", "safe_bytes"}
        assert slot["slot"] == service.settings.slot
        assert b"retained_bytes" in captures.run("outbox", "backlog")
