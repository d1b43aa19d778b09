"""What the page of a message does: redrive, archive, purge, and edit and resend."""

import re
from collections.abc import AsyncIterator
from html import unescape

import pytest

from postroom.adapters.compose.console import ConsoleSettings
from postroom.application.access.mailbox import AuthorizedMailbox
from postroom.application.threads import background_task
from postroom.domain.capability.rights import Right
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace, controlled_mailbox
from tests.support.messages import message
from tests.support.servers.console import Answer, Browser, served_console
from tests.support.waiting import until_answer

READS = [Right.READ_HEADERS, Right.READ_PAYLOAD]
ID = "a/b?c"


@pytest.fixture
async def place() -> AsyncIterator[MemoryPlace]:
    """A mailbox in memory with access control and a dead letter."""
    async with controlled_mailbox() as place:
        await place.mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=1))
        await place.mailbox.send_message(
            message(
                b'{"total": 1}\n', message_id=ID, content_type="application/json", attrs={"tenant": "acme"}
            )
        )
        (received,) = await place.mailbox.receive_messages("orders")
        await received.nack(reason="<boom>")
        async with background_task(place.mailbox.redrives.worker.run()):
            yield place


def fields_of(page: Answer) -> dict[str, str]:
    """Return what a browser sends of the last form of a page."""
    form = page.text.rpartition("<form")[2]
    inputs = re.findall(r'<input[^>]*?name="([^"]+)"[^>]*?value="([^"]*)"', form)
    areas = re.findall(r'<textarea[^>]*?name="([^"]+)"[^>]*>\n?([^<]*)</textarea>', form)
    selects = re.findall(r'<select[^>]*name="([^"]+)".*?value="([^"]*)" selected', form, re.DOTALL)
    return {unescape(name): unescape(value) for name, value in [*inputs, *areas, *selects]}


async def status(place: MemoryPlace) -> str:
    return (await place.mailbox.get_message(ID)).status


@pytest.mark.parametrize(
    ("action", "operation", "after", "notice"),
    [
        ("redrive", Right.REDRIVE, "ready", "The message was redriven"),
        ("archive", Right.ADMIN, "expired", "The message was archived"),
        ("purge", Right.ADMIN, "expired", "The message was purged"),
    ],
    ids=["redrive", "archive", "purge"],
)
async def test_an_action_is_confirmed_done_once_and_told(
    place: MemoryPlace, action: str, operation: Right, after: str, notice: str
) -> None:
    async with served_console(place.mailbox, access=access_of(place)) as browser:
        await browser.sign_in(place.issue(operations=[*READS, operation, Right.REDRIVE]))
        assert f"/message/{action}?id=a%2Fb%3Fc" in (await browser.get("/messages/a/b%3Fc")).text
        page = await browser.get(f"/message/{action}?id=a%2Fb%3Fc")
        assert "&lt;boom&gt;" in page.text
        assert await status(place) == "dead"
        fields = fields_of(page)
        page = await browser.send(f"/message/{action}", fields)
        assert page.status == 200
        assert notice in page.text
        assert fields["job_id"] in page.text
        assert await status(place) == after
        again = await browser.send(f"/message/{action}", fields)
        assert again.status == 200
        assert len(await place.mailbox.list_redrives()) == 1


