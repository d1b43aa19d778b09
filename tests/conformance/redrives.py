"""What redrive jobs do, whichever way a mailbox is reached."""

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.waiting import until_answer

PREVIEWED = "01890a5d-ac96-774b-bcce-b302099a8059"
JOB, OTHER = "01890a5d-ac96-774b-bcce-b302099a8057", "01890a5d-ac96-774b-bcce-b302099a8058"


async def check_start_of_a_preview(mailbox: Mailbox, topic: str, dead: int) -> None:
    """Start a job whose preview showed a dead letter that was redriven since."""
    has_several = "@" not in mailbox.name  # of a namespace, each has its own cut-off
    spec = RedriveSpec(topics=(topic,), limit=None)
    preview = await mailbox.preview_redrive(spec)
    assert preview.matched == dead
    assert await mailbox.redrive_dead_letters(topic, limit=1) == 1
    report = await mailbox.start_redrive(
        spec, job_id=PREVIEWED, cutoff=preview.cutoff, previewed=preview.matched
    )

    async def is_over() -> bool:
        return not (await mailbox.get_redrive(PREVIEWED)).is_active

    await until_answer(is_over)
    report = await mailbox.get_redrive(PREVIEWED)
    assert (report.moved, report.matched - report.skipped) == (dead - 1, dead - 1)
    skipped = (await mailbox.list_redrive_messages(PREVIEWED, outcome="skipped")).items
    if not has_several:
        assert [each.reason for each in skipped] == ["redriven"]
        for cutoff, previewed in ((preview.cutoff + 1_000_000, None), (None, 1 << 62)):
            with pytest.raises(InvalidRequest):
                await mailbox.start_redrive(spec, cutoff=cutoff, previewed=previewed)
    await mailbox.change_redrive(PREVIEWED, "undo")
    await until_answer(is_over)
    (received,) = await mailbox.receive_messages(topic)  # so that it is a dead letter again
    await received.nack(reason="broken")


async def check_redrive_jobs(mailbox: Mailbox, topic: str, dead: int) -> None:
    """Redrive all dead letters of a topic by a job, and undo it."""
    spec = RedriveSpec(topics=(topic,), reasons=("max_attempts",), headers={}, rate=1_000)
    preview = await mailbox.preview_redrive(spec)
    assert (preview.matched, len(preview.samples), preview.groups[0].count) == (dead, dead, dead)
    assert preview.digest
    assert (await mailbox.preview_redrive(spec)).digest == preview.digest
    report = await mailbox.start_redrive(spec, job_id=JOB)
    assert (report.job_id, report.mailbox, report.spec, report.matched) == (JOB, mailbox.name, spec, dead)

    async def is_idle(job: str = JOB) -> bool:
        return not (await mailbox.get_redrive(job)).is_active

    await until_answer(is_idle)
    assert (await mailbox.start_redrive(spec, job_id=JOB)).status == "completed"  # a repetition
    assert len(await mailbox.peek_messages(topic)) == dead
    page = await mailbox.list_redrive_messages(JOB, limit=1)
    assert (len(page.items), page.items[0].outcome, page.items[0].topic) == (1, "redriven", topic)
    assert (page.next_cursor is None) == (dead == 1)
    await mailbox.change_redrive(JOB, "undo")
    await until_answer(is_idle)
    undone = await mailbox.list_redrive_messages(JOB, outcome="undone", cursor=None, limit=1_000)
    assert (len(undone.items), undone.next_cursor) == (dead, None)
    assert (await mailbox.list_redrive_messages(JOB, outcome="skipped")).items == ()
    (job,) = await mailbox.list_redrives()
    assert (job.status, job.moved, job.restored) == ("undone", dead, dead)
    assert len((await mailbox.list_dead_letters(topic)).items) == dead
    # The same messages are dead again, by other events.
    assert (await mailbox.preview_redrive(spec)).digest != preview.digest
    with pytest.raises(IdempotencyConflict):
        await mailbox.start_redrive(RedriveSpec(), job_id=JOB)
    with pytest.raises(NotFound):
        await mailbox.get_redrive(OTHER)
    with pytest.raises(InvalidRequest, match="can't resume"):
        await mailbox.change_redrive(JOB, "resume")
    with pytest.raises(InvalidRequest):
        await mailbox.start_redrive(RedriveSpec(rate=0))
    with pytest.raises(NotFound):
        await mailbox.list_redrive_messages(OTHER)
    with pytest.raises(InvalidRequest):
        await mailbox.list_redrive_messages(JOB, cursor="wrong")
    await check_start_of_a_preview(mailbox, topic, dead)
    edit = RedriveSpec(
        topics=(topic,),
        destination=f"{topic}.fixed",
        set_headers={"a": "1"},
        remove_headers=("b",),
        merge_patch='{"c": 2}',
        limit=None,
    )
    assert (await mailbox.start_redrive(edit, job_id=OTHER)).spec == edit
    await until_answer(lambda: is_idle(OTHER))
    report = await mailbox.get_redrive(OTHER)
    assert (report.status, report.moved + report.skipped) == ("completed", dead)
