"""The comparison of two messages: what differs, and for whom it is shown."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.console import ConsoleSettings
from postroom.domain.capability.rights import Right
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled
from tests.support.clocks import ManualClock
from tests.support.messages import message, receive_one
from tests.support.servers.console import Browser, served_console

Stored = Controlled[OwnedMailbox, ManualClock]
HOSTILE = "<script>alert(1)</script>\u202e"
URL = "/compare?id=first&id=second"


async def send(stored: Stored, id_: str, body: object, topic: str = "shop", **fields: Any) -> None:
    """Send a message with a body of JSON."""
    payload = json.dumps(body).encode()
    fields = {"content_type": "application/json", "message_id": id_} | fields
    await stored.mailbox.send_message(message(payload, topic, **fields))


def table(text: str, caption: str) -> list[list[str]]:
    """Return the texts of the cells of a table, row by row."""
    found = re.search(rf"<caption[^>]*>{caption}</caption>.*?<tbody>(.*?)</tbody>", text, re.DOTALL)
    assert found is not None, caption
    return [
        [
            " ".join(unescape(re.sub(r"<.*?>", "", cell)).split())
            for cell in re.findall(r"<t[dh].*?>(.*?)</t[dh]>", row, re.DOTALL)
        ]
        for row in re.findall(r"<tr>(.*?)</tr>", found[1], re.DOTALL)
    ]


async def test_headers_histories_and_payloads_are_shown_side_by_side(
    stored: Stored, stored_browser: Browser
) -> None:
    await send(stored, "first", {"id": 1, "lines": [{"n": 1}]}, attrs={"shop": "north"}, principal="ada")
    await (await receive_one(stored.mailbox, "shop")).ack()
    stored.clock.advance(250)
    await send(stored, "second", {"id": 1, "lines": [{"n": 2}], "vip": True}, principal="ada")
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get(URL)
    assert page.status == 200
    assert table(page.text, "Fields that differ") == [
        ["/lines/0/n", "differs", "1", "2"],
        ["/vip", "only in the second", "", "true"],
    ]
    headers = {row[0]: row[1:] for row in table(page.text, "Headers that differ")}
    assert headers["message id"] == ["differs", "first", "second"]
    assert headers["status"] == ["differs", "acked", "ready"]
    assert headers["custom header shop"] == ["only in the first", "north", ""]
    assert "principal" not in headers
    history = table(page.text, "Events of both messages")
    assert [[row[0], row[2].split()[0], row[4].split()[:1]] for row in history] == [
        ["same", "MessageSentSent", ["MessageSentSent"]],
        ["only in the first", "MessageReceivedDelivered", []],
        ["only in the first", "MessageAckedAcked", []],
    ]
    assert "The bytes differ." in page.text
    assert table((await stored_browser.get(URL + "&id=")).text, "Fields that differ")


async def test_equal_messages_differ_in_nothing_but_ids_and_times(
    stored: Stored, stored_browser: Browser
) -> None:
    for id_ in ("first", "second"):
        await send(stored, id_, {"id": 1})
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get(URL)
    assert "The bytes are equal." in page.text
    assert [row[0] for row in table(page.text, "Headers that differ")] == ["message id"]
    page = await stored_browser.get("/compare?id=first&id=first")
    assert "Both are the same message." in page.text
    assert "No header differs." in page.text


async def test_other_payloads_are_compared_as_lines(stored: Stored, stored_browser: Browser) -> None:
    await send(stored, "first", None)
    await stored.mailbox.send_message(message(b"\x00\xff", message_id="second"))
    await stored.mailbox.send_message(message(b"a\nb", message_id="text", content_type="text/plain"))
    await stored_browser.sign_in(stored.issue())
    assert "<del>- null</del>" in (await stored_browser.get(URL)).text
    page = await stored_browser.get("/compare?id=second&id=text")
    assert "<ins>+ b</ins>" in page.text


async def test_without_the_right_to_read_payloads_only_headers_are_compared(
    stored: Stored, stored_browser: Browser
) -> None:
    await send(stored, "first", {"secret": 1})
    await send(stored, "second", {"secret": 2})
    await stored_browser.sign_in(stored.issue(operations=[Right.READ_HEADERS], principal="ann"))
    page = await stored_browser.get(URL)
    assert "secret" not in page.text
    assert "bytes" not in page.text
    assert "needs the right <code>read-payload</code>" in page.text
    assert [row[0] for row in table(page.text, "Headers that differ")] == ["message id"]
    entries = [(each.operation, each.target) for each in stored.audit.entries if each.principal == "ann"]
    assert {("read-headers", "first"), ("read-headers", "second")} == {*entries}
    await stored_browser.sign_in(stored.issue(operations=[Right.SEND]))
    assert (await stored_browser.get(URL)).status == 403


async def test_a_message_of_another_topic_is_answered_as_one_that_does_not_exist(
    stored: Stored, stored_browser: Browser
) -> None:
    await send(stored, "first", 1)
    await stored_browser.sign_in(stored.issue(topics=["shop"]))
    foreign, unknown = [
        await stored_browser.get(f"/compare?id=first&id={id_}") for id_ in ("foreign", "nobody")
    ]
    assert foreign.status == unknown.status == 403
    texts = [re.sub(r"foreign|nobody|[0-9a-f-]{36}", "", each.text) for each in (foreign, unknown)]
    assert texts[0] == texts[1]
    assert "payments" not in foreign.text


async def test_whether_masked_values_differ_is_not_told(stored: Stored, tmp_path: Path) -> None:
    settings = ConsoleSettings(mask_headers=("x-card", "principal"), mask_payload_fields=("/card",))
    await send(stored, "first", {"card": "4111", "n": 1}, attrs={"x-card": "4111"}, principal="ada")
    await send(stored, "second", {"card": "4111", "n": 1}, attrs={"x-card": "4111"}, principal="bob")
    await stored.mailbox.send_message(message(b"plain", message_id="text", content_type="text/plain"))
    options: dict[str, Any] = {"store": str(tmp_path / "store.db"), "access": access_of(stored)}
    async with served_console(stored.mailbox, settings=settings, **options) as browser:
        await browser.sign_in(stored.issue(operations=[Right.READ_HEADERS, Right.READ_PAYLOAD]))
        page = await browser.get(URL)
        assert not re.search(r"4111|>ada<|bytes (are equal|differ)", page.text)
        assert table(page.text, "Fields that differ") == [["/card", "hidden", '"[masked]"', '"[masked]"']]
        headers = {row[0]: row[1] for row in table(page.text, "Headers that differ")}
        assert (headers["principal"], headers["custom header x-card"]) == ("hidden", "hidden")
        page = await browser.get("/compare?id=first&id=text")
        assert "A whole payload is hidden" in page.text
        assert "plain" not in re.sub(r"text/plain", "", page.text)
        await browser.sign_in(stored.issue())
        assert "The bytes are equal." in (await browser.get(URL)).text


async def test_text_of_others_is_escaped_everywhere(stored: Stored, stored_browser: Browser) -> None:
    for number in (1, 2):
        text = f"{HOSTILE}{number}"
        await send(
            stored,
            text,
            {text: text, "same": {HOSTILE: number}},
            attrs={text: text},
            principal=text,
            correlation_id=text,
        )
        await (await receive_one(stored.mailbox, "shop")).nack(reason=text)
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/compare", params=[("id", f"{HOSTILE}1"), ("id", f"{HOSTILE}2")])
    assert page.status == 200
    assert "<script>alert" not in page.text
    assert "\u202e" not in re.sub(r' value="[^"]*"', "", page.text)
    assert len(table(page.text, "Fields that differ")) == 3


async def test_large_payloads_and_headers_make_a_bounded_page(
    stored: Stored, stored_browser: Browser
) -> None:
    for id_, number in (("first", 1), ("second", 2)):
        await send(stored, id_, [number] * 200_000, attrs={f"h{n}": f"{number}" * 100 for n in range(500)})
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get(URL)
    assert page.status == 200
    assert "Only the first part was compared" in page.text or "more are not shown" in page.text
    assert len(page.text) < 1_500_000


@pytest.mark.parametrize("query", ["", "?id=first", "?id=first&id=second&id=third", "?id=&id=%20"])
async def test_any_other_number_of_messages_leads_to_a_form(
    stored: Stored, stored_browser: Browser, query: str
) -> None:
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/compare" + query)
    assert (page.status, page.text.count('name="id"')) == (200, 2)
    assert ("Choose two messages" in page.text) == bool(query)
    assert ('value="first"' in page.text) == ("first" in query)


async def test_messages_and_searches_lead_to_it(stored: Stored, stored_browser: Browser) -> None:
    await send(stored, "first", 1)
    await send(stored, "second", 1, causality_parent="first")
    await stored_browser.sign_in(stored.issue())
    page = await stored_browser.get("/messages/second")
    assert 'href="/console/compare?id=second&amp;id=first"' in page.text
    page = await stored_browser.get("/search?topics=shop")
    assert page.text.count('type="checkbox" name="id"') == 2
    assert 'action="/console/compare"' in page.text
