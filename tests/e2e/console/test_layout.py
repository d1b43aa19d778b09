"""Actions stay in the window, and tables in their frames, however long names are."""

import asyncio
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple
from urllib.parse import quote

import pytest
from playwright.sync_api import Page

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_capabilities, open_key_ring
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.console import pages
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right, Rights
from postroom.domain.names import DEFAULT_MAILBOX
from postroom.domain.policy import TopicPolicy
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.subscription import SubscriptionFilter
from tests.e2e.console.conftest import enter_token
from tests.screenshots import NO_PAGES
from tests.support.browser import Window, chromium_or_skip, overflow
from tests.support.servers.http import PostroomServer

LONG = "orders." + "abcdefghij" * 24 + "-longest"
ERROR = "ConnectionError: " + "warehouse.internal:5432/" * 40
REQUEST = "r" * 255
WORKER = "0199d3a0-0000-7000-8000-000000000009"
SIZES = ((390, 844), (1280, 800), (1920, 1080))
PATHS = {
    "/messages/{id:path}": "/messages/{dead}",
    "/message/resend": "/message/resend?id={dead}",
    "/message/{action}": "/message/purge?id={dead}",
    "/topics/show": "/topics/show?name={topic}&period=24h",
    "/topics/policy": "/topics/policy?name={topic}",
    "/topics/purge": "/topics/purge?name={topic}",
    "/send": "/send?topic={topic}",
    "/consumers/worker": "/consumers/worker?id={worker}&principal={principal}",
    "/outboxes/failures": "/outboxes/failures?kind=recorded&name={store}",
    "/log/commits/{position}": "/log/commits/3",
    "/log/events/{position}": "/log/events/3",
    "/log/verify": "/log/verify?from=1",
    "/redrives/select": "/redrives/select?action=cancel&topics={topic}&statuses=ready",
    "/redrives/preview": "/redrives/preview?topics={topic}",
    "/redrives/{job_id}": "/redrives/{job}",
    "/redrives/{job_id}/{action}": "/redrives/{job}/undo",
    "/subscriptions/rewind": "/subscriptions/rewind?name={subscription}",
    "/subscriptions/delete": "/subscriptions/delete?name={subscription}",
    "/schedules/delete": "/schedules/delete?name={schedule}",
    "/search": "/search?columns=topic&columns=principal&columns=correlation_id&columns=attempts",
    "/searches/{search_id}/delete": "/searches/{search}/delete",
    "/tail": "/tail?show=events&after=0",
    "/timeline": "/timeline?correlation_id={request}",
    "/compare": "/compare?id={dead}&id={other}",
    "/what-if": "/what-if?topic={topic}&max_attempts=5",
}
"""Paths of the routes that need parameters; the others are their own."""


def list_paths() -> list[str]:
    """Return the path of each page of the console, and of the search as it is by default."""
    routes = [
        route.path
        for module in iter_modules(pages.__path__)
        for route in getattr(import_module(f"{pages.__name__}.{module.name}"), "ROUTES", ())
        if "GET" in route.methods and route.path not in NO_PAGES
    ]
    return [*(PATHS.get(each, each) for each in routes), "/search", "/audit?operation=admin"]


CUT = """() => [...document.querySelectorAll(".table-frame td[data-label]")]
.filter((each) => window.innerWidth < 600 && each.checkVisibility())
.filter((each) => parseFloat(getComputedStyle(each).paddingLeft) < 128)
.map((each) => `the label of ${each.dataset.label} is covered`)
.concat([...document.querySelectorAll("main .table-frame, main .plot-table")]
.filter((each) => each.checkVisibility() && each.scrollWidth > each.clientWidth)
.map((each) => `${each.getAttribute("aria-label")}: ${each.scrollWidth - each.clientWidth} px`))"""
"""Returns the tables whose content is wider than their frame, and cells of cards that cover their labels."""
HIDDEN = """() => [...document.querySelectorAll("main button, main .button, main .actions a")]
.filter((each) => {
  if (!each.checkVisibility()) { return false; }
  each.scrollIntoView({ block: "center", inline: "nearest" });
  window.scrollTo(0, window.scrollY);
  for (const frame of document.querySelectorAll(".table-frame")) { frame.scrollLeft = 0; }
  const box = each.getBoundingClientRect();
  const at = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
  return box.left < 0 || box.right > window.innerWidth || !at || !(each.contains(at) || at.contains(each));
}).map((each) => each.textContent.trim() || each.getAttribute("aria-label"))"""
"""Returns the actions that are not in the window, or that something covers, before any table is scrolled."""


