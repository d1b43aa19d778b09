"""What a caller may do, and the sessions of browsers, which administrators see and end."""

import re
from html import unescape

import pytest

from postroom.domain.capability.rights import MaxMessages, Quota, Right
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.servers.console import Browser, served_console


async def test_the_rights_of_a_token_are_shown_in_full(place: MemoryPlace, browser: Browser) -> None:
    token = place.issue(
        Quota(100, None, 60_000),
        MaxMessages(7),
        topics=["orders.*"],
        operations=[Right.SEND, Right.READ_HEADERS],
        principal="ada <i>",
    )
    await browser.sign_in(token)
    page = await browser.get("/access")
    for text in ("ada &lt;i&gt;", "orders.*", "100 operations a minute", "<dd>7</dd>"):
        assert text in page.text
    yes = r'<th scope="row">([a-z-]+)</th><td[^>]*><span class="badge badge-good">'
    permitted = re.findall(yes, page.text)
    assert permitted == ["send", "read-headers"]
    assert "Who is signed in" not in page.text
    assert token not in page.text


async def test_a_token_of_another_mailbox_may_see_that_it_may_do_nothing(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(mailboxes=["another@one"]))
    page = await browser.get("/access")
    assert (page.status, "does not cover this mailbox" in page.text) == (200, True)
    assert ">yes<" not in page.text


async def test_administrators_see_who_is_signed_in_and_end_sessions(place: MemoryPlace) -> None:
    async with (
        served_console(place.mailbox, access=access_of(place)) as admin,
        Browser.another(admin) as other,
    ):
        await other.sign_in(place.issue(principal="olga", operations=[Right.READ_HEADERS]))
        await admin.sign_in(place.issue(principal="root"))
        page = await admin.get("/access")
        cookies = [each.value for each in other.client.cookie_jar]
        assert not any(each in page.text for each in cookies)
        rows = re.findall(
            r'<th scope="row">([^<]+?) ?<.*?name="session" value="([^"]+)"', page.text, re.DOTALL
        )
        sessions = {unescape(name): unescape(id_) for name, id_ in rows if name in ("olga", "root")}
        assert sessions.keys() >= {"olga"}
        assert (await other.get("/")).status == 200
        page = await admin.post("/access/end", session=sessions["olga"])
        assert "The session of olga has ended." in page.text
        assert (await other.get("/")).status == 401
        page = await admin.post("/access/end", session=sessions["olga"])
        assert (page.status, "already ended" in page.text) == (404, True)
        assert (await admin.get("/")).status == 200
    ends = [each for each in place.audit.entries if each.criteria == ("session",)]
    assert [(each.principal, each.outcome) for each in ends] == [
        ("root", "allowed"),
        ("root", "E_NOT_FOUND"),
    ]


@pytest.mark.parametrize("limit", ["operations", "topics"])
async def test_nobody_else_sees_or_ends_sessions(place: MemoryPlace, browser: Browser, limit: str) -> None:
    operations = [each for each in Right if each is not Right.ADMIN or limit == "topics"]
    await browser.sign_in(place.issue(topics=["orders" if limit == "topics" else "*"], operations=operations))
    page = await browser.get("/access")
    assert (page.status, "Who is signed in" in page.text) == (200, False)
    page = await browser.post("/access/end", session="any")
    assert (page.status, "E_CAP_SCOPE" in page.text) == (403, True)
    assert (await browser.get("/access")).status == 200
