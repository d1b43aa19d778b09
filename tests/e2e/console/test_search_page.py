"""The search page in a browser: results first, facets beside them, saved searches, and columns."""

from collections.abc import Callable

import pytest
from playwright.sync_api import Locator, Page

from postroom.domain.capability.rights import Right
from tests.e2e.console.conftest import Console
from tests.support.browser import DESKTOP, PHONE, Window, find_problems, overflow
from tests.support.hostile_store import DEAD, TOPIC, XSS

MAX_TABS = 8
"""Key presses to the first result, with the link that skips the form."""
NAME = "Dead orders, for everybody"


@pytest.fixture
def operator(console: Console, windows: Callable[..., Window]) -> Window:
    """The window of somebody who may redrive."""
    window = windows()
    operations = (Right.READ_HEADERS, Right.READ_PAYLOAD, Right.REDRIVE)
    assert console.sign_in(window, console.issue("ann", operations))
    return window


def box(element: Locator) -> dict[str, float]:
    """Return the place of an element in the window."""
    place = element.bounding_box()
    assert place is not None
    return {"left": place["x"], "top": place["y"], "right": place["x"] + place["width"]}


def first_result(page: Page) -> Locator:
    return page.locator("#results table a").first


def test_results_come_first_and_facets_are_beside_or_below_them(console: Console, operator: Window) -> None:
    page = operator.open(f"{console.base}/search?topics={TOPIC}")
    assert box(first_result(page))["top"] < DESKTOP[1]
    assert box(page.locator(".facets"))["left"] > box(page.locator("#results"))["right"]
    assert box(page.locator(".facets"))["top"] < DESKTOP[1]
    presses = 0
    page.keyboard.press("Tab")  # to the link that skips the navigation
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    while not first_result(page).evaluate("each => each === document.activeElement"):
        page.keyboard.press("Tab")
        presses += 1
        assert presses <= MAX_TABS
    page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
    assert box(page.locator(".facets"))["top"] > box(first_result(page))["top"]
    assert overflow(page) <= 0
    operator.assert_quiet(console.host)


def test_a_saved_search_is_opened_by_others_and_deleted(
    console: Console, operator: Window, windows: Callable[..., Window]
) -> None:
    page = operator.open(
        f"{console.base}/search?topics={TOPIC}&statuses=dead&columns=attempts&columns=header:x"
    )
    page.get_by_role("link", name="Save this search…").click()
    page.get_by_label("Name", exact=True).fill(NAME)
    assert find_problems(page) == []
    page.get_by_role("button", name="Save the search").click()
    page.get_by_text(f"The search {NAME} is saved.").wait_for()
    reader = windows(size=PHONE)
    assert console.sign_in(reader, console.issue("ben", (Right.READ_HEADERS,)), "/search")
    reader.page.get_by_role("link", name="Saved searches").click()
    reader.page.get_by_role("heading", name="Saved searches").wait_for()
    assert find_problems(reader.page) == []
    reader.page.get_by_role("link", name=NAME, exact=True).click()
    reader.page.get_by_text(f"{DEAD} messages match").wait_for()
    assert reader.page.get_by_role("link", name="Redrive all dead letters…").count() == 0
    assert find_problems(reader.page) == []
    reader.assert_quiet(console.host)
    page.get_by_role("link", name="Saved searches").click()
    page.get_by_role("link", name=f"Delete {NAME}").click()
    page.get_by_role("button", name="Delete it").click()
    page.get_by_text(f"The search {NAME} is deleted.").wait_for()
    operator.assert_quiet(console.host)


def test_without_scripts_a_search_is_saved_and_hostile_text_is_text(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(runs_scripts=False)
    assert console.sign_in(window, console.issue("ann"))
    name = XSS[:80]
    page = window.open(f"{console.base}/search?limit=25")
    page.get_by_role("link", name="Save this search…").click()
    page.get_by_label("Name", exact=True).fill(name)
    page.get_by_role("button", name="Save the search").click()
    page.get_by_role("link", name="Saved searches").click()
    page.get_by_role("link", name=name, exact=True).wait_for()
    assert page.locator("img[src='x'], main script").count() == 0
    page.get_by_role("link", name=f"Delete {name}").click()
    page.get_by_role("button", name="Delete it").click()
    window.assert_quiet(console.host)


def test_a_job_is_started_once_however_often_the_button_is_pressed_and_after_going_back(
    console: Console, operator: Window
) -> None:
    page = operator.open(f"{console.base}/search?topics={TOPIC}&statuses=dead&text=order-1")
    page.get_by_role("link", name="Redrive all dead letters…").click()
    page.get_by_role("heading", name="Redrive 2 dead letters?").wait_for()
    page.get_by_role("button", name="Start the job").click()
    page.get_by_text("2 of 2").first.wait_for()
    job = page.url
    page.go_back()
    page.get_by_role("button", name="Start the job").wait_for()
    if page.get_by_role("button", name="Start the job").is_enabled():  # the page as it was
        page.get_by_role("button", name="Start the job").click()
        page.get_by_text("2 of 2").first.wait_for()
        assert page.url == job
    operator.open(f"{console.base}/redrives")
    assert page.locator("#jobs tbody tr").count() == 1
    operator.assert_quiet(console.host)
