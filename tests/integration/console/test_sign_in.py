"""Sessions of the console: signing in and out, forged forms, and what an expired token leaves."""

import re
from html import unescape
from io import BytesIO

import pytest

from postroom.adapters.compose.console import ConsoleSettings, new_code
from postroom.adapters.compose.serve import SurfaceProtection
from postroom.domain.capability.rights import Right
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.servers.console import Browser, served_console

HOUR_US = 3_600_000_000


async def test_a_token_signs_in_and_never_appears_in_a_page_cookie_or_url(
    place: MemoryPlace, browser: Browser
) -> None:
    token = place.issue(principal="olga")
    page = await browser.get("/")
    assert (page.status, "Sign in" in page.text) == (401, True)
    page = await browser.sign_in(token)
    assert (page.status, page.path) == (200, "/console/")
    assert "olga" in page.text
    cookies = list(browser.client.cookie_jar)
    assert [(each["httponly"], each["samesite"], each["path"]) for each in cookies] == [
        (True, "strict", "/console")
    ]
    assert token not in page.text + str(page.headers) + str(cookies) + page.path


@pytest.mark.parametrize(
    "token", ["", "junk", "x" * 20_000, "\u202eprm1_a"], ids=["none", "junk", "long", "bidi"]
)
async def test_what_is_no_token_is_refused_in_words(browser: Browser, token: str) -> None:
    page = await browser.sign_in(token)
    assert page.status == 401
    assert 'role="alert"' in page.text


async def test_sign_out_ends_the_session(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    old = {each.key: each.value for each in browser.client.cookie_jar}
    page = await browser.post("/sign-out")
    assert page.path == "/console/sign-in"
    assert (await browser.get("/", cookies=old)).status == 401


@pytest.mark.parametrize("body", [b"csrf=guess", b"a=1&" * 2_000], ids=["guess", "fields"])
async def test_nobody_else_signs_a_browser_out(place: MemoryPlace, browser: Browser, body: bytes) -> None:
    await browser.sign_in(place.issue())
    headers = {"content-type": "application/x-www-form-urlencoded"}
    await browser.send("/sign-out", body, headers=headers)
    assert (await browser.get("/")).status == 200


async def test_a_session_ends_when_its_token_expires_or_is_revoked(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(lifetime_ms=60_000))
    await place.clock.advance(61)
    page = await browser.get("/")
    assert page.status == 401
    assert "expired" in page.text


async def test_a_form_of_an_expired_session_is_sent_again_after_signing_in(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(lifetime_ms=60_000))
    await place.clock.advance(61)
    page = await browser.post("/topics/pause", topic="orders", note="<typed> \u202e")
    assert page.status == 401
    fields = {
        unescape(name): unescape(value)
        for name, value in re.findall(r'name="([^"]+)" value="([^"]*)"', page.text)
    }
    assert fields["resume.note"] == "<typed> \u202e"
    page = await browser.sign_in(place.issue(), **fields)
    assert "Send again" in page.text
    assert not (await place.mailbox.get_backlog()).paused_topics
    fields = dict(re.findall(r'name="([^"]+)" value="([^"]*)"', page.text))
    page = await browser.post("/topics/pause", **fields)
    assert (page.status, page.path) == (200, "/console/")
    assert (await place.mailbox.get_backlog()).paused_topics == ["orders"]


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
    ids=["cross-site", "same-site", "origin", "null"],
)
async def test_a_form_of_another_site_is_refused(
    place: MemoryPlace, browser: Browser, headers: dict[str, str]
) -> None:
    await browser.sign_in(place.issue())
    fields = {"csrf": browser.csrf, "topic": "orders"}
    assert (await browser.send("/topics/pause", fields, headers=headers)).status == 403
    assert not (await place.mailbox.get_backlog()).paused_topics


