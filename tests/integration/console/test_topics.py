"""Topics in the console: their list, the page of one, purging, and the editor of policies."""

import re

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.console.values import DASH, SPACE
from postroom.application.queries import describe_topic
from postroom.domain.capability.rights import Right
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled, MemoryPlace
from tests.support.clocks import ManualClock
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console

LONG = "orders." + "x" * 248


def charts(text: str) -> list[str]:
    """Return the titles of the charts of a page."""
    return re.findall(r'<figure class="chart-frame"><figcaption>([^<]*)', text)


def table(text: str, title: str) -> list[list[str]]:
    """Return the cells of the table of a chart."""
    body = text.partition(f'<caption class="visually-hidden">{title}</caption>')[2].partition("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body.partition("<tbody")[2], re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>([^<]*)", each) for each in rows]


async def test_the_list_is_filtered_sorted_and_paged(place: MemoryPlace, browser: Browser) -> None:
    for number in range(60):
        await place.mailbox.send_batch([message(topic=f"t{number:02}")] * (number + 1))
    await place.mailbox.pause_topic("t07")
    await browser.sign_in(place.issue())
    first = (await browser.get("/topics")).text
    assert "62 topics" in first
    assert "Page 1 of 2" in first
    assert "t47" in first
    assert "t50" not in first
    assert "t50" in (await browser.get("/topics?page=2")).text
    largest = (await browser.get("/topics?sort=ready")).text
    assert largest.index(">t59<") < largest.index(">t58<") < largest.index(">t20<")
    assert ">t00<" not in largest
    paused = (await browser.get("/topics?show=paused")).text
    assert ">t07<" in paused
    assert "1 of 62" in paused
    assert ">t08<" not in paused
    assert "No topic matches" in (await browser.get("/topics?topics=none")).text
    part = await browser.get("/topics?topics=t0", headers={"HX-Request": "true"})
    assert part.text.lstrip().startswith('<div id="topics"')
    assert (await browser.get("/topics?sort=nothing")).status == 400