async def test_a_second_operator_is_told_that_nothing_is_left_to_do(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get("/message/redrive?id=a%2Fb%3Fc")
    await place.mailbox.redrive_dead_letters("orders")
    page = await browser.send("/message/redrive", fields_of(page))
    assert "Nothing was redriven: the message is no longer a dead letter" in page.text
    page = await browser.get("/message/redrive?id=a%2Fb%3Fc")
    assert "This message is not a dead letter" in page.text
    assert "<button" not in page.text.rpartition("<h1>")[2]


async def test_an_original_and_its_copy_name_each_other(place: MemoryPlace, browser: Browser) -> None:
    spec = RedriveSpec(topics=("orders",), set_headers={"tenant": "other"})
    await place.mailbox.start_redrive(spec)
    await until_answer(lambda: place.mailbox.receive_messages("orders"))
    await browser.sign_in(place.issue())
    original = unescape((await browser.get("/messages/a/b%3Fc")).text)
    (copy,) = re.findall(r'copied as</dt><dd><a href="/console/messages/([^"]+)"', original)
    page = await browser.get(f"/messages/{copy}")
    assert 'copy of</dt><dd><a href="/console/messages/a/b%3Fc"' in page.text
    page = await browser.get("/message/archive?id=a%2Fb%3Fc")
    assert "A redrive job has sent a copy of this message" in page.text
    page = await browser.send("/message/archive", fields_of(page))
    assert "The message was archived" in page.text


async def test_what_the_token_does_not_permit_is_neither_offered_nor_done(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    forms = {
        action: fields_of(await browser.get(f"/message/{action}?id=a%2Fb%3Fc"))
        for action in ("redrive", "purge", "archive", "resend")
    }
    await browser.sign_in(place.issue(operations=READS))
    page = await browser.get("/messages/a/b%3Fc")
    assert "/message/redrive" not in page.text
    assert "/message/resend" not in page.text
    for action, fields in forms.items():
        answer = await browser.post(f"/message/{action}", **{**fields, "csrf": browser.csrf})
        assert answer.status == 403, action
    assert await status(place) == "dead"
    assert [each.topic for each in await place.mailbox.list_topics() if each.ready] == []
    for path in ("/message/drop?id=x", "/message/"):
        assert (await browser.get(path)).status == 404


async def test_a_read_only_console_offers_and_does_nothing(place: MemoryPlace) -> None:
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        await browser.sign_in(place.issue())
        page = await browser.get("/messages/a/b%3Fc")
        assert "/message/redrive" not in page.text
        answer = await browser.post("/message/purge", id=ID, job_id="0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01")
        assert answer.status == 403
    assert await status(place) == "dead"


async def test_an_edited_message_is_a_new_one_that_the_original_caused(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue(principal="olga"))
    form = fields_of(await browser.get("/message/resend?id=a%2Fb%3Fc"))
    assert form["payload"] == '{"total": 1}\n'
    edits = {"payload": '{"total": 2}\r\n', "header-name-1": "edited", "header-value-1": "<yes>"}
    page = await browser.send("/message/resend", form | edits)
    assert page.status == 200
    assert f"caused by {ID}" in unescape(page.text)
    (received,) = await place.mailbox.receive_messages("orders")
    assert received.payload == b'{"total": 2}\n'
    assert received.message_id == form["new_id"]
    assert received.attrs == {"tenant": "acme", "edited": "<yes>"}
    assert (received.causality_parent, received.principal, received.content_type) == (
        ID,
        "olga",
        "application/json",
    )
    assert await status(place) == "dead"
    again = await browser.send("/message/resend", form | edits)
    assert "It had already been sent" in again.text
    other = await browser.send("/message/resend", form | edits | {"payload": "other"})
    assert "nothing was sent" in other.text
    assert fields_of(other)["payload"] == "other"
    assert fields_of(other)["new_id"] != form["new_id"]


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ({"topic": "two words"}, "Topic name"),
        ({"topic": "other"}, "does not cover this topic"),
        ({"encoding": "base64"}, "not base64"),
        ({"priority": "11"}, "priority must be at most 10"),
        ({"header-value-0": "x" * 70_000}, "attrs must have up to 65536 bytes"),
    ],
    ids=["topic", "foreign-topic", "base64", "priority", "size"],
)
async def test_a_form_that_is_refused_says_why_and_loses_nothing(
    place: MemoryPlace, browser: Browser, edits: dict[str, str], error: str
) -> None:
    await browser.sign_in(place.issue(topics=["orders"]))
    form = fields_of(await browser.get("/message/resend?id=a%2Fb%3Fc"))
    page = await browser.send("/message/resend", form | edits | {"correlation_id": "typed"})
    assert page.status >= 400
    assert error in unescape(page.text)
    assert fields_of(page)["correlation_id"] == "typed"
    assert fields_of(page)["new_id"] == form["new_id"]
    assert await place.mailbox.receive_messages("orders") == []


async def test_the_calls_of_a_page_are_those_of_the_capability(place: MemoryPlace) -> None:
    """The page reads by the calls that are audited, and acts by those that need their rights."""
    session = await place.control.open_session(place.issue())
    assert isinstance(session.mailbox, AuthorizedMailbox)
    assert session.read_headers == session.mailbox.read_headers
