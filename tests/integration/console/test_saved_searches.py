"""Searches that are saved in the mailbox, for all who may search their topics."""

import re
from collections.abc import AsyncIterator
from html import unescape
from urllib.parse import quote

import pytest

from postroom.adapters.compose.console import ConsoleSettings
from postroom.domain.capability.rights import Right
from tests.support.access import MemoryPlace
from tests.support.servers.console import Answer, Browser, served_console

OPERATOR = (Right.READ_HEADERS, Right.REDRIVE)
_SAVED = re.compile(r'<th scope="row"><a href="/console(/search[^"]*)">(.*?)</a>', re.DOTALL)
_DELETE = re.compile(r'href="/console(/searches/[0-9a-f-]+/delete)"')


def saved(page: Answer) -> dict[str, str]:
    """Return the links of the saved searches on a page by their names."""
    return {unescape(name): unescape(href) for href, name in _SAVED.findall(page.text)}


async def test_a_search_is_saved_opened_by_another_and_deleted(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue(principal="ann", operations=OPERATOR))
    page = await browser.get()
    page = await browser.get("/search?topics=orders&start_time=2h&columns=shard")
    (form,) = re.findall(r'href="/console([^"]+)">Save this search', page.text)
    assert "topics=orders&amp;start_time=2h&amp;columns=shard" in (await browser.get(unescape(form))).text
    page = await browser.post(
        "/searches", name="Orders, lately", query="topics=orders&start_time=2h&columns=shard"
    )
    assert "The search Orders, lately is saved." in page.text
    assert page.path == "/console/search?topics=orders&start_time=2h&columns=shard"
    async with Browser.another(browser) as other:
        await other.sign_in(place.issue(principal="ben", operations=(Right.READ_HEADERS,)))
        page = await other.get("/searches?query=topics%3Dorders")
        href = saved(page)["Orders, lately"]
        assert href == "/search?topics=orders&start_time=2h&columns=shard"
        assert (await other.get(href)).status == 200
        assert "Save the search" not in page.text
        assert "Save this search" not in (await other.get("/search")).text
        assert not _DELETE.search(page.text)
        assert (await other.post("/searches", name="mine", query="")).status == 403
    page = await browser.get("/searches")
    (delete,) = _DELETE.findall(page.text)
    assert "Orders, lately" in (await browser.get(delete)).text
    page = await browser.post(delete, name="Orders, lately")
    assert saved(page) == {}
    assert (await browser.get(delete)).status == 404
    assert (await browser.post(delete)).status == 404
    kinds = [each.criteria for each in place.audit.entries if each.operation == "redrive"]
    assert ("save_search",) in kinds
    assert ("delete_search",) in kinds


async def test_a_name_with_another_query_is_replaced_after_a_question(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(operations=OPERATOR))
    await browser.get("/searches?query=")
    await browser.post("/searches", name="orders", query="topics=orders&order=oldest")
    again = await browser.post("/searches", name="orders", query="topics=orders&order=oldest")
    assert "is saved" in again.text
    page = await browser.post("/searches", name="orders", query="topics=orders&limit=25")
    assert page.status == 409
    assert "Replace it" in page.text
    (before,) = await place.mailbox.list_searches()
    assert before.query == "topics=orders&order=oldest"
    await browser.post("/searches", name="orders", query="topics=orders&limit=25", replace="1")
    (after,) = await place.mailbox.list_searches()
    assert (after.search_id, after.query) == (before.search_id, "topics=orders&limit=25")


async def test_a_token_of_some_topics_sees_saves_and_deletes_searches_of_these_only(
    place: MemoryPlace, browser: Browser
) -> None:
    foreign = await place.mailbox.save_search("secret payments", "topics=payments")
    everything = await place.mailbox.save_search("everything", "statuses=dead")
    await place.mailbox.save_search("glob", "topics=or*")
    own = await place.mailbox.save_search("own", "topics=orders")
    await browser.sign_in(place.issue(topics=["orders"], operations=OPERATOR))
    page = await browser.get("/searches")
    assert set(saved(page)) == {"own"}
    assert "secret" not in page.text
    for query in ("topics=payments", "", "topics=orders&topics=payments", "%74opics=payments", "topics=*"):
        assert (await browser.post("/searches", name="mine", query=query)).status == 403, query
    for each in (foreign, everything):
        answers = [
            (await browser.post(f"/searches/{id_}/delete")).status
            for id_ in (each.search_id, "01890a5d-ac96-774b-bcce-b302099a8057")
        ]
        assert answers == [403, 403]
    # The name of a search that it can't see is free.
    page = await browser.post("/searches", name="secret payments", query="topics=orders")
    assert page.status == 200
    assert (await browser.post(f"/searches/{own.search_id}/delete")).status == 200
    assert len(await place.mailbox.list_searches()) == 4


async def test_hostile_names_and_queries_are_text_or_refused(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    await browser.get("/searches?query=")
    for name in (
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "{{ 7*7 }}",
        "../..",
        "😀 ü",
    ):
        page = await browser.post("/searches", name=name, query="match=%3Cscript%3E")
        assert page.status == 200
        page = await browser.get("/searches")
        assert name in saved(page)
        assert "<script>alert" not in page.text
        assert "<img" not in page.text
    for name in ("", "\u202eevil", "a\0b", "x" * 81):
        assert (await browser.post("/searches", name=name, query="")).status == 400, name
    for query in ("statuses=alive", "start_time=soon", "columns=payload", "at=never", "limit=0"):
        page = await browser.post("/searches", name="n", query=query)
        assert page.status == 400, query
    await place.mailbox.save_search("through the API", "evil=1&topics=orders")
    href = saved(await browser.get("/searches"))["through the API"]
    assert (await browser.get(href)).status == 400  # the page has no such parameter
    long = "&".join(f"header={quote('k' * 60)}{number}%3Dv" for number in range(40))
    assert (await browser.post("/searches", name="long", query=long)).status == 400


@pytest.fixture
async def masked(place: MemoryPlace) -> AsyncIterator[Browser]:
    settings = ConsoleSettings(mask_headers=("tenant",))
    access = lambda mailbox, search: place.control.open_session  # noqa: E731  # as of `served_console`
    async with served_console(place.mailbox, access=access, settings=settings) as browser:
        yield browser


async def test_searches_by_hidden_values_and_by_words_are_shown_to_those_who_may_run_them(
    place: MemoryPlace, masked: Browser
) -> None:
    await place.mailbox.save_search("by tenant", "header=tenant%3Dumbrella")
    await place.mailbox.save_search("by words", "match=umbrella")
    await masked.sign_in(place.issue(operations=(Right.READ_HEADERS,)))
    page = await masked.get("/searches")
    assert saved(page) == {}
    assert "umbrella" not in page.text
    await masked.sign_in(place.issue())
    assert set(saved(await masked.get("/searches"))) == {"by tenant", "by words"}


async def test_a_mailbox_keeps_at_most_200_searches(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    await browser.get("/searches?query=")
    for number in range(200):
        await place.mailbox.save_search(f"search {number}", "topics=orders")
    page = await browser.post("/searches", name="one more", query="")
    assert page.status == 429
    assert "limit of 200" in page.text
    assert len(saved(await browser.get("/searches"))) == 200
