"""The live tail, the comparison and the timeline as people use them in a browser."""

import re
from base64 import b64encode
from collections.abc import Callable, Sequence
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from playwright.sync_api import Page, expect

from postroom.domain.capability.rights import Right
from tests.e2e.console.conftest import Console
from tests.support.browser import PHONE, Window, find_problems, overflow
from tests.support.hostile_store import RTL, XSS
from tests.support.hostile_store import TOPIC as ORDERS

TOPIC = "tail.topic"
MAX_ROWS = 200


def send(console: Console, ids: Sequence[str], topic: str = TOPIC, **fields: str) -> None:
    """Send messages with these ids."""
    headers = {"Authorization": f"Bearer {console.issue('shop')}"}
    payload = b64encode(b"{}").decode()
    sent = [{"topic": topic, "payload_b64": payload, "message_id": each, **fields} for each in ids]
    assert console.server.call("POST", "/v1/send", sent, headers).status == 200


def after_of(page: Page) -> int:
    """Return the position in the URL."""
    return int(parse_qs(urlsplit(page.url).query)["after"][0])


def ids(page: Page) -> list[str]:
    """Return the ids of the messages in the table, newest first."""
    return page.locator("tbody tr td:nth-of-type(4) a").all_inner_texts()


@pytest.fixture
def tail(console: Console, windows: Callable[..., Window]) -> Window:
    """A window that shows the live tail of the topic, and is live."""
    window = windows()
    assert console.sign_in(window, console.issue("ops"), f"/tail?topics={TOPIC}")
    expect(window.page.locator("#live-state")).to_have_text("Live")
    return window


def test_messages_come_pause_and_resume_by_keys_and_a_reload_misses_none(
    console: Console, tail: Window
) -> None:
    page = tail.page
    first = [f"first-{number}" for number in range(3)]
    send(console, first)
    expect(page.get_by_role("link", name="first-2")).to_be_visible()
    assert ids(page) == first[::-1]
    page.keyboard.press("p")
    expect(page.locator("#live-state")).to_contain_text("Paused after position")
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    send(console, ["second"])
    send(console, ["third"], "others")
    page.get_by_role("button", name="Resume").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="second")).to_be_visible()
    expect(page.locator("#live-state")).to_have_text("Live")
    assert ids(page) == ["second", *first[::-1]]
    page.reload()
    assert ids(page) == ["second", *first[::-1]]
    assert find_problems(page) == []
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert overflow(page) <= 0
    tail.assert_quiet(console.host)


def test_a_tail_keeps_the_latest_rows_and_its_url_the_oldest_of_them(console: Console, tail: Window) -> None:
    page = tail.page
    before = after_of(page)
    for part in range(14):  # each at its own time, as a browser gets the latest 20 of what comes at once
        name = f"part-{part}"
        send(console, [f"{name}-{number}" for number in range(18)])
        expect(page.get_by_role("link", name=f"{name}-17")).to_be_visible()
    assert page.locator("[data-rows] tr").count() == MAX_ROWS
    oldest = int(page.locator("[data-rows] tr").last.get_attribute("data-position") or 0)
    assert after_of(page) == oldest - 1 > before
    tail.assert_quiet(console.host)


def test_without_scripts_a_tail_is_a_page_that_leads_to_what_came_since(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(runs_scripts=False)
    assert console.sign_in(window, console.issue("ops"), "/tail?topics=quiet.tail")
    page = window.page
    assert page.get_by_role("button", name="Pause").count() == 0
    send(console, ["quiet-1"], "quiet.tail")
    page.reload()
    assert ids(page) == ["quiet-1"]
    page.get_by_role("link", name=re.compile("Show what came after position")).click()
    assert ids(page) == []
    send(console, ["quiet-2"], "quiet.tail")
    page.reload()
    assert ids(page) == ["quiet-2"]
    page.get_by_label("Show", exact=True).select_option("events")
    page.get_by_role("button", name="Show", exact=True).click()
    assert ids(page)[0] == "quiet-2"
    window.assert_quiet(console.host)


def test_hostile_text_comes_as_text(console: Console, tail: Window) -> None:
    page = tail.page
    send(console, [f"{XSS} {RTL} {number}" for number in range(2)], principal=XSS)
    expect(page.locator("[data-rows] tr td a").first).to_be_visible()
    assert page.locator("img[src='x'], main script").count() == 0
    assert not set(page.locator("main").inner_text()) & set("\u202e\u202c")
    tail.assert_quiet(console.host)


def test_a_stream_that_ends_says_so_and_a_reload_signs_in_and_goes_on(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    token = console.issue("brief", [Right.READ_HEADERS])
    assert console.sign_in(window, token, f"/tail?topics={TOPIC}")
    page = window.page
    expect(page.locator("#live-state")).to_have_text("Live")
    after = after_of(page)
    window.context.clear_cookies()
    page.keyboard.press("p")
    page.keyboard.press("p")
    expect(page.locator("#live-state")).to_contain_text("Reload the page to go on.")
    page.reload()
    page.get_by_label("Capability token").fill(token)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#live-state")).to_have_text("Live")
    assert after_of(page) == after


def test_two_messages_of_a_search_are_compared(console: Console, windows: Callable[..., Window]) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"), f"/search?topics={ORDERS}")
    page = window.page
    for id_ in ("waiting-1", "waiting-2"):
        page.get_by_role("checkbox", name=f"Compare {id_}", exact=True).check()
    page.get_by_role("button", name="Compare two").click()
    expect(page.get_by_role("heading", name="Compare two messages")).to_be_visible()
    expect(page.locator("tr", has_text="/order").filter(has_text="differs")).to_be_visible()
    page.go_back()
    page.get_by_role("checkbox", name="Compare waiting-3", exact=True).check()
    page.get_by_role("button", name="Compare two").click()
    expect(page.get_by_role("alert")).to_have_text("Choose two messages; 3 are chosen.")
    assert find_problems(page) == []
    window.assert_quiet(console.host)


def test_a_message_leads_to_its_comparison_and_its_timeline(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"), f"/messages/{quote(XSS, safe='')}")
    page = window.page
    page.get_by_label("Id of another message").fill("waiting-1")
    page.get_by_role("button", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", name="Compare two messages")).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="Their timeline").click()
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    assert page.locator("svg.trace").count() == 4
    widths = page.locator("svg.trace").evaluate_all(
        "all => all.map(each => each.getBoundingClientRect().width)"
    )
    assert min(widths) > 150
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert overflow(page) <= 0
    window.assert_quiet(console.host)
