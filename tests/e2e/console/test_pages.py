from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e.console.conftest import Console
from tests.support.browser import DESKTOP, PHONE, Window, find_problems, find_violations, overflow
from tests.support.hostile_store import LONG_ID, QUIET_TOPIC, RTL, SCRIPT_URL, TOPIC, XSS

HOSTILE = """<!doctype html><html lang="en"><title>Page</title><main><h1>Page</h1>
<div style="width: 500px; height: 1px"></div>
<p style="color: #aaa; background: #fff">Text that is too pale to be read</p>
<script>fetch("http://other.example/"); alert("hostile"); missing()</script></main></html>"""
PAGES = {
    "overview": "/",
    "log": "/log",
    "commits": "/log/commits",
    "verification of the log": "/log/verify?from=1&through=20",
    "event": "/log/events/5",
    "commit": "/log/commits/5",
    "audit": "/audit",
    "verification of the audit log": "/audit/verify",
    "access": "/access",
    "cluster": "/cluster",
    "look-up of a message": "/messages",
    "dead letter": f"/messages/{LONG_ID}",
    "message with hostile text": f"/messages/{quote(XSS, safe='')}",
    "search": f"/search?topics=orders.*&text={quote(XSS)}&at=20",
    "live tail": "/tail?show=events&after=0",
    "timeline": f"/timeline?correlation_id={quote(f'{XSS} {RTL}')}",
    "form of a timeline": "/timeline",
    "comparison of JSON": "/compare?id=order-1&id=order-2",
    "comparison of hostile text": f"/compare?id={quote(XSS, safe='')}&id={LONG_ID}",
    "comparison of bytes": "/compare?id=binary&id=protobuf",
    "form of a comparison": "/compare?id=order-1",
    "groups of dead letters": "/dead-letters",
    "dead letters": "/dead-letters/letters",
    "redrive jobs": "/redrives",
    "form of a redrive job": "/redrives/new",
    "subscriptions": "/subscriptions",
    "form of a rewind": "/subscriptions/rewind?name=mail",
    "deletion of a subscription": "/subscriptions/delete?name=mail",
    "topics": "/topics?sort=dead",
    "topic": f"/topics/show?name={TOPIC}",
    "policy of a topic": f"/topics/policy?name={TOPIC}",
    "purge of a topic": f"/topics/purge?name={TOPIC}",
    "consumers": "/consumers",
    "outboxes": "/outboxes",
    "form of a message": f"/send?topic={TOPIC}",
    "schedules": "/schedules",
    "deletion of a schedule": "/schedules/delete?name=nightly",
    "what-if": "/what-if?topic=orders.*&max_attempts=5",
    "edit of a message": "/message/resend?id=order-1",
    "confirmation": "/message/purge?id=order-1",
    "cancellation": "/message/cancel?id=waiting-1",
    "rescheduling": "/message/reschedule?id=waiting-1",
}
TEXTS = {
    "verification of the log": "20",
    "cluster": "This process belongs to no cluster",
    "search": LONG_ID[:20],
    "live tail": "MessageSent",
    "timeline": LONG_ID,
    "comparison of JSON": "/order",
    "comparison of hostile text": "The bytes are equal.",
    "comparison of bytes": "00000000",
    "what-if": "Dead letters avoided",
    "subscriptions": "refunds.*",
    "form of a rewind": "position of the log, or beginning",
    "deletion of a subscription": "It gets no more copies.",
    "topic": "Dead letters by error",
    "purge of a topic": "Nothing is removed before you confirm it.",
    "form of a message": "JSON is checked",
    "schedules": "0 3 * * *",
    "deletion of a schedule": "It sends no more messages.",
    "cancellation": "The history of the message keeps it.",
    "rescheduling": "A time from now",
}
"""What is on a page only if it has what its name says."""
MESSAGES = {
    "script as id": SCRIPT_URL,
    "slashes and bidi characters": f"a/b?c=d&e=%2F#{RTL}",
    "large": "large",
    "binary": "binary",
    "protobuf": "protobuf",
    "html": "html",
    "invalid": "invalid",
}


def test_a_window_records_what_its_pages_must_not_do(windows: Callable[..., Window]) -> None:
    window = windows(size=PHONE)
    window.page.set_content(HOSTILE)
    window.wait_until(lambda: len(window.errors) == 3)

    assert window.dialogs == ["hostile"]
    assert window.hosts == {"other.example"}
    assert any("missing is not defined" in error for error in window.errors)
    assert any("Failed to fetch" in error for error in window.errors)
    assert any("ERR_NAME_NOT_RESOLVED" in error for error in window.errors)
    with pytest.raises(AssertionError):
        window.assert_quiet("other.example")
    assert overflow(window.page) > 100
    (violation,) = find_violations(window.page)
    assert violation.startswith("color-contrast: p: ")


@pytest.fixture(scope="module")
def signed_in(console: Console, browser: Browser) -> Window:
    """The window of somebody who may do everything; it closes with the browser."""
    window = Window(browser)
    assert console.sign_in(window, console.issue("ops"))
    return window


@pytest.fixture
def admin(signed_in: Window) -> Window:
    """The same without the errors of earlier tests."""
    signed_in.errors.clear()
    return signed_in


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_and_accessible_and_fits_the_window(
    console: Console, admin: Window, name: str
) -> None:
    check_page(admin, console, PAGES[name])
    assert TEXTS.get(name, "") in admin.page.locator("main").inner_text()


def test_forms_and_errors_before_sign_in_are_accessible(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(size=PHONE)
    for path in ("/", "/none"):
        assert find_problems(window.open(console.base + path)) == []
    assert not console.sign_in(window, "prm1_none")
    assert find_problems(window.page) == []
    assert console.sign_in(window, console.issue("ops"))
    page = window.open(f"{console.base}/messages/none")
    assert page.locator("h1").inner_text()
    assert find_problems(page) == []


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_shown_whatever_its_id_and_body(console: Console, admin: Window, name: str) -> None:
    set_size(admin.page, PHONE)
    page = admin.open(f"{console.base}/messages/{quote(MESSAGES[name], safe='')}")

    check_content(page)
    assert find_problems(page) == []
    assert len(page.content()) < 1_000_000
    admin.assert_quiet(console.host)


def test_a_body_is_downloaded_and_never_rendered(console: Console, admin: Window) -> None:
    page = admin.open(f"{console.base}/messages/html")
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").first.click()

    assert download.value.path().read_text() == f"<html><body>{XSS}</body></html>"
    admin.assert_quiet(console.host)


def test_without_scripts_pages_can_be_read_and_forms_work(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(runs_scripts=False)
    assert console.sign_in(window, console.issue("ops"))
    page = window.page
    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()

    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()
    page.get_by_role("button", name="Access").click()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Capability token").wait_for()
    window.assert_quiet(console.host)


def check_content(page: Page) -> None:
    """Raise AssertionError where a page has no heading, or hostile text became elements of it."""
    assert page.locator("h1").count() == 1
    assert page.locator("img[src='x'], main script, a[href^='javascript:' i]").count() == 0
    assert not set(page.locator("main").inner_text()) & set("\u202e\u202c\x1b")


def check_page(window: Window, console: Console, path: str) -> None:
    """Raise AssertionError unless a page is as every page must be, light and dark, wide and narrow."""
    page = window.page
    set_size(page, PHONE)
    window.open(console.base + path)
    check_content(page)
    assert overflow(page) <= 0
    set_size(page, DESKTOP)
    assert find_problems(page) == []
    window.assert_quiet(console.host)


def set_size(page: Page, size: tuple[int, int]) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
