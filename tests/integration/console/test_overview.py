"""The overview: what it counts, for whom, and its live part."""

import asyncio
import re
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import ClientTimeout

from postroom.adapters.compose.console import ConsoleSettings, PartState
from postroom.domain.capability.rights import Right
from postroom.domain.policy import TopicPolicy
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console
from tests.support.waiting import until_answer

SECONDS = 60
FOREVER = ClientTimeout(None)


def cells(text: str, topic: str) -> list[str]:
    """Return the text of the cells of a topic's row."""
    row = next(each for each in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL) if topic in each)
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


async def test_it_counts_messages_by_topic_and_shard(place: MemoryPlace, browser: Browser) -> None:
    mailbox = place.mailbox
    await mailbox.set_topic_policy("bills", TopicPolicy(max_attempts=1))
    for _ in range(4):
        await mailbox.send_message(message(topic="bills"))
    await mailbox.send_message(message(topic="bills", deliver_after_ms=60_000))
    _, second = await mailbox.receive_messages("bills", max_messages=2)
    await second.nack(reason="bad")
    page = await browser.sign_in(place.issue())
    assert cells(page.text, ">bills<")[:5] == ["active", "2", "1", "1", "1"]
    assert cells(page.text, ">payments<")[:5] == ["active", "1", "0", "0", "0"]
    assert 'href="/console/dead-letters?topics=bills"' in page.text
    assert 'href="/console/search?topics=payments"' in page.text


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
    assert cells(page.text, ">orders<")[0] == "paused"
    assert "Topic orders is paused" not in (await browser.get("/")).text
    page = await browser.post("/topics/resume", topic="orders")
    assert cells(page.text, ">orders<")[0] == "active"
    page = await browser.post("/topics/pause", topic="nothing")
    assert (page.status, "E_NOT_FOUND" in page.text) == (404, True)


async def test_the_live_part_changes_and_ends_with_the_token(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue(lifetime_ms=60_000))
    async with browser.client.get(browser.url + "/live", timeout=FOREVER) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        name, text = await next_event(stream.content)  # type: ignore[arg-type]  # it reads lines, too
        assert (name, cells(text, ">orders<")[1]) == ("live", "1")
        assert browser.csrf in text
        await place.mailbox.send_message(message())
        while cells(text, ">orders<")[1] != "2":
            name, text = await next_event(stream.content)  # type: ignore[arg-type]
        await place.clock.advance(61)
        while name == "live":
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
        while name == "live":
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


async def test_a_caller_who_may_not_read_headers_sees_why(place: MemoryPlace, browser: Browser) -> None:
    page = await browser.sign_in(place.issue(operations=[Right.SEND]))
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
