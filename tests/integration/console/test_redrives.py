"""Redrive jobs in the console: from the form to the end of the job."""

import re
from html import unescape
from pathlib import Path

from postroom.adapters.compose.console import ConsoleSettings
from postroom.application.messages import NewMessage
from postroom.application.reports import RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.policy import TopicPolicy
from tests.integration.console.dead_letter_store import Desk, opened_desk
from tests.support.servers.console import Answer
from tests.support.stores import copy_store
from tests.support.waiting import until_answer

_FIELD = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')


def start_form(page: Answer) -> dict[str, str]:
    """Return the fields of the form of a preview that starts the job."""
    form = page.text.split('class="inline"', 1)[1].split("</form>", 1)[0]
    return {name: unescape(value) for name, value in _FIELD.findall(form)}


async def ended(desk: Desk, job_id: str) -> RedriveReport:
    """Return a job when it is not at work any more."""

    async def is_over() -> bool:
        return not (await desk.mailbox.get_redrive(job_id)).is_active

    await until_answer(is_over)
    return await desk.mailbox.get_redrive(job_id)


async def test_a_job_has_what_its_preview_showed_and_starts_once(desk: Desk) -> None:
    everything = await desk.browser.post("/redrives/preview")
    assert "Redrive 18 dead letters?" in everything.text
    assert "it selects all dead letters" in everything.text
    page = await desk.browser.post("/redrives/preview", topics="orders.*\r\n", text="", limit="")
    assert "it selects all dead letters" not in page.text
    assert "Redrive 14 dead letters?" in page.text
    assert await desk.mailbox.list_redrives() == []
    form = start_form(page)
    await desk.mailbox.set_topic_policy("orders.eu", TopicPolicy(max_attempts=1))
    await desk.mailbox.send_message(NewMessage(topic="orders.eu", payload=b"new"))
    (received,) = await desk.mailbox.receive_messages("orders.eu")
    await received.nack(reason="a failure after the preview")
    first = await desk.browser.send("/redrives", form)
    second = await desk.browser.send("/redrives", form)
    (job,) = await desk.mailbox.list_redrives()
    assert first.path == second.path == f"/console/redrives/{job.job_id}"
    report = await ended(desk, job.job_id)
    assert (report.status, report.matched, report.moved) == ("completed", 14, 14)
    left = (await desk.mailbox.list_dead_letters()).items
    assert {each.last_error for each in left if each.topic != "payments"} == {"a failure after the preview"}
    page = await desk.browser.get(f"/redrives/{job.job_id}?outcome=redriven")
    assert page.text.count('scope="row"') == 14
    assert "every 2s" not in page.text
    changed = await desk.browser.send("/redrives", form | {"topics": "payments"})
    assert changed.status == 409


async def test_a_job_lists_its_messages_while_it_runs_and_tells_what_became_of_them(desk: Desk) -> None:
    page = await desk.browser.post("/redrives/preview", topics="payments")
    page = await desk.browser.send("/redrives", start_form(page))
    (job,) = await desk.mailbox.list_redrives()
    await ended(desk, job.job_id)
    part = await desk.browser.get(f"/redrives/{job.job_id}", headers={"HX-Request": "true"})
    assert part.text.count('scope="row"') == 4
    assert "4 ready" in part.text
    assert "every 5s" in part.text  # as they wait
    await desk.mailbox.set_topic_policy("payments", TopicPolicy(max_attempts=1))
    first, second, *_ = await desk.mailbox.receive_messages("payments", max_messages=4)
    await first.ack()
    await second.nack(reason="again")
    part = await desk.browser.get(f"/redrives/{job.job_id}", headers={"HX-Request": "true"})
    shown = [text for text in ("1 acked", "1 dead again", "2 in flight") if text in part.text]
    assert shown == ["1 acked", "1 dead again", "2 in flight"]


async def test_a_job_is_paused_resumed_cancelled_and_undone_and_others_see_it(desk: Desk) -> None:
    page = await desk.browser.post("/redrives/preview", topics="orders.eu", rate="1")
    page = await desk.browser.send("/redrives", start_form(page))
    (job,) = await desk.mailbox.list_redrives()
    path = f"/redrives/{job.job_id}"
    assert "hx-trigger" in page.text
    page = await desk.browser.post(f"{path}/pause")
    assert "The job is paused." in page.text
    assert "Resume" in page.text
    part = await desk.browser.get(path, headers={"HX-Request": "true"})
    assert part.text.lstrip().startswith('<div id="progress"')
    part = await desk.browser.get("/redrives", headers={"HX-Request": "true"})
    assert part.text.lstrip().startswith('<div id="jobs" hx-get="/console/redrives"')
    await desk.mailbox.change_redrive(job.job_id, "resume")  # another operator
    assert ">Pause<" in (await desk.browser.get(path)).text
    assert "Cancel the redrive job?" in (await desk.browser.get(f"{path}/cancel")).text
    await desk.browser.post(f"{path}/cancel")
    page = await desk.browser.post(f"{path}/resume")
    assert page.status == 400
    page = await desk.browser.post(f"{path}/undo")
    assert (await ended(desk, job.job_id)).status == "undone"
    assert (await desk.browser.post(f"{path}/explode")).status == 404
    assert (await desk.browser.get("/redrives/junk")).status == 400


async def test_what_is_wrong_in_the_form_is_said_and_nothing_typed_is_lost(desk: Desk) -> None:
    await desk.browser.get("/redrives/new")
    for field, value in (
        ("rate", "fast"),
        ("dead_since", "soon"),
        ("headers", "tenant"),
        ("limit", "0"),
        ("fingerprints", "x\n" * 101),
        ("action", "explode"),
        ("merge_patch", "[1]"),
    ):
        page = await desk.browser.post("/redrives/preview", **{"namespace": "<typed>", field: value})
        assert (page.status, 'role="alert"' in page.text) == (400, True), field
        assert 'value="&lt;typed&gt;"' in page.text
    assert await desk.mailbox.list_redrives() == []


