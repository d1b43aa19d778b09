"""Actions of the page of a message: redrive, archive, purge, cancel, reschedule, and edit and resend."""

import re
from collections.abc import AsyncIterator, Sequence
from html import escape, unescape
from typing import Any

import pytest

from postroom.adapters.compose.console import ConsoleSettings
from postroom.application.access.audit import AuditEntry
from postroom.application.access.mailbox import AuthorizedMailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.threads import background_task
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Rejected
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.subscription import SubscriptionFilter
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


async def test_the_edited_copy_of_a_subscription_is_sent_to_the_topic_of_its_original(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.set_subscription("audit", SubscriptionFilter(("parcels",)))
    await place.mailbox.send_message(message(b"x", topic="parcels"))
    (copy,) = await place.mailbox.receive_messages("audit")
    await browser.sign_in(place.issue())
    form = fields_of(await browser.get("/message/resend", params={"id": copy.message_id}))
    assert form["topic"] == "parcels"
    assert (await browser.send("/message/resend", form)).status == 200
    assert len(await place.mailbox.receive_messages("parcels", max_messages=9)) == 2


@pytest.mark.parametrize(
    ("edits", "error"),
    [
        ({"topic": "two words"}, "Topic name"),
        ({"topic": "other"}, "does not cover this topic"),
        ({"encoding": "base64"}, "not base64"),
        ({"priority": "11"}, "priority must be at most 10"),
        ({"header-value-0": "x" * 70_000}, '"Custom headers" must have up to 65536 bytes'),
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


WAITING, HOUR_MS = "waiting/1", 3_600_000
WAITING_PAGE = "/messages/waiting/1"


async def send_waiting(place: MemoryPlace, status: str, **options: Any) -> Sequence[ReceivedMessage]:
    """Send a message that is ready, delayed or in flight; return it if it was received."""
    delay = HOUR_MS if status == "delayed" else 0
    sent = message(topic="mail", message_id=WAITING, deliver_after_ms=delay, **options)
    await place.mailbox.send_message(sent)
    return await place.mailbox.receive_messages("mail") if status == "in_flight" else ()


async def waiting_status(place: MemoryPlace) -> str:
    return (await place.mailbox.get_message(WAITING)).status


async def form_of(browser: Browser, action: str) -> dict[str, str]:
    """Return the fields of the first form of the confirmation of an action."""
    page = await browser.get(f"/message/{action}", params={"id": WAITING})
    main = page.text.rpartition("<h1>")[2]
    return fields_of(Answer(page.status, page.headers, main.partition("</form>")[0], page.path))


@pytest.mark.parametrize("before", ["ready", "delayed", "in_flight"])
async def test_a_message_is_cancelled_after_a_confirmation_and_its_history_keeps_the_reason(
    place: MemoryPlace, browser: Browser, before: str
) -> None:
    received = await send_waiting(place, before)
    await browser.sign_in(place.issue(principal="olga", operations=[*READS, Right.ADMIN]))
    shown = await browser.get(WAITING_PAGE)
    assert "/message/cancel?id=waiting%2F1" in shown.text
    assert ("/message/reschedule" in shown.text) == (before != "in_flight")
    form = await form_of(browser, "cancel")
    assert await waiting_status(place) == before
    page = await browser.send("/message/cancel", form | {"reason": "<ordered twice>"})
    assert page.status == 200
    assert "The message was cancelled." in page.text
    assert "Cancelled by olga: &lt;ordered twice&gt;" in page.text
    assert "/message/cancel" not in page.text
    assert await waiting_status(place) == "expired"
    for each in received:
        with pytest.raises(Rejected):
            await each.ack()
    assert [(each.principal, each.operation, each.target, each.matches) for each in changes(place)] == [
        ("olga", Right.ADMIN, WAITING, 1)
    ]
    again = await browser.send("/message/cancel", form)
    assert "Nothing was cancelled, as the message is settled." in again.text
    page = await browser.get("/message/cancel", params={"id": WAITING})
    assert "This message is expired, so it can&#39;t be cancelled." in page.text.replace("'", "&#39;")


def changes(place: MemoryPlace) -> list[AuditEntry]:
    """Return the audit entries of messages that were cancelled or rescheduled."""
    calls = {"cancel_messages", "reschedule_messages"}
    return [each for each in place.audit.entries if not calls.isdisjoint(each.criteria)]


async def test_a_delayed_message_is_delivered_now_or_after_another_time(
    place: MemoryPlace, browser: Browser
) -> None:
    await send_waiting(place, "delayed")
    await browser.sign_in(place.issue(lifetime_ms=24 * HOUR_MS))
    form = await form_of(browser, "reschedule")
    page = await browser.send("/message/reschedule", form | {"delay": " 2h "})
    assert "The message was rescheduled." in page.text
    await place.clock.advance(7_199)
    assert await waiting_status(place) == "delayed"
    await place.clock.advance(1)
    assert await waiting_status(place) == "ready"
    for later in ("30m", "2099-01-31T08:00Z"):
        await browser.send("/message/reschedule", form | {"delay": "2020-01-31"})
        assert await waiting_status(place) == "ready"
        await browser.send("/message/reschedule", form | {"delay": later})
        assert await waiting_status(place) == "delayed"
    now = fields_of(await browser.get("/message/reschedule", params={"id": WAITING}))
    page = await browser.send("/message/reschedule", now)
    assert "The message was rescheduled." in page.text
    assert len(await place.mailbox.receive_messages("mail")) == 1
    assert [each.target for each in changes(place)] == [WAITING] * 6


@pytest.mark.parametrize(
    ("action", "field", "value", "error"),
    [
        ("reschedule", "delay", "", "which is not a duration"),
        ("reschedule", "delay", "<soon>", "which is not a duration"),
        ("reschedule", "delay", "-1h", "which is not a duration"),
        ("reschedule", "delay", "1h30m", "which is not a duration"),
        ("reschedule", "delay", "999999999d", "longer than 36,500 days"),
        ("reschedule", "delay", "2d", "would become a dead letter before"),
        ("cancel", "reason", "<x>" * 100, "reason must have at most 255 characters"),
    ],
)
async def test_a_change_that_is_refused_says_why_and_loses_nothing(
    place: MemoryPlace, browser: Browser, action: str, field: str, value: str, error: str
) -> None:
    await send_waiting(place, "delayed", ttl_seconds=86_400)
    await browser.sign_in(place.issue())
    page = await browser.send(f"/message/{action}", await form_of(browser, action) | {field: value})
    assert page.status == 400
    assert error in unescape(page.text)
    assert f'name="{field}" type="text" value="{escape(value)}"' in page.text
    assert await waiting_status(place) == "delayed"


async def test_a_message_that_was_received_meanwhile_is_left_to_its_consumer(
    place: MemoryPlace, browser: Browser
) -> None:
    await send_waiting(place, "ready")
    await browser.sign_in(place.issue())
    form = await form_of(browser, "reschedule")
    (received,) = await place.mailbox.receive_messages("mail")
    page = await browser.send("/message/reschedule", form | {"delay": "2h"})
    assert "Nothing was rescheduled, as the message is in flight" in page.text
    await received.reject()
    for action, done in (("reschedule", "rescheduled"), ("cancel", "cancelled")):
        page = await browser.send(f"/message/{action}", form | {"delay": "2h"})
        assert f"Nothing was {done}, as the message is a dead letter" in page.text
    assert await waiting_status(place) == "dead"


async def test_changes_of_a_message_are_neither_offered_nor_done_beyond_the_token(
    place: MemoryPlace, browser: Browser
) -> None:
    await send_waiting(place, "delayed")
    fields = {"id": WAITING, "delay": "2h"}
    before = (await place.mailbox.get_backlog()).position
    await browser.sign_in(place.issue(operations=[each for each in Right if each != Right.ADMIN]))
    shown = await browser.get(WAITING_PAGE)
    for action in ("cancel", "reschedule"):
        assert f"/message/{action}" not in shown.text
        page = await browser.get(f"/message/{action}", params={"id": WAITING})
        assert "needs the right <code>admin</code>" in page.text
        assert (await browser.post(f"/message/{action}", **fields)).status == 403
    await browser.sign_in(place.issue(topics=["orders"]))
    for action in ("cancel", "reschedule"):
        answers = [
            await browser.post(f"/message/{action}", **fields | {"id": id_}) for id_ in (WAITING, "missing-1")
        ]
        own, missing = (
            re.sub(r"(waiting/1|missing-1)|corr[^<]*|[0-9a-f-]{32,36}", "", each.text) for each in answers
        )
        assert answers[0].status == answers[1].status
        assert own == missing
    assert (await place.mailbox.get_backlog()).position == before


async def test_of_messages_with_the_same_id_the_shown_one_is_changed(
    place: MemoryPlace, browser: Browser
) -> None:
    await send_waiting(place, "delayed")
    limited = (await place.control.open_session(place.issue(topics=["bills"]))).mailbox
    await limited.send_message(message(topic="bills", message_id=WAITING))
    stream_id = (await limited.get_message(WAITING)).stream_id
    await browser.sign_in(place.issue())
    shown = await browser.get(f"/messages/{stream_id}")
    assert f"/message/cancel?id={stream_id}" in shown.text
    page = await browser.get("/message/cancel", params={"id": stream_id})
    assert "<dd>bills</dd>" in page.text
    await browser.send("/message/cancel", fields_of(page))
    assert (await place.mailbox.get_message(stream_id)).status == "expired"
    assert await waiting_status(place) == "delayed"
