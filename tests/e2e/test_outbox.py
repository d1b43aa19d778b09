import asyncio
import json

import psycopg
import pytest

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from tests.e2e.conftest import TIMEOUT_SECONDS
from tests.support.outboxes import order_placed, record
from tests.support.waiting import wait_until


@pytest.fixture
def configured(postroom, messaging_database, nats_url):
    """The command line with an outbox to look after, and a stream for events order_placed only."""
    (postroom.folder / "postroom.toml").write_text(
        f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n'
        f'[nats]\nurl = "{nats_url}"\n'
        '[outbox]\nmax_attempts = 1\npoll = "20ms"\n'
    )

    async def make_stream():
        async with connect(NatsSettings(nats_url), "test") as client:
            await client.jetstream().add_stream(name="SEA", subjects=["sea.event.order_placed.*"])

    asyncio.run(make_stream())
    return postroom


def test_events_are_relayed_counted_and_cleaned_up(configured, messaging_database):
    record(messaging_database, *(order_placed("o-1", n) for n in range(3)))
    backlog = configured.ok("outbox", "backlog", "--json").json
    assert (backlog["context"], backlog["count"]) == ("sea", 3)
    assert backlog["oldest_at"].endswith("Z")
    assert configured.ok("outbox", "relay", "--once", "--json").json == {
        "published": 3,
        "failed": 0,
        "parked": 0,
    }
    assert configured.ok("outbox", "backlog", "--json").json == {
        "context": "sea",
        "count": 0,
        "oldest_at": None,
    }
    assert configured.ok("outbox", "cleanup").out == "0 published events removed\n"
    assert configured.ok("outbox", "cleanup", "--older-than", "0", "--json").json == {"removed": 3}


def test_up_relays_events_and_refuses_settings_that_it_cannot_relay_with(configured, messaging_database):
    record(messaging_database, order_placed("o-1", 1))
    running = configured.start("up", "--http", "127.0.0.1:0")
    try:
        wait_until(lambda: configured.ok("outbox", "backlog", "--json").json["count"] == 0)
        running.terminate()
        out, err = running.communicate(timeout=TIMEOUT_SECONDS)
        assert (running.returncode, b"relay, console" in out) == (0, True), err
    finally:
        running.kill()
    (configured.folder / "postroom.toml").write_text("[outbox]\nmax_attempts = 1\n")
    refused = configured("up", "--http", "127.0.0.1:0", "--store", "unused.db")
    assert (refused.code, (configured.folder / "unused.db").exists()) == (2, False), refused


def test_an_operator_retries_and_discards_what_the_stream_refuses(configured, messaging_database):
    first, second, third = record(
        messaging_database,
        order_placed("o-1", 1, event_type="order_paid"),
        order_placed("o-2", 1, event_type="order_paid"),
        order_placed("o-1", 2),
    )
    relayed = configured.ok("outbox", "relay", "--once").out
    assert relayed == "0 published, 0 failed and will be retried, 2 parked\n"

    parked = configured.ok("outbox", "list", "--parked", "--json").json["events"]
    assert [(each["id"], each["attempts"]) for each in parked] == [(str(first), 1), (str(second), 1)]
    assert "No stream has the subject sea.event.order_paid.v1" in parked[0]["error"]
    assert "  parked  " in configured.ok("outbox", "list").out

    assert configured.ok("outbox", "retry", str(first)).out == "1 event will be retried\n"
    assert configured.ok("outbox", "retry", "--all", "--json").json == {"retried": 1}
    discarded = configured.ok("outbox", "discard", str(first), str(second), "--reason", "no longer needed")
    assert discarded.out == "2 events discarded; payloads are kept in table aggregate_events\n"
    assert configured.ok("outbox", "relay", "--once", "--json").json["published"] == 1

    refused = configured("outbox", "discard", str(third), "--json")
    assert (refused.code, refused.error["code"]) == (1, "E_SCHEMA")
    assert "is already published; nothing was changed" in refused.error["message"]
    missing = configured("outbox", "retry", str(first), "--json")
    assert (missing.code, missing.error["code"]) == (3, "E_NOT_FOUND")


