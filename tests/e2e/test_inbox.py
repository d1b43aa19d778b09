"""`postroom inbox` as its users run it, with a FastAPI service that handles what it posts."""

import asyncio
import json
import re
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import psycopg
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response

from postroom.adapters.http.signature import verify_signature
from tests.e2e.conftest import SCRIPT, TIMEOUT_SECONDS, Postroom
from tests.support.waiting import wait_until

KEY = "0123456789abcdef0123456789abcdef"
IDS = {name: f"550e8400-e29b-41d4-a716-{n:012}" for n, name in enumerate(("fine", "known", "poison", "down"))}
SUBJECT = "vibespro.event.vibe_created.v1"


class Service:
    """The handler of SDS-047 section 12, as a user writes it with FastAPI."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.created: list[str] = []
        self.status = {"fine": 200, "known": 409, "poison": 422, "down": 503}
        app = FastAPI()

        @app.post("/handle")
        async def handle(request: Request) -> Response:
            body = await request.body()
            verify_signature(request.headers, body, KEY)
            event = json.loads(body)
            self.seen.append(event)
            return Response(status_code=self.status[event["payload"]["name"]])

        @app.post("/created")
        async def created(request: Request) -> Response:
            self.created.append(json.loads(await request.body())["payload"]["name"])
            return Response()

        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run)

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self._server.started)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}/"


@pytest.fixture
def service() -> Iterator[Service]:
    running = Service()
    running.start()
    yield running
    running.stop()


@pytest.fixture
def inbox(postroom: Postroom, nats_url: str, messaging_database: str, service: Service) -> Postroom:
    """The command line with everything in `postroom.toml`, and streams as it says."""
    (postroom.folder / "key").write_text(KEY + "\n")
    (postroom.folder / "postroom.toml").write_text(
        f"""
        [nats]
        url = "{nats_url}"

        [messaging]
        database = "{messaging_database}"
        context = "sea"

        [consumers.sea__from_vibespro]
        stream = "VIBESPRO_EVENTS"
        filter_subject = "vibespro.event.>"
        max_deliver = 2

        [inbox]
        handler = "{service.url}handle"
        allow = ["{service.url} 127.0.0.0/8"]
        signing_key_file = "key"
        backoff_base = "5ms"
        backoff_max = "10ms"
        """
    )
    asyncio.run(publish(nats_url))
    return postroom


async def publish(url: str) -> None:
    client = await nats.connect(url)
    await client.jetstream().add_stream(name="VIBESPRO_EVENTS", subjects=["vibespro.event.>"])
    await client.jetstream().add_stream(name="SEA_DLQ", subjects=["sea.dlq.>"])
    for name, id_ in IDS.items():
        headers = {"Nats-Msg-Id": id_}
        await client.jetstream().publish(SUBJECT, json.dumps({"name": name}).encode(), headers=headers)
    await client.close()


def settled(database: str) -> list[tuple[str, bool]]:
    with psycopg.connect(database) as connection:
        return connection.execute(
            "SELECT message_id::text, processed_at IS NOT NULL FROM inbox_messages ORDER BY message_id"
        ).fetchall()


def test_each_event_type_has_its_url_or_its_function(
    inbox: Postroom, service: Service, nats_url: str
) -> None:
    settings = inbox.folder / "postroom.toml"
    urls = f'"other" = "{service.url}other", "vibe_*" = "{service.url}created"'
    settings.write_text(f"{settings.read_text()}\nhandlers = {{ {urls} }}\n")
    assert inbox.ok("inbox", "consume", "--once", "--json").json == {"processed": 4}
    assert (sorted(service.created), service.seen) == (sorted(IDS), [])

    (inbox.folder / "vibes.py").write_text(
        "from postroom import EventHandlers\n"
        "handlers = EventHandlers(unhandled='ignore')\n"
        "@handlers.on('vibe_created')\n"
        "async def create(request):\n"
        "    open(request.payload['name'], 'w').close()\n"
        "worker = 5\n"
    )
    consume = ("inbox", "consume", "--once", "--json")
    for wrong, problem in (
        (("--handlers", "vibes"), "does not name an object of type EventHandlers"),
        (("--handlers", "vibes:worker"), "is of type int, not EventHandlers"),
        (("--handlers", "nothing:handlers"), "nothing:handlers can't be imported"),
        (("--handlers", "vibes:handlers", "--handler", service.url), "exclude each other"),
    ):
        assert problem in inbox(*consume, *wrong).error["message"]
    asyncio.run(publish_later(nats_url))
    assert inbox.ok(*consume, "--handlers", "vibes:handlers").json == {"processed": 2}
    assert (inbox.folder / "later").exists()


async def publish_later(url: str) -> None:
    client = await nats.connect(url)
    for event_type in ("vibe_created", "vibe_lost"):
        await client.jetstream().publish(f"vibespro.event.{event_type}.v1", b'{"name": "later"}')
    await client.close()


def test_every_response_settles_its_message(
    inbox: Postroom, service: Service, messaging_database: str
) -> None:
    for _ in range(2):  # `down` comes again only after a while
        inbox.ok("inbox", "consume", "--once")
    assert settled(messaging_database) == [
        (IDS["fine"], True),
        (IDS["known"], True),
        (IDS["poison"], False),
        (IDS["down"], False),
    ]
    assert sorted(event["payload"]["name"] for event in service.seen) == [
        "down",
        "down",
        "fine",
        "known",
        "poison",
    ]
    assert service.seen[0].keys() == {
        *("message_id", "subject", "event_type", "event_version", "occurred_at"),
        *("correlation_id", "causation_id", "payload"),
    }
    letters = inbox.ok("inbox", "dlq", "list", "--json").json["dead_letters"]
    assert [
        (each["message_id"], each["reason"], each["attempts"], each["last_error"]) for each in letters
    ] == [
        (IDS["poison"], "poison", 1, "HTTP 422"),
        (IDS["down"], "max_deliver", 2, "HTTP 503"),
    ]
    empty = {"context": "sea", "count": 0, "oldest_at": None, "queues": []}
    assert inbox.ok("inbox", "backlog", "--json").json == empty


def test_dead_letters_are_redriven_when_the_service_has_recovered(
    inbox: Postroom, service: Service, messaging_database: str
) -> None:
    for _ in range(2):
        inbox.ok("inbox", "consume", "--once")
    service.seen.clear()
    dry = inbox.ok("inbox", "dlq", "redrive", "--dry-run")
    assert all(len(line) <= 80 for line in dry.out.splitlines())
    assert IDS["poison"] in dry.out
    assert service.seen == []
    failed = inbox("inbox", "dlq", "redrive", "--limit", "1")
    assert (failed.code, "1 failed" in failed.out) == (1, True)
    service.status |= {"poison": 200, "down": 200}
    done = inbox.ok("inbox", "dlq", "redrive")
    assert done.out == "2 processed, 0 duplicates, 0 failed, 0 held back by those\n"
    assert [event["message_id"] for event in service.seen[1:]] == [IDS["poison"], IDS["down"]]
    assert inbox.ok("inbox", "dlq", "list").out == "(none)\n"
    assert all(processed for _, processed in settled(messaging_database))


def test_dead_letters_are_discarded_by_id_or_all(inbox: Postroom, messaging_database: str) -> None:
    for _ in range(2):
        inbox.ok("inbox", "consume", "--once")
    for arguments in ((), (IDS["poison"], "--all")):
        refused = inbox("inbox", "dlq", "discard", *arguments)
        assert (refused.code, refused.err.count("\n")) == (2, 1)
        assert "Name the dead letters to discard" in refused.err
    missing = inbox("inbox", "dlq", "discard", "nobody", "--json")
    assert (missing.code, missing.error["code"]) == (3, "E_NOT_FOUND")
    discarded = inbox.ok("inbox", "dlq", "discard", IDS["poison"], "--reason", "a test order")
    assert discarded.out == "1 dead letter discarded; kept in the history, table aggregate_events\n"
    assert inbox.ok("inbox", "dlq", "discard", "--all", "--json").json == {"discarded": 1}
    assert inbox.ok("inbox", "dlq", "list", "--json").json == {"dead_letters": []}
    with psycopg.connect(messaging_database) as connection:
        rows = connection.execute("SELECT count(*) FROM aggregate_events WHERE type LIKE '%Discarded.1'")
        assert rows.fetchall() == [(2,)]


def test_processed_messages_are_deleted(inbox: Postroom, messaging_database: str) -> None:
    inbox.ok("inbox", "consume", "--once")
    assert inbox.ok("inbox", "cleanup", "--json").json == {"removed": 0}
    assert inbox.ok("inbox", "cleanup", "--older-than", "1ms").out == "2 processed messages removed\n"
    assert [id_ for id_, _ in settled(messaging_database)] == [IDS["poison"], IDS["down"]]


def test_a_worker_ends_cleanly_at_sigterm(inbox: Postroom, service: Service, tmp_path: Path) -> None:
    worker = subprocess.Popen(
        [SCRIPT, "inbox", "consume", "--json"],
        cwd=inbox.folder,
        env=inbox.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(service.seen) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    worker.send_signal(signal.SIGTERM)
    out, _ = worker.communicate(timeout=TIMEOUT_SECONDS)
    assert worker.returncode == 0
    assert json.loads(out)["processed"] == 2


def test_backlog_and_metrics_count_the_queue_of_ordered_workers(inbox: Postroom, service: Service) -> None:
    settings = {f"POSTROOM_INBOX__BACKOFF_{each}": "1h" for each in ("BASE", "MAX")}
    worker = subprocess.Popen(
        [SCRIPT, "inbox", "consume", "--metrics-port", "0"],
        cwd=inbox.folder,
        env=inbox.environment | settings | {"POSTROOM_INBOX__ORDERED": "true"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert worker.stderr is not None
    url = next(match[1] for line in worker.stderr if (match := re.search(r"Metrics at (http://\S+)\.", line)))

    def is_waiting_for_one() -> bool:
        with urllib.request.urlopen(url) as response:
            metrics[:] = [response.read().decode()]
        return len(service.seen) == 4 and f"postroom_inbox_queued{labels}}} 1.0" in metrics[0]

    metrics: list[str] = []
    labels = '{consumer="VIBESPRO_EVENTS/sea__from_vibespro",context="sea"'
    wait_until(is_waiting_for_one)
    samples = dict(re.findall(r"^(postroom_inbox_part\w+)\{.*\} (\S+)$", metrics[0], re.MULTILINE))
    assert 0 <= float(samples.pop("postroom_inbox_partition_oldest_seconds")) < TIMEOUT_SECONDS
    assert samples == {
        "postroom_inbox_partitions": "64.0",
        "postroom_inbox_partition_queued": "1.0",
        "postroom_inbox_partition_first_sequence": "4.0",
    }
    backlog = inbox.ok("inbox", "backlog", "--json").json
    (queue,) = backlog["queues"]
    assert (backlog["count"], queue["consumer"]) == (1, "VIBESPRO_EVENTS/sea__from_vibespro")
    assert (queue["count"], queue["partitions"], queue["fullest_count"]) == (1, 1, 1)
    assert "VIBESPRO_EVENTS/sea__from_vibespro" in inbox.ok("inbox", "backlog").out
    worker.send_signal(signal.SIGTERM)
    worker.communicate(timeout=TIMEOUT_SECONDS)
    assert worker.returncode == 0


def test_the_key_is_shown_nowhere(inbox: Postroom, service: Service) -> None:
    done = inbox.ok("inbox", "consume", "--once", "--log-level", "debug", "--debug")
    assert KEY not in done.out + done.err


def test_invalid_configurations_are_refused_in_one_sentence(inbox: Postroom) -> None:
    for changes, says in [
        (("--handler", "http://169.254.169.254/latest"), "is not on the allow-list"),
        (("--handler", "https://user:secret@example.com/"), "contains credentials"),
        (("--context", "other"), "No stream has the subject other.dlq.>"),
        (("--consumer", "nobody"), "has no consumer nobody; choose one of"),
        (("--consumer", "NOWHERE/nobody"), "has no stream NOWHERE"),
        (("--database", "postgresql://postgres@127.0.0.1:1/x"), "can't be reached"),
    ]:
        done = inbox("inbox", "consume", "--once", *changes)
        assert done.code in (1, 2, 3, 4)
        assert says in done.err
        assert done.err.count("\n") == 1
        assert "secret" not in done.err


def test_invalid_settings_are_named(inbox: Postroom) -> None:
    for name, value, says in [
        ("SIGNING_KEY_FILE", "", "there is no key"),
        ("SIGNING_KEY_FILE", "missing", "can't be read: No such file"),
        ("HANDLER", "", "No handler is configured"),
        ("HANDLES", "x", "unknown key 'handles'"),
    ]:
        environment: dict[str, Any] = {f"POSTROOM_INBOX__{name}": value}
        done = inbox("inbox", "consume", "--once", **environment)
        assert done.code in (1, 2)
        assert says in done.err
        assert done.err.count("\n") == 1
