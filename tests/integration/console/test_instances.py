"""Several mailboxes in one console: a page of all, and sessions, forms and audits that are of one each."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar

from postroom.adapters.compose.console import ConsoleSettings, InstanceSource, new_code, open_instances
from postroom.adapters.compose.serve import make_service, serve_apps
from postroom.application.service import Service, SurfaceMetrics
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Unavailable
from tests.integration.console.conftest import access_of
from tests.integration.console.test_overview import FOREVER, next_event
from tests.support.access import MemoryPlace, controlled_mailbox
from tests.support.messages import message
from tests.support.servers.console import Answer, Browser, served_console
from tests.support.waiting import until_answer

AT = "/instances"


def source_of(name: str, place: MemoryPlace, token: str | None = None) -> InstanceSource:
    """Return an instance whose mailbox can be reached."""

    @asynccontextmanager
    async def open_service(stopping: asyncio.Event) -> AsyncIterator[tuple[Service, str | None]]:
        yield make_service("memory:", place.mailbox, access=access_of(place), stopping=stopping), token

    return InstanceSource(name, "memory:", ConsoleSettings(), open_service)


class Door:
    """What keeps an instance from being reached until it is opened."""

    def __init__(self, source: InstanceSource) -> None:
        self.is_open = False
        self._source = source

    def source(self) -> InstanceSource:
        """Return the instance behind it."""

        @asynccontextmanager
        async def open_service(stopping: asyncio.Event) -> AsyncIterator[tuple[Service, str | None]]:
            if not self.is_open:
                raise Unavailable("The database refuses connections.")
            async with self._source.open_service(stopping) as opened:
                yield opened

        return self._source._replace(open_service=open_service)


@pytest.fixture
async def billing() -> AsyncIterator[MemoryPlace]:
    """Another mailbox, with its own keys and its own audit log."""
    async with controlled_mailbox() as place:
        await place.mailbox.send_message(message(topic="invoices"))
        yield place


@pytest.fixture
async def shared(place: MemoryPlace, billing: MemoryPlace) -> AsyncIterator[Browser]:
    """A browser at the console of `place`, which shows `billing`, too; both ask for tokens."""
    sources = [source_of("billing", billing)]
    async with served_console(place.mailbox, access=access_of(place), instances=sources) as browser:
        await until_answer(lambda: is_open(browser, "billing"))
        yield browser


@asynccontextmanager
async def linked(sources: Sequence[InstanceSource], **settings: Any) -> AsyncIterator[Browser]:
    """Serve instances as `postroom console NAME=ADDRESS …` does; yield a browser that used the link."""
    code, stopping, metrics = new_code(), asyncio.Event(), SurfaceMetrics()
    app = open_instances(sources, ConsoleSettings(**settings), metrics, stopping, code)
    async with (
        serve_apps("127.0.0.1:0", "/console", app, metrics) as url,
        ClientSession(cookie_jar=CookieJar(unsafe=True)) as client,
    ):
        browser = Browser(client, url + "/console")
        page = await browser.open_link(code.text)
        browser.url = browser.url.removesuffix(AT)
        assert page.status == 200, page.text
        yield browser
        stopping.set()


async def is_open(browser: Browser, name: str) -> bool:
    """Return whether an instance can be reached."""
    return (await browser.get(f"{AT}/{name}/")).status != 503


def rows(page: Answer) -> dict[str, list[str]]:
    """Return the cells of the page of all, by the names of the instances."""
    found = re.findall(r'<th scope="row">.*?title="([^"]*)".*?</th>(.*?)</tr>', page.text, re.DOTALL)
    return {
        name: [
            re.sub(r"<.*?>", " ", each).strip() for each in re.findall(r"<td.*?>(.*?)</td>", text, re.DOTALL)
        ]
        for name, text in found
    }


def cookies(browser: Browser) -> dict[str, str]:
    """Return the cookies of a browser."""
    return {each.key: each.value for each in browser.client.cookie_jar}


async def test_signing_in_at_one_instance_grants_no_other(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    token = place.issue()
    await shared.sign_in(token)
    page = await shared.get(f"{AT}/")
    assert rows(page)["acme@one"][0] == "reachable"
    assert rows(page)["billing"] == ["not signed in", "", "", "", "", "", "", ""]
    assert "invoices" not in page.text
    for path in ("/", "/topics", "/search", "/live", "/access", "/search/export?format=csv"):
        answer = await shared.get(f"{AT}/billing{path}")
        assert answer.status == 401, path
        assert "invoices" not in answer.text
    answer = await shared.send(f"{AT}/billing/sign-in", {"token": token})
    assert answer.status == 401
    assert [each.principal for each in billing.audit.entries] == []


async def test_a_cookie_of_one_instance_is_none_of_another(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    await shared.sign_in(place.issue())
    (name, value) = next(iter(cookies(shared).items()))
    assert "billing" not in name
    for forged in (f"{name}-at-billing", name):
        async with ClientSession() as client:
            headers = {"Cookie": f"{forged}={value}"}
            async with client.get(f"{shared.url}{AT}/billing/", headers=headers) as answer:
                assert answer.status == 401, forged
    await shared.send(f"{AT}/billing/sign-in", {"token": billing.issue()})
    own = cookies(shared)
    assert set(own) == {name, f"{name}-at-billing"}
    swapped = {name: own[f"{name}-at-billing"], f"{name}-at-billing": own[name]}
    async with ClientSession() as client:
        headers = {"Cookie": "; ".join(f"{key}={each}" for key, each in swapped.items())}
        for path in ("/", f"{AT}/billing/"):
            async with client.get(shared.url + path, headers=headers) as answer:
                assert answer.status == 401, path


async def test_a_form_of_one_instance_is_refused_by_another(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    await shared.send(f"{AT}/billing/sign-in", {"token": billing.issue()})
    await shared.sign_in(place.issue())
    await shared.get("/topics/policy?name=orders")
    stolen = shared.csrf
    answer = await shared.send(f"{AT}/billing/topics/pause", {"csrf": stolen, "topic": "invoices"})
    assert answer.status == 403
    assert not any(each.paused for each in await billing.mailbox.list_topics())
    await shared.get(f"{AT}/billing/topics/policy?name=invoices")
    assert shared.csrf != stolen
    await shared.post(f"{AT}/billing/topics/pause", topic="invoices")
    assert [each.paused for each in await billing.mailbox.list_topics()] == [True]
    assert not any(each.paused for each in await place.mailbox.list_topics())
    assert Right.ADMIN in {each.operation for each in billing.audit.entries}
    assert Right.ADMIN not in {each.operation for each in place.audit.entries}


@pytest.mark.parametrize("path", ["/../billing/topics", "/%2e%2e/billing/", "/a/..", "/.%2E/", "//billing"])
async def test_a_sign_in_leads_to_no_other_instance(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace, path: str
) -> None:
    answer = await shared.send(f"{AT}/billing/sign-in", {"token": billing.issue(), "next": path})
    assert (answer.status, answer.path) == (200, f"/console{AT}/billing/")


async def test_a_form_that_outlived_its_session_is_sent_again_to_its_own_instance(
    shared: Browser, billing: MemoryPlace
) -> None:
    answer = await shared.send(f"{AT}/billing/topics/pause", {"csrf": "x", "topic": "invoices"})
    assert answer.status == 401
    fields = {"token": billing.issue(), "next": "/topics/pause", "resume": "1", "resume.topic": "invoices"}
    answer = await shared.send(f"{AT}/billing/sign-in", fields)
    assert f'action="/console{AT}/billing/topics/pause"' in answer.text


async def test_signing_out_of_one_instance_leaves_the_others(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    await shared.sign_in(place.issue())
    await shared.send(f"{AT}/billing/sign-in", {"token": billing.issue()})
    await shared.get(f"{AT}/billing/")
    await shared.post(f"{AT}/billing/sign-out")
    assert (await shared.get(f"{AT}/billing/")).status == 401
    assert (await shared.get("/")).status == 200


async def test_a_switcher_leads_to_each_instance_and_one_alone_has_none(
    shared: Browser, browser: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    await shared.sign_in(place.issue())
    await shared.send(f"{AT}/billing/sign-in", {"token": billing.issue()})
    for path, name in (("/", "acme@one"), (f"{AT}/billing/topics", "billing")):
        page = await shared.get(path)
        switcher = page.text.partition('id="instances-menu"')[2].partition("</div>")[0]
        assert re.findall(r'<a href="([^"]*)"', switcher) == [
            "/console/",
            f"/console{AT}/billing/",
            f"/console{AT}/",
        ]
        assert re.findall(r'aria-current="true">([^<]*)<', switcher) == [name]
    await browser.sign_in(place.issue())
    assert "instances" not in (await browser.get("/")).text
    assert (await browser.get(f"{AT}/")).status == 404


async def test_the_page_of_all_shows_what_each_token_permits(
    shared: Browser, place: MemoryPlace, billing: MemoryPlace
) -> None:
    assert (await shared.get(f"{AT}/")).path.startswith("/console/sign-in")
    await billing.mailbox.send_message(message(topic="receipts"))
    await shared.sign_in(place.issue())
    for operations, topics, ready in (
        (tuple(Right), ["*"], "2"),
        ((Right.READ_HEADERS,), ["receipts"], "1"),
        ((Right.SEND,), ["*"], ""),
    ):
        token = billing.issue(operations=operations, topics=topics)
        await shared.send(f"{AT}/billing/sign-in", {"token": token})
        cells = rows(await shared.get(f"{AT}/"))["billing"]
        assert cells[2] == ready
        assert ("epoch" in cells[-1]) == (topics == ["*"] and bool(ready))


async def test_one_link_starts_a_session_at_each_instance(place: MemoryPlace, billing: MemoryPlace) -> None:
    sources = [source_of("orders", place, place.issue()), source_of("billing", billing, billing.issue())]
    async with linked(sources) as browser:
        await until_answer(lambda: is_open(browser, "orders"))
        await until_answer(lambda: is_open(browser, "billing"))
        page = await browser.get("/")
        assert {name: (cells[0], cells[2]) for name, cells in rows(page).items()} == {
            "orders": ("reachable", "2"),
            "billing": ("reachable", "1"),
        }
        tokens = set()
        for name in ("orders", "billing"):
            assert (await browser.get(f"{AT}/{name}")).status == 200
            await browser.get(f"{AT}/{name}/")
            tokens.add(browser.csrf)
        assert len(tokens) == len(set(cookies(browser).values())) == 2
        assert (await browser.get(f"{AT}/none/")).status == 404
        prefix = browser.url.rpartition("/")[2]
        async with browser.client.get(browser.url.replace(prefix, "x" * 22) + f"{AT}/orders/") as answer:
            assert answer.status == 401


async def test_an_instance_that_is_down_does_not_delay_the_others_and_appears_when_it_is_up(
    place: MemoryPlace, billing: MemoryPlace
) -> None:
    door = Door(source_of("billing", billing, billing.issue()))
    async with linked([source_of("orders", place, place.issue()), door.source()]) as browser:
        await until_answer(lambda: is_open(browser, "orders"))
        cells = rows(await browser.get("/"))
        assert cells["orders"][0] == "reachable"
        assert cells["billing"][0].startswith("can&#39;t be reached")
        page = await browser.get(f"{AT}/billing/search")
        assert page.status == 503
        assert "The database refuses connections" in page.text
        door.is_open = True
        await until_answer(lambda: is_open(browser, "billing"))
        assert "invoices" in (await browser.get(f"{AT}/billing/")).text
        assert rows(await browser.get("/"))["billing"][2] == "1"


async def test_why_an_instance_is_down_is_for_those_with_a_session_of_it(
    place: MemoryPlace, billing: MemoryPlace
) -> None:
    sources = [Door(source_of("billing", billing)).source()]
    async with served_console(place.mailbox, access=access_of(place), instances=sources) as browser:
        await browser.sign_in(place.issue())
        page = await browser.get(f"{AT}/")
        assert rows(page)["billing"][0] == "can&#39;t be reached"
        down = await browser.get(f"{AT}/billing/")
        assert down.status == 503
        assert "database" not in page.text + down.text


async def test_an_instance_that_hangs_is_shown_without_counts_beside_the_others(
    place: MemoryPlace, billing: MemoryPlace
) -> None:
    asked, answers = asyncio.Event(), asyncio.Event()
    list_topics = billing.mailbox.list_topics

    async def hang() -> Any:
        asked.set()
        await answers.wait()
        return await list_topics()

    billing.mailbox.list_topics = hang  # type: ignore[method-assign] # the mailbox of a store that hangs
    sources = [source_of("orders", place, place.issue()), source_of("billing", billing, billing.issue())]
    async with linked(sources) as browser:
        await until_answer(lambda: is_open(browser, "orders"))
        await until_answer(lambda: is_open_service(browser, "billing"))
        cells = rows(await browser.get("/"))
        assert asked.is_set()
        assert (cells["orders"][0], cells["orders"][2]) == ("reachable", "2")
        assert cells["billing"][0].startswith("can&#39;t be reached")
        assert cells["billing"][2] == ""
        answers.set()
        await until_answer(lambda: shows(browser, "billing", "1"))


async def is_open_service(browser: Browser, name: str) -> bool:
    """Return whether the console of an instance is open, without a page that counts."""
    return (await browser.get(f"{AT}/{name}/access")).status == 200


async def shows(browser: Browser, name: str, ready: str) -> bool:
    """Return whether the page of all shows a number of ready messages."""
    return rows(await browser.get("/"))[name][2] == ready


async def test_live_parts_exports_and_saved_searches_are_below_the_path_of_their_instance(
    place: MemoryPlace, billing: MemoryPlace
) -> None:
    sources = [source_of("orders", place, place.issue()), source_of("billing", billing, billing.issue())]
    async with linked(sources) as browser:
        await until_answer(lambda: is_open(browser, "billing"))
        base = f"{browser.url.partition('/console')[2]}{AT}/billing"
        page = await browser.get(f"{AT}/billing/")
        links = set(re.findall(r'(?:href|action|src|hx-get|data-live)="(/[^"]*)"', page.text))
        own = {each for each in links if each.startswith(f"/console{base}/")}
        root = f"/console{base.removesuffix('/billing')}"
        assert links - own == {f"{root}/", f"{root}/orders/"}
        (live,) = re.findall(r'data-live="([^"]*)"', page.text)
        url = browser.url.partition("/console")[0]
        async with browser.client.get(url + live, timeout=FOREVER) as stream:
            name, text = await next_event(stream.content)  # type: ignore[arg-type] # it reads lines, too
            assert (name, "invoices" in text) == ("live", True)
        answer = await browser.post(f"{AT}/billing/searches", name="Bills", query="topics=invoices")
        assert answer.path == f"/console{base}/search?topics=invoices"
        assert [each.name for each in await billing.mailbox.list_searches()] == ["Bills"]
        assert await place.mailbox.list_searches() == []
        assert (
            f'href="/console{base}/search?topics=invoices"'
            in (await browser.get(f"{AT}/billing/searches")).text
        )


async def test_a_read_only_console_refuses_changes_of_each_instance(billing: MemoryPlace) -> None:
    source = source_of("billing", billing, billing.issue())
    source = source._replace(settings=ConsoleSettings(read_only=True))
    async with linked([source]) as browser:
        await until_answer(lambda: is_open(browser, "billing"))
        await browser.get(f"{AT}/billing/")
        assert (await browser.post(f"{AT}/billing/topics/pause", topic="invoices")).status == 403
