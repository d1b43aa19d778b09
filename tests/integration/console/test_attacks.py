"""The console under attack: every route by every token, forged forms, headers, odd input, memory."""

import gc
import re
from collections.abc import Iterator
from itertools import product

import pytest
from starlette.routing import Route

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.serve import make_service, unrestricted
from postroom.adapters.console.app import make_console
from postroom.adapters.console.pages import message_actions
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.settings import ConsoleData, ConsoleSettings
from postroom.domain.capability.rights import Expires, NotBefore, Right
from postroom.domain.capability.token import Token
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.console_matrix import NEEDS, PUBLIC, READS, Need, is_permitted, need_of
from tests.support.servers.console import Answer, Browser

Stored = Controlled[OwnedMailbox, ManualClock]
ALL = frozenset(Right)
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
PAGES = (
    "/",
    "/search",
    "/messages/foreign",
    "/dead-letters",
    "/redrives",
    "/subscriptions",
    "/log",
    "/audit",
    "/access",
)
NASTY = (
    "\x00",
    "\u202e<script>alert(1)</script>",
    "'\"; DROP TABLE log; --",
    "../../etc/passwd",
    "{{7*7}}${7*7}%s%n",
    "-1",
    "9" * 30,
    "1e999",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "a" * 3_000,
    "[",
    "*" * 64,
)
NUMBERS = ("from", "position", "cursor", "limit", "before", "at")
NAMES = (
    *("event", "topic", "message", "since", "until", "through", "chain", "begin", "principal", "capability"),
    *("operation", "outcome", "target", "topics", "statuses", "match", "text", "id", "order", "as_of"),
    *("fingerprint", "reason", "next", "code", "page", "field", "q", "key"),
)
"""Names of parameters, of any page."""


async def test_errors_of_a_session_keep_its_navigation_and_unknown_parameters_are_refused(
    stored_browser: Browser, stored: Stored
) -> None:
    await stored_browser.sign_in(stored.issue())
    paths = (
        "/none",
        "/messages/none",
        "/topics/pause",
        "/search?topc=orders",
        "/log?event=None",
        "/access?x",
        "/topics?sort=ready&sort=dead",
        "/topics/show?name=orders&name=payments",
        "/consumers?text=a&text=b",
    )
    for path in paths:
        page = await stored_browser.get(path)
        assert page.status in (400, 404), path
        assert 'href="/console/dead-letters"' in page.text, path
    page = await stored_browser.get("/dead-letters?topic=orders")
    assert "no parameter &#39;topic&#39;; it has by, cursor, fingerprint, order" in page.text
    stored_browser.client.cookie_jar.clear()
    assert 'href="/console/dead-letters"' not in (await stored_browser.get("/none")).text


@pytest.mark.parametrize("operations", [tuple(Right), (Right.READ_HEADERS,)])
async def test_each_page_of_the_navigation_answers_a_token_that_is_limited_to_topics(
    stored_browser: Browser, stored: Stored, operations: tuple[Right, ...]
) -> None:
    await stored_browser.sign_in(stored.issue(topics=["orders*"], operations=operations))
    paths = nav_of((await stored_browser.get("/")).text)
    for path in paths:
        page = await stored_browser.get(path)
        assert page.status == 200, path
        assert 'role="alert"' not in page.text, path
        assert "payments" not in page.text, path
    await stored_browser.sign_in(stored.issue(operations=operations))
    others = nav_of((await stored_browser.get("/")).text) - paths
    assert others >= {"/log", "/outboxes"}


def nav_of(text: str) -> set[str]:
    """Return the paths that the navigation of a page links to."""
    return set(re.findall(r'href="/console([^"?#]*)"', text.partition("<main")[0])) - {""}


async def request(browser: Browser, method: str, path: str, csrf: str, form: Need | None = None) -> Answer:
    """Make a request, and read no stream of events."""
    data = {"csrf": csrf, **dict(form.form if form is not None else ())} if method == "POST" else None
    url = browser.url + path
    async with browser.client.request(method, url, data=data, allow_redirects=False) as response:
        is_stream = response.content_type == "text/event-stream"
        text = "" if is_stream else (await response.read()).decode("utf-8", "replace")
        return Answer(response.status, response.headers, text, response.url.raw_path_qs)