async def test_a_preview_can_be_changed_and_all_fields_reach_the_job(desk: Desk) -> None:
    fields = {
        "topics": "orders.eu\norders.us",
        "reasons": "max_attempts",
        "dead_since": "2d",
        "headers": "",
        "rate": "100",
        "delay_ms": "60000",
        "limit": "2",
        "destination": "orders.repaired",
        "set_headers": "repaired=by hand=1",
    }
    page = await desk.browser.post("/redrives/preview", **fields)
    form = start_form(page)
    page = await desk.browser.send("/redrives/preview", form | {"change": "1"})
    assert 'value="60000"' in page.text
    assert "orders.eu\norders.us</textarea>" in page.text
    await desk.browser.send("/redrives", form)
    (job,) = await desk.mailbox.list_redrives()
    spec = job.spec
    assert (spec.topics, spec.limit, spec.delay_ms) == (("orders.eu", "orders.us"), 2, 60_000)
    assert (spec.destination, spec.set_headers) == ("orders.repaired", {"repaired": "by hand=1"})
    await ended(desk, job.job_id)
    page = await desk.browser.get(f"/redrives/{job.job_id}")
    assert "orders.repaired" in page.text


async def test_what_is_masked_is_neither_a_criterion_nor_shown(filled: Path, tmp_path: Path) -> None:
    hidden = ConsoleSettings(mask_headers=("Authorization",), mask_payload_fields=("/card",))
    async with opened_desk(copy_store(filled, tmp_path), settings=hidden) as desk:
        fields = {
            "topics": "payments",
            "set_headers": "authorization=s3cret",
            "merge_patch": '{"card": "s3cret"}',
        }
        job = start_form(await desk.browser.post("/redrives/preview", **fields))
        assert job["set_headers"] == "authorization=s3cret"
        page = await desk.browser.send("/redrives", job)
        assert page.text.count("s3cret") == 2  # an administrator sees it
        path = page.path.removeprefix("/console")
        operator = desk.place.issue(operations=[Right.READ_HEADERS, Right.REDRIVE])
        await desk.browser.sign_in(operator)
        page = await desk.browser.get(path)
        assert (page.status, "s3cret" in page.text, page.text.count("[masked]")) == (200, False, 2)
        await desk.browser.get("/redrives/new")
        for criterion in ({"headers": "authorization=a"}, {"text": "a"}, {"match": "a"}):
            page = await desk.browser.post("/redrives/preview", **criterion)
            assert page.status == 403, criterion


async def test_a_job_cancels_what_waits(desk: Desk) -> None:
    await desk.mailbox.send_message(NewMessage(topic="waiting.a", payload=b"1", sticky_key="k"))
    await desk.mailbox.send_message(NewMessage(topic="waiting.a", payload=b"2", deliver_after_ms=60_000))
    fields = {"action": "cancel", "topics": "waiting.*", "note": "ordered twice"}
    page = await desk.browser.post("/redrives/preview", **fields, reasons="rejected")
    assert (page.status, "reasons applies to dead letters" in page.text) == (400, True)
    page = await desk.browser.post("/redrives/preview", **fields)
    assert "Cancel 2 messages?" in page.text
    assert "cancelled messages are never delivered again" in page.text
    assert all(status in page.text for status in ("ready", "delayed"))
    await desk.browser.send("/redrives", start_form(page))
    (job,) = await desk.mailbox.list_redrives()
    assert (await ended(desk, job.job_id)).moved == 2
    page = await desk.browser.get(f"/redrives/{job.job_id}?outcome=cancelled")
    assert ("ordered twice" in page.text, page.text.count('scope="row"')) == (True, 2)
    page = await desk.browser.post("/redrives/preview", action="reschedule", keys="k")
    assert "Reschedule 0 messages?" in page.text
    await desk.browser.sign_in(desk.place.issue(operations=[Right.READ_HEADERS, Right.REDRIVE]))
    page = await desk.browser.get("/redrives/new")
    assert "Reschedule" not in page.text
    assert (await desk.browser.post("/redrives/preview", **fields)).status == 403


async def test_a_token_that_may_only_read_can_neither_preview_nor_start_nor_change_jobs(desk: Desk) -> None:
    page = await desk.browser.post("/redrives/preview", topics="payments")
    form = start_form(page)
    await desk.browser.send("/redrives", form)
    (job,) = await desk.mailbox.list_redrives()
    await desk.browser.sign_in(desk.place.issue(operations=[Right.READ_HEADERS]))
    page = await desk.browser.get("/")
    assert "Redrive jobs" not in page.text
    for path in ("/redrives", "/redrives/new", f"/redrives/{job.job_id}"):
        assert (await desk.browser.get(path)).status == 403, path
    for path in ("/redrives", "/redrives/preview", f"/redrives/{job.job_id}/undo"):
        assert (await desk.browser.post(path, **{**form, "csrf": desk.browser.csrf})).status == 403, path
    await desk.browser.sign_in(
        desk.place.issue(operations=[Right.READ_HEADERS, Right.REDRIVE], topics=["orders.*"])
    )
    assert job.job_id not in (await desk.browser.get("/redrives")).text
    assert (await desk.browser.post("/redrives/preview", topics="")).status == 403
    page = await desk.browser.post("/redrives/preview", topics="orders.eu", action="purge")
    form = {**start_form(page), "csrf": desk.browser.csrf} if page.status == 200 else {}
    assert (await desk.browser.send("/redrives", form)).status == 403
