"""The pages of the log: events, commits, their links, and the verification of a range."""

import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.console.pages import log as log_page
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.ports.event_log import Head
from postroom.application.queries import browse_log
from postroom.domain.capability.rights import Right
from postroom.domain.commit import Commit
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.servers.console import Answer, Browser, served_console
from tests.support.stores import MAILBOX, message

Stored = Controlled[OwnedMailbox, ManualClock]


def commits_of(folder: Path) -> list[Commit]:
    """Return the commits of the store."""
    with closing(SqliteEventLog(folder / "store.db", MAILBOX, create_missing=False)) as log:
        return list(log.commits())


def head_of(folder: Path) -> Head:
    """Return the end of the log."""
    with closing(SqliteEventLog(folder / "store.db", MAILBOX, create_missing=False)) as log:
        head = log.head()
    assert head is not None
    return head


def positions(page: Answer) -> list[int]:
    """Return the positions of the events that a page shows."""
    return [int(each) for each in re.findall(r'href="[^"]*/log/events/(\d+)">', page.text)]


async def following(
    browser: Browser, page: Answer, pattern: str = 'rel="next" href="([^"]+)"'
) -> Answer | None:
    """Return the page to which a link leads."""
    link = re.search(pattern, page.text)
    return await browser.get(unescape(link[1]).removeprefix("/console")) if link else None


async def test_events_are_shown_newest_first_page_by_page(
    stored: Stored, stored_browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_page, "ROWS", 7)
    await stored_browser.sign_in(stored.issue())
    page: Answer | None = await stored_browser.get("/log")
    shown: list[int] = []
    while page is not None:
        assert page.status == 200, page.text
        shown += positions(page)
        page = await following(stored_browser, page)
    assert shown == list(range(head_of(tmp_path).position, 0, -1))


async def test_events_are_found_by_type_topic_message_time_and_position(
    stored: Stored, stored_browser: Browser, tmp_path: Path
) -> None:
    await stored_browser.sign_in(stored.issue())
    last = head_of(tmp_path).position
    sent = await stored_browser.get("/log", params={"event": "MessageSent", "topic": "pay*"})
    assert positions(sent) == [last, last - 1]
    since = (datetime.fromtimestamp(stored.clock.wall() / 1e6, UTC) - timedelta(seconds=1)).isoformat()
    later = positions(await stored_browser.get("/log", params={"since": since}))
    earlier = positions(await stored_browser.get("/log", params={"until": since}))
    assert later + earlier == list(range(last, 0, -1))
    assert later
    assert earlier
    assert positions(await stored_browser.get("/log", params={"message": "a/b?<b>\u202e"})) == [last]
    jump = await stored_browser.get("/log", params={"position": "5"})
    assert positions(jump) == [5, 4, 3, 2, 1]
    none = await stored_browser.get("/log", params={"topic": "nothing"})
    assert "No event matches here" in none.text


async def test_a_filter_that_matches_little_reads_a_bounded_part_of_the_log_a_page(
    stored: Stored, stored_browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse_log, "POSITIONS_PER_PAGE", 4)
    await stored_browser.sign_in(stored.issue())
    page: Answer | None = await stored_browser.get("/log", params={"event": "MailboxCreated"})
    pages = 0
    while page is not None and not positions(page):
        assert "This page searched" in page.text
        page, pages = await following(stored_browser, page), pages + 1
    assert page is not None
    assert positions(page) == [1]
    assert pages > 3


@pytest.mark.parametrize(
    "query",
    [
        {"event": "MessageSeen"},
        {"since": "yesterday"},
        {"until": "99999999999999d"},
        {"position": "-1"},
        {"position": "\u0663"},
        {"before": "9" * 40},
        {"message": "x" * 300_000},
    ],
    ids=["event", "since", "until", "position", "digits", "before", "message"],
)
async def test_what_is_no_filter_is_one_clear_error(
    stored: Stored, stored_browser: Browser, query: dict[str, str]
) -> None:
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/log", params=query)
    assert page.status in (400, 414, 431)
    assert "E_INTERNAL" not in page.text


async def test_an_event_is_shown_with_its_fields_but_no_payload(
    stored: Stored, stored_browser: Browser, tmp_path: Path
) -> None:
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get(f"/log/events/{head_of(tmp_path).position}")
    assert "MessageSent" in page.text
    assert "payload hash" in page.text
    assert "hello" not in page.text
    assert "<b>" not in page.text
    assert "\u202e" not in page.text
    assert "\\u202e" in page.text
    assert (await stored_browser.get("/log/events/999999")).status == 404