async def test_the_page_of_a_topic_tells_what_happened_and_who_receives(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.set_settings(
        SettingsChanges(topics={"or*": {"max_attempts": 1}, "orders": {"visibility_ms": 60_000}})
    )
    await place.mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
    await place.mailbox.send_message(message())
    one, _ = await place.mailbox.receive_messages("orders", consumer="shop/ship@host-1:4711")
    await one.nack(reason="<b>no such customer</b>")
    await browser.sign_in(place.issue())
    text = (await browser.get("/topics/show?name=orders")).text
    for expected in (
        "shop/ship@host-1:4711",
        "&lt;b&gt;no such customer&lt;/b&gt;",
        ">visibility_ms<",
        ">or*<",
        "name=mail",
        "Change the policy",
        "Purge",
    ):
        assert expected in text
    copies = (await browser.get("/topics/show?name=mail")).text
    assert "This topic is a subscription" in copies
    assert "Send a message" not in copies
    idle = await browser.get("/topics/show?name=payments")
    assert "Nobody received from it lately" in idle.text
    assert (await browser.get("/topics/show?name=a%20b")).status == 400


async def test_a_topic_that_does_not_exist_yet_says_so_and_offers_to_send_to_it(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.set_topic_policy("planned", {"max_attempts": 1})
    await browser.sign_in(place.issue())
    page = await browser.get("/topics/show?name=nothing")
    assert page.status == 200
    assert "does not exist yet" in page.text
    assert "/send?topic=nothing" in page.text
    for absent in (">Pause<", "Purge", "Nobody received", "Dead-lettered"):
        assert absent not in page.text
    for name in ("orders", "planned"):
        text = (await browser.get(f"/topics/show?name={name}")).text
        assert "does not exist yet" not in text
        assert "Purge" in text
    async with Browser.another(browser) as limited:
        await limited.sign_in(place.issue(topics=["orders", "no*"]))
        assert "does not exist yet" in (await limited.get("/topics/show?name=nothing")).text
        assert "does not exist yet" not in (await limited.get("/topics/show?name=orders")).text


async def test_rates_and_latencies_of_a_period_are_charts_with_tables(
    place: MemoryPlace, browser: Browser
) -> None:
    for _ in range(3):
        await place.mailbox.send_message(message())
    for each in await place.mailbox.receive_messages("orders", max_messages=4):
        await place.clock.advance(2)
        await each.ack()
    await browser.sign_in(place.issue())
    text = (await browser.get("/topics/show?name=orders")).text
    assert charts(text) == [
        f"Messages sent in 1{SPACE}min, and what became of them",
        "Time from sending to the ack, by time of sending",
    ]
    assert re.findall(r"<title>[^<]*: sent (\d+)", text)[-1] == "4"
    rows = table(text, "Time from sending to the ack, by time of sending")
    assert len(rows) in (61, 62)
    assert [each for each in rows if DASH not in each] == [rows[0]]  # newest first
    assert rows[0][1:] == [f"4{SPACE}s", f"8{SPACE}s", f"8{SPACE}s"]
    week = (await browser.get("/topics/show?name=orders&period=7d")).text
    assert f"Messages sent in 3{SPACE}h" in week
    assert re.findall(r'aria-current="page">([^<]*)</a>', week)[-1] == "7 d"
    refused = await browser.get("/topics/show?name=orders&period=1y")
    assert (refused.status, "choose one of 1h, 24h, 7d" in refused.text) == (400, True)


async def test_times_that_were_not_measured_have_no_rows(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    text = (await browser.get("/topics/show?name=orders")).text
    assert "Times of messages" not in text  # nobody received any
    assert charts(text) == [f"Messages sent in 1{SPACE}min, and what became of them"]
    await place.mailbox.receive_messages("orders")
    text = (await browser.get("/topics/show?name=orders")).text
    assert re.findall(r'<tr><th scope="row">(Wait|Work|Total)', text) == ["Wait"]


async def test_what_was_not_read_is_a_gap_in_charts(
    place: MemoryPlace, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describe_topic, "MAX_EVENTS", 2)
    for _ in range(4):
        await place.clock.advance(600)
        await place.mailbox.send_message(message())
    await browser.sign_in(place.issue())
    rows = table(
        (await browser.get("/topics/show?name=orders")).text,
        f"Messages sent in 1{SPACE}min, and what became of them",
    )
    counts = [row[1] for row in rows]
    assert [each for each in counts if each != "0"][:2] == ["1", "1"]
    assert counts[-1] == DASH
    assert counts.count("0") == 9


async def test_a_token_of_some_topics_sees_and_changes_these_only(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.receive_messages("payments", consumer="secret-consumer")
    await browser.sign_in(place.issue(topics=["orders"]))
    listed = (await browser.get("/topics")).text
    assert ">orders<" in listed
    assert "payments" not in listed
    assert (await browser.get("/topics/show?name=orders")).status == 200
    assert (await browser.get("/topics/show?name=payments")).status == 403
    assert "secret-consumer" not in (await browser.get("/consumers")).text
    done = await browser.post("/topics/policy", name="orders", max_attempts="2", confirmed="1")
    assert done.status == 200
    assert (await place.mailbox.get_topic_policy("orders")).max_attempts == 2
    refused = await browser.post("/topics/policy", name="payments", max_attempts="2", confirmed="1")
    assert refused.status == 403
    preview = await browser.post("/topics/policy", name="orders", max_attempts="3")
    assert "needs the right <code>admin</code> for all topics" in preview.text
    assert (await browser.post("/topics/purge", name="payments", ready="1", confirmed="1")).status == 403


async def test_without_admin_or_in_a_read_only_console_nothing_can_be_changed(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
    text = (await browser.get("/topics/show?name=orders")).text
    assert "Purge" not in text
    assert "Change the policy" not in text
    assert (await browser.get("/topics/purge?name=orders")).status == 403
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as other:
        await other.sign_in(place.issue())
        assert "Purge" not in (await other.get("/topics/show?name=orders")).text


async def test_the_rate_of_a_topic_with_few_messages_is_not_rounded_to_zero(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    page = (await browser.get("/topics/show?name=orders")).text
    cells = re.findall(r'data-label="Rate"[^>]*>([^<]*)', page)
    assert cells == ["1 an hour", "1 a day", "0.1 a day"]
    await place.mailbox.set_topic_policy("idle", {"max_attempts": 1})
    page = (await browser.get("/topics/show?name=idle")).text
    assert re.findall(r'data-label="Rate"[^>]*>([^<]*)', page) == ["0", "0", "0"]
    assert "No message was sent to it within 1 h." in page


async def test_a_topic_is_purged_after_a_preview(place: MemoryPlace, browser: Browser) -> None:
    await place.mailbox.set_topic_policy("orders", {"max_attempts": 1})
    await place.mailbox.send_batch([message(), message(deliver_after_ms=60_000)])
    await (await place.mailbox.receive_messages("orders", max_messages=1))[0].nack()
    await browser.sign_in(place.issue())
    assert "2 ready and delayed messages" in (await browser.get("/topics/purge?name=orders")).text
    nothing = await browser.post("/topics/purge", name="orders")
    assert nothing.status == 400
    assert "Choose what to remove" in nothing.text
    preview = await browser.post("/topics/purge", name="orders", ready="1")
    assert "Remove 2 messages" in preview.text
    (before,) = (each for each in await place.mailbox.list_topics() if each.topic == "orders")
    assert (before.ready, before.delayed, before.dead) == (1, 1, 1)
    done = await browser.post("/topics/purge", name="orders", ready="1", confirmed="1")
    assert "2 messages removed from orders: ready and delayed messages" in done.text
    (after,) = (each for each in await place.mailbox.list_topics() if each.topic == "orders")
    assert (after.ready, after.delayed, after.dead) == (0, 0, 1)
    assert "nothing to remove" in (await browser.post("/topics/purge", name="orders", ready="1")).text


async def test_a_policy_is_changed_after_a_preview_of_what_it_changes(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.set_settings(SettingsChanges(topics={"or*": {"max_attempts": 7}}))
    await place.mailbox.set_topic_policy("orders", {"max_attempts": 2, "dead_capacity": 500})
    await place.mailbox.send_batch([message()] * 3)
    await browser.sign_in(place.issue())
    form = (await browser.get("/topics/policy?name=orders")).text
    assert 'name="max_attempts" inputmode="numeric" value="2"' in form
    own = {"max_attempts": "2", "dead_capacity": "500"}
    unchanged = await browser.post("/topics/policy", name="orders", **own)
    assert unchanged.status == 400
    assert "Nothing is changed" in unchanged.text
    wrong = await browser.post("/topics/policy", name="orders", **own | {"max_attempts": "two"})
    assert wrong.status == 400
    assert 'value="two"' in wrong.text
    invalid = await browser.post("/topics/policy", name="orders", **own, visibility_ms="1")
    assert invalid.status == 400
    assert "visibility_ms" in invalid.text
    for number in range(3):
        (each,) = await place.mailbox.receive_messages("orders", max_messages=1)
        await each.reject(f"bad {number}")
    changes = {"dead_capacity": "1", "fair_keys": "true", "key_weights": "gold=3"}
    preview = (await browser.post("/topics/policy", name="orders", **changes)).text
    assert "3 dead letters" in preview or "2 dead letters" in preview
    assert "can&#39;t be undone" in preview
    assert "gold=3" in preview
    assert re.search(r">2</td><td[^>]*>7</td>", preview)  # max_attempts follows the glob again
    assert (await place.mailbox.get_topic_policy("orders")).max_attempts == 2
    again = (await browser.post("/topics/policy", name="orders", **changes, change="1")).text
    assert "gold=3" in again
    done = await browser.post("/topics/policy", name="orders", **changes, confirmed="1")
    assert "The policy of orders is changed" in done.text
    policy = await place.mailbox.get_topic_policy("orders")
    assert (policy.max_attempts, policy.dead_capacity, policy.key_weights) == (7, 1, {"gold": 3})


async def test_a_change_of_retries_is_simulated_with_past_messages(
    stored: Controlled[OwnedMailbox, ManualClock], stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    preview = await stored_browser.post("/topics/policy", name="orders", max_attempts="1")
    assert "/what-if?topic=orders&amp;events=5000&amp;max_attempts=1" in preview.text
    others = await stored_browser.post("/topics/policy", name="orders", dead_capacity="5")
    assert "/what-if?topic" not in others.text


async def test_a_topic_is_paused_and_resumed(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    paused = await browser.post("/topics/state", name="orders", paused="1")
    assert "is paused" in paused.text
    assert "/topics/show?name=orders" in paused.path
    assert "delivers messages again" in (await browser.post("/topics/state", name="orders")).text
    assert not any(each.paused for each in await place.mailbox.list_topics())


async def test_names_of_255_characters_are_shown(place: MemoryPlace, browser: Browser) -> None:
    await place.mailbox.send_message(message(topic=LONG, sticky_key="k" * 255))
    await place.mailbox.receive_messages(LONG, consumer="c" * 255)
    await browser.sign_in(place.issue())
    for path in ("/topics", f"/topics/show?name={LONG}", "/consumers"):
        assert LONG in (await browser.get(path)).text
