"""Events reach an archive as CloudEvents, each once, while relay, NATS and ingester are killed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from postroom.adapters.compose.queries import read_mailbox
from postroom.domain.envelope.build import OpenedEnvelope
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.message import MessageSent
from tests.integration.test_outbox_crashes import AGGREGATES, make_stream, record_orders
from tests.support.fork_server import popen
from tests.support.outboxes import column
from tests.support.servers.nats import NatsServer
from tests.support.waiting import SECONDS, wait_until

SCRIPT = Path(sys.executable).with_name("postroom")
MAILBOX = "acme@archive"
SUBJECT = "sea.event.>"
ROUND = 200


class Processes:
    """Relays that publish CloudEvents, and ingesters that archive them, with a settings file of their own."""

    def __init__(self, folder: Path, database: str, nats_url: str) -> None:
        self._folder = folder
        self._nats_url = nats_url
        self.store = str(folder / "archive.db")
        self._environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
        (folder / "postroom.toml").write_text(
            f'mailbox = "{MAILBOX}"\n[messaging]\ndatabase = "{database}"\ncontext = "sea"\n'
            f'[nats]\nurl = "{nats_url}"\n'
            '[outbox]\npoll = "20ms"\nbatch = 50\nformat = "cloudevents-structured"\n'
        )

    def relay(self) -> "subprocess.Popen[bytes]":
        return self._start("outbox", "relay")

    def ingester(self) -> "subprocess.Popen[bytes]":
        names = ("--subject", SUBJECT, "--durable", "archive", "--store", self.store)
        return self._start("ingest", "--url", self._nats_url, *names)

    def _start(self, *arguments: str) -> "subprocess.Popen[bytes]":
        command = [str(SCRIPT), *arguments, "--log-level", "error"]
        return popen(command, self._folder, self._environment, stdout=subprocess.DEVNULL)


@contextmanager
def running(process: "subprocess.Popen[bytes]") -> Iterator["subprocess.Popen[bytes]"]:
    """Kill a process at the end of the context, unless it was killed before."""
    try:
        yield process
    finally:
        process.kill()
        process.wait(SECONDS)


def archived(store: str) -> list[MessageSent]:
    try:
        with read_mailbox(store, MAILBOX) as reader:
            return [each.event for each in reader.log.read() if isinstance(each.event, MessageSent)]
    except (NotFound, Unavailable):
        return []


def read(event: MessageSent) -> tuple[str | None, str, str | None, object]:
    """Return id, type, key and data of a CloudEvent."""
    custom = event.headers.custom_headers or {}
    payload = OpenedEnvelope(parse_envelope(event.envelope)).payload
    return (
        event.headers.message_id,
        event.topic,
        custom.get("ce_partitionkey"),
        msgspec.json.decode(payload),
    )


@pytest.mark.extended
def test_each_event_of_an_outbox_is_archived_once_as_the_same_cloud_event_through_kills(
    messaging_database: str, tmp_path: Path
) -> None:
    with NatsServer(tmp_path / "nats", sync_always=True) as nats:
        asyncio.run(make_stream(nats.url))
        processes = Processes(tmp_path, messaging_database, nats.url)
        with running(processes.relay()), running(processes.ingester()):
            record_orders(messaging_database, ROUND)
            wait_until(lambda: archived(processes.store))
        with running(processes.relay()), running(processes.ingester()):
            record_orders(messaging_database, ROUND, first=ROUND)
            wait_until(lambda: len(archived(processes.store)) > ROUND // 2)
            nats.kill()
            nats.start()
            record_orders(messaging_database, ROUND, first=2 * ROUND)
            wait_until(lambda: len(archived(processes.store)) >= 3 * ROUND)
    events = sorted(map(read, archived(processes.store)), key=str)
    ids = column(messaging_database, "id")
    assert events == sorted(
        (
            (f"/sea|{id_}", "order_placed", AGGREGATES[n % 10], {"order": AGGREGATES[n % 10], "n": n})
            for n, id_ in enumerate(ids)
        ),
        key=str,
    )
