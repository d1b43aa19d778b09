"""`kill -9` of the ingester, of NATS and of PostgreSQL in turn while messages are published and ingested.

Every message whose publishing NATS acknowledged is stored, and stored once. Run as a module with a count it
tells what it saw: `python -m tests.integration.test_ingest_crashes 100000`.
"""

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import cycle
from pathlib import Path

import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import StreamConfig

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.ingest import open_ingester
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.queries import read_mailbox
from postroom.domain.errors import NotFound, Unavailable
from tests.integration.ingest_world import DURABLE, MAILBOX, STREAM, SUBJECT, namespace, stored
from tests.support.fork_server import popen
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer
from tests.support.stores import envelope
from tests.support.waiting import SECONDS

ROOT = Path(__file__).parents[2]
MESSAGES, KILLS = 2_000, 6
PUBLISHED_AT_ONCE = 64
ACK_WAIT_SECONDS = 2
OWNER_WAIT_MS = 20_000
PATIENCE_SECONDS = 300


class Figures(msgspec.Struct):
    """What one run saw."""

    published: int = 0
    kills: dict[str, int] = {}
    seconds: float = 0.0
    redelivered: int = 0


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path / "nats", sync_always=True) as server:
        yield server


async def test_killing_ingester_and_nats_loses_nothing_and_stores_nothing_twice(
    tmp_path: Path, nats_server: NatsServer
) -> None:
    await run(MESSAGES, KILLS, nats_server, str(tmp_path / "store.db"))


async def test_killing_ingester_nats_and_postgres_loses_nothing_and_stores_nothing_twice(
    nats_server: NatsServer, postgres_server: PostgresServer
) -> None:
    store = postgres_server.create_database()
    migrate_store(store)
    await run(MESSAGES, KILLS, nats_server, store, postgres_server)


async def run(
    count: int, kills: int, server: NatsServer, store: str, postgres: PostgresServer | None = None
) -> Figures:
    """Publish messages while something is killed every now and then; check what the archive holds then."""
    figures, began = Figures(), time.monotonic()
    ids = [f"order-{number}" for number in range(count)]
    with ingester_process(server.url, store) as ingester:
        victims = cycle(
            [
                ("ingester", ingester.restart),
                ("NATS", lambda: restart(server)),
                *([("PostgreSQL", lambda: restart(postgres))] if postgres is not None else []),
            ]
        )
        acked: set[str] = set()
        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            tasks.create_task(publish_all(server.url, ids, acked))
            for number in range(kills):
                while len(acked) < count * (number + 1) // (kills + 1):
                    await asyncio.sleep(0.01)
                name, kill = next(victims)
                kill()  # in this thread: a server ends with the thread that started it
                figures.kills[name] = figures.kills.get(name, 0) + 1
        assert acked == set(ids)
        figures.redelivered = await everything_is_acked(server.url)
    figures.published = len(acked)
    figures.seconds = time.monotonic() - began
    assert stored(store) == Counter(ids)
    with read_mailbox(store, MAILBOX) as reader:
        assert reader.verify_log().messages == count
    return figures


def restart(server: NatsServer | PostgresServer) -> None:
    server.kill()
    for tries_left in reversed(range(20)):
        try:
            server.start()
            return
        except Unavailable:  # processes of PostgreSQL that were killed may hold its memory for a moment
            if not tries_left:
                raise
            time.sleep(0.1)


async def publish_all(url: str, ids: list[str], acked: set[str]) -> None:
    """Publish an envelope of each id, again and again until the stream says that it has it."""
    client = await patiently_connected(url)
    await client.jetstream().add_stream(StreamConfig(name=STREAM, subjects=["acme.>"], duplicate_window=600))
    waiting = iter(ids)

    async def publish() -> None:
        for id_ in waiting:
            while id_ not in acked:
                try:
                    await client.jetstream().publish(
                        SUBJECT, envelope(id_), timeout=2, headers={"Nats-Msg-Id": id_}
                    )
                    acked.add(id_)
                except (NatsError, OSError, TimeoutError):
                    await asyncio.sleep(0.05)

    try:
        await asyncio.gather(*(publish() for _ in range(PUBLISHED_AT_ONCE)))
    finally:
        await client.close()


async def everything_is_acked(url: str) -> int:
    """Wait until the consumer has nothing left; return how many deliveries there were beyond the first."""
    client = await patiently_connected(url)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                with suppress(NatsError, TimeoutError):
                    info = await client.jetstream().consumer_info(STREAM, DURABLE)
                    if not info.num_pending and not info.num_ack_pending:
                        assert info.delivered is not None
                        return int(info.delivered.consumer_seq - info.delivered.stream_seq)
                await asyncio.sleep(0.1)
    finally:
        await client.close()


async def patiently_connected(url: str) -> Client:
    async def ignore(_: Exception) -> None:
        pass

    return await nats.connect(url, max_reconnect_attempts=-1, reconnect_time_wait=0.05, error_cb=ignore)


# -- the process that gets killed ---


class IngesterProcess:
    def __init__(self, url: str, store: str) -> None:
        self._command = [sys.executable, "-m", "tests.integration.test_ingest_crashes", "ingest", url, store]
        self.start()

    def start(self) -> None:
        self._process = popen(self._command, ROOT, stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        assert self._process.poll() is None, "the ingester ended by itself"
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(SECONDS)

    def restart(self) -> None:
        self.kill()
        self.start()


@contextmanager
def ingester_process(url: str, store: str) -> Iterator[IngesterProcess]:
    process = IngesterProcess(url, store)
    try:
        yield process
    finally:
        process.kill()


async def ingest(url: str, store: str) -> None:
    """Ingest, and begin again when the server was not there at the start, as a supervisor would."""
    what = namespace(url, store, ack_wait_seconds=ACK_WAIT_SECONDS, batch_size=100)
    while True:
        with suppress(Unavailable, NotFound):
            async with (
                open_mailbox(store, what.mailbox, mode="archive", wait_ms=OWNER_WAIT_MS) as postroom,
                open_ingester(what, postroom) as ingester,
            ):
                await ingester.run()
        await asyncio.sleep(0.1)


def main(count: int) -> None:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)  # PostgreSQL may run as a user of its own
        for kind in ("SQLite", "PostgreSQL"):
            server = opened.enter_context(NatsServer(folder / f"nats-{kind}", sync_always=True))
            postgres, store = None, str(folder / "store.db")
            if kind == "PostgreSQL":
                postgres = opened.enter_context(PostgresServer(folder / "postgres"))
                store = postgres.create_database()
                migrate_store(store)
            print(kind, asyncio.run(run(count, KILLS * 3, server, store, postgres)), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "ingest":
        asyncio.run(ingest(*sys.argv[2:]))
    else:
        main(int(sys.argv[1]))
