"""Each documented key on each page, and the way to the first result by keyboard."""

from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.console.conftest import Console
from tests.e2e.console.test_pages import PAGES
from tests.support.browser import DESKTOP, PHONE, Window
from tests.support.hostile_store import LONG_ID

LETTERS = {
    "o": "Overview",
    "t": "Topics",
    "c": "Consumers",
    "f": "Live tail",
    "d": "Dead letters",
    "s": "Search",
    "l": "Log",
    "a": "Audit",
    "r": "Redrive jobs",
    "b": "Subscriptions",
    "h": "Schedules",
    "w": "What-if",
    "k": "Cluster",
    "n": "Send",
}
MAX_TABS = 8
RECORD_CLICKS = """() => {
  window.clicked = [];
  document.addEventListener("click", (event) => {
    event.preventDefault();
    window.clicked.push(event.target.textContent);
  });
}"""


@pytest.fixture(scope="module")
def signed_in(console: Console, browser: Browser) -> Iterator[Window]:
    """The window of somebody who may do everything."""
    window = Window(browser)
    assert console.sign_in(window, console.issue("ops"))
    yield window
    window.close()


@pytest.mark.parametrize("name", PAGES)
def test_each_key_does_on_each_page_what_the_documentation_says(
    console: Console, signed_in: Window, name: str
) -> None:
    page, url = signed_in.page, console.base + PAGES[name]
    page.goto(url)
    links = page.locator(".nav a")
    digits = {str(number + 1): text for number, text in enumerate(links.all_inner_texts()[:9])}
    labels = set(links.all_inner_texts())
    assert labels >= set(LETTERS.values())
    page.evaluate(RECORD_CLICKS)
    for key in LETTERS | digits:
        page.keyboard.press("g")
        page.keyboard.press(key)
    page.keyboard.press("1")  # without g, a digit is no key
    assert page.evaluate("clicked") == [*LETTERS.values(), *digits.values()]

    page.keyboard.press("/")
    expect(page.get_by_role("searchbox", name="Message id or words")).to_be_focused()
    page.keyboard.type("g1?/")  # keys are text where somebody types
    expect(page.get_by_role("searchbox", name="Message id or words")).to_have_value("g1?/")
    page.goto(url)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog", name="Keys")).to_be_hidden()
    signed_in.errors.clear()


def test_a_key_opens_a_page(console: Console, signed_in: Window) -> None:
    page = signed_in.open(f"{console.base}/access")
    for key, label in (("h", "Schedules"), ("1", "Overview"), ("d", "Dead letters")):
        page.keyboard.press("g")
        with page.expect_navigation():
            page.keyboard.press(key)
        expect(page.locator(".nav [aria-current=page]")).to_have_text(label)


def test_results_are_a_few_tabs_away(console: Console, signed_in: Window) -> None:
    page = signed_in.open(f"{console.base}/search?topics=orders.*")
    for _ in range(2):
        page.keyboard.press("Tab")
    assert focused(page) == "Skip to the results"
    page.keyboard.press("Enter")
    for _ in range(MAX_TABS):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('tbody')"):
            break
    assert page.evaluate("document.activeElement.closest('tbody a') !== null")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Message", exact=True).wait_for()


def test_bars_of_the_timeline_are_one_stop(console: Console, signed_in: Window) -> None:
    page = signed_in.open(f"{console.base}/search")
    bars = page.locator("[data-timeline] a[data-start]")
    stops = bars.evaluate_all("bars => bars.filter(bar => bar.tabIndex === 0).length")
    assert stops == min(1, bars.count())


def test_an_id_and_a_word_are_found_from_every_page(console: Console, signed_in: Window) -> None:
    page = signed_in.open(f"{console.base}/cluster")
    page.keyboard.press("/")
    page.keyboard.type("EUR")
    page.keyboard.press("Enter")
    page.get_by_role("link", name=LONG_ID[:5]).first.wait_for()
    page.keyboard.press("/")
    page.keyboard.type("order-1")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="The message with the id order-1").click()
    page.get_by_role("heading", name="Why it died").wait_for()


def test_the_navigation_of_a_phone_opens_by_a_button(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(size=PHONE)
    assert console.sign_in(window, console.issue("ops"))
    page = window.page
    expect(page.get_by_role("navigation", name="Pages")).to_be_hidden()
    page.get_by_role("button", name="Menu", exact=True).click()
    page.get_by_role("link", name="Schedules").click()
    page.get_by_role("heading", name="Schedules").wait_for()
    page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    expect(page.get_by_role("navigation", name="Pages")).to_be_visible()
    window.assert_quiet(console.host)


def focused(page: Page) -> str:
    """Return the text of the element with the focus."""
    return str(page.evaluate("document.activeElement.textContent.trim()"))
