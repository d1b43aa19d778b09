"""Every table fits 80 columns with its ids whole, however long its other values are."""

import asyncio
from datetime import UTC, datetime
from itertools import takewhile

import pytest
from rich.cells import cell_len

from postroom.adapters.cli.values import DIFFERS
from postroom.adapters.compose import open_mailbox
from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
from tests.projections.histories import build_without_spark
from tests.support.outboxes import order_placed, record

MAILBOX = f"{'m' * 60}@{'p' * 60}"
TOPIC = "orders." + "t" * 200
ERROR = "the payment provider answered 503 Service Unavailable, " * 5


@pytest.fixture
def message_id(postroom):
    """The id of a dead letter in a store whose names and texts are all long."""

    async def fill():
        policy = TopicPolicy(max_attempts=1)
        async with open_mailbox(str(postroom.store), MAILBOX, default_policy=policy) as mailbox:
            message = NewMessage(topic=TOPIC, payload=b"{", principal="p" * 100, attrs={"n" * 50: "v" * 100})
            sent = await mailbox.send_message(message)
            (received,) = await mailbox.receive_messages(TOPIC, consumer="c" * 200)
            await mailbox.nack_messages([received.receipt], reason=ERROR)
        return sent.message_id

    message_id = asyncio.run(fill())
    build_without_spark(postroom.store)
    return message_id


def shown(postroom, *arguments):
    """Run a command, check that its tables fit, and return what it printed."""
    done = postroom(*arguments)
    assert done.code in (0, DIFFERS), done
    rules = [number for number, line in enumerate(done.out.splitlines()) if line.startswith("─")]
    assert rules
    for rule in rules:
        for line in takewhile(bool, done.out.splitlines()[rule - 1 :]):
            assert cell_len(line) <= 80, line
    return done.out


@pytest.mark.parametrize("arguments", [("dlq", "list"), ("search",)])
def test_a_table_of_messages_shows_their_ids_whole(postroom, message_id, arguments):
    assert message_id in shown(postroom, *arguments, "--mailbox", MAILBOX)


@pytest.mark.parametrize(
    "arguments",
    [
        ("backlog",),
        ("activity",),
        ("views", "status"),
        ("views", "simulate", "--max-attempts", "3"),
        ("migrate", "--dry-run", "--messaging", "{database}"),
        ("streams", "diff"),
        ("streams", "list"),
        ("outbox", "backlog"),
        ("inbox", "backlog"),
        ("views", "contexts"),
    ],
    ids=" ".join,
)
def test_other_tables_fit_the_terminal(postroom, message_id, request, arguments):
    if arguments[0] in {"migrate", "streams", "outbox", "inbox"} or "contexts" in arguments:
        request.getfixturevalue("services")
    shown(postroom, *(each.format(database=postroom.environment.get("EMPTY", "")) for each in arguments))


def test_a_message_is_shown_with_its_facts_on_as_many_lines_as_they_need(postroom, message_id):
    for arguments in (("show",), ("show", "--why"), ("dlq", "show")):
        text = shown(postroom, *arguments, message_id)
        assert message_id in text
        assert "".join(ERROR.split()) in "".join(text.split())


def test_wide_tables_and_json_have_full_values(postroom, message_id):
    wide = postroom.ok("dlq", "list", "--mailbox", MAILBOX, "--wide").out
    (letter,) = postroom.ok("dlq", "list", "--mailbox", MAILBOX, "--json").json["dead_letters"]

    assert (letter["topic"], letter["last_error"]) == (TOPIC, ERROR)
    for value in (message_id, TOPIC, "max_attempts", ERROR.strip(), letter["last_seen"]):
        assert value in wide


def test_tables_show_ages_instead_of_times(postroom, message_id):
    year = f"{datetime.now(UTC):%Y}-"

    assert year not in postroom.ok("dlq", "list", "--mailbox", MAILBOX).out
    assert year in postroom.ok("dlq", "list", "--mailbox", MAILBOX, "--wide").out


def test_a_failed_event_is_listed_with_its_id_whole(postroom, services, messaging_database):
    (event_id,) = record(
        messaging_database, order_placed("a" * 100, 1, event_type="order_refused" + "d" * 60)
    )
    postroom.ok("outbox", "relay", "--once")

    assert str(event_id) in shown(postroom, "outbox", "list")


@pytest.fixture
def services(postroom, messaging_database, empty_database, nats_url):
    """Settings with an outbox, an inbox and streams whose names are long."""
    context = "sea" + "c" * 60
    (postroom.folder / "postroom.toml").write_text(
        f'[messaging]\ndatabase = "{messaging_database}"\ncontext = "{context}"\n'
        f'[nats]\nurl = "{nats_url}"\n'
        "[outbox]\nmax_attempts = 1\n"
        f'[streams.{"S" * 60}]\nsubjects = ["{"s" * 100}.>", "{"u" * 100}.>"]\n'
        f'[consumers.{"c" * 60}]\nstream = "{"S" * 60}"\n'
    )
    postroom.environment["EMPTY"] = empty_database

    async def make_stream():
        async with connect(NatsSettings(nats_url), "test") as client:
            await client.jetstream().add_stream(name="E" * 60, subjects=[f"{'x' * 120}.*"])

    asyncio.run(make_stream())
    record(messaging_database, order_placed("o-1", 1))
    return postroom