class Layout(NamedTuple):
    """A window at a console whose names are as long as may be, its address, and what paths have."""

    window: Window
    base: str
    names: dict[str, str]


async def fill(store: str) -> dict[str, str]:
    """Fill a store with long names and errors; return what paths have."""
    assert len(LONG) == 255
    async with open_mailbox(store, DEFAULT_MAILBOX) as mailbox:
        await mailbox.set_topic_policy(LONG, TopicPolicy(max_attempts=1))
        headers = {"k" * 200: "v" * 200}
        new = NewMessage(
            topic=LONG, payload=b'{"a": 1}', principal="p" * 255, correlation_id=REQUEST, attrs=headers
        )
        await mailbox.send_batch([new for _ in range(9)])
        for each in await mailbox.receive_messages(LONG, max_messages=6, consumer="c" * 200):
            await each.nack(reason=ERROR)
        letters = (await mailbox.list_dead_letters()).items
        subscription, schedule = "s" + LONG[1:], "n" * 200
        await mailbox.set_subscription(subscription, SubscriptionFilter((LONG,), headers))
        await mailbox.set_schedule(schedule, ScheduleSpec(LONG, "0 3 * * *", headers={"k": "v" * 200}))
        await mailbox.run_schedule(schedule)
        saved = await mailbox.save_search("f" * 80, f"topics={LONG}", principal="p" * 255)
        return {
            "dead": letters[0].message_id,
            "other": letters[1].message_id,
            "topic": LONG,
            "request": REQUEST,
            "subscription": subscription,
            "schedule": schedule,
            "search": saved.search_id,
            "store": quote(store),
            "worker": WORKER,
            "principal": "p" * 255,
        }


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Layout]:
    """A window that is signed in as somebody with a long name, whose visits are audited."""
    folder = tmp_path_factory.mktemp("layout")
    store = str(folder / "store.db")
    names = asyncio.run(fill(store))
    rebuild_projections(store, runner=LocalTaskRunner())
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("p" * 255, Rights(("*",), ("*",), tuple(Right)), lifetime_ms=3_600_000)
    with PostroomServer(folder / "server", store, dev=False) as server, chromium_or_skip() as browser:
        headers = {"Authorization": f"Bearer {token}"}
        spec = {"spec": {"topics": [LONG], "limit": 2}}
        names["job"] = server.call("POST", "/v1/redrives", spec, headers).json["job_id"]
        handler = {"topic": LONG, "handler": "h" * 255, "consumer": "c" * 200, "concurrency": 4}
        worker = {"name": "w" * 255, "host": "o" * 255, "version": "v" * 255, "handlers": [handler]}
        answer = server.call("PUT", f"/v1/workers/{WORKER}", {"worker": worker}, headers)
        assert answer.status == 200, answer.text
        window, base = Window(browser), f"{server.address}/console"
        window.open(f"{base}/sign-in")
        enter_token(window, token)
        window.page.locator("nav.nav").wait_for(state="attached")
        yield Layout(window, base, names)
        window.close()


@pytest.mark.parametrize("path", list_paths())
def test_no_action_is_outside_the_window_and_no_table_outside_its_frame(layout: Layout, path: str) -> None:
    page = layout.window.open(layout.base + path.format(**layout.names))
    assert page.locator(".alert").count() == 0, page.locator(".alert").first.text_content()
    for width, height in SIZES:
        page.set_viewport_size({"width": width, "height": height})
        assert hidden_actions(page) == [], width
        assert overflow(page) <= 0, width
        assert page.evaluate(CUT) == [], width


def test_the_measurement_finds_what_is_cut_off(layout: Layout) -> None:
    layout.window.page.set_viewport_size({"width": 1280, "height": 800})
    page = layout.window.open(f"{layout.base}/dead-letters")
    page.evaluate("document.querySelector('.table-frame table').style.width = '3000px'")
    page.evaluate(
        "document.querySelectorAll('tbody td:last-child').forEach(each => each.style.position = 'static')"
    )
    assert "Redrive these…" in hidden_actions(page)
    assert page.evaluate(CUT) != []


def hidden_actions(page: Page) -> list[str]:
    """Return the texts of the actions that nobody sees without scrolling a table."""
    found: list[str] = page.evaluate(HIDDEN)
    return found
