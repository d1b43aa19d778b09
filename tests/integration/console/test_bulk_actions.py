"""Actions on all messages that a search finds: links to jobs, and what changes between preview and start."""

import asyncio
import re
from html import unescape
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

import pytest

from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right
from postroom.domain.policy import TopicPolicy
from tests.integration.console.dead_letter_store import Desk
from tests.integration.console.test_redrives import ended, start_form
from tests.support.servers.console import Answer

ACTIONS = ("redrive", "archive", "cancel", "reschedule")
_LINK = re.compile(r'<a class="button" href="/console(/redrives/select\?[^"]*action=(\w+))">')


def offered(page: Answer) -> dict[str, str]:
    """Return the links of the actions that a page of results offers."""
    return {action: unescape(href) for href, action in _LINK.findall(page.text)}


async def test_a_job_selects_what_the_search_found(desk: Desk) -> None:
    page = await desk.browser.get("/search?topics=orders.*&statuses=dead")
    assert "14 messages match" in page.text
    assert set(offered(page)) == {"redrive", "archive"}
    for action, heading in (("redrive", "Redrive 14"), ("archive", "Archive 14")):
        assert f"{heading} dead letters?" in (await desk.browser.get(offered(page)[action])).text
    page = await desk.browser.get(offered(page)["redrive"])
    await desk.browser.send("/redrives", start_form(page))
    (job,) = await desk.mailbox.list_redrives()
    assert (await ended(desk, job.job_id)).moved == 14


async def test_actions_are_offered_for_statuses_and_criteria_that_a_job_has(desk: Desk) -> None:
    await desk.mailbox.send_message(NewMessage(topic="orders.eu", payload=b"new"))
    for query, actions in (
        ("", ACTIONS),
        ("statuses=dead&statuses=ready", ACTIONS),
        (
            "statuses=dead&statuses=acked&start_time=40d&end_time=0h&limit=25&order=oldest",
            ("redrive", "archive"),
        ),
        ("statuses=acked", ()),  # finds nothing
        ("at=5", ()),
        ("topics=no.such", ()),
    ):
        page = await desk.browser.get(f"/search?{query}")
        assert tuple(offered(page)) == actions, query
        assert ("download>CSV" in page.text) == bool(actions), query
    for fields in ({"header": "n\\=m=1"}, {"header": "n= x "}, {"principals": "x\ny"}, {"message_id": " x"}):
        page = await desk.browser.get("/redrives/select?" + urlencode({"action": "redrive"} | fields))
        assert page.status == 400, fields
        assert "select by principals, headers or ids" in page.text
    for fields in ({"action": "purge"}, {"action": ""}, {"action": "redrive", "at": "5"}, {"statuses": "x"}):
        assert (await desk.browser.get("/redrives/select?" + urlencode(fields))).status == 400
    await desk.browser.sign_in(desk.place.issue(operations=(Right.READ_HEADERS, Right.REDRIVE)))
    assert tuple(offered(await desk.browser.get("/search"))) == ("redrive",)
    await desk.browser.sign_in(desk.place.issue(operations=(Right.READ_HEADERS,)))
    assert offered(await desk.browser.get("/search")) == {}
    await desk.browser.sign_in(desk.place.issue(topics=["payments"]))
    page = await desk.browser.get("/search?topics=payments")
    assert "Archive 4 dead letters?" in (await desk.browser.get(offered(page)["archive"])).text
    foreign = offered(page)["archive"].replace("payments", "orders.eu")
    assert (await desk.browser.get(foreign)).status == 403


async def test_a_job_on_what_waits_is_on_the_statuses_of_the_search(desk: Desk, tmp_path: Path) -> None:
    for number in range(4):
        await desk.mailbox.send_message(NewMessage(topic="waiting", payload=b"%d" % number))
    await desk.mailbox.send_message(NewMessage(topic="waiting", payload=b"late", deliver_after_ms=60_000))
    (held,) = await desk.mailbox.receive_messages("waiting", max_messages=1)
    await asyncio.to_thread(rebuild_projections, str(tmp_path / "store.db"), runner=LocalTaskRunner())
    for query, text, count in (
        ("statuses=ready", "Cancel all that are ready or delayed…", 4),
        ("statuses=in_flight", "Cancel all that are in flight…", 1),
        ("statuses=ready&statuses=in_flight", "Cancel all that wait…", 5),
        ("", "Cancel all that wait…", 5),
    ):
        page = await desk.browser.get(f"/search?topics=waiting&{query}")
        assert text in page.text
        form = await desk.browser.get(offered(page)["cancel"])
        assert form.status == 200
        fields = dict(parse_qsl(form.path.partition("?")[2]))
        page = await desk.browser.get("/redrives/preview?" + urlencode(fields))
        assert f"Cancel {count} message{'s' if count > 1 else ''}?" in page.text, query
    page = await desk.browser.get("/redrives/preview?action=cancel&topics=waiting&statuses=ready")
    await desk.browser.send("/redrives", start_form(page))
    (job,) = await desk.mailbox.list_redrives()
    assert (await ended(desk, job.job_id)).moved == 4
    assert (await desk.mailbox.get_message(held.message_id)).status == "in_flight"
    page = await desk.browser.get("/redrives/select?action=cancel&statuses=acked")
    assert (page.status, "finds no messages that could be changed" in page.text) == (400, True)


