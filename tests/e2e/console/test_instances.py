"""Several mailboxes in one console, in Chromium: the page of all, the switcher, the interval of updates."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from postroom.adapters.compose import open_mailbox
from postroom.application.messages import NewMessage
from tests.e2e.console.test_layout import CUT, SIZES, hidden_actions
from tests.support.browser import PHONE, Window, chromium_or_skip, find_problems, overflow
from tests.support.servers.process import ServerProcess

START_SECONDS = 60.0
LONG = "a-name-of-forty-characters-0123456789-ab"


async def fill(folder: Path) -> None:
    """Fill two mailboxes of a store and one of another."""
    for store, mailbox, count in (
        ("shop", "orders@local", 3),
        ("shop", "mail@local", 1),
        ("bills", "main@local", 2),
    ):
        async with open_mailbox(str(folder / f"{store}.db"), mailbox) as opened:
            await opened.send_batch(
                [NewMessage(topic=f"{mailbox[:4]}.new", payload=b"{}") for _ in range(count)]
            )


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The link of a console whose instances are in its settings and settings file of their own."""
    folder = tmp_path_factory.mktemp("instances")
    asyncio.run(fill(folder))
    (folder / "bills.toml").write_text(f'store = "{folder / "bills.db"}"\n[console]\nread_only = true\n')
    settings = folder / "postroom.toml"
    settings.write_text(
        f'store = "{folder / "shop.db"}"\n[console.instances]\norders = "orders@local"\n'
        f'{LONG} = "mail@local"\nbills = "{folder / "bills.toml"}"\ngone = "{folder / "gone" / "x.db"}"\n'
    )
    log = folder / "console.log"
    postroom = str(Path(sys.executable).parent / "postroom")
    process = ServerProcess("console", [postroom, "--config", str(settings), "console", "--json"], log)
    process.start(lambda: '"link"' in log.read_text(), START_SECONDS)
    try:
        facts = next(json.loads(line) for line in log.read_text().splitlines() if '"link"' in line)
        assert facts["instances"] == ["orders", LONG, "bills", "gone"]
        yield facts["link"]
    finally:
        process.stop()


@pytest.fixture(scope="module")
def browser(link: str) -> Iterator[Browser]:
    """Chromium for the tests of the file, after their console."""
    with chromium_or_skip() as started:
        yield started


@pytest.fixture(scope="module")
def window(link: str, browser: Browser) -> Iterator[Window]:
    """A window that used the link, at the page of all, when the mailboxes can be reached."""
    window = Window(browser)
    page = window.open(link)
    assert f"one session at each of orders, {LONG}, bills, gone" in page.content()
    page.get_by_role("button", name="Open the console").click()
    page.wait_for_url("**/instances/")
    window.wait_until(lambda: page.reload() and page.get_by_text("reachable", exact=True).count() == 3)
    yield window
    window.close()


def open_all(window: Window) -> str:
    """Open the page of all; return its address."""
    url = window.page.url
    return window.open(url.partition("/instances/")[0] + "/instances/").url


def test_the_page_of_all_shows_each_and_one_that_is_gone(window: Window) -> None:
    open_all(window)
    rows = window.page.locator("#instances tbody tr")
    assert rows.count() == 4
    assert [rows.nth(number).locator("td.number").first.text_content() for number in range(3)] == [
        "3",
        "1",
        "2",
    ]
    assert "There is no store at" in (rows.nth(3).text_content() or "")
    assert find_problems(window.page) == []
    window.assert_quiet(window.page.url.split("/")[2])


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]} px")
def test_the_page_of_all_and_the_switcher_fit(window: Window, size: tuple[int, int]) -> None:
    window.page.set_viewport_size({"width": size[0], "height": size[1]})
    base = open_all(window)
    for path in ("", f"{LONG}/"):
        page = window.open(base + path)
        assert (hidden_actions(page), overflow(page), page.evaluate(CUT)) == ([], 0, [])
    page.get_by_role("button", name=f"Instance: {LONG}").click()
    menu = page.locator("#instances-menu")
    assert menu.is_visible()
    box = menu.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= size[0]


def test_the_switcher_leads_to_another_instance_by_keys(window: Window) -> None:
    base = open_all(window)
    page = window.open(base + "orders/topics")
    page.get_by_role("button", name="Instance: orders").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_url("**/instances/bills/")
    assert page.get_by_text("main.new").count() > 0
    assert page.get_by_role("button", name="Pause main.new").count() == 0  # read-only by its own settings
    page = window.open(base + "orders/")
    assert page.get_by_role("button", name="Pause orde.new").count() == 1


def test_a_choice_of_the_interval_is_sent_at_once_and_is_that_of_all_instances(window: Window) -> None:
    base = open_all(window)
    page = window.open(base + "orders/")
    expect(page.locator("#live-state")).to_have_text("Live")
    page.get_by_label("Updates").select_option("60")
    expect(page.locator("#live-state")).to_have_text("Updated every minute")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page = window.open(base + "bills/")
    assert page.get_by_label("Updates").input_value() == "60"
    page.get_by_label("Updates").select_option("off")
    page.get_by_role("link", name="Reload").wait_for()
    asked.clear()
    window.open(base + "orders/")
    assert [each for each in asked if "/live" in each] == []
    page.get_by_label("Updates").select_option("live")
    expect(page.locator("#live-state")).to_have_text("Live")


def test_without_scripts_the_switcher_and_the_interval_work(
    link: str, browser: Browser, window: Window
) -> None:
    cookies: Any = window.context.cookies()
    plain = Window(browser, PHONE, runs_scripts=False)
    try:
        plain.context.add_cookies(cookies)
        page = plain.open(open_all(window) + "orders/")
        page.get_by_role("button", name="Instance: orders").click()
        page.get_by_role("link", name="bills").click()
        assert page.url.endswith("/instances/bills/")
        page.get_by_label("Updates").select_option("15")
        page.get_by_role("button", name="Set").click()
        assert page.get_by_label("Updates").input_value() == "15"
        assert page.locator("meta[http-equiv=refresh]").get_attribute("content") == "15"
        page.get_by_label("Updates").select_option("live")
        page.get_by_role("button", name="Set").click()
        assert page.locator("meta[http-equiv=refresh]").count() == 0
        assert page.get_by_role("link", name="Reload").count() == 1
    finally:
        plain.close()
