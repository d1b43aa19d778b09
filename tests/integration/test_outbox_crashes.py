"""Nothing is lost, doubled or put out of order when relays, NATS or PostgreSQL end without warning."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import psycopg
import pytest

from postroom.adapters.compose.connect import connect as connect_mailbox
from postroom.adapters.compose.outbox import MailboxTarget, MessagingSettings, NatsSettings, open_relay
from postroom.adapters.nats.connection import connect
from postroom.adapters.postgres.messaging.outbox import Outbox
from postroom.adapters.postgres.migrate import migrate
from tests.support.fork_server import popen
from tests.support.outboxes import SUBJECT, column, numbers, order_placed
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.process import pause
from tests.support.waiting import SECONDS, wait_until

SCRIPT = Path(sys.executable).with_name("postroom")
AGGREGATES = [f"o-{n}" for n in range(10)]
DYING_RELAY = """
import asyncio, os, signal, sys
from postroom.adapters.compose import brokers, outbox as wiring
from postroom.adapters.nats import publisher

left = int(sys.argv[3])

def dying(kind):
    class DyingPublisher(kind):
        async def publish(self, *message):
            global left
            published = await super().publish(*message)
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return published

    return DyingPublisher

async def main():
    publisher.JetStreamPublisher = dying(publisher.JetStreamPublisher)
    brokers.MailboxPublisher = dying(brokers.MailboxPublisher)
    messaging = wiring.MessagingSettings(sys.argv[1], "sea")
    settings = wiring.OutboxSettings(batch=int(sys.argv[4]))
    url = sys.argv[2]
    target = wiring.NatsSettings(url) if url.startswith("nats:") else wiring.MailboxTarget(address=url)
    async with wiring.open_relay(messaging, target, settings) as relay:
        while await relay.relay_once():
            pass

asyncio.run(main())
"""
"""A relay that dies when the stream has stored its n-th event, and before that is noted."""


class Relays:
    """Relay processes of one outbox, with a settings file of their own."""

    def __init__(self, folder: Path, database: str, nats_url: str) -> None:
        self._folder = folder
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        (folder / "postroom.toml").write_text(
            f'[messaging]\ndatabase = "{database}"\ncontext = "sea"\n[nats]\nurl = "{nats_url}"\n'
            '[outbox]\npoll = "20ms"\nbatch = 50\n'
        )

    @contextmanager
    def start(self) -> Iterator["subprocess.Popen[bytes]"]:
        """Run a relay for as long as the context lasts, unless it dies earlier."""
        process = popen(
            [SCRIPT, "outbox", "relay", "--json", "--log-level", "error"],
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


async def make_stream(url: str) -> None:
    async with connect(NatsSettings(url), "test") as client:
        await client.jetstream().add_stream(name="SEA_EVENTS", subjects=["sea.event.>"])


async def relay_all(url: str, nats_url: str) -> None:
    async with open_relay(MessagingSettings(url, "sea"), NatsSettings(nats_url)) as relay:
        while await relay.relay_once():
            pass


async def on_the_stream(url: str) -> list[bytes]:
    async with connect(NatsSettings(url), "test") as client:
        stream = client.jetstream()
        count = (await stream.stream_info("SEA_EVENTS")).state.messages
        subscription = await stream.subscribe(SUBJECT, stream="SEA_EVENTS", ordered_consumer=True)
        return [(await subscription.next_msg(timeout=10)).data for _ in range(count)]


@pytest.fixture
def stream_url(nats_url: str) -> str:
    asyncio.run(make_stream(nats_url))
    return nats_url


def record_orders(url: str, count: int, first: int = 0) -> None:
    """Record events of ten orders, ten in a transaction."""
    with psycopg.connect(url) as connection:
        for n in range(first, first + count, 10):
            Outbox().record(connection, *(order_placed(AGGREGATES[n % 10], n) for n in range(n, n + 10)))
            connection.commit()


def check(url: str, nats_url: str, count: int) -> None:
    """See that every event is on the stream once and in its aggregate's order, and its history whole."""
    found = asyncio.run(on_the_stream(nats_url))
    for n, aggregate in enumerate(AGGREGATES):
        assert numbers(found, aggregate) == list(range(n, count, 10))
    with psycopg.connect(url) as connection:
        histories = connection.execute(
            "SELECT types, count(*) FROM (SELECT array_agg(type ORDER BY version) AS types"
            " FROM aggregate_events GROUP BY stream) AS histories GROUP BY types"
        ).fetchall()
    assert histories == [(["OutboxEventRecorded.3", "OutboxEventPublished.1"], count)]


