"""Long-running commands that start while a server is down, or before the store exists."""

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import msgspec
import psycopg
import pytest

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from tests.e2e.conftest import TIMEOUT_SECONDS, Postroom
from tests.support.outboxes import column, order_placed, record
from tests.support.servers.nats import NatsServer
from tests.support.servers.process import LOOPBACK, free_port


def read_event(process: "subprocess.Popen[bytes]", event: str) -> bytes:
    """Return the line of the log with an event."""
    assert process.stderr is not None
    while line := process.stderr.readline():
        if event.encode() in line:
            return line
    raise AssertionError(f"The process ended with {process.wait(TIMEOUT_SECONDS)} before it logged {event}.")


def stop(*processes: "subprocess.Popen[bytes]") -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.communicate(timeout=TIMEOUT_SECONDS)
        assert process.returncode in (0, -signal.SIGTERM)  # by the signal, while it waits


async def make_streams(url: str) -> None:
    async with connect(NatsSettings(url), "test") as client:
        for name in ("SEA", "ACME"):
            await client.jetstream().add_stream(name=name, subjects=[f"{name.lower()}.>"])


def test_a_relay_and_an_ingester_that_start_while_nats_is_down_wait_for_it(
    postroom: Postroom, messaging_database: str, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats") as server:
        asyncio.run(make_streams(server.url))
    (postroom.folder / "postroom.toml").write_text(
        f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n[nats]\nurl = "{server.url}"\n'
        '[outbox]\npoll = "20ms"\n'
    )
    record(messaging_database, order_placed("o-1", 1))
    assert postroom("outbox", "relay", "--once").code == 4
    relay = postroom.start("outbox", "relay")
    ingester = postroom.start("ingest", "--url", server.url, "--subject", "acme.>", "--durable", "archive")
    for process in (relay, ingester):
        assert b"can't be reached" in read_event(process, "start.unavailable")
    with server:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while None in column(messaging_database, "published_at"):
            assert time.monotonic() < deadline
        read_event(ingester, "Ingesting into")
        stop(relay, ingester)


def test_a_worker_that_starts_while_its_database_is_down_waits_and_ends_at_once_when_asked(
    postroom: Postroom,
) -> None:
    (postroom.folder / "app.py").write_text("from postroom import Worker\n\nworker = Worker()\n")
    url = f"postgresql://{LOOPBACK}:{free_port()}/shop"
    worker = postroom.start("--store", url, "work", "app:worker")
    read_event(worker, "start.unavailable")
    stop(worker)
    assert postroom("--store", url, "work", "app:worker", "--once").code == 4


def test_a_follower_waits_for_a_store_in_a_folder_that_exists(postroom: Postroom) -> None:
    follower = postroom.start("views", "follow")
    assert b"There is no store at" in read_event(follower, "start.unavailable")
    postroom.ok("send", "orders", stdin=b"1")
    read_event(follower, "Following")
    assert b"views rebuild" in read_event(follower, "follow.unavailable")
    stop(follower)
    assert postroom("--store", "no/such/folder.db", "views", "follow").code == 3


@pytest.mark.parametrize("change", ["/no_such_database", "user"])
def test_a_database_that_refuses_a_login_is_no_temporary_failure(
    postroom: Postroom, messaging_database: str, change: str
) -> None:
    with psycopg.connect(messaging_database) as connection:
        host, port = connection.info.host, connection.info.port
    url = f"postgresql://{host}:{port}/no_such_database"
    if change == "user":
        url = f"postgresql://no_such_user@{host}:{port}/{messaging_database.rpartition('/')[2]}"
    for command in (["outbox", "backlog", "--context", "sea", "--database", url], ["--store", url, "stats"]):
        done = postroom(*command, "--json")
        assert done.code == 2, done
        assert "refuses the connection" in done.error["message"]
        assert "retry_after_ms" not in done.error


def test_a_missing_privilege_and_missing_tables_are_no_temporary_failures(
    postroom: Postroom, messaging_database: str
) -> None:
    backlog = ("outbox", "backlog", "--context", "sea", "--database", messaging_database, "--json")
    role = f"reader_{messaging_database.rpartition('/')[2].lower()}"
    with psycopg.connect(messaging_database, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role}")
        options = f"{'&' if '?' in messaging_database else '?'}options=-c%20role%3D{role}"
        denied = postroom(*backlog[:5], messaging_database + options, "--json")
        connection.execute("ALTER TABLE outbox_events RENAME TO elsewhere")
        missing = postroom(*backlog)
        connection.execute(f"DROP ROLE {role}")
    assert (denied.code, missing.code) == (2, 2)
    assert "denies a privilege" in denied.error["message"]
    assert "postroom migrate --messaging" in missing.error["message"]


def test_nats_that_refuses_a_login_is_no_temporary_failure(
    postroom: Postroom, messaging_database: str, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats", authorization={"user": "a", "password": "b"}) as server:
        (postroom.folder / "postroom.toml").write_text(
            f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n[nats]\nurl = "{server.url}"\n'
        )
        relay = postroom.start("outbox", "relay", "--json")
        _, err = relay.communicate(timeout=TIMEOUT_SECONDS)
        assert relay.returncode == 2
        assert "refuses the connection" in msgspec.json.decode(err)["message"]
