"""The overview: what it counts, for whom, and its live part."""

import asyncio
import json
import re
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import ClientTimeout

from postroom.adapters.compose.console import ConsoleSettings, PartState
from postroom.adapters.console.values import DASH
from postroom.domain.capability.rights import Right
from postroom.domain.policy import TopicPolicy
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console
from tests.support.waiting import until_answer

SECONDS = 60
FOREVER = ClientTimeout(None)


def row_of(text: str, topic: str) -> str:
    """Return the HTML of a topic's row."""
    rows: list[str] = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    return next(each for each in rows if topic in each)


def names(text: str) -> list[str]:
    """Return the names of the topics that a page lists."""
    return re.findall(r'<a class="ident clamp"[^>]*>([^<]*)</a>', text)


def cells(text: str, topic: str) -> list[str]:
    """Return the text of the cells of a topic's row."""
    row = row_of(text, topic)
    return [re.sub(r"<.*?>|\s", "", each) for each in re.findall(r"<td.*?>(.*?)</td>", row, re.DOTALL)]


async def next_event(lines: asyncio.StreamReader) -> tuple[str, str]:
    """Return the name and the text of the next server-sent event."""
    name, text = "", ""
    async with asyncio.timeout(SECONDS):
        while line := (await lines.readline()).decode():
            if line.startswith("event: "):
                name = line.removeprefix("event: ").strip()
            elif line.startswith("data: "):
                text += line.removeprefix("data: ")
            elif name:
                return name, text
    return "closed", ""


async def test_it_counts_messages_by_topic(place: MemoryPlace, browser: Browser) -> None:
    mailbox = place.mailbox
    await mailbox.set_topic_policy("bills", TopicPolicy(max_attempts=1))
    for _ in range(4):
        await mailbox.send_message(message(topic="bills"))
    await mailbox.send_message(message(topic="bills", deliver_after_ms=60_000))
    _, second = await mailbox.receive_messages("bills", max_messages=2)
    await second.nack(reason="bad")
    page = await browser.sign_in(place.issue())
    assert cells(page.text, ">bills<")[:4] == ["2", "1", "1", "1"]
    assert cells(page.text, ">payments<")[:4] == ["1", "0", "0", "0"]
    assert 'href="/console/dead-letters?topics=bills"' in page.text
    assert 'href="/console/topics/show?name=payments"' in page.text


async def test_topics_are_found_sorted_and_divided_into_pages(place: MemoryPlace, browser: Browser) -> None:
    mailbox = place.mailbox
    for number in range(60):
        await mailbox.send_batch([message(topic=f"shop.{number:02}")] * (1 + number % 3))
    await mailbox.set_topic_policy("shop.59", TopicPolicy(max_attempts=1))
    (dead,) = await mailbox.receive_messages("shop.59", max_messages=1)
    await dead.nack(reason="bad")
    await mailbox.pause_topic("shop.07")
    (last,) = await mailbox.receive_messages("payments")
    await last.ack()
    first = await browser.sign_in(place.issue())
    assert "of 3" in first.text
    assert names(first.text) == ["orders", "payments", *(f"shop.{number:02}" for number in range(23))]
    assert cells(first.text, ">payments<")[:5] == ["0", "0", "0", "0", DASH]
    third = await browser.get("/?page=3")
    assert names(third.text) == [f"shop.{number:02}" for number in range(48, 60)]
    assert names((await browser.get("/?page=9")).text) == names(third.text)
    for query, expected in (
        ("show=dead", ["shop.59"]),
        ("show=paused", ["shop.07"]),
        ("show=idle", ["payments"]),
        ("topics=PAY", ["payments"]),
        ("topics=shop.*5", [f"shop.{tens}5" for tens in range(6)]),
        ("topics=none", []),
        ("show=messages&topics=p", [f"shop.{number:02}" for number in range(25)]),
    ):
        assert names((await browser.get(f"/?{query}")).text) == expected, query
    ready = [
        int(cells(text, f">{name}<")[0])
        for text in [(await browser.get("/?sort=ready")).text]
        for name in names(text)
    ]
    assert ready == sorted(ready, reverse=True)
    for query in ("show=all", "sort=size", "page=x", "topic=orders"):
        refused = await browser.get(f"/?{query}")
        assert (refused.status, 'aria-label="Pages"' in refused.text) == (400, True), query


