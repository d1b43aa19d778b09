"""Charts in a browser: what a pointer shows, the table behind, and what an update leaves alone."""

from base64 import b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

from postroom.adapters.console.charts import HOUR_MS, time_ticks
from postroom.adapters.console.values import DASH
from postroom.domain.policy import DAY_MS
from tests.e2e.console.conftest import Console
from tests.support.browser import DESKTOP, PHONE, Window, find_problems, overflow
from tests.support.hostile_store import TOPIC

RATES = "Messages per second, over ten minutes"


def call(console: Console, path: str, body: Any) -> Any:
    """Make a call of the HTTP API; return its answer."""
    headers = {"Authorization": f"Bearer {console.issue('shop')}"}
    answer = console.server.call("POST", path, body, headers)
    assert answer.status == 200, answer.text
    return answer.json


def handle(console: Console, topic: str, count: int) -> None:
    """Send messages of a topic, and ack them."""
    call(console, "/v1/send", [{"topic": topic, "payload_b64": b64encode(b"x").decode()}] * count)
    messages = call(console, "/v1/recv", {"topic": topic, "max_messages": count})["messages"]
    call(console, "/v1/ack", {"receipts": [each["receipt"] for each in messages]})


def chart(page: Page, title: str) -> Locator:
    """Return a chart."""
    return page.locator("figure.chart-frame", has=page.locator("figcaption", has_text=title))


@pytest.mark.parametrize("runs_scripts", [True, False])
def test_a_pointer_shows_a_value_and_a_table_has_all(
    console: Console, windows: Callable[..., Window], runs_scripts: bool
) -> None:
    handle(console, "charts.shown", 3)
    window = windows(runs_scripts=runs_scripts)
    assert console.sign_in(window, console.issue("ops"), "/topics/show?name=charts.shown")
    page, title = window.page, "Time from sending to the ack"
    found = chart(page, title)
    assert found.locator(".plot-y text").first.text_content() == "0"
    column = found.locator(".plot-hit").last
    said = column.locator("title").text_content()
    assert said is not None
    assert "p50" in said
    if runs_scripts:
        column.hover()
        expect(found.locator("[data-plot-value]")).to_have_text(said)
    found.get_by_text("as a table").click()
    rows = found.locator("tbody tr")
    assert 61 <= rows.count() <= 62
    shown = [each for each in rows.all_inner_texts() if DASH not in each]
    assert len(shown) == 1
    assert shown[0].split("\t")[0] == said.partition(": ")[0]
    window.assert_quiet(console.host)


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=lambda size: f"{size[0]} px")
def test_charts_are_accessible_and_their_labels_are_within_them(
    console: Console, windows: Callable[..., Window], size: tuple[int, int]
) -> None:
    handle(console, "charts.fit", 2)
    window = windows(size=size)
    for path in (f"/topics/show?name={quote(TOPIC)}", "/topics/show?name=charts.fit&period=7d", "/search"):
        assert console.sign_in(window, console.issue("ops"), path)
        page = window.page
        assert page.locator("figure.chart-frame").count() > 0
        for details in page.locator("figure details").all():
            details.locator("summary").click()
        assert overflow(page) <= 0
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(OVERLAPS) == []
        assert find_problems(page) == []
    window.assert_quiet(console.host)


@pytest.mark.parametrize("width", [320, 390, 480, 641, 768, 1280])
def test_labels_of_any_length_of_time_do_not_overlap(
    console: Console, windows: Callable[..., Window], width: int
) -> None:
    handle(console, "charts.fit", 2)
    window = windows(size=(width, 800))
    assert console.sign_in(window, console.issue("ops"), "/search")
    start = 1_796_000_045_858
    for length in (
        1,
        3,
        4,
        5,
        6,
        7,
        9,
        60,
        900,
        6_500,
        45_000,
        400_000,
        2 * HOUR_MS,
        11 * HOUR_MS,
        9 * DAY_MS,
    ):
        for first in (start, start + length // 7, start + length // 3):
            ticks = [[each.at, each.anchor, each.text] for each in time_ticks(first, first + length)]
            window.page.evaluate(SHOW_TIMES, ticks)
            assert window.page.evaluate(OVERLAPS) == [], (length, ticks)
            assert window.page.evaluate(OUTSIDE) == [], (length, ticks)


def test_an_update_leaves_an_open_table_open(console: Console, windows: Callable[..., Window]) -> None:
    window = windows()
    assert console.sign_in(window, console.issue("ops"))
    page = window.page
    page.get_by_text("Live", exact=True).wait_for()
    rates = chart(page, RATES)
    rates.get_by_text("as a table").click()
    table = rates.locator("tbody")
    before = table.inner_text()
    handle(console, "charts.live", 5)
    window.wait_until(lambda: table.inner_text() != before)
    assert rates.locator("details").get_attribute("open") is not None
    assert rates.locator(".plot-x text").all_text_contents()[-1] == "now"
    window.assert_quiet(console.host)


SHOW_TIMES = """(ticks) => {
  document.querySelector(".plot-x").innerHTML = ticks.map(([at, anchor, text]) =>
    `<text x="${at}%" y="50%" class="at-${anchor}">${text}</text>`).join("");
}"""
OUTSIDE = """() => [...document.querySelectorAll(".plot text")].filter((each) => {
  if (!each.checkVisibility()) { return false; }
  const box = each.getBoundingClientRect();
  const frame = each.closest(".chart-frame").getBoundingClientRect();
  return box.left < frame.left || box.right > frame.right || box.top < frame.top || box.bottom > frame.bottom;
}).map((each) => each.textContent)"""
OVERLAPS = """() => [...document.querySelectorAll(".plot-x, .plot-y")].flatMap((axis) => {
  const texts = [...axis.querySelectorAll("text")].filter((each) => each.checkVisibility());
  const boxes = texts.map((each) => [each.textContent, each.getBoundingClientRect()]);
  return boxes.flatMap(([text, one], index) => boxes.slice(index + 1).filter(([, other]) =>
    one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom
  ).map(([other]) => `${text} and ${other}`));
})"""
