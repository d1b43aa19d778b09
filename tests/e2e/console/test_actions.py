"""What operators do, all behind a proxy that serves the console below a path of its own."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page

from tests.e2e.console.conftest import Console, enter_token
from tests.support.browser import Window, find_problems
from tests.support.hostile_store import DEAD, LONG_ID, QUIET_TOPIC, SCRIPT_URL, TOPIC, XSS
from tests.support.prefix_proxy import PrefixProxy
from tests.support.servers.http import PostroomServer

PREFIX = "/ops"


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A console behind a proxy that states its prefix, which no request may miss."""
    console = Console(tmp_path_factory.mktemp("console"), behind_proxy=True, allowed_hosts=["127.0.0.1"])
    with console.server as server, PrefixProxy(server.address, PREFIX) as proxy:
        console.base = f"{proxy.origin}{PREFIX}/console"
        yield console
        assert proxy.refused == []


def test_an_action_whose_token_expired_leads_to_sign_in_and_back(
    console: Console, windows: Callable[..., Window]
) -> None:
    window = windows()
    seconds = 4
    while not console.sign_in(window, console.issue("ops", lifetime_ms=seconds * 1_000)):
        seconds *= 4  # the machine was too slow for so short a life
    page = window.page
    page.get_by_text("Reload the page to go on.").wait_for()

    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    page.get_by_label("Capability token").wait_for()
    assert find_problems(page) == []
    enter_token(window, console.issue("ops"))
    page.get_by_text(QUIET_TOPIC).wait_for()
    assert find_problems(page) == []
    page.get_by_role("button", name="Send again").click()

    page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()
    page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()


def test_a_redrive_by_keyboard_leaves_out_what_fails_after_its_preview(
    console: Console, windows: Callable[..., Window]
) -> None:
    window, token = windows(), console.issue("ops")
    assert console.sign_in(window, token)
    page = window.page
    press(page, page.get_by_role("link", name="Dead letters", exact=True))
    press(page, page.get_by_role("link", name="Redrive these"))
    page.get_by_role("heading", name=f"Redrive {DEAD} dead letters?").wait_for()
    assert find_problems(page) == []
    fail(console.server, token, ["late-1", "late-2"])
    press(page, page.get_by_role("button", name="Start the job"))
    fail(console.server, token, ["late-3"])

    page.get_by_text(f"{DEAD} of {DEAD}").wait_for()
    page.locator("main").get_by_text("completed").first.wait_for()
    assert find_problems(page) == []
    assert dead_letters(console.server, token) == {"late-1", "late-2", "late-3"}
    window.assert_quiet(console.host)


def test_a_waiting_message_is_rescheduled_and_cancelled_by_keyboard(
    console: Console, windows: Callable[..., Window]
) -> None:
    window, token = windows(), console.issue("ops")
    headers = {"Authorization": f"Bearer {token}"}
    body = [{"topic": QUIET_TOPIC, "payload_b64": "", "message_id": "later", "deliver_after_ms": 3_600_000}]
    assert console.server.call("POST", "/v1/send", body, headers).status == 200
    assert console.sign_in(window, token, "/messages/later")
    page = window.page
    for link, text, button, outcome in (
        ("Reschedule…", "2h", "Deliver it after this time", "rescheduled"),
        ("Cancel…", "ordered twice", "Cancel it", "cancelled"),
    ):
        press(page, page.get_by_role("link", name=link))
        page.get_by_role("textbox").fill(text)
        press(page, page.get_by_role("button", name=button))
        page.get_by_text(f"The message was {outcome}.").wait_for()
        assert find_problems(page) == []
    page.get_by_role("cell", name="Cancelled by ops: ordered twice").wait_for()
    window.assert_quiet(console.host)


