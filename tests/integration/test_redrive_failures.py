"""Redrive jobs go on when what they need fails for a while, and only then."""

import asyncio
import threading
from collections import Counter
from collections.abc import Collection, Iterable

import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.messages import NewMessage
from postroom.application.redrive import jobs, selection
from postroom.domain.capability.rights import Right
from postroom.domain.errors import BrokenLog, PostroomError, Unauthenticated, Unavailable
from postroom.domain.message import MessageRedriven
from postroom.domain.names import message_stream
from postroom.domain.record import Record
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.redrives import NAME, POLICY, add_dead_letters, dead_ids, ended, owned
from tests.support.waiting import SECONDS, until_answer

IDS = [f"m{number}" for number in range(8)]


class FailingLog(MemoryEventLog):
    """A log whose reads fail when a test says so."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.failures = 0
        self.broken_streams: set[bytes] = set()

    def at_positions(
        self, positions: Iterable[int], optional: Collection[int] = (), *, envelopes: bool = True
    ) -> dict[int, Record]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("The database is down.")
        return super().at_positions(positions, optional, envelopes=envelopes)

    def read_stream(self, stream: bytes) -> list[Record]:
        if stream in self.broken_streams:
            raise BrokenLog("The log was altered.", 1)
        return super().read_stream(stream)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "RETRY_SECONDS", 0.01)


@pytest.mark.parametrize("chunk", [2, 100])
async def test_a_log_that_cannot_be_read_for_a_while_has_a_job_leave_nothing_out(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "CHUNK", chunk)
    monkeypatch.setattr(jobs, "CHUNK", chunk)
    log = FailingLog()
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec(text="orders", rate=1_000))
    async with owned(log) as mailbox:
        log.failures = 2
        report = await ended(mailbox, job)
        assert (report.status, report.moved, log.failures) == ("completed", len(IDS), 0)
        assert await dead_ids(mailbox) == []


async def test_a_job_that_fails_again_and_again_holds_up_no_other() -> None:
    log = FailingLog()
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, IDS)
        first = await ended(mailbox, await mailbox.start_redrive(RedriveSpec(limit=4)))
        log.broken_streams.add(message_stream(NAME, first.job_id))
        await mailbox.change_redrive(first.job_id, "undo")
        second = await ended(mailbox, await mailbox.start_redrive(RedriveSpec()))
        assert (second.status, second.moved) == ("completed", 4)
        assert (await mailbox.get_redrive(first.job_id)).status == "undoing"
        log.broken_streams.clear()
        assert (await ended(mailbox, first)).restored == 4


async def test_an_owner_that_was_replaced_in_the_middle_of_a_job_changes_nothing_more() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as old:
        await add_dead_letters(old, IDS)
        job = await old.start_redrive(RedriveSpec(rate=20))

        async def has_begun() -> bool:
            return (await old.get_redrive(job.job_id)).moved > 0

        await until_answer(has_begun)
        async with owned(log) as new:
            report = await ended(new, job)
            assert (report.status, report.moved) == ("completed", len(IDS))
            with pytest.raises(PostroomError):
                await old.send_message(NewMessage(topic="orders", payload=b"x"))
        changes = Counter(event.stream for _, event in log.replay() if isinstance(event, MessageRedriven))
        assert changes == Counter(message_stream(NAME, each) for each in IDS)


async def test_a_job_outlasts_the_capability_that_started_it_which_then_changes_it_no_more() -> None:
    async with controlled_mailbox() as place:
        await place.mailbox.set_topic_policy("orders", POLICY)
        await add_dead_letters(place.mailbox, IDS)
        mailbox = await mailbox_of(place, operations=(Right.REDRIVE,), lifetime_ms=60_000)
        job = await mailbox.start_redrive(RedriveSpec(rate=20))
        await place.clock.advance(61)
        with pytest.raises(Unauthenticated):
            await mailbox.change_redrive(job.job_id, "cancel")

        async def is_done() -> bool:
            return not (await place.mailbox.get_redrive(job.job_id)).is_active

        await until_answer(is_done)
        assert (await place.mailbox.get_redrive(job.job_id)).moved == len(IDS)


async def test_a_preview_of_many_dead_letters_lets_the_mailbox_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CHUNK", 1)
    async with owned(MemoryEventLog(NAME), is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        preview = asyncio.create_task(mailbox.preview_redrive(RedriveSpec()))
        turns = 0
        while not preview.done():
            turns += 1
            await asyncio.sleep(0)
        assert (await preview).matched == len(IDS)
        assert turns >= len(IDS)


async def test_the_mailbox_goes_on_while_large_bodies_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gone_on = threading.Event()
    monkeypatch.setattr(RedriveSpec, "covers_content", lambda *_: has_gone_on.wait(SECONDS))
    async with owned(MemoryEventLog(NAME), is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        preview = asyncio.create_task(mailbox.preview_redrive(RedriveSpec(match="m1")))
        await mailbox.send_message(NewMessage(topic="others", payload=b"x"))
        has_gone_on.set()
        assert (await preview).matched == len(IDS)


async def test_a_job_goes_on_and_is_undone_though_retention_removed_the_log_up_to_its_messages() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec())
        await mailbox.change_redrive(job.job_id, "pause")
    async with owned(log) as mailbox:
        purge = RedriveSpec(action="purge", message_ids=tuple(IDS[:4]))
        purged = await ended(mailbox, await mailbox.start_redrive(purge))
        first = mailbox.engine.mailbox.position
        assert await mailbox.delete_old_events(mailbox.engine.now()) > 0
        assert mailbox.engine.mailbox.position > first
    async with owned(log) as mailbox:
        await mailbox.change_redrive(job.job_id, "resume")
        report = await ended(mailbox, job)
        await mailbox.change_redrive(job.job_id, "undo")
        assert (await ended(mailbox, job)).restored == report.moved
        again = await ended(mailbox, await mailbox.start_redrive(RedriveSpec()))
        assert (again.status, again.moved) == ("completed", 4)
        received = await mailbox.receive_messages("orders", max_messages=8)
        await mailbox.ack_messages([each.receipt for each in received])
        assert await mailbox.delete_old_events(mailbox.engine.now()) > 0
    async with owned(log) as mailbox:
        for each in (job, purged, again):
            assert (await mailbox.list_redrive_messages(each.job_id)).items == ()
        await mailbox.change_redrive(again.job_id, "undo")
        report = await ended(mailbox, again)
        assert (report.status, report.restored, report.retained) == ("undone", 0, 4)
