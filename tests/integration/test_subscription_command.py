"""`postroom subscription` creates, shows, rewinds and deletes subscriptions, and says what it did."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.adapters.cli import inspect, log, messages, subscriptions, topic
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import NOTHING, WrongUsage
from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import NewMessage
from postroom.application.queries.message_lists import explain_empty
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.policy import TopicPolicy
from postroom.domain.subscription import SubscriptionFilter, SubscriptionStatus
from tests.support.altered_commits import alter
from tests.support.stores import MAILBOX, receive_one
from tests.support.waiting import until_answer

Open = Callable[..., Session]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the session of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)

    def open_session(*, as_json: bool = False) -> Session:
        settings = load_settings({"store": "store.db", "mailbox": MAILBOX}, {}, None)
        return Session("test", settings, Output(as_json))

    return open_session


@pytest.fixture
def run(session: Open, capsys: Captured) -> Callable[..., Any]:
    """Return a function that runs a command and returns its answer."""

    async def run_command(command: Any, *arguments: Any, **options: Any) -> Any:
        capsys.readouterr()
        await command(session(as_json=True), *arguments, **options)
        return json.loads(capsys.readouterr().out)

    return run_command


def opened() -> Any:
    return open_mailbox("store.db", MAILBOX, durability="relaxed")


async def send(mailbox: OwnedMailbox, *payloads: str, topic: str = "orders.eu", **fields: Any) -> None:
    await mailbox.send_batch([NewMessage(topic=topic, payload=each.encode(), **fields) for each in payloads])


async def is_live(mailbox: OwnedMailbox) -> bool:
    (report,) = await mailbox.list_subscriptions()
    return report.status == "live"


async def test_a_subscription_is_created_with_topics_and_headers_and_listed(
    session: Open, run: Callable[..., Any], capsys: Captured
) -> None:
    await subscriptions.set_subscription(session(), "mail", ["orders.*", "refunds"], header=["country=de"])
    out = capsys.readouterr().out
    assert out == "Subscription mail gets orders.*, refunds with country=de; it is live\n"
    async with opened() as mailbox:
        await send(mailbox, "a", attrs={"country": "de"})
        await send(mailbox, "b", attrs={"country": "fr"})
        await mailbox.receive_messages("mail")
        await subscriptions.set_subscription(session(), "all", ["*"])  # by way of the owner
    (all_, mail) = (await run(subscriptions.list_subscriptions))["subscriptions"]
    assert (all_["name"], all_["topics"], all_["status"], all_["behind"]) == ("all", ["*"], "live", 0)
    assert (mail["headers"], mail["in_flight"], mail["ready"]) == ({"country": "de"}, 1, 0)
    shown = await run(subscriptions.show, "mail")
    assert shown == mail | {"position": shown["position"]}  # each command that owns the mailbox adds a record
    await subscriptions.list_subscriptions(session())
    table = capsys.readouterr().out
    assert "orders.*, refunds with co" in table
    assert ("skipped" in table, "paused" in table) == (False, False)
    await topic.pause(session(), "all")  # although it has no messages
    await subscriptions.list_subscriptions(session())
    assert "paused" in capsys.readouterr().out
    await subscriptions.show(session(), "mail")
    assert "0 ready, 1 in flight, 0 dead" in capsys.readouterr().out
    with pytest.raises(NotFound, match="did you mean mail"):
        await subscriptions.show(session(), "mial")


@pytest.mark.parametrize(("start", "expected"), [("now", 0), ("beginning", 2), ("0", 2), ("1h", 2)])
async def test_a_subscription_starts_now_or_in_the_past(
    run: Callable[..., Any], session: Open, start: str, expected: int
) -> None:
    async with opened() as mailbox:
        await send(mailbox, "a", "b")
        await run(subscriptions.set_subscription, "mail", ["orders.*"], start=start)
        await until_answer(partial(is_live, mailbox))
        (report,) = await mailbox.list_subscriptions()
        assert report.ready == expected
    with pytest.raises(WrongUsage):
        await run(subscriptions.set_subscription, "other", ["orders.*"], start="yesterday")


async def test_a_rewind_says_what_it_removes_and_copies_and_asks(
    session: Open, run: Callable[..., Any], capsys: Captured
) -> None:
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        await send(mailbox, "a", "b", "c")
        (first, *_) = await mailbox.receive_messages("mail", max_messages=1)
        await first.ack()
    effects = {"name": "mail", "position": 0, "removed": 2, "copied": 3}
    assert await run(subscriptions.rewind, "mail", "beginning", dry_run=True) == effects
    assert await subscriptions.rewind(session(), "mail", "0s", dry_run=True) is None
    text = "2 messages would be removed from mail, and 0 copied to it again\n"
    assert capsys.readouterr().out == text
    with pytest.raises(WrongUsage, match=r"2 messages would be removed from mail, and 3 copied.* add --yes"):
        await run(subscriptions.rewind, "mail", "beginning")
    async with opened() as mailbox:
        assert await run(subscriptions.rewind, "mail", "beginning", yes=True) == effects
        payloads: list[bytes] = []
        while len(payloads) < 3:
            received = await mailbox.receive_messages("mail", wait_ms=60_000)
            payloads += [each.payload for each in received]
            assert received, payloads
    assert payloads == [b"a", b"b", b"c"]


@pytest.mark.usefixtures("session")
async def test_the_list_only_reads(run: Callable[..., Any]) -> None:
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        await send(mailbox, "a")
        owned = await mailbox.list_subscriptions()
        assert (await run(subscriptions.list_subscriptions))["subscriptions"][0]["ready"] == 1
    with read_mailbox("store.db", MAILBOX) as reader:
        position, before = reader.get_backlog().position, reader.list_subscriptions()
        listed = (await run(subscriptions.list_subscriptions))["subscriptions"]
        assert json.loads(msgspec.json.encode(before)) == listed
        assert (await run(subscriptions.show, "mail"))["ready"] == 1
        assert reader.get_backlog().position == position
    assert [each.filter for each in before] == [each.filter for each in owned]


async def test_a_delete_asks_and_says_what_is_left_and_how_to_remove_it(
    session: Open, run: Callable[..., Any], capsys: Captured
) -> None:
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        await send(mailbox, "a", "b")
        await (await receive_one(mailbox, "mail")).reject("broken")
    assert await run(subscriptions.delete, "mail", dry_run=True) == {
        "name": "mail",
        "left": 2,
        "ready": 1,
        "in_flight": 0,
        "dead": 1,
        "behind": 0,
    }
    await subscriptions.delete(session(), "mail", dry_run=True, yes=True)
    assert capsys.readouterr() == (
        "Subscription mail would be deleted; its topic keeps 1 ready, 0 in flight and 1 dead messages\n",
        "",
    )
    with pytest.raises(WrongUsage, match="--yes"):
        await subscriptions.delete(session(), "mail")
    await subscriptions.delete(session(), "mail", yes=True)
    captured = capsys.readouterr()
    assert captured.out == "Subscription mail is deleted\n"
    assert "2 messages left in topic mail" in captured.err
    assert "postroom topic purge mail" in captured.err
    assert await run(topic.purge, "mail", yes=True) == {"purged": 2}
    assert await run(subscriptions.list_subscriptions) == {"subscriptions": []}
    with pytest.raises(NotFound):
        await subscriptions.delete(session(), "mail", yes=True)


@pytest.mark.usefixtures("session")
async def test_a_message_that_was_altered_on_disk_is_counted_and_the_others_are_copied() -> None:
    async with opened() as mailbox:
        for payload in ("one", "two", "three"):
            await send(mailbox, payload)
    alter("store.db", "envelopes", lambda part: part.replace(b"two", b"owt"))
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)), start=0)
        await until_answer(partial(is_live, mailbox))
        (report,) = await mailbox.list_subscriptions()
        copies = await mailbox.receive_messages("mail", max_messages=9)
    assert [each.payload for each in copies] == [b"one", b"three"]
    assert report.skipped == 1


@pytest.mark.usefixtures("session")
async def test_what_precedes_a_commit_that_cannot_be_read_is_copied() -> None:
    async with opened() as mailbox:
        for payload in ("one", "two", "three"):
            await send(mailbox, payload, message_id=payload)
        alter("store.db", "events", lambda part: b"" if b"two" in part else part)
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)), start=0)
        copies = await mailbox.receive_messages("mail", max_messages=9, wait_ms=10_000)
        (report,) = await mailbox.list_subscriptions()
    assert [each.payload for each in copies] == [b"one"]
    assert (report.status, report.skipped) == ("copying", 0)
    assert f"positions {report.position + 1} to" in report.problem


async def test_the_log_shows_what_a_subscription_copies(session: Open, capsys: Captured) -> None:
    async with opened() as mailbox:
        await send(mailbox, "a")
        position = (await mailbox.get_backlog()).position
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*", "x"), {"a": "b"}))
        await mailbox.rewind_subscription("mail", 0)
        await until_answer(partial(is_live, mailbox))
    capsys.readouterr()
    names = ["SubscriptionSet", "SubscriptionRewound", "SubscriptionAdvanced"]
    log.show(session(as_json=True), event=names)
    created, rewound, *advanced = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert created["filter"] == {"topics": ["orders.*", "x"], "headers": {"a": "b"}}
    assert created["after"] == position < created["position"] < rewound["position"]
    assert rewound["after"] == 0
    assert advanced[-1]["status"] == "live"
    log.show(session(), event=names)
    table = capsys.readouterr().out
    assert "topics orders.* x" in table
    assert "status live" in table


async def test_a_copy_is_shown_with_its_original_and_its_story_begins_with_the_copy(
    session: Open, run: Callable[..., Any], capsys: Captured
) -> None:
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        await send(mailbox, "a", message_id="own", unique_key="u")
        (copy,) = await mailbox.receive_messages("mail")
        assert (copy.topic, copy.published_topic) == ("mail", "orders.eu")
        assert copy.to_json()["published_topic"] == "orders.eu"
        await copy.release()
        await mailbox.set_topic_policy("orders.eu", {"subscriptions_only": True})
        await send(mailbox, "b", message_id="newer", unique_key="u", on_conflict="replace")
        await mailbox.rewind_subscription("mail", (await mailbox.get_backlog()).position)
        await until_answer(partial(is_live, mailbox))
        assert (await mailbox.get_message("own")).copy_of is None
        assert (await mailbox.get_message(copy.message_id)).copy_of == "own"
        story = [each.text for each in (await mailbox.explain_message(copy.message_id)).story]
        newer_id = story[-1].split("message ")[1].split(",")[0]
        newer = [each.text for each in (await mailbox.explain_message(newer_id)).story]
        (sent, *_) = [each.text for each in (await mailbox.explain_message("newer")).story]
    assert story[0].startswith("Copied to subscription mail, shard ")
    assert "from message own, which was sent to orders.eu, to be delivered at once" in story[0]
    assert "has its unique key and is newer, replaced it" in story[-1]
    assert newer[-1].startswith("Removed by an operator, who rewound the subscription")
    assert sent.endswith("its topic has subscriptions_only, so it is never delivered.")
    inspect.show(session(as_json=True), copy.message_id)
    assert json.loads(capsys.readouterr().out)["copy_of"] == "own"
    inspect.show(session(), copy.message_id)
    assert "copy of" in capsys.readouterr().out


async def test_an_empty_receive_names_the_subscriptions_or_what_a_subscription_has_yet_to_do(
    session: Open, capsys: Captured
) -> None:
    async with opened() as mailbox:
        await send(mailbox, "a")
        await mailbox.set_topic_policy("news", {"subscriptions_only": True})
    assert await messages.recv(session(), "news") == NOTHING
    err = capsys.readouterr().err
    assert (
        "go to subscriptions only (subscriptions_only of its policy); postroom subscription set NAME news"
        in err
    )
    async with opened() as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("n*",)))
        assert await messages.recv(session(), "mail") == NOTHING
        assert "Topic mail has no ready messages." in capsys.readouterr().err
    assert await messages.recv(session(), "news") == NOTHING
    assert "receive from mail." in capsys.readouterr().err
    async with opened() as mailbox:
        with pytest.raises(InvalidRequest, match="is the queue of subscription mail"):
            await mailbox.send_message(NewMessage(topic="mail", payload=b"x"))


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("live", "Topic mail has no ready messages."),
        (
            "copying",
            "Subscription mail has yet to read 1,200 positions of the log; its owner goes on copying.",
        ),
        ("clearing", "Subscription mail was rewound and is being emptied; its owner goes on copying."),
    ],
)
async def test_an_empty_receive_says_that_a_subscription_has_yet_to_copy(
    session: Open, status: SubscriptionStatus, reason: str
) -> None:
    async with opened() as mailbox:
        report = await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",)))
        topics = await mailbox.list_topics()
    reports = [msgspec.structs.replace(report, status=status, behind=1_200)]
    assert explain_empty("mail", topics, MAILBOX, TopicPolicy(), reports).startswith(reason)