def test_of_two_operators_who_redrive_a_dead_letter_at_once_one_does(
    console: Console, windows: Callable[..., Window]
) -> None:
    token = console.issue("ops")
    fail(console.server, token, ["contended"])
    pages = [window.page for window in (windows(), windows()) if console.sign_in(window, token)]
    for page in pages:
        page.goto(f"{console.base}/message/redrive?id=contended")
    for page in pages:
        page.get_by_role("button", name="Redrive it").click(no_wait_after=True)
    for page in pages:
        page.locator(".notices").wait_for()

    headers = {"Authorization": f"Bearer {token}"}
    jobs = console.server.call("GET", "/v1/redrives", headers=headers).json["jobs"]
    assert sum(each["moved"] for each in jobs if each["spec"].get("message_ids") == ["contended"]) == 1
    assert "contended" not in dead_letters(console.server, token)


def press(page: Page, target: Locator) -> None:
    """Go to an element by the Tab key, and press Enter."""
    target.first.wait_for()
    for _ in range(400):
        page.keyboard.press("Tab")
        if target.first.evaluate("element => element === document.activeElement"):
            page.keyboard.press("Enter")
            return
    raise AssertionError(f"{target} can't be reached by the keyboard.")


def fail(server: PostroomServer, token: str, ids: list[str]) -> None:
    """Send messages of the topic, and have each become a dead letter, as a consumer would."""
    headers = {"Authorization": f"Bearer {token}"}

    def call(path: str, body: Any) -> Any:
        answer = server.call("POST", path, body, headers)
        assert answer.status == 200, answer.text
        return answer.json

    call("/v1/send", [{"topic": TOPIC, "payload_b64": "", "message_id": id_} for id_ in ids])
    failed: set[str] = set()
    while failed != set(ids):
        for each in call("/v1/recv", {"topic": TOPIC, "max_messages": 50})["messages"]:
            if each["msg_id"] in ids:
                call(f"/v1/nack/{quote(each['msg_id'])}", {"receipt": each["receipt"]})
                failed.add(each["msg_id"])


def dead_letters(server: PostroomServer, token: str) -> set[str]:
    answer = server.call("GET", f"/v1/dlq?topic={TOPIC}", headers={"Authorization": f"Bearer {token}"})
    return {each["message_id"] for each in answer.json["items"]}


def test_a_search_is_its_url(console: Console, windows: Callable[..., Window]) -> None:
    first, second = windows(), windows()
    for window in (first, second):
        assert console.sign_in(window, console.issue("ops"), "/search")
    page = first.page
    page.evaluate("document.querySelectorAll('main details').forEach(each => each.open = true)")
    page.get_by_label("Topics", exact=True).fill("orders.*")
    page.get_by_label("Headers", exact=True).fill(f"link={SCRIPT_URL}")
    page.get_by_label("Text in headers").fill(XSS)
    page.get_by_role("checkbox", name="expired").check()
    for status in ("dead", "ready"):  # which of them depends on the tests before
        page.get_by_role("checkbox", name=status).check()
    page.get_by_role("button", name="Search", exact=True).click()
    page.get_by_role("link", name=LONG_ID[:20]).wait_for()

    shown = state(page)
    page.reload()
    assert state(page) == shown
    second.open(page.url)
    assert state(second.page) == shown
    first.assert_quiet(console.host)


def state(page: Page) -> tuple[str, Any]:
    """Return the text of a page, and the values of its fields."""
    fields = "[...document.querySelectorAll('main input, main select')]"
    values = page.evaluate(f"{fields}.map(each => [each.name, each.value, each.checked])")
    return page.locator("main").inner_text(), values


def test_an_operator_sees_what_another_one_does(console: Console, windows: Callable[..., Window]) -> None:
    first, second = windows(), windows()
    for window in (first, second):
        assert console.sign_in(window, console.issue("ops"))

    first.page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").click()
    second.page.get_by_role("button", name=f"Resume {QUIET_TOPIC}").click()
    first.page.get_by_role("button", name=f"Pause {QUIET_TOPIC}").wait_for()

    first.assert_quiet(console.host)
    second.assert_quiet(console.host)
