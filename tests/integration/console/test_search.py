"""The search page over a store with read models."""

import asyncio
import csv
import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from html import unescape
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import polars as pl
import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.export import MAX_EXPORTS, StoreSearchQueries
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.compose.testing import ManualClock
from postroom.adapters.console.event_filter import PARAMETERS
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import ExportFormat, ExportOptions
from postroom.domain.capability.rights import Right
from postroom.domain.search import BodyRules, EventFilter, Order
from tests.projections import histories
from tests.projections.histories import START_US, STORY, VARIED, build_without_spark, live
from tests.support.access import Controlled
from tests.support.servers.console import Browser, served_console
from tests.support.stores import copy_store
from tests.support.waiting import until, until_answer

MAILBOX = "box0@test"
ODD = [
    NewMessage(
        topic="odd",
        payload=b'=1+1,"<b>"',
        principal="<script>alert(1)</script>",
        attrs={"=1+1": "\u202eevil", "a=b\\": "x"},
        correlation_id="' OR 1=1 --",
        published_at_us=START_US + 1_000_000,
    )
]
_MESSAGE = re.compile(r'href="/console/messages/([^"]+)"')
_NEXT, _PREVIOUS = (re.compile(rf'rel="{each}" href="/console([^"]+)"') for each in ("next", "prev"))
_FACET = re.compile(
    r'<a href="/console([^"]+)"><span class="ident">.*?</span></a> <span class="number">(\d+)'
)


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a past, to be copied and left alone."""
    path = tmp_path_factory.mktemp("past") / "store.db"
    live(path, MAILBOX, [*STORY, *VARIED])
    histories.send(path, MAILBOX, ODD)
    live(path, "other@test", VARIED)
    build_without_spark(path)
    return path


class Place(Controlled):  # type: ignore[type-arg] # of a mailbox in a store
    store: str


@pytest.fixture
async def place(past: Path, tmp_path: Path) -> AsyncIterator[Place]:
    store = str(copy_store(past, tmp_path))
    async with open_mailbox(store, MAILBOX, accept_clock=True) as mailbox:
        place = Place(mailbox, ManualClock())
        place.store = store
        yield place


@pytest.fixture
async def browser(place: Place) -> AsyncIterator[Browser]:
    """A browser whose user may do everything."""
    async with served_console(place.mailbox, store=place.store) as browser:
        yield browser


@pytest.fixture
async def checked(place: Place) -> AsyncIterator[Browser]:
    """A browser that is asked for a token."""
    access = lambda mailbox, search: place.control.open_session  # noqa: E731  # as of `served_console`
    async with served_console(place.mailbox, store=place.store, access=access) as browser:
        yield browser


def messages(page: str) -> list[str]:
    """Return the ids of the messages on a page."""
    return [unescape(each) for each in _MESSAGE.findall(page)]


def results(page: str) -> list[str]:
    """Return the ids of the results, without the dead letters of a moment."""
    return messages(page.partition('aria-labelledby="moment"')[0])


async def test_pages_lead_forward_and_back_over_all_messages(place: Place, browser: Browser) -> None:
    everything = await place.mailbox.search_messages(EventFilter(limit=1_000))
    page = await browser.get("/search?limit=7")
    pages = [messages(page.text)]
    while following := _NEXT.search(page.text):
        page = await browser.get(unescape(following[1]))
        pages.append(messages(page.text))
    assert list(chain.from_iterable(pages)) == [each.message_id for each in everything.items]
    for earlier in pages[-2::-1]:
        (previous,) = _PREVIOUS.findall(page.text)
        page = await browser.get(unescape(previous))
        assert messages(page.text) == earlier
    assert not _PREVIOUS.search(page.text)


async def test_facets_and_bars_of_the_timeline_lead_to_what_they_count(
    place: Place, browser: Browser
) -> None:
    page = await browser.get("/search?limit=250")
    counts = _FACET.findall(page.text)
    bars = re.findall(r'<a href="/console([^"]+)" aria-label="[^"]*: (\d+)"', page.text)
    assert len(counts) > 5
    assert len(bars) > 2
    for href, count in [*counts, *bars[:5]]:
        narrowed = await browser.get(unescape(href))
        assert len(messages(narrowed.text)) == int(count)
    assert sum(int(count) for _, count in bars) == len(messages(page.text))


async def test_what_the_form_sends_is_a_short_url_whose_reload_is_identical(browser: Browser) -> None:
    fields = dict.fromkeys(sorted(PARAMETERS), "") | {"header": "a\\=b\\\\=x", "order": "oldest"}
    page = await browser.get("/search?" + urlencode(fields))
    assert page.path == "/console/search?" + urlencode({"header": "a\\=b\\\\=x", "order": "oldest"})
    assert len(messages(page.text)) == 1
    assert (await browser.get(page.path.removeprefix("/console"))).text == page.text


async def test_any_text_in_any_field_is_a_page_and_never_markup(browser: Browser) -> None:
    for text in ("<script>&" + "é" * 3_000, "\u202e\0%00 * OR 1=1"):
        for name in (*PARAMETERS, "at", "back", "columns"):
            page = await browser.get("/search?" + urlencode({name: text}))
            assert page.status in (200, 400), (name, text)
            assert "<h1>Search</h1>" in page.text
            assert ('role="alert"' in page.text) == (page.status == 400)
            assert "<script>" not in page.text
            assert "\u202e" not in re.sub(r'value="[^"]*"', "", page.text)


@pytest.mark.parametrize("open_", [open_mailbox, connect], ids=["owned", "shared"])
async def test_without_read_models_unsettled_messages_are_searched(tmp_path: Path, open_: Any) -> None:
    store = str(tmp_path / "store.db")
    async with open_(store, MAILBOX) as mailbox:
        await mailbox.send_batch([NewMessage(topic=each, payload=b"") for each in ("shop", "odd")])
        async with served_console(mailbox, store=store) as browser:
            page = await browser.get("/search?topics=sh*")
            assert len(messages(page.text)) == 1
            assert "postroom views rebuild" in page.text
            assert (await browser.get("/search/export?format=csv")).status == 404


async def test_the_backlog_of_a_past_position_is_shown(place: Place, browser: Browser) -> None:
    page = await browser.get("/search?at=1")
    (href,) = re.findall(r'href="/console([^"]+)">Show the backlog', page.text)
    page = await browser.get(unescape(href))
    assert "Position 1 of the log" in page.text
    page = await browser.get("/search?at=999999")
    assert page.status == 400
    assert 'role="alert"' in page.text


async def test_suggestions_begin_with_what_was_typed(browser: Browser) -> None:
    page = await browser.get("/search/suggestions/principal?principals=al")
    assert re.findall('value="([^"]*)"', page.text) == ["alice"]
    page = await browser.get("/search/suggestions/principal?principals=" + "<")
    assert "<script>" not in page.text
    assert (await browser.get("/search/suggestions/envelope_blob?topics=a")).status == 404


async def test_an_export_has_all_that_matches_in_any_format(place: Place, browser: Browser) -> None:
    everything = await place.mailbox.search_messages(EventFilter(limit=1_000, order=Order.OLDEST_FIRST))
    ids = [each.message_id for each in everything.items]
    page = await browser.get("/search/export?format=json&limit=1&cursor=&payload=1")
    rows = [json.loads(line) for line in page.text.split("\n")[:-1]]
    assert [row["message_id"] for row in rows] == ids
    assert page.headers["content-disposition"].startswith('attachment; filename="messages-')
    page = await browser.get("/search/export?format=csv&payload=1&topics=odd")
    (row,) = csv.DictReader(io.StringIO(page.text, newline=""))
    assert row["payload"] == "'" + ODD[0].payload.decode()
    async with browser.client.get(browser.url + "/search/export?format=parquet&topics=o*") as response:
        frame = pl.read_parquet(io.BytesIO(await response.read()))
    assert frame.select("topic", "principal").rows() == [("odd", ODD[0].principal)]
    assert (await browser.get("/search/export?format=xls")).status == 400
    assert (await browser.get("/search/export?format=csv&topics=%ed")).status in (200, 400)


async def test_a_search_for_words_says_in_which_payloads_it_searched(place: Place, checked: Browser) -> None:
    await checked.sign_in(place.issue())
    assert "the payloads of no topic are indexed" in (await checked.get("/search?match=evil")).text
    assert "are indexed" not in (await checked.get("/search?text=evil")).text
    for topics, known in ((("*",), ""), (("odd", "shop*"), "payloads of odd, shop*.")):
        rebuild_projections(place.store, runner=LocalTaskRunner(), bodies=BodyRules(topics))
        await checked.sign_in(place.issue())
        page = await checked.get("/search?match=evil")
        assert ("[search]" in page.text) == bool(known)
        assert known in page.text
        for limits, text in (
            (["odd"], ""),
            (["later", "odd"], "Only headers were searched of later, whose payloads are not indexed."),
            (["o*"], "those topics whose payloads are indexed"),
        ):
            await checked.sign_in(place.issue(topics=limits))
            page = await checked.get("/search?match=evil")
            assert ("[search]" in page.text) == bool(known and text)
            assert not known or text in page.text
            assert "shop*" not in page.text


async def test_a_token_sees_and_exports_what_it_covers_and_each_call_is_audited(
    place: Place, checked: Browser
) -> None:
    await checked.sign_in(place.issue(topics=["odd", "o*"], operations=[Right.READ_HEADERS], principal="ann"))
    page = await checked.get("/search?text=evil&limit=25")
    assert page.status == 200
    assert page.path.partition("?")[2] == "text=evil&limit=25&topics=odd&topics=o*"
    assert "1 message matches" in page.text
    assert "shop" not in page.text
    page = await checked.get("/search?topics=o*")
    assert len(messages(page.text)) == 1
    assert "With payloads" not in page.text
    assert (await checked.get("/search?topics=o*&match=evil")).status == 403
    for path in (
        "/search/export?format=csv",
        "/search/export?format=csv&topics=*",
        "/search/export?format=csv&topics=odd&payload=1",
        "/search/suggestions/principal?principals=a",
    ):
        assert (await checked.get(path)).status == 403, path
    topics = await checked.get("/search/suggestions/topic?topics=")
    assert re.findall('value="([^"]*)"', topics.text) == ["odd"]
    export = await checked.get("/search/export?format=json&topics=odd")
    assert "envelope" not in export.text
    await until(lambda: any(each.criteria[:1] == ("export_end",) for each in place.audit.entries))
    entries = [each for each in place.audit.entries if each.principal == "ann"]
    kinds = {each.criteria[0] for each in entries if each.criteria and each.outcome == "allowed"}
    assert {"facets", "timeline", "suggestions", "export", "export_end"} <= kinds
    end = next(each for each in entries if each.criteria[:1] == ("export_end",))
    assert (end.matches, end.operation, end.topics) == (1, "read-headers", ("odd",))
    assert not any("odd" in each.criteria or "evil" in each.criteria for each in entries)


@pytest.mark.extended
async def test_more_than_two_exports_are_refused_until_their_downloads_end(tmp_path: Path) -> None:
    store = tmp_path / "large.db"
    large = [NewMessage(topic="large", payload=bytes(100_000)) for _ in range(200)]  # no socket takes so much
    await asyncio.to_thread(histories.send, store, MAILBOX, large)
    await asyncio.to_thread(build_without_spark, store)
    async with (
        open_mailbox(str(store), MAILBOX, accept_clock=True) as mailbox,
        served_console(mailbox, store=str(store)) as browser,
        AsyncExitStack() as downloads,
    ):
        export = "/search/export?format=json&payload=1"

        async def start_download() -> bool:
            download = await downloads.enter_async_context(browser.client.get(browser.url + export))
            return download.status == 200

        for _ in range(2):  # those of the second round begin when those of the first have ended early
            for _ in range(MAX_EXPORTS):
                await until_answer(start_download)
            refused = await browser.get(export)
            assert refused.status == 429
            assert f"{MAX_EXPORTS} exports are running" in refused.text
            await downloads.aclose()


async def test_the_process_of_an_export_has_ended_however_often_its_reader_is_cancelled(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def start_and_record(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        processes.append(await start(*arguments, **options))
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_and_record)
    begun = asyncio.Event()

    async def read() -> None:
        queries = StoreSearchQueries(place.store, None, MAILBOX)  # type: ignore[arg-type]  # not read
        async with queries.export(EventFilter(), ExportOptions(ExportFormat.JSON)):
            begun.set()
            await asyncio.Event().wait()

    reading = asyncio.create_task(read())
    await until(begun.is_set)
    while not reading.done():
        reading.cancel()
        await asyncio.sleep(0)
    assert [each.returncode is not None for each in processes] == [True]


async def test_what_is_hidden_is_not_in_results_facets_suggestions_and_exports(place: Place) -> None:
    access = lambda mailbox, search: place.control.open_session  # noqa: E731  # as of `served_console`
    hidden = ConsoleSettings(mask_headers=("principal", "=1+1"), mask_payload_fields=("/card",))
    async with served_console(place.mailbox, store=place.store, access=access, settings=hidden) as browser:
        await browser.sign_in(place.issue(operations=[Right.READ_HEADERS, Right.READ_PAYLOAD]))
        page = await browser.get("/search?topics=odd")
        assert len(messages(page.text)) == 1
        assert "[masked]" in page.text
        assert "alert(1)" not in page.text
        assert "Principal</h2>" not in page.text
        for path in (
            *("principals=alice", "header=%5C%3D1%2B1=x", "text=evil", "match=evil"),
            "topics=odd&principals=alice",
        ):
            for target in ("/search?", "/search/export?format=csv&"):
                assert (await browser.get(target + path)).status == 403, path
        assert "value=" not in (await browser.get("/search/suggestions/principal?principals=a")).text
        export = await browser.get("/search/export?format=json&payload=1&topics=odd")
        row = json.loads(export.text)
        assert (row["principal"], row["custom_headers"]["=1+1"]) == ("[masked]", "[masked]")
        assert (row["envelope_b64"], row["payload"], row["payload_b64"]) == (None, None, None)
        await browser.sign_in(place.issue())
        page = await browser.get("/search?topics=odd&principals=%3Cscript%3Ealert(1)%3C/script%3E")
        assert len(messages(page.text)) == 1


async def test_a_message_is_offered_by_its_id_only_if_there_is_one(place: Place, browser: Browser) -> None:
    id_ = messages((await browser.get("/search?limit=25")).text)[0]
    offered = "The message with the id"
    assert offered in (await browser.get(f"/search?match={id_}")).text
    for text in ("nothing-like-it", "two words", "part*"):
        page = await browser.get("/search?" + urlencode({"match": text}))
        assert (page.status, offered in page.text) == (200, False), text


async def test_columns_of_choice_are_part_of_every_link(place: Place, browser: Browser) -> None:
    columns = [("columns", "principal"), ("columns", "shard"), ("columns", "header:tenant")]
    page = await browser.get("/search?limit=5&" + urlencode(columns))
    headings = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', page.text)
    assert headings[:5] == ["Message", "Principal", "Shard", "tenant", "Compare"]
    following = _NEXT.search(page.text)
    facets = _FACET.findall(page.text)
    assert following
    for href in (following[1], facets[0][0]):
        assert urlencode(columns) in unescape(href)
        page = await browser.get(unescape(href))
        assert "tenant</th>" in page.text
    for wrong in ("payload", "header:", "envelope_blob", "<script>"):
        page = await browser.get("/search?" + urlencode({"columns": wrong}))
        assert page.status == 400
        assert "There is no column" in page.text
    many = urlencode([("columns", f"header:{number}") for number in range(21)])
    assert (await browser.get(f"/search?{many}")).status == 400
    odd = urlencode({"columns": "header:=1+1", "topics": "odd"})
    assert "\\u202eevil" in (await browser.get(f"/search?{odd}")).text


async def test_a_search_as_of_a_position_shows_the_statuses_of_then(place: Place, browser: Browser) -> None:
    events = (await place.mailbox.get_message("order-1")).history
    died = next(each.position for each in events if each.event == "MessageDeadLettered")
    received = next(each.position for each in events if each.event == "MessageReceived")
    page = await browser.get(f"/search?at={died}&columns=status")
    assert messages(page.text)[:1] == ["order-1"]
    assert "badge-bad" in page.text
    assert f"Statuses are as of position {died}" in page.text
    assert 'class="facets"' not in page.text
    assert "Export all" not in page.text
    page = await browser.get(f"/search?at={received}&columns=status")
    assert "badge-accent" in page.text  # it was in flight
    assert "badge-bad" not in page.text
    page = await browser.get(f"/search?at={received}&statuses=dead")
    assert "No message matches" in page.text
    page = await browser.get("/search?at=60&limit=3&order=oldest")
    found = results(page.text)
    while following := _NEXT.search(page.text):
        page = await browser.get(unescape(following[1]))
        found += results(page.text)
    assert len(found) == len(set(found)) > 9
    for future in ("999999", "2999-01-01"):
        assert (await browser.get(f"/search?at={future}")).status == 400


async def test_times_may_be_ages(place: Place, browser: Browser) -> None:
    everything = await browser.get("/search?limit=250")
    assert messages((await browser.get("/search?limit=250&end_time=0s")).text) == messages(everything.text)
    assert messages((await browser.get("/search?start_time=1s")).text) == []


async def test_no_export_is_offered_when_nothing_matches(browser: Browser) -> None:
    page = await browser.get("/search?topics=no.such.topic")
    assert "No message matches" in page.text
    assert "/search/export" not in page.text
