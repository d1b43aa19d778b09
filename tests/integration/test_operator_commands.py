"""What operators see and do on the command line: topics, mailboxes, settings, and names that do not exist."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from postroom.adapters.cli import config, dlq, inspect, mailbox, maintenance, messages, topic, work
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.serve import checked_access
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.application.worker_reports import HandlerState, WorkerState
from postroom.domain.errors import NotFound
from postroom.domain.policy import TopicPolicy
from tests.support.stores import MAILBOX, message

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]
IDS = [f"0199d2c4-6f00-7a10-8c21-3b5b0f6f9e{n:02d}" for n in range(12)]
COLUMNS = 80


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def open_session(
        *, as_json: bool = False, environment: dict[str, str] | None = None, **flags: str
    ) -> Session:
        settings = load_settings(
            {"store": "store.db", "mailbox": MAILBOX} | flags, environment or {}, flags.get("config")
        )
        return Session("test", settings, Output(as_json))

    return open_session


@pytest.fixture
async def store(session: Open) -> str:
    """Return a store with a topic `orders` of two messages and a topic `invoices` of one."""
    async with open_mailbox("store.db", MAILBOX, durability="relaxed") as opened:
        await opened.set_topic_policy("orders", TopicPolicy(max_attempts=3, visibility_ms=30_000))
        await opened.send_batch([message(), message(), message(topic="invoices")])
    return "store.db"


def lines(captured: Captured) -> list[str]:
    """Return the lines on stdout, each of which fits a terminal."""
    found = captured.readouterr().out.splitlines()
    assert [line for line in found if len(line) > COLUMNS] == []
    return found


def document(captured: Captured) -> Any:
    return json.loads(captured.readouterr().out)


# -- backups ---


async def test_a_backup_is_listed_verified_and_restored(
    session: Open, store: str, jetstream_store: str, capsys: Captured
) -> None:
    maintenance.create(session(), "monday")
    header, _, row, *_, headline, summary = lines(capsys)
    assert header.split() == ["log", "first", "head", "epoch", "recorded"]
    assert row.split()[:4] == [MAILBOX, "1", "6", "1"]
    assert headline == "monday: complete"
    assert summary.startswith("  6 records, 0.0 MB, as of ")
    maintenance.verify(session(as_json=True), "monday")
    (log,) = document(capsys)["manifest"]["mailboxes"]
    assert (log["mailbox"], log["position"], len(log["chain"])) == (MAILBOX, 6, 64)
    await maintenance.restore(session(), "monday", "restored.db")
    assert lines(capsys)[-1] == "The store has no read models yet; make them with: postroom views rebuild"
    await maintenance.restore(session(), "monday", jetstream_store)
    says = "JetStream has no read models; build them with: postroom views rebuild --into"
    assert lines(capsys)[-1] == says
    for restored in ("restored.db", jetstream_store):
        topic.list_topics(session(store=restored))
        assert len(lines(capsys)) == 4


# -- topics ---


async def test_a_topic_is_paused_and_resumed_and_listed_as_such(
    session: Open, store: str, capsys: Captured
) -> None:
    await topic.pause(session(), "orders")
    await topic.pause(session(as_json=True), "orders")
    assert capsys.readouterr().out.splitlines() == ["orders is paused", '{"topic":"orders","paused":true}']
    topic.list_topics(session())
    header, _, invoices, orders = lines(capsys)
    assert [*filter(None, map(str.strip, header.split("  ")))] == [
        "topic",
        "ready",
        "delayed",
        "in flight",
        "dead",
        "oldest",
        "paused",
        "policy",
    ]
    assert invoices.split()[:5] == ["invoices", "1", "0", "0", "0"]
    assert invoices.endswith("default")
    assert "paused" in orders
    assert orders.endswith("max_attempts=3")
    inspect.backlog(session(), "orders")
    assert lines(capsys)[-1] == "  paused: orders"
    assert await messages.recv(session(), "orders") == 3
    assert "Topic orders is paused; postroom topic resume orders" in capsys.readouterr().err
    await topic.resume(session(), "orders")
    assert await messages.recv(session(), "orders", ack=True) is None
    capsys.readouterr()
    topic.list_topics(session(as_json=True))
    listed = document(capsys)
    assert (listed["mailbox"], listed["default_policy"]["max_attempts"]) == (MAILBOX, 5)
    assert [(each["topic"], each["paused"], each["ready"]) for each in listed["topics"]] == [
        ("invoices", False, 1),
        ("orders", False, 0),
    ]


async def test_a_topic_is_shown_with_what_happened_and_its_consumers(
    session: Open, store: str, capsys: Captured
) -> None:
    await messages.recv(session(), "orders", consumer="ship@host:1")
    capsys.readouterr()
    await topic.show(session(), "orders")
    shown = "\n".join(lines(capsys))
    for text in ("in flight", "messages sent in", "total p95", "ship@host:1"):
        assert text in shown
    await topic.show(session(as_json=True), "orders")
    report = document(capsys)
    assert (report["summary"]["topic"], report["consumers"][0]["in_flight"]) == ("orders", 2)
    await topic.policy(session(), "steps", ["ordered_keys=true"])
    await messages.send(session(), "steps", "x", key="step-1")
    capsys.readouterr()
    await topic.show(session(), "steps")
    assert any(line.startswith("step-1") for line in lines(capsys))
    await topic.list_consumers(session())
    assert lines(capsys)[-1].split()[:2] == ["ship@host:1", "orders"]
    await topic.list_consumers(session(as_json=True))
    assert [each["consumer"] for each in document(capsys)["consumers"]] == ["ship@host:1"]


async def test_workers_are_listed_a_line_for_each_handler(
    session: Open, store: str, capsys: Captured
) -> None:
    handlers = tuple(HandlerState(each, "ship", "", 4, 1, 10, 2) for each in ("orders", "\x1b[31mred"))
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.report_worker(str(uuid4()), WorkerState("shop", "host-1", 7, "1.2", "0.1", 1, handlers))
        await work.list_workers(session(as_json=True))
        (report,) = document(capsys)["workers"]
        await work.list_workers(session())
    assert (report["name"], report["version"], len(report["handlers"])) == ("shop", "1.2", 2)
    shown = lines(capsys)
    assert [line.split()[:3] for line in shown[-2:]] == [["shop", "host-1:7", "1.2"]] * 2
    assert "\x1b" not in "".join(shown)


async def test_a_topic_that_does_not_exist_is_answered_with_those_that_do(
    session: Open, store: str, capsys: Captured
) -> None:
    for command in (topic.pause, topic.resume, dlq.redrive_dead_letters):
        with pytest.raises(NotFound, match="no topic oders; did you mean orders\\? Others are invoices\\."):
            await command(session(), "oders")
    assert messages.peek(session(), "oders") == 3
    assert await messages.recv(session(), "oders") == 3
    assert await messages.recv(session(), "oders", wait="1ms") == 3
    inspect.backlog(session(), "oders")
    dlq.list_dead_letters(session(), "oders")
    await topic.policy(session(), "oders")
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition("; ")[2] for note in notes] == ["did you mean orders? Others are invoices."] * 6


# -- mailboxes ---


async def test_mailboxes_are_listed_with_their_mode_owner_and_size(
    session: Open, store: str, capsys: Captured
) -> None:
    async with (
        open_mailbox(store, "acme@archive", mode="archive", durability="relaxed"),
        open_mailbox(store, MAILBOX, owner="the shop", durability="relaxed"),
    ):
        await mailbox.list_mailboxes(session(as_json=True, mailbox="acme@archive"))
        (archive,) = document(capsys)["mailboxes"]
        assert (archive["mailbox"], archive["mode"], archive["epoch"]) == ("acme@archive", "archive", 1)
        assert archive["owner"].startswith("process ")
        assert (archive["records"], archive["bytes"] > 0) == (2, True)
        await mailbox.list_mailboxes(session())
        assert "the shop" in lines(capsys)[2]
    await mailbox.list_mailboxes(session())
    (row,) = lines(capsys)[2:]
    assert row.split()[:5] == [MAILBOX, "queue", "none", "2", "7"]


def test_a_mailbox_that_does_not_exist_is_answered_with_those_that_do(session: Open, store: str) -> None:
    with pytest.raises(
        NotFound, match=r"no mailbox acme@on; did you mean acme@one\? Name one with --mailbox"
    ):
        session(mailbox="acme@on").mailboxes()


# -- messages by the beginning of their ids ---


async def test_a_message_is_shown_by_the_beginning_of_its_id(session: Open, capsys: Captured) -> None:
    other = "0199d2c5-0000-7000-8000-000000000000"
    async with open_mailbox("store.db", MAILBOX, durability="relaxed") as opened:
        await opened.send_batch([message(message_id=id_) for id_ in [*IDS, other, "0199-mine"]])
    for prefix in ("0199d2c5", "0199d2c5-0000-7", other):
        inspect.show(session(as_json=True), prefix)
        assert document(capsys)["message_id"] == other
    inspect.show(session(), "0199d2c5", why=True)
    assert other in capsys.readouterr().out
    for prefix in ("019", "0199d2c50", "0199-", "zzzz", "mine"):
        with pytest.raises(NotFound, match=r"has no message .* at least four digits"):
            inspect.show(session(), prefix)
    with pytest.raises(NotFound, match=f"Message {other} is not a dead letter but ready"):
        dlq.show_dead_letter(session(), "0199d2c5")


async def test_the_beginning_of_several_ids_is_answered_with_the_first_ten(
    session: Open, capsys: Captured
) -> None:
    async with open_mailbox("store.db", MAILBOX, durability="relaxed") as opened:
        await opened.send_batch([message(message_id=id_) for id_ in reversed(IDS)])
    with pytest.raises(WrongUsage, match="0199d2c4 is the beginning of more than 10 message ids; add digits"):
        inspect.show(session(), "0199d2c4")
    notes = capsys.readouterr().err.splitlines()
    assert [note.split()[0] for note in notes] == IDS[:10]
    assert notes[0].split()[1] == "orders"
    with pytest.raises(WrongUsage, match=f"is the beginning of 2 message ids: {IDS[10]}, {IDS[11]}; add"):
        inspect.show(session(as_json=True), IDS[10][:-1])


# -- settings ---


def test_settings_are_shown_with_their_sources_and_without_secrets(
    session: Open, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "postroom.toml").write_text(
        """
        timeout_ms = "3s"
        [policy]
        visibility = "1m"
        [topics."orders"]
        max_attempts = 3
        [nats]
        url = "nats://token@one:4222"
        [messaging]
        database = "postgresql://shop:pa/ss@w0rd@db/shop?password=w0rd"
        [schedules.nightly]
        cron = "0 3 * * *"
        topic = "reports"
        payload = "hidden payload"
        """
    )
    environment = {"POSTROOM_LIMITS__TOPICS": "9", "POSTROOM_INBOX__SIGNING_KEY": "whsec_w0rd"}
    config.show(session(as_json=True, environment=environment))
    text = capsys.readouterr().out
    for secret in ("token@", "w0rd", "pa/ss", "whsec", "hidden payload"):
        assert secret not in text
    found = {each["name"]: (each["value"], each["source"]) for each in json.loads(text)["settings"]}
    assert found["store"] == ("store.db", "--store")
    assert found["timeout_ms"] == (3_000, "postroom.toml")
    assert found["durability"] == ("full", "default")
    assert found["policy.visibility_ms"] == (60_000, "postroom.toml")
    assert found["policy.max_attempts"] == (5, "default")
    assert found["topics.orders.max_attempts"] == (3, "postroom.toml")
    assert found["limits.topics"] == (9, "POSTROOM_LIMITS__TOPICS")
    assert found["inbox.signing_key"] == ("(hidden)", "POSTROOM_INBOX__SIGNING_KEY")
    assert found["nats.url"] == ("nats://(hidden)@one:4222", "postroom.toml")
    assert found["messaging.database"][0].startswith("postgresql://(hidden)@db/shop")
    assert found["schedules.nightly"] == ("...", "postroom.toml")
    config.show(session(environment=environment), "policy")
    shown = lines(capsys)
    assert len(shown) == 2 + len(TopicPolicy.__struct_fields__)
    assert [*map(str.split, shown)][4] == ["policy.visibility", "1m", "postroom.toml"]


def test_a_section_that_does_not_exist_is_answered_with_those_that_do(session: Open) -> None:
    with pytest.raises(WrongUsage, match=r"no section polcy; did you mean policy or proxy\?"):
        config.show(session(), "polcy")


@pytest.mark.parametrize(
    ("section", "setting", "problem"),
    [
        ("access", 'cap_cache_ttl = "1s"', "cap_cache_ttl_ms must be at least 5000; it was 1000"),
        ("access", 'quotas = {shop = "9 a minute"}', "the quota of shop '9 a minute' is not AMOUNT/WINDOW"),
        ("access", 'quotas = {shop = "9/7m"}', "The window of the quota of shop '9/7m' must be one of 1s"),
        ("access", 'quotas = {shop = "x/1m"}', "'x'"),
        ("audit", 'retention = "1s"', "retention_ms must be at least 3600000"),
        ("console", 'prefix = "console/"', "prefix is 'console/'"),
    ],
)
def test_config_show_refuses_the_settings_that_serve_refuses(
    session: Open, section: str, setting: str, problem: str
) -> None:
    Path("postroom.toml").write_text(f"[{section}]\n{setting}\n")
    opened = session()
    with pytest.raises(WrongUsage, match=problem) as refusal:
        config.show(opened, section)
    assert str(refusal.value).startswith(f"[{section}] in postroom.toml, or POSTROOM_")
    with pytest.raises(WrongUsage, match=problem):
        config.show(opened)
    if section == "access":
        with pytest.raises(WrongUsage) as served:
            checked_access(opened)
        assert str(served.value) == str(refusal.value)
