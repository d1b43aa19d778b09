"""The live tail: what comes, for whom, and what it says of what it leaves out."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from html import unescape
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import ClientTimeout

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.console import live
from postroom.adapters.console.pages import tail as tail_page
from postroom.application.queries import tail_log
from postroom.application.threads import wait_at_most
from postroom.domain.capability.rights import Right
from postroom.domain.capability.token import Token
from postroom.domain.errors import BrokenLog
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled, MemoryPlace
from tests.support.clocks import ManualClock
from tests.support.messages import message
from tests.support.servers.console import Answer, Browser, served_console

Stored = Controlled[OwnedMailbox, ManualClock]
SECONDS = 60


class Event(NamedTuple):
    """A server-sent event."""

    name: str
    text: str
    id: str


def rows(text: str) -> list[int]:
    """Return the positions of the events in some rows, newest first."""
    return [int(each) for each in re.findall(r'<tr data-position="(\d+)">', text)]


async def next_event(lines: Any) -> Event:
    """Return the next server-sent event that is no comment."""
    name, text, id_ = "", "", ""
    async with asyncio.timeout(SECONDS):
        while line := (await lines.readline()).decode():
            field, _, value = line.rstrip("\n").partition(": ")
            match field:
                case "event":
                    name = value
                case "data":
                    text += value
                case "id":
                    id_ = value
                case "" if name:
                    return Event(name, text, id_)
    return Event("closed", "", "")


@asynccontextmanager
async def stream(browser: Browser, query: str = "", **headers: str) -> AsyncIterator[Any]:
    """Yield the lines of a stream of events."""
    url = f"{browser.url}/tail/live?{query}"
    async with browser.client.get(url, timeout=ClientTimeout(None), headers=headers) as response:
        assert response.status == 200, await response.text()
        yield response.content


def after_of(page: Answer) -> int:
    """Return the position in the URL of a page."""
    return int(page.path.partition("after=")[2])


async def test_a_page_begins_before_the_end_of_the_log_and_its_url_says_where(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position
    page = await stored_browser.get("/tail?topics=payments&text=")
    assert page.path == "/console/tail?topics=payments&show=messages&after=0"
    assert rows(page.text) == [head, head - 1]
    monkeypatch.setattr(tail_page, "POSITIONS_BEFORE", 1)
    page = await stored_browser.get("/tail?topics=payments")
    assert (after_of(page), rows(page.text)) == (head - 1, [head])
    assert (await stored_browser.get(page.path.removeprefix("/console"))).text == page.text
    await stored.mailbox.send_message(message(topic="payments"))
    again = await stored_browser.get(page.path.removeprefix("/console"))  # a reload shows both
    assert rows(again.text) == [head + 1, head]
    (newer,) = re.findall(r'href="/console(/tail[^"]+)">Show what came', page.text)
    assert rows((await stored_browser.get(unescape(newer))).text) == [head + 1]


async def test_what_comes_is_sent_and_a_browser_that_connects_again_misses_nothing(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position
    query = f"topics=pay*&show=events&after={head}"
    async with stream(stored_browser, query) as lines:
        await stored.mailbox.send_message(message(topic="payments", message_id="new-1"))
        event = await next_event(lines)
        assert (event.name, event.id, rows(event.text)) == ("rows", f"{head + 1}", [head + 1])
        assert "new-1" in event.text
        await stored.mailbox.send_message(message())  # of another topic
        event = await next_event(lines)
        assert (event.id, rows(event.text)) == (f"{head + 2}", [])
    sent = await stored.mailbox.send_message(message(topic="payments"))
    await stored.mailbox.cancel_messages([sent.message_id])
    async with stream(stored_browser, query, **{"last-event-id": event.id}) as lines:
        event = await next_event(lines)
        assert rows(event.text) == [head + 4, head + 3]
        assert "MessageExpired" in event.text
    async with stream(stored_browser, f"topics=payments&after={head}") as lines:
        assert rows((await next_event(lines)).text) == [head + 3, head + 1]


async def test_more_than_a_browser_gets_at_a_time_is_counted(stored: Stored, stored_browser: Browser) -> None:
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position
    async with stream(stored_browser, f"after={head}") as lines:
        await stored.mailbox.send_message(message())
        await next_event(lines)
        await stored.mailbox.send_batch([message() for _ in range(500)])
        shown, omitted = 0, 0
        while shown + omitted < 500:
            text = (await next_event(lines)).text
            assert len(rows(text)) <= tail_page.ROWS_PER_STEP
            assert len(text) < 50_000
            shown += len(rows(text))
            omitted += sum(int(each) for each in re.findall(r"(\d+) more that match came here", text))
        assert shown + omitted == 500
        assert omitted
    page = await stored_browser.get(f"/tail?after={head}")
    assert len(rows(page.text)) == tail_page.ROWS
    assert "401 more that match came here" in page.text


async def test_what_is_skipped_is_told(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_log, "MAX_BEHIND", 3)
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position
    page = await stored_browser.get("/tail?show=events&after=0")
    assert rows(page.text) == [head, head - 1, head - 2]
    assert f"{head - 3} positions of the log before this were skipped" in page.text


async def test_failures_are_shown_alone(stored: Stored, stored_browser: Browser) -> None:
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/tail?show=failures&after=0")
    assert len(rows(page.text)) == 6
    assert page.text.count("last error boom") == page.text.count("reason visibility_expired") == 3


async def test_a_token_of_some_topics_sees_these_and_tells_of_no_other(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue(topics=["orders", "bills.*"]))
    page = await stored_browser.get("/tail?show=events")
    assert page.path == "/console/tail?topics=orders&topics=bills.*&show=events&after=0"
    assert page.text.count("MessageSent") == 9
    assert "payments" not in page.text
    assert "/console/log/" not in page.text
    head = (await stored.mailbox.get_backlog()).position
    for query in ("topics=payments", "topics=*", "topics=orders&topics=payments"):
        for path in ("/tail", "/tail/live"):
            refused = await stored_browser.get(f"{path}?{query}&after=0")
            assert (refused.status, "E_CAP_SCOPE" in refused.text) == (403, True), (path, query)
    async with stream(stored_browser, f"show=events&after={head}") as lines:
        await stored.mailbox.send_message(message(topic="payments"))
        await stored.mailbox.send_message(message(topic="bills.new"))
        text = ""
        while "bills.new" not in text:
            text += (await next_event(lines)).text
        assert "payments" not in text
        assert len(rows(text)) == 1


async def test_words_need_the_right_to_read_payloads(stored: Stored, stored_browser: Browser) -> None:
    await stored.mailbox.send_message(message(b"green apples", content_type="text/plain"))
    await stored_browser.sign_in(stored.issue(operations=[Right.READ_HEADERS]))
    assert (await stored_browser.get("/tail?after=0")).status == 200
    for path in ("/tail", "/tail/live"):
        assert (await stored_browser.get(f"{path}?match=apples&after=0")).status == 403
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/tail?match=apples&after=0")
    assert len(rows(page.text)) == 1
    await stored_browser.sign_in(stored.issue(operations=[Right.SEND]))
    assert (await stored_browser.get("/tail?after=0")).status == 403


async def test_masked_headers_are_hidden_and_no_criteria(stored: Stored, tmp_path: Path) -> None:
    settings = ConsoleSettings(mask_headers=("principal", "x-card"))
    await stored.mailbox.send_message(message(principal="ada", attrs={"x-card": "4111"}))
    options: dict[str, Any] = {"store": str(tmp_path / "store.db"), "access": access_of(stored)}
    async with served_console(stored.mailbox, settings=settings, **options) as browser:
        await browser.sign_in(stored.issue(operations=[Right.READ_HEADERS]))
        page = await browser.get("/tail?after=0")
        assert ("principal [masked]" in page.text, "principal ada" in page.text) == (True, False)
        for criterion in ("principals=ada", "header=x-card%3D4111", "text=4111"):
            assert (await browser.get(f"/tail?{criterion}&after=0")).status == 403, criterion
        await browser.sign_in(stored.issue())
        assert "principal ada" in (await browser.get("/tail?header=x-card%3D4111&after=0")).text


async def test_text_of_others_is_escaped(stored: Stored, stored_browser: Browser) -> None:
    hostile = "<script>alert(1)</script>\u202e\n\u2028"
    await stored.mailbox.send_message(
        message(topic="<b>&\"'", message_id=hostile, principal=hostile, content_type=hostile)
    )
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position
    texts = [(await stored_browser.get("/tail?after=0")).text]
    async with stream(stored_browser, f"after={head - 1}") as lines:
        texts.append((await next_event(lines)).text)
    for text in texts:
        assert not {"\u202e", "\u2028"} & set(text)
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert(1)" in text
        assert "<b>&" not in text


@pytest.mark.parametrize(
    "query",
    [
        "show=all",
        "after=-1",
        "after=x",
        "after=99999999999999",
        "statuses=dead",
        "start_time=1",
        "header=x",
        "at=1",
    ],
)
async def test_what_a_tail_does_not_have_is_one_clear_error(
    stored: Stored, stored_browser: Browser, query: str
) -> None:
    await stored_browser.sign_in(stored.issue())
    for path in ("/tail", "/tail/live"):
        page = await stored_browser.get(f"{path}?{query}")
        assert (page.status, 'role="alert"' in page.text) == (400, True)


async def test_a_stream_ends_when_the_token_is_revoked_and_says_so(
    stored: Stored, stored_browser: Browser
) -> None:
    token = stored.issue()
    await stored_browser.sign_in(token)
    head = (await stored.mailbox.get_backlog()).position
    async with stream(stored_browser, f"after={head}") as lines:
        stored.capabilities.revoke(Token.decode(token).read_identifier().nonce)
        await stored.control.refresh()
        event = await next_event(lines)
        assert event.name == "end"
        assert "revoked" in event.text


async def test_streams_that_are_opened_at_once_are_no_more_than_the_limit(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    url = f"{stored_browser.url}/tail/live?after=0"
    async with AsyncExitStack() as opened:
        requests = [stored_browser.client.get(url, timeout=ClientTimeout(None)) for _ in range(40)]
        answers = await asyncio.gather(*map(opened.enter_async_context, requests))
        statuses = Counter(each.status for each in answers)
        assert statuses == {200: live.MAX_STREAMS_OF_BEARER, 429: 40 - live.MAX_STREAMS_OF_BEARER}


async def test_a_stream_that_pauses_for_long_is_kept_alive_and_ends_with_its_token(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_page, "PAUSE_SECONDS", 3_600)
    monkeypatch.setattr(tail_page, "QUIET_SECONDS", 3_600)
    monkeypatch.setattr(live, "CHECK_SECONDS", 0.05)
    token = stored.issue()
    await stored_browser.sign_in(token)
    async with stream(stored_browser, "after=0") as lines:
        assert (await next_event(lines)).name == "rows"
        async with asyncio.timeout(SECONDS):
            assert await lines.readline() == live.SAME.encode().splitlines(keepends=True)[0]
        stored.capabilities.revoke(Token.decode(token).read_identifier().nonce)
        await stored.control.refresh()
        assert (await next_event(lines)).name == "end"


async def test_a_step_that_fails_is_followed_by_the_pause_for_its_work(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def wait(seconds: float, stopped: Any) -> None:
        pauses.append(seconds)
        await wait_at_most(seconds if len(pauses) == 1 else 3_600, stopped)

    monkeypatch.setattr(live, "wait_at_most", wait)
    monkeypatch.setattr(live, "CHECK_SECONDS", 1e12)
    monkeypatch.setattr(tail_page, "SHARE", 1e9)
    await stored_browser.sign_in(stored.issue())
    head = (await stored.mailbox.get_backlog()).position

    def refuse(_: object) -> None:
        raise BrokenLog("The commit was altered.", head)

    async with stream(stored_browser, f"after={head}") as lines:
        monkeypatch.setattr(tail_log, "decode_runs", refuse)
        await stored.mailbox.send_message(message())
        assert (await next_event(lines)).name == "problem"
        async with asyncio.timeout(SECONDS):
            while len(pauses) < 2:
                await asyncio.sleep(0)
    assert pauses[1] > tail_page.QUIET_SECONDS


async def test_a_token_of_some_topics_is_told_no_number_of_events_of_others(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_log, "MAX_LOOKUPS", 0)
    head = (await stored.mailbox.get_backlog()).position
    assert await stored.mailbox.receive_messages("payments")
    text = "events here are of messages that were sent earlier"
    query = f"/tail?show=events&topics=orders&after={head}"
    await stored_browser.sign_in(stored.issue())
    assert re.search(rf"\d {text}", (await stored_browser.get(query)).text)
    await stored_browser.sign_in(stored.issue(topics=["orders"]))
    assert f">Some {text}" in (await stored_browser.get(query)).text


async def test_pages_and_streams_are_audited_with_the_names_of_their_criteria(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue(principal="ann"))
    await stored_browser.get("/tail?topics=orders&text=secret&after=0")
    async with stream(stored_browser, "topics=orders&after=0") as lines:
        await next_event(lines)
    await stored_browser.get("/tail/live?topics=orders&match=x&statuses=")
    entries = [(each.operation, each.topics, each.criteria, each.matches) for each in stored.audit.entries]
    assert entries == [
        ("read-headers", ("orders",), ("tail", "topics", "text"), 0),
        ("read-headers", ("orders",), ("tail", "topics"), 9),
    ]


async def test_links_lead_to_the_tail_of_a_topic_and_of_a_search(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/topics/show?name=orders")
    assert 'href="/console/tail?topics=orders"' in page.text
    page = await stored_browser.get("/search?topics=orders&text=a&statuses=dead&limit=25")
    assert 'href="/console/tail?topics=orders&amp;text=a"' in page.text


async def test_a_mailbox_in_memory_has_no_log_to_follow(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    for path in ("/tail", "/tail?after=0", "/tail/live?after=0"):
        page = await browser.get(path)
        assert (page.status, "postroom log show" in page.text) == (404, True)