def routes(mailbox: OwnedMailbox) -> list[str]:
    """Return the routes of the console, each as method and path."""
    service = make_service("memory:", mailbox, access=unrestricted)
    app = make_console(service, ConsoleData(), ConsoleSettings(), Samples(mailbox, None))
    return sorted(
        f"{method} {each.path}"
        for each in app.routes
        if isinstance(each, Route)
        for method in each.methods or ()
        if method != "HEAD"
    )


def path_of(route: str) -> tuple[str, str]:
    """Return the method and a path of a route."""
    method, _, pattern = route.partition(" ")
    need = need_of(route)
    path = need.path if need is not None and need.path else re.sub(r"\{[^}]+\}", "1", pattern)
    return method, path


def scopes(place: Stored) -> Iterator[tuple[str, str, frozenset[Right], bool, bool]]:
    """Yield name, token, operations, whether it covers the mailbox, and whether it is limited to topics."""
    for each in Right:
        yield f"only {each}", place.issue(operations=[each]), frozenset({each}), True, False
    for each in READS:
        rest = ALL - {each}
        yield f"all but {each}", place.issue(operations=sorted(rest)), rest, True, False
    yield "all", place.issue(), ALL, True, False
    yield "topics", place.issue(topics=["orders", "orders.*"]), ALL, True, True
    yield "mailbox", place.issue(mailboxes=["another@*"]), ALL, False, False


async def csrf_of(browser: Browser) -> str:
    """Return the token of the forms of a session."""
    await browser.get("/access")
    return browser.csrf