def published(url: str) -> int:
    with psycopg.connect(url) as connection:
        ((count,),) = connection.execute("SELECT count(published_at) FROM outbox_events").fetchall()
    return int(count)


@pytest.mark.parametrize(("stored", "batch"), [(1, 500), (50, 500), (70, 5), (85, 5)])
def test_a_relay_killed_between_publishing_and_noting_it_doubles_nothing(
    messaging_database: str, stream_url: str, stored: int, batch: int
) -> None:
    """With small batches it is behind, and so it dies while two batches are in flight."""
    record_orders(messaging_database, 100)
    arguments = [messaging_database, stream_url, str(stored), str(batch)]
    died = subprocess.run([sys.executable, "-c", DYING_RELAY, *arguments], check=False, timeout=SECONDS)
    assert died.returncode == -signal.SIGKILL
    assert asyncio.run(on_the_stream(stream_url)) != []
    assert published(messaging_database) < stored
    asyncio.run(relay_all(messaging_database, stream_url))
    check(messaging_database, stream_url, 100)


@pytest.mark.parametrize("stored", [30, 85])
async def test_a_relay_to_a_mailbox_killed_in_the_middle_of_a_batch_loses_and_doubles_nothing(
    messaging_database: str, tmp_path: Path, stored: int
) -> None:
    record_orders(messaging_database, 100)
    store = str(tmp_path / "sea.db")
    arguments = [messaging_database, store, str(stored), "20"]
    died = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", DYING_RELAY, *arguments], check=False, timeout=SECONDS
    )
    assert died.returncode == -signal.SIGKILL
    assert published(messaging_database) < stored
    target = MailboxTarget(address=store)
    async with open_relay(MessagingSettings(messaging_database, "sea"), target) as relay:
        while await relay.relay_once():
            pass
    async with connect_mailbox(store) as mailbox:
        received = await mailbox.receive_messages("sea.order", max_messages=200)
    payloads = [message.payload for message in received]
    for n, aggregate in enumerate(AGGREGATES):
        assert numbers(payloads, aggregate) == list(range(n, 100, 10))


def test_relays_that_are_killed_and_stopped_lose_and_reorder_nothing(
    messaging_database: str, stream_url: str, tmp_path: Path
) -> None:
    relays = Relays(tmp_path, messaging_database, stream_url)
    rng = Random(5)
    recorded = 0
    with ExitStack() as running:
        processes = [running.enter_context(relays.start()) for _ in range(2)]
        for _ in range(4):
            record_orders(messaging_database, 500, recorded)
            recorded += 500
            time.sleep(rng.random() / 5)
            processes.pop(0).kill()
            pause(processes[0].pid)
            record_orders(messaging_database, 100, recorded)
            recorded += 100
            processes.append(running.enter_context(relays.start()))
            time.sleep(rng.random() / 5)
            processes[0].send_signal(signal.SIGCONT)
        wait_until(lambda: published(messaging_database) == recorded)
    check(messaging_database, stream_url, recorded)


def test_nats_killed_again_and_again_costs_no_attempts_and_loses_nothing(
    messaging_database: str, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats", sync_always=True) as server:
        asyncio.run(make_stream(server.url))
        with Relays(tmp_path, messaging_database, server.url).start():
            for n in range(2):
                record_orders(messaging_database, 500, n * 500)
                wait_until(lambda n=n: published(messaging_database) > n * 500)  # type: ignore[misc]
                server.kill()
                time.sleep(0.3)
                server.start()
            wait_until(lambda: published(messaging_database) == 1_000)
        check(messaging_database, server.url, 1_000)
        assert set(column(messaging_database, "publish_attempts")) == {1}


def test_postgresql_killed_again_and_again_loses_nothing(
    postgres_server: PostgresServer, stream_url: str, tmp_path: Path
) -> None:
    url = postgres_server.create_database()
    migrate(url, "messaging")
    with Relays(tmp_path, url, stream_url).start():
        for n in range(2):
            record_orders(url, 300, n * 300)
            postgres_server.kill()
            postgres_server.start()
        wait_until(lambda: published(url) == 600)
    check(url, stream_url, 600)


def test_a_relay_that_gets_sigterm_records_its_batch_and_reports_its_counts(
    messaging_database: str, stream_url: str, tmp_path: Path
) -> None:
    record_orders(messaging_database, 200)
    with Relays(tmp_path, messaging_database, stream_url).start() as process:
        wait_until(lambda: published(messaging_database) > 0)
        process.terminate()
        out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    done = published(messaging_database)
    assert out == b'{"published":%d,"failed":0,"parked":0}\n' % done
    assert len(asyncio.run(on_the_stream(stream_url))) == done