@pytest.mark.parametrize("csrf", ["", "guess", "\u00e9"], ids=["none", "guess", "other-characters"])
async def test_a_form_without_the_tokens_of_its_session_changes_nothing(
    place: MemoryPlace, browser: Browser, csrf: str
) -> None:
    await browser.sign_in(place.issue())
    page = await browser.send("/topics/pause", {"csrf": csrf, "topic": "orders"})
    assert (page.status, "Send again" in page.text) == (403, True)
    assert not (await place.mailbox.get_backlog()).paused_topics


async def test_another_host_is_refused_even_with_a_session(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get("/", headers={"host": "evil.example"})
    assert (page.status, "E_HOST" in page.text) == (421, True)


async def test_buttons_show_what_the_token_permits_and_the_server_checks_it_again(
    place: MemoryPlace, browser: Browser
) -> None:
    page = await browser.sign_in(place.issue(operations=[Right.READ_HEADERS], topics=["orders"]))
    assert "Pause orders" not in page.text
    assert "payments" not in page.text
    assert "Reader" in page.text
    page = await browser.post("/topics/pause", topic="orders")
    assert (page.status, "E_CAP_SCOPE" in page.text) == (403, True)


async def test_a_read_only_console_refuses_every_action(place: MemoryPlace) -> None:
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        page = await browser.sign_in(place.issue())
        assert "Pause orders" not in page.text
        page = await browser.post("/topics/pause", topic="orders")
        assert (page.status, "read-only" in page.text) == (403, True)


async def test_a_link_starts_one_session_and_tokens_do_not(place: MemoryPlace) -> None:
    code = new_code()
    async with served_console(place.mailbox, code=code, is_alone=True) as browser:
        assert (await browser.get("/")).status == 401
        assert (await browser.sign_in("anything")).status == 401
        for path in ("/", "/sign-in", "/log", "/topics/pause"):
            assert (await browser.get(path)).status == 401
        assert (await browser.get("/start?code=guess")).status == 401
        assert (await browser.open_link("guess")).status == 401
        first = browser.url
        page = await browser.open_link(code.text)
        assert (page.status, "orders" in page.text) == (200, True)
        assert (await browser.get("/access")).status == 200
        async with Browser.another(browser) as other:
            other.url = first
            assert (await other.get(f"/start?code={code.text}")).status == 401
            assert (await other.open_link(code.text)).status == 401
            assert (await other.get("/../v1/topics")).status == 404


async def test_only_the_button_uses_the_code_of_a_link(place: MemoryPlace) -> None:
    code = new_code()
    async with served_console(place.mailbox, code=code, is_alone=True) as browser:
        for method in ("HEAD", "GET", "OPTIONS", "GET"):
            async with browser.client.request(method, f"{browser.url}/start?code={code.text}") as answer:
                assert "set-cookie" not in answer.headers
        headers = {"sec-fetch-site": "cross-site"}
        forged = await browser.send("/start", {"code": code.text}, headers=headers)
        assert forged.status == 403
        assert (await browser.open_link(code.text)).status == 200


async def test_the_cookie_of_a_link_is_for_a_path_that_is_not_in_the_link(place: MemoryPlace) -> None:
    paths = set()
    for _ in range(2):
        code = new_code()
        async with served_console(place.mailbox, code=code, is_alone=True) as browser:
            await browser.open_link(code.text)
            (cookie,) = browser.client.cookie_jar
            assert re.fullmatch(r"/console/[\w-]{22}", cookie["path"])
            paths.add(cookie["path"])
    assert len(paths) == 2


async def test_failed_attempts_to_sign_in_are_throttled_by_capability_and_address(place: MemoryPlace) -> None:
    settings = ConsoleSettings(max_failed_sign_ins=3)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        guessed, other = place.issue(), place.issue()
        letters = [each for each in "ABCDE" if each != guessed[-9]]
        altered = [guessed[:-9] + letter + guessed[-8:] for letter in letters[:4]]
        statuses = [(await browser.sign_in(each)).status for each in altered]
        assert statuses == [401, 401, 401, 429]
        page = await browser.sign_in(guessed)
        assert (page.status, int(page.headers["retry-after"]) > 0) == (429, True)
        assert "failed attempts to sign in" in page.text
        assert [(await browser.sign_in(f"junk-{n}")).status for n in range(5)] == [401, 401, 401, 429, 429]
        assert (await browser.sign_in(other)).status == 200


async def test_attempts_through_a_trusted_proxy_are_throttled_by_the_address_of_the_browser(
    place: MemoryPlace,
) -> None:
    for is_trusted, expected in ((True, 401), (False, 429)):
        async with served_console(
            place.mailbox,
            access=access_of(place),
            settings=ConsoleSettings(max_failed_sign_ins=1),
            protection=SurfaceProtection(behind_proxy=is_trusted),
            trusts_proxy=is_trusted,
        ) as browser:
            for address, status in (("192.0.2.1", 401), ("192.0.2.2", expected)):
                headers = {"x-forwarded-for": f"198.51.100.{status % 7}, {address}"}
                page = await browser.send("/sign-in", {"token": "junk"}, headers=headers)
                assert page.status == status


@pytest.mark.parametrize(
    "target",
    ["//evil.example", "/\\evil.example", "https://evil.example", "/a\r\nb"],
    ids=["slashes", "backslash", "url", "line"],
)
async def test_signing_in_leads_nowhere_else(place: MemoryPlace, browser: Browser, target: str) -> None:
    page = await browser.sign_in(place.issue(), next=target)
    assert (page.status, page.path) == (200, "/console/")


async def test_links_begin_with_the_prefix_of_a_trusted_proxy_only(place: MemoryPlace) -> None:
    headers = {"x-forwarded-prefix": "/ops"}
    for is_trusted, prefix in ((True, "/ops/console"), (False, "/console")):
        async with served_console(
            place.mailbox,
            access=access_of(place),
            protection=SurfaceProtection(behind_proxy=is_trusted),
            trusts_proxy=is_trusted,
        ) as browser:
            page = await browser.get("/sign-in", headers=headers)
            assert f'action="{prefix}/sign-in"' in page.text
            page = await browser.get("/sign-in", headers={"x-forwarded-prefix": '/"><b>'})
            assert 'action="/console/sign-in"' in page.text


async def test_every_answer_forbids_scripts_of_others_frames_and_caches(browser: Browser) -> None:
    for path in ("/", "/sign-in", "/nothing", "/start?code=x"):
        headers = (await browser.get(path)).headers
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert headers["cache-control"] == "no-store"


async def test_a_form_that_is_too_large_is_refused_in_words(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    fields = [f"topic={'x' * 1_000}"] * 1_100
    page = await browser.send("/topics/pause", BytesIO("&".join(fields).encode()))
    assert (page.status, "E_FRAME" in page.text) == (413, True)


async def test_a_method_that_a_page_does_not_accept_is_refused_in_words(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get("/topics/pause?topic=orders")
    assert (page.status, "does not accept" in page.text) == (400, True)
    assert not (await place.mailbox.get_backlog()).paused_topics


async def test_a_token_that_may_not_read_leads_to_a_page_that_it_may_see(
    place: MemoryPlace, browser: Browser
) -> None:
    page = await browser.sign_in(place.issue(operations=[Right.SEND], topics=["news"]))
    assert (page.status, page.path) == (200, "/console/send")
    assert "Sender" in page.text
    assert (await browser.get("/")).path == "/console/send"
    assert (await browser.get("/live")).status == 403
    for rights, path in (
        ([Right.RECV], "/console/access"),
        ([Right.REDRIVE], "/console/redrives"),
        ([each for each in Right if each is not Right.READ_HEADERS], "/console/send"),
        ([Right.READ_HEADERS], "/console/"),
    ):
        async with Browser.another(browser) as other:
            page = await other.sign_in(place.issue(operations=rights))
            assert (page.status, page.path) == (200, path)
    async with Browser.another(browser) as other:
        page = await other.sign_in(place.issue(mailboxes=["another@*"]))
        assert (page.status, page.path) == (200, "/console/access")
