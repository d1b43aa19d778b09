"""Topics, consumers and sends as people use them in a browser."""

from base64 import b64encode
from collections.abc import Callable
from urllib.parse import quote

import pytest
from playwright.sync_api import Page

from postroom.domain.capability.rights import Right
from tests.e2e.console.conftest import Console
from tests.support.browser import DESKTOP, PHONE, Window, find_problems, overflow
from tests.support.hostile_store import QUIET_TOPIC, TOPIC

LONG = "orders." + "w" * 248
CONSUMER = "shop/ship@" + "h" * 240 + ":4711"
WORKER = "0199d3a0-0000-4000-8000-000000000000"
LONG_PAGES = (
    "/topics?topics=www",
    f"/topics/show?name={LONG}",
    f"/topics/policy?name={LONG}",
    f"/topics/purge?name={LONG}",
    "/consumers?text=www",
    f"/consumers/worker?id={WORKER}&principal=shop",
    f"/send?topic={LONG}",
)
SIZES = (PHONE, DESKTOP, (1920, 1080))
_OUTSIDE = """() => [...document.querySelectorAll("main button, main a.button, main input, main select")]
  .filter((each) => each.offsetParent !== null)
  .map((each) => [each.textContent || each.name, each.getBoundingClientRect()])
  .filter(([, box]) => box.width > 0 && (box.left < -1 || box.right > innerWidth + 1))
  .map(([name, box]) => `${name.slice(0, 40)}: ${box.left} to ${box.right}`)"""


@pytest.fixture(scope="module")
def used(console: Console) -> Console:
    """The console, after a topic and a consumer with names of 255 characters were used."""
    headers = {"Authorization": f"Bearer {console.issue('shop')}"}
    sent = [{"topic": LONG, "payload_b64": b64encode(b"x").decode()}] * 3
    assert console.server.call("POST", "/v1/send", sent, headers).status == 200
    body = {"topic": LONG, "max_messages": 2, "consumer": CONSUMER}
    received = console.server.call("POST", "/v1/recv", body, headers).json["messages"]
    nack = {"receipts": [received[0]["receipt"]], "reason": "r" * 900}
    assert console.server.call("POST", "/v1/nack", nack, headers).status == 200
    handler = {"topic": LONG, "handler": "f" * 255, "consumer": CONSUMER, "concurrency": 10_000}
    worker = {"name": "w" * 255, "host": "h" * 255, "process": 1 << 60, "version": "v" * 255}
    worker |= {"postroom_version": "0" * 255, "uptime_ms": 1, "handlers": [handler] * 2}
    assert console.server.call("PUT", f"/v1/workers/{WORKER}", {"worker": worker}, headers).status == 200
    return console


@pytest.mark.parametrize("path", LONG_PAGES)
def test_every_action_is_in_view_with_names_of_255_characters(
    used: Console, windows: Callable[..., Window], path: str
) -> None:
    window = windows()
    assert used.sign_in(window, used.issue("ops"), path)
    for width, height in SIZES:
        window.page.set_viewport_size({"width": width, "height": height})
        assert window.page.evaluate(_OUTSIDE) == []
        assert overflow(window.page) <= 0
    assert find_problems(window.page) == []
    window.assert_quiet(used.host)


def test_a_policy_is_changed_after_its_effects_were_shown(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"), "/topics")
    page = window.page
    page.get_by_label("Part of the name, or a glob").fill("orders.c")
    page.keyboard.press("Enter")
    page.get_by_role("link", name=TOPIC, exact=True).click()
    page.get_by_role("link", name="Change the policy").click()
    page.get_by_label("max_attempts").fill("4")
    page.get_by_role("button", name="Preview").click()
    page.get_by_text("Dead letters avoided").wait_for()  # the simulation, which htmx loads
    assert find_problems(page) == []
    page.get_by_role("button", name="Change it again").click()
    assert page.get_by_label("max_attempts").input_value() == "4"
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Change the policy", exact=True).click()
    page.get_by_text("it applies from now on").wait_for()
    assert _row(page, "max_attempts").startswith("4")
    window.assert_quiet(console.host)


def test_a_message_is_checked_and_sent_and_its_topic_purged(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"), "/send?topic=news.sent")
    page = window.page
    page.get_by_label("Payload", exact=True).fill('{"order": 1,')
    page.get_by_role("button", name="Send", exact=True).click()
    page.get_by_text("is not JSON").wait_for()
    assert find_problems(page) == []
    (refusal,) = window.errors  # Chromium notes the status of a refused form
    assert "422" in refusal
    window.errors.clear()
    page.get_by_label("Payload", exact=True).fill('{"order": 1}')
    page.get_by_role("button", name="Check it").click()
    page.get_by_text("The payload is valid").wait_for()
    assert "postroom --store" in page.locator("#snippet-2").inner_text()
    page.get_by_role("button", name="Send", exact=True).click()
    page.locator(".notices").get_by_text("was sent").wait_for()
    window.open(f"{console.base}/topics/show?name=news.sent")
    page.get_by_role("link", name="Purge").click()
    page.get_by_label("ready and delayed").check()
    page.get_by_role("button", name="Preview").click()
    page.get_by_role("button", name="Remove 1 message").click()
    page.get_by_text("1 message removed from news.sent").wait_for()
    window.assert_quiet(console.host)


def test_a_topic_is_paused_and_resumed_on_its_page_without_scripts(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows(runs_scripts=False)
    path = f"/topics/show?name={quote(QUIET_TOPIC)}"
    assert console.sign_in(window, console.issue("ops"), path)
    page = window.page
    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()
    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()
    assert "/topics/show" in page.url


def test_a_reader_has_no_actions(console: Console, windows: Callable[..., Window]) -> None:
    window = windows()
    token = console.issue("reader", [Right.READ_HEADERS])
    assert console.sign_in(window, token, f"/topics/show?name={TOPIC}")
    assert window.page.locator("main button").count() == 0
    assert window.page.get_by_role("link", name="Send").count() == 0


def _row(page: Page, field: str) -> str:
    return page.locator("tr", has=page.locator("th", has_text=field)).first.locator("td").first.inner_text()