@pytest.fixture(autouse=True)
def no_waits_for_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs of one message end when they end; pages say so without waiting."""
    monkeypatch.setattr(message_actions, "JOB_POLLS", 0)


async def test_each_route_is_permitted_or_refused_as_the_scope_of_the_token_says(
    stored: Stored, stored_browser: Browser
) -> None:
    differences: list[tuple[object, ...]] = []
    for name, token, operations, mailbox, topics in scopes(stored):
        assert (await stored_browser.sign_in(token, next="/access")).status == 200
        csrf = await csrf_of(stored_browser)
        for route in routes(stored.mailbox):
            if route in PUBLIC:
                continue
            need, (method, path) = need_of(route), path_of(route)
            answer = await request(stored_browser, method, path, csrf, need)
            is_refused = answer.status in (401, 403)
            if need is not None:
                expected = is_permitted(need, operations, mailbox=mailbox, topics=topics)
            elif not mailbox or not operations & {*READS, Right.SEND}:
                expected = False  # of a page that is not listed, those tokens see nothing
                is_refused = answer.status >= 400
            else:
                expected = not is_refused
            if expected == is_refused or answer.status >= 500:
                differences.append((name, route, expected, answer.status, answer.text[-600:]))
            if topics and "payments" in answer.text:
                differences.append((name, route, "it tells of another topic", answer.status, ""))
    assert not differences, "\n".join(map(str, differences))


async def test_the_matrix_has_routes_of_the_console_only(stored: Stored) -> None:
    assert {*NEEDS, *PUBLIC} <= {*routes(stored.mailbox)}


@pytest.fixture
def refused_tokens(stored: Stored) -> dict[str, str]:
    """Tokens that open no session."""
    now = stored.clock.wall() // 1_000
    valid, revoked = stored.issue(), stored.issue()
    stored.capabilities.revoke(Token.decode(revoked).read_identifier().nonce)
    return {
        "junk": "prm1_junk",
        "altered": valid[:-6] + ("AAAAAA" if not valid.endswith("AAAAAA") else "BBBBBB"),
        "expired": stored.issue(Expires(now)),
        "not yet valid": stored.issue(NotBefore(now + 1_000)),
        "revoked": revoked,
    }


async def test_no_route_answers_without_a_session_or_with_a_token_that_is_not_valid(
    stored: Stored, stored_browser: Browser, refused_tokens: dict[str, str]
) -> None:
    await stored.control.refresh()
    for token in refused_tokens.values():
        assert (await stored_browser.sign_in(token)).status == 401
    assert not list(stored_browser.client.cookie_jar)
    for cookies, route in product(({}, {"postroom-console": "guess"}), routes(stored.mailbox)):
        if route not in PUBLIC:
            method, path = path_of(route)
            stored_browser.client.cookie_jar.update_cookies(cookies)
            answer = await request(stored_browser, method, path, "guess")
            assert (answer.status, "Sign in" in answer.text) == (401, True), route


@pytest.mark.parametrize("end", ["expired", "revoked", "ended"])
async def test_an_action_whose_session_ended_meanwhile_changes_nothing_and_its_fields_are_not_lost(
    stored: Stored, stored_browser: Browser, end: str
) -> None:
    token = stored.issue(lifetime_ms=60_000)
    await stored_browser.sign_in(token)
    csrf = await csrf_of(stored_browser)
    if end == "expired":
        stored.clock.advance(61_000)
    elif end == "revoked":
        stored.capabilities.revoke(Token.decode(token).read_identifier().nonce)
        await stored.control.refresh()
    else:
        async with Browser.another(stored_browser) as admin:
            page = await admin.sign_in(stored.issue(), next="/access")
            sessions = re.findall(r'name="session" value="([^"]+)"', page.text)
            for id_ in reversed(sessions):  # its own is the last used, and the first of the list
                await admin.post("/access/end", session=id_)
    answer = await stored_browser.send("/topics/pause", {"csrf": csrf, "topic": "orders", "note": "typed"})
    assert answer.status == 401
    assert 'value="typed"' in answer.text
    assert not (await stored.mailbox.get_backlog()).paused_topics


async def test_a_form_needs_the_csrf_token_of_its_own_session(
    stored: Stored, stored_browser: Browser
) -> None:
    actions = [route for route in routes(stored.mailbox) if route.startswith("POST") and route not in PUBLIC]
    assert actions
    async with Browser.another(stored_browser) as other:
        await other.sign_in(stored.issue())
        await stored_browser.sign_in(stored.issue())
        own, foreign = await csrf_of(stored_browser), await csrf_of(other)
        assert own != foreign
        before = (await stored.mailbox.get_backlog()).position
        for route, csrf in product(actions, ("", foreign, own[:-1], own + "x")):
            method, path = path_of(route)
            answer = await request(stored_browser, method, path, csrf, need_of(route))
            assert answer.status == 403, (route, csrf)
        assert (await stored.mailbox.get_backlog()).position == before


@pytest.mark.parametrize(
    "headers",
    [{"origin": "http://127.0.0.1:1"}, {"origin": "https://evil.example"}, {"sec-fetch-site": "same-site"}],
    ids=["port", "origin", "same-site"],
)
async def test_no_form_of_another_site_is_accepted_nor_signs_anybody_in_or_out(
    stored: Stored, stored_browser: Browser, headers: dict[str, str]
) -> None:
    fields = {"token": stored.issue()}
    answer = await stored_browser.send("/sign-in", fields, headers=headers)
    assert answer.status == 403
    assert not list(stored_browser.client.cookie_jar)
    await stored_browser.sign_in(stored.issue())
    csrf = await csrf_of(stored_browser)
    for route in routes(stored.mailbox):
        if route.startswith("POST"):
            answer = await stored_browser.send(path_of(route)[1], {"csrf": csrf}, headers=headers)
            assert answer.status == 403 or route == "POST /sign-out"
    assert (await stored_browser.get("/access")).status == 200


async def test_signing_in_makes_a_new_session_whatever_cookie_the_browser_has(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue(operations=[Right.READ_HEADERS]))
    (old,) = stored_browser.client.cookie_jar
    name, fixed = old.key, old.value
    await stored_browser.sign_in(stored.issue())
    (new,) = stored_browser.client.cookie_jar
    assert (new.key, new.value == fixed) == (name, False)
    async with Browser.another(stored_browser) as attacker:
        for value in (fixed, "chosen-by-the-attacker", ""):
            assert (await attacker.get("/access", cookies={name: value})).status == 401


async def test_every_answer_has_the_headers_that_protect_it(stored: Stored, stored_browser: Browser) -> None:
    await stored_browser.sign_in(stored.issue())
    csrf = await csrf_of(stored_browser)
    asked = [path_of(route) for route in routes(stored.mailbox) if route != "POST /sign-out"]
    asked += [("GET", path) for path in ("/nothing", "/log/events/0", "/log?since=x", "/static/none.js")]
    asked += [("PUT", "/"), ("DELETE", "/log"), ("POST", "/log"), ("OPTIONS", "/"), ("HEAD", "/")]
    asked += [("POST", "/sign-out")]
    for method, path in asked:
        answer = await request(stored_browser, method, path, csrf)
        shown = {name: answer.headers.get(name) for name in HEADERS}
        assert shown == HEADERS, (method, path, answer.status)
        is_static = path.startswith("/static/")
        assert answer.headers["cache-control"] == "no-store" or is_static, (method, path)
        assert "set-cookie" not in answer.headers or path in ("/sign-in", "/sign-out", "/access")
    answer = await stored_browser.get("/access", headers={"host": "evil.example"})
    assert answer.status == 421
    assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


async def test_no_page_has_a_script_or_style_in_itself_or_from_another_host(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    csrf = await csrf_of(stored_browser)
    for route in routes(stored.mailbox):
        if route.startswith("GET") and route != "GET /static/{name}":
            text = (await request(stored_browser, *path_of(route), csrf)).text
            assert not re.search(r"<script(?![^>]* src=\"/console/static/)", text), route
            assert not re.search(r"<style|\sstyle=|\son[a-z]+=\"|javascript:", text), route
            assert not re.search(r"(?:src|href|action)=\"(?:https?:)?//", text), route


async def test_whatever_a_parameter_has_no_page_fails_or_repeats_it_as_markup(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    pages = [path_of(route)[1].partition("?")[0] for route in routes(stored.mailbox) if route[:3] == "GET"]
    queries = [dict.fromkeys((*NAMES, *NUMBERS), value) for value in NASTY]
    queries += [{name: value} for name in NUMBERS for value in ("9" * 30, "-1")]
    queries += [dict.fromkeys(NAMES, value) for value in ("\x00", "9" * 30)]
    for path, query in product(pages, queries):
        if path not in ("/live", "/start"):
            answer = await stored_browser.get(path, params=query)
            assert answer.status < 500, (path, query, answer.text[-600:])
            assert "<script>alert" not in answer.text
            shown = re.sub(r' value="[^"]*"|<textarea.*?</textarea>', "", answer.text, flags=re.DOTALL)
            assert "\u202e" not in shown, (path, query)


async def test_a_form_of_another_kind_or_too_large_is_refused_in_words(
    stored: Stored, stored_browser: Browser
) -> None:
    await stored_browser.sign_in(stored.issue())
    csrf = await csrf_of(stored_browser)
    many = "&".join(f"f{n}=1" for n in range(1_500))
    for data, kind in (
        (b'{"csrf": "%s", "topic": "orders"}' % csrf.encode(), "application/json"),
        (b"csrf=" + csrf.encode() + b"&topic=orders", "text/plain"),
        (b"--x\r\nbroken", "multipart/form-data; boundary=x"),
        (b"--x\r\n" * 5_000, "multipart/form-data; boundary=x"),
        (f"csrf={csrf}&{many}".encode(), "application/x-www-form-urlencoded"),
        (b"%ff%fe=%00&csrf=" + b"%" * 100, "application/x-www-form-urlencoded"),
    ):
        answer = await stored_browser.send("/topics/pause", data, headers={"content-type": kind})
        assert 400 <= answer.status < 500, (kind, answer.status)
        assert "E_INTERNAL" not in answer.text
    assert not (await stored.mailbox.get_backlog()).paused_topics


async def test_page_loads_leave_nothing_in_memory(stored: Stored, stored_browser: Browser) -> None:
    async def load(rounds: int) -> int:
        for _ in range(rounds):
            for path in PAGES:
                assert (await stored_browser.get(path)).status == 200
        gc.collect()
        return len(gc.get_objects())

    await stored_browser.sign_in(stored.issue())
    await load(5)
    before = await load(5)
    after = await load(20)
    assert after - before < 300, f"{after - before} objects are left by {20 * len(PAGES)} page loads"