async def test_commits_are_shown_with_the_links_between_them(
    stored: Stored, stored_browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_page, "ROWS", 2)
    await stored_browser.sign_in(stored.issue())
    commits = commits_of(tmp_path)
    page: Answer | None = await stored_browser.get("/log/commits")
    shown: list[str] = []
    while page is not None:
        shown += re.findall(r"/log/commits/(\d+)", page.text)
        assert "broken" not in page.text
        page = await following(stored_browser, page)
    assert shown == [str(each.first) for each in reversed(commits)]
    page = await stored_browser.get(f"/log/commits/{commits[-2].last}")
    assert commits[-2].chain.hex() in page.text
    assert commits[-3].chain.hex() in page.text
    assert positions(page) == list(range(commits[-2].first, commits[-2].last + 1))


async def test_a_range_is_verified_part_by_part_and_an_altered_commit_is_named(
    stored: Stored, stored_browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_page, "EVENTS_PER_PART", 3)
    await stored_browser.sign_in(stored.issue())
    commits = commits_of(tmp_path)

    async def verify() -> Answer:
        page = await stored_browser.get("/log/verify?from=1")
        for _ in range(100):
            following_page = await following(
                stored_browser, page, r'<a class="button primary" href="([^"]+)"'
            )
            if following_page is None:
                return page
            page = following_page
        raise AssertionError("the parts have no end")

    page = await verify()
    assert "intact so far" not in page.text
    assert f"Positions 1 to {commits[-1].last}" in page.text
    assert commits[-1].chain.hex() in page.text
    victim = commits[-2]
    with closing(sqlite3.connect(tmp_path / "store.db")) as file, file:
        file.execute("UPDATE log SET at = at + 1 WHERE last = ?", (victim.last,))
    page = await verify()
    assert (page.status, f"The commit of positions {victim.first} to {victim.last}" in page.text) == (
        200,
        True,
    )
    assert f"/log/commits/{victim.first}" in page.text
    assert "broken" in (await stored_browser.get(f"/log/commits/{victim.first}")).text
    last = commits[-1].last
    page = await stored_browser.get(f"/log/verify?from={last}&chain={'00' * 32}")
    assert "it was rewritten" in page.text


async def test_one_range_is_verified_at_a_time(stored: Stored, stored_browser: Browser) -> None:
    await stored_browser.sign_in(stored.issue())
    with log_page._verifying:  # as another request does
        page = await stored_browser.get("/log/verify?from=1")
    assert (page.status, "Another verification is running" in page.text) == (429, True)
    assert (await stored_browser.get("/log/verify?from=1")).status == 200


@pytest.mark.parametrize("path", ["/log", "/log/commits", "/log/events/1", "/log/commits/1", "/log/verify"])
async def test_the_log_needs_the_headers_of_all_topics_and_reads_are_audited(
    stored: Stored, stored_browser: Browser, path: str
) -> None:
    for token in (
        stored.issue(topics=["orders"]),
        stored.issue(operations=[each for each in Right if each is not Right.READ_HEADERS]),
    ):
        await stored_browser.sign_in(token)
        page = await stored_browser.get(path)
        assert (page.status, "E_CAP_SCOPE" in page.text) == (403, True)
    await stored_browser.sign_in(stored.issue(operations=[Right.READ_HEADERS], principal="ada"))
    assert (await stored_browser.get(path)).status == 200
    outcomes = [(each.operation, each.outcome) for each in stored.audit.entries]
    assert outcomes == [("read-headers", "E_CAP_SCOPE")] * 2 + [("read-headers", "allowed")]


async def test_masked_headers_and_hashes_of_masked_payloads_are_for_administrators_only(
    stored: Stored, tmp_path: Path
) -> None:
    settings = ConsoleSettings(mask_headers=("x-card", "principal"), mask_payload_fields=("/card",))
    await stored.mailbox.send_message(message(attrs={"x-card": "4111-1111", "x-shop": "north"}))
    path = f"/log/events/{head_of(tmp_path).position}"
    options: dict[str, Any] = {"store": str(tmp_path / "store.db"), "access": access_of(stored)}
    async with served_console(stored.mailbox, settings=settings, **options) as browser:
        await browser.sign_in(stored.issue(operations=[Right.READ_HEADERS, Right.READ_PAYLOAD]))
        page = await browser.get(path)
        assert "[masked]" in page.text
        assert "north" in page.text
        assert "4111-1111" not in page.text
        assert "payload hash" not in page.text
        await browser.sign_in(stored.issue())
        page = await browser.get(path)
        assert "4111-1111" in page.text
        assert "payload hash" in page.text


async def test_a_mailbox_in_memory_has_no_log_to_show(place: Stored, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get("/log")
    assert (page.status, "postroom log show" in page.text) == (404, True)
