"""The interval of updates that a person chooses: which pages keep it, and what the server sends."""

import asyncio
import re
from http.cookies import SimpleCookie
from typing import Any

import pytest

from postroom.adapters.compose.console import ConsoleSettings
from tests.integration.console.conftest import access_of
from tests.integration.console.test_overview import FOREVER, next_event
from tests.support.access import Controlled, MemoryPlace
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console

LIVE_PAGES = ("/", "/tail?after=0", "/topics", "/subscriptions", "/schedules", "/redrives")
POLLS = re.compile(r'hx-trigger="(every [^"]*)"')


async def choose(browser: Browser, every: str, path: str = "/") -> None:
    """Choose an interval on a page, as its form does."""
    page = await browser.send("/refresh", {"every": every, "next": path})
    assert page.status == 200, page.text
    assert f'value="{every}" selected' in page.text


async def test_every_live_page_has_the_choice_and_keeps_it(
    stored_browser: Browser, stored: Controlled[Any, Any]
) -> None:
    await stored_browser.sign_in(stored.issue())
    for path in LIVE_PAGES:
        page = await stored_browser.get(path)
        assert '<option value="live" selected>As it happens</option>' in page.text, path
        assert '<meta http-equiv="refresh"' not in page.text, path
        assert "Reload</a>" in page.text, path
    await choose(stored_browser, "15", "/topics?sort=ready")
    for path in LIVE_PAGES:
        page = await stored_browser.get(path)
        assert '<option value="15" selected>Every 15 s</option>' in page.text, path
        assert '<noscript><meta http-equiv="refresh" content="15"></noscript>' in page.text, path
        assert set(POLLS.findall(page.text)) <= {"every 15s"}, path
    assert POLLS.findall((await stored_browser.get("/topics")).text) == ["every 15s"]
    await choose(stored_browser, "5")
    assert POLLS.findall((await stored_browser.get("/topics")).text) == ["every 5s"]
    await choose(stored_browser, "off")
    for path in LIVE_PAGES:
        page = await stored_browser.get(path)
        assert not POLLS.search(page.text), path
        assert "data-live=" not in page.text, path
        assert "http-equiv" not in page.text, path
    assert "Show what came after position" in (await stored_browser.get("/tail?after=0")).text


async def test_a_choice_leads_back_to_its_page_and_nowhere_else(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    page = await browser.send("/refresh", {"every": "60", "next": "/topics?show=dead"})
    assert page.path == "/console/topics?show=dead"
    for path in ("//evil.example/", "https://evil.example", "/../v1/topics", ""):
        assert (await browser.send("/refresh", {"every": "60", "next": path})).path == "/console/", path
    for every in ("1", "", "60; Path=/", "0.001"):
        answer = await browser.send("/refresh", {"every": every, "next": "/"})
        assert (answer.status, "choose one of live, 5, 15, 60, off" in answer.text) == (400, True), every
    headers = {"Origin": "https://evil.example"}
    assert (await browser.send("/refresh", {"every": "off", "next": "/"}, headers=headers)).status == 403
    browser.client.cookie_jar.clear()
    browser.client.cookie_jar.update_cookies(SimpleCookie("postroom-console-refresh=none"))
    await browser.sign_in(place.issue())
    assert 'value="live" selected' in (await browser.get("/")).text


async def test_a_read_only_console_has_the_choice_as_well(place: MemoryPlace) -> None:
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        await browser.sign_in(place.issue())
        await choose(browser, "60")


@pytest.mark.parametrize("path", ["/live", "/tail/live?after=0"])
async def test_a_browser_that_wants_no_updates_gets_no_stream(
    stored_browser: Browser, stored: Controlled[Any, Any], path: str
) -> None:
    await stored_browser.sign_in(stored.issue())
    await choose(stored_browser, "off")
    assert (await stored_browser.get(path)).status == 204  # after which browsers do not connect again


async def test_a_stream_sends_no_more_often_than_it_was_asked_to(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    async with Browser.another(browser) as patient:
        await patient.sign_in(place.issue())
        await choose(patient, "60")
        async with (
            browser.client.get(browser.url + "/live", timeout=FOREVER) as fast,
            patient.client.get(patient.url + "/live", timeout=FOREVER) as slow,
        ):
            for stream in (fast, slow):
                assert (await next_event(stream.content))[0] == "live"  # type: ignore[arg-type] # it reads lines
            for number in range(3):
                await place.mailbox.send_message(message(topic=f"new-{number}"))
                name = ""
                while name != "live":
                    name, _ = await next_event(fast.content)  # type: ignore[arg-type]
            waiting = asyncio.ensure_future(next_event(slow.content))  # type: ignore[arg-type]
            done, _ = await asyncio.wait([waiting], timeout=0.1)
            waiting.cancel()
            assert not done