async def test_what_changed_between_preview_and_start_is_skipped_and_told(desk: Desk) -> None:
    page = await desk.browser.get("/search?topics=payments&statuses=dead")
    page = await desk.browser.get(offered(page)["redrive"])
    assert "Redrive 4 dead letters?" in page.text
    form = start_form(page)
    await desk.mailbox.redrive_dead_letters("payments", limit=1)
    (received,) = await desk.mailbox.receive_messages("payments")
    await received.ack()
    await desk.mailbox.send_message(NewMessage(topic="payments", payload=b"new"))
    (received,) = await desk.mailbox.receive_messages("payments")
    await received.reject("a failure after the preview")
    for _ in range(2):  # submitted twice
        page = await desk.browser.send("/redrives", form)
        assert page.status == 200
    (job,) = await desk.mailbox.list_redrives()
    report = await ended(desk, job.job_id)
    assert (report.matched, report.moved, report.skipped) == (4, 3, 1)
    page = await desk.browser.get(f"/redrives/{job.job_id}?outcome=skipped")
    assert "settled" in page.text
    left = (await desk.mailbox.list_dead_letters("payments")).items
    assert [each.last_error for each in left] == ["a failure after the preview"]
    # Back, and once more: the old form is the same job.
    again = await desk.browser.send("/redrives", form)
    assert again.path == f"/console/redrives/{job.job_id}"
    assert len(await desk.mailbox.list_redrives()) == 1


async def test_a_job_on_waiting_messages_leaves_what_was_sent_after_its_preview(desk: Desk) -> None:
    for number in range(5):
        await desk.mailbox.send_message(NewMessage(topic="waiting", payload=b"%d" % number))
    page = await desk.browser.get("/redrives/preview?action=cancel&topics=waiting&note=twice")
    assert "Cancel 5 messages?" in page.text
    form = start_form(page)
    late = await desk.mailbox.send_message(NewMessage(topic="waiting", payload=b"late"))
    received = await desk.mailbox.receive_messages("waiting", max_messages=2)
    await received[0].ack()
    page = await desk.browser.send("/redrives", form)
    assert "5 messages matched" in page.text
    (job,) = await desk.mailbox.list_redrives()
    report = await ended(desk, job.job_id)
    assert (report.matched, report.moved, report.skipped) == (5, 4, 1)
    assert (await desk.mailbox.get_message(late.message_id)).status == "ready"
    assert (await desk.mailbox.list_topics())[-1].ready == 1


@pytest.mark.parametrize(
    "changes", [{"cutoff": "x"}, {"previewed": "-1"}, {"cutoff": "9" * 18}, {"previewed": "9" * 18}]
)
async def test_a_forged_preview_is_refused(desk: Desk, changes: dict[str, str]) -> None:
    form = start_form(await desk.browser.get("/redrives/preview?topics=payments"))
    assert (await desk.browser.send("/redrives", form | changes)).status == 400
    assert await desk.mailbox.list_redrives() == []


async def test_a_job_that_was_stopped_in_the_middle_tells_what_it_did_and_goes_on(desk: Desk) -> None:
    form = start_form(await desk.browser.get("/redrives/preview?topics=orders.*&rate=1"))
    await desk.browser.send("/redrives", form)
    (job,) = await desk.mailbox.list_redrives()
    page = await desk.browser.post(f"/redrives/{job.job_id}/pause")
    before = await desk.mailbox.get_redrive(job.job_id)
    assert before.moved < before.matched == 14
    assert f"{before.moved} of 14" in page.text
    await desk.browser.post(f"/redrives/{job.job_id}/cancel")
    await desk.mailbox.set_topic_policy("orders.eu", TopicPolicy(max_attempts=1))
    form = start_form(await desk.browser.get("/redrives/preview?topics=orders.*"))
    page = await desk.browser.send("/redrives", form)
    rest = (await desk.mailbox.list_redrives())[0]
    report = await ended(desk, rest.job_id)
    assert before.moved + report.moved == 14