async def test_the_overview_of_many_topics_is_small_and_so_is_what_changes(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.send_batch([message(topic=f"topic-{number:04}") for number in range(2_000)])
    await browser.sign_in(place.issue())
    async with browser.client.get(browser.url + "/") as page:
        assert page.headers["content-encoding"] == "gzip"
        assert int(page.headers["content-length"]) < 20_000
    async with browser.client.get(browser.url + "/live", timeout=FOREVER) as stream:
        assert stream.headers["content-encoding"] == "gzip"
        await next_event(stream.content)  # type: ignore[arg-type]
        await place.mailbox.send_message(message(topic="topic-0001"))
        name, text = "", ""
        while ">2<" not in text:
            name, text = await next_event(stream.content)  # type: ignore[arg-type]
        assert (name, len(text) < 4_000) == ("change", True)


async def test_text_of_others_is_escaped_everywhere(place: MemoryPlace, browser: Browser) -> None:
    topic = "<script>alert(1)</script>\"'&"
    await place.mailbox.send_message(message(topic=topic))
    page = await browser.sign_in(place.issue(principal="<i>olga</i>"))
    assert "<script>alert" not in page.text
    assert "&lt;script&gt;alert(1)" in page.text
    assert "<i>" not in page.text
    page = await browser.post("/topics/pause", topic=topic)
    assert (page.status, "<script>alert" in page.text, "is paused" in page.text) == (200, False, True)


async def test_a_topic_is_paused_and_resumed(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    page = await browser.post("/topics/pause", topic="orders")
    assert "Topic orders is paused" in page.text
    assert "paused" in row_of(page.text, ">orders<")
    assert "Topic orders is paused" not in (await browser.get("/")).text
    page = await browser.post("/topics/resume", topic="orders")
    assert "paused" not in row_of(page.text, ">orders<")
    page = await browser.post("/topics/pause", topic="nothing")
    assert (page.status, "E_NOT_FOUND" in page.text) == (404, True)


async def test_the_live_part_changes_and_ends_with_the_token(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue(lifetime_ms=60_000))
    async with browser.client.get(browser.url + "/live", timeout=FOREVER) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name, text = await next_event(stream.content)  # type: ignore[arg-type]  # it reads lines, too
        assert (name, cells(text, ">orders<")[0]) == ("live", "1")
        assert browser.csrf in text
        await place.mailbox.send_message(message())
        changed: list[str] = []
        while not any(">2<" in each for each in changed):
            name, text = await next_event(stream.content)  # type: ignore[arg-type]
            assert name == "change"
            changed = [html for _, html in json.loads(text)]
        assert not any("payments" in each for each in changed)
        await place.mailbox.send_message(message(topic="new"))
        while name != "live":
            name, text = await next_event(stream.content)  # type: ignore[arg-type]
        assert "new" in names(text)
        await place.clock.advance(61)
        while name != "end":
            name, text = await next_event(stream.content)  # type: ignore[arg-type]
        assert (name, "expired" in text) == ("end", True)


async def test_the_live_part_ends_with_the_service_and_the_session(place: MemoryPlace) -> None:
    async with (
        AsyncExitStack() as opened,
        served_console(place.mailbox, access=access_of(place)) as browser,
    ):
        await browser.sign_in(place.issue())
        first = await opened.enter_async_context(browser.client.get(browser.url + "/live", timeout=FOREVER))
        assert (await next_event(first.content))[0] == "live"  # type: ignore[arg-type]
        await browser.post("/sign-out")
        name = "live"
        while name in ("live", "change"):
            name, _ = await next_event(first.content)  # type: ignore[arg-type]
        assert name == "end"
        await browser.sign_in(place.issue())
        second = await opened.enter_async_context(browser.client.get(browser.url + "/live", timeout=FOREVER))
        assert (await next_event(second.content))[0] == "live"  # type: ignore[arg-type]


async def test_live_parts_of_a_capability_are_few(place: MemoryPlace, browser: Browser) -> None:
    token = place.issue()

    async def status(of: Browser) -> int:
        async with of.client.get(of.url + "/live", timeout=FOREVER) as stream:
            return stream.status

    async with AsyncExitStack() as opened:
        twin = await opened.enter_async_context(Browser.another(browser))
        other = await opened.enter_async_context(Browser.another(browser))
        await browser.sign_in(token)
        await twin.sign_in(token)
        await other.sign_in(place.issue())
        for each in (browser, twin) * 4:
            request = each.client.get(browser.url + "/live", timeout=FOREVER)
            stream = await opened.enter_async_context(request)
            assert stream.status == 200
        assert [await status(each) for each in (browser, twin, other)] == [429, 429, 200]

    async def has_room() -> bool:
        return await status(browser) == 200

    await until_answer(has_room)


async def test_browsers_share_the_live_part_but_not_their_tokens(
    place: MemoryPlace, browser: Browser
) -> None:
    page = await browser.sign_in(place.issue(principal="olga"))
    first = browser.csrf
    browser.client.cookie_jar.clear()
    page = await browser.sign_in(place.issue(principal="igor"))
    assert first not in page.text
    assert browser.csrf in page.text
    browser.client.cookie_jar.clear()
    page = await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
    assert "Pause orders" not in page.text


async def test_a_caller_who_may_not_read_headers_sees_no_topic(place: MemoryPlace, browser: Browser) -> None:
    page = await browser.sign_in(place.issue(operations=[Right.SEND]))
    assert "orders" not in page.text
    page = await browser.get("/live")
    assert (page.status, "read-headers" in page.text) == (403, True)
    assert "orders" not in page.text


async def test_rates_come_from_the_metrics_of_the_mailbox(place: MemoryPlace) -> None:
    settings = ConsoleSettings(prefix="/ops/console")
    async with served_console(
        place.mailbox, access=access_of(place), settings=settings, measure=place.mailbox.measure
    ) as browser:
        page = await browser.sign_in(place.issue())
        assert (page.path, "Messages per second" in page.text) == ("/ops/console/", True)
        page = await browser.sign_in(place.issue(topics=["orders"]))
        assert "Messages per second" not in page.text


async def test_it_shows_parts_of_the_process_and_their_errors_to_administrators(place: MemoryPlace) -> None:
    failed = PartState("views", False, 3, "OSError: <i>", "2030-01-02T03:04:05Z")
    parts = [PartState("worker <b>", True), failed]
    options: Any = {"access": access_of(place), "parts": lambda: parts}
    async with served_console(place.mailbox, **options) as browser:
        text = (await browser.sign_in(place.issue())).text
        assert cells(text, "worker &lt;b&gt;") == ["running", "0", "", ""]
        assert cells(text, ">views<") == ["restarting", "3", "2030-01-0203:04:05.000", "OSError:&lt;i&gt;"]
        for topics, is_shown in (("*", True), ("orders", False)):
            await browser.post("/sign-out")
            token = place.issue(topics=(topics,), operations=(Right.READ_HEADERS,))
            text = (await browser.sign_in(token)).text
            assert (">views<" in text, "OSError" in text) == (is_shown, False)