def test_an_operator_lists_retries_and_discards_a_row_that_cannot_be_read(configured, messaging_database):
    bad, _ = record(messaging_database, order_placed("o-1", 1), order_placed("o-2", 1))
    with psycopg.connect(messaging_database) as connection:
        connection.execute("UPDATE outbox_events SET occurred_at = '-infinity' WHERE id = %s", (bad,))
    relayed = {"published": 1, "failed": 0, "parked": 1}
    assert configured.ok("outbox", "relay", "--once", "--json").json == relayed
    (parked,) = configured.ok("outbox", "list", "--parked", "--json").json["events"]
    assert (parked["id"], parked["occurred_at"]) == (str(bad), None)
    assert "occurred_at is outside the years 1 to 9999" in parked["error"]
    assert configured.ok("outbox", "backlog", "--json").json["oldest_at"] is None
    assert configured.ok("outbox", "retry", str(bad), "--json").json == {"retried": 1}
    assert configured.ok("outbox", "discard", str(bad), "--json").json == {"discarded": 1}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("retry",), "Name the events to retry, or pass --all"),
        (("retry", "--all", "1"), "Name the events to retry, or pass --all"),
        (("retry", "order-1"), "Event ids are UUIDs; one of order-1 is not"),
        (("cleanup", "--older-than", "soon"), "'soon' is not a duration"),
        (("relay",), "No context is configured"),
        (("relay", "--to", "http://127.0.0.1"), "A target's URL begins with nats://"),
        (("relay", "--to", "mailbox:#main@local", "--context", "sea"), "A mailbox's URL is mailbox:ADDRESS"),
        (("relay", "--to", "mailbox:a.db", "--nats", "127.0.0.1"), "--to and --nats both name a target"),
        (("relay", "--format", "avro"), "'avro' is not one of 'postroom', 'cloudevents-binary'"),
        (("relay", "--source", "/shop"), "--source is an attribute of CloudEvents; pass --format"),
        (("capture", "--table", "t", "--source", "/shop"), "--source is an attribute of CloudEvents"),
    ],
)
def test_wrong_usage_is_reported_in_one_sentence(postroom, arguments, problem):
    done = postroom("outbox", *arguments, "--database", "postgresql://127.0.0.1:9/shop")
    assert done.code == 2
    assert problem in done.err
    assert done.err.count("\n") == 1


def test_invalid_and_missing_settings_are_reported_with_their_section(postroom):
    done = postroom("outbox", "backlog", "--json")
    assert done.code == 2
    assert "[messaging] in postroom.toml, or POSTROOM_MESSAGING__" in done.error["message"]
    done = postroom(
        "outbox", "relay", "--database", "postgresql://127.0.0.1:9/shop", POSTROOM_OUTBOX__CLAIM="1s"
    )
    assert done.code == 2
    assert "[outbox] in postroom.toml, or POSTROOM_OUTBOX__: " in done.err


def test_events_are_relayed_to_a_mailbox(postroom, messaging_database):
    record(messaging_database, *(order_placed("o-1", n) for n in range(3)))
    done = postroom.ok(
        "outbox", "relay", "--once", "--json", "--database", messaging_database, "--context", "sea",
        "--to", f"mailbox:{postroom.store}#shop@local", "--topic", "orders",
    )  # fmt: skip
    assert done.json == {"published": 3, "failed": 0, "parked": 0}
    received = postroom.ok("recv", "orders", "--max", "10", "--json", POSTROOM_MAILBOX="shop@local").lines
    assert len(received) == 3


def test_an_option_takes_precedence_over_the_environment_and_that_over_the_file(postroom, messaging_database):
    (postroom.folder / "postroom.toml").write_text(
        '[outbox]\nformat = "cloudevents-binary"\nsource = "/file"\ntopic = "orders"\n'
        f'to = "mailbox:{postroom.store}#shop@local"\n'
        f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "sea"\n'
    )
    for options in (["--format", "cloudevents-structured"], ["--source", "/option"]):
        record(messaging_database, order_placed("o-1", 1))
        postroom.ok("outbox", "relay", "--once", *options, POSTROOM_OUTBOX__SOURCE="/environment")
    received = postroom.ok("recv", "orders", "--max", "2", "--json", POSTROOM_MAILBOX="shop@local").lines
    structured, binary = received
    assert json.loads(structured["payload"])["source"] == "/environment"
    assert binary["attrs"]["ce_source"] == "/option"


def test_servers_that_are_not_there_are_named(postroom):
    database = ("--database", "postgresql://me:secret@127.0.0.1:9/shop")
    done = postroom("outbox", "backlog", *database)
    assert done.code == 4
    assert "The database postgresql://me@127.0.0.1:9/shop can't be reached" in done.err
    done = postroom(
        "outbox", "relay", "--once", *database, "--context", "sea", "--nats", "nats://127.0.0.1:9"
    )
    assert done.code == 4
    assert "NATS at nats://127.0.0.1:9 can't be reached" in done.err
