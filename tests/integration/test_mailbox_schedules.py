"""The owner sends each tick of a schedule once, over restarts, pauses, jumps of the clock and full topics."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom import NewMessage, ScheduleSpec, open_mailbox, read_mailbox
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.testing import ManualClock, MemoryMailbox, open_memory_mailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import rfc3339
from postroom.domain.envelope.build import open_envelope
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import MessageSent
from postroom.domain.policy import TopicPolicy
from postroom.domain.schedule import ScheduleRan
from postroom.domain.settings import SettingsChanges
from tests.support.logs import capture_logs
from tests.support.namespaces import open_namespace
from tests.support.waiting import SECONDS, until_answer

MINUTE = 60
EVERY_MINUTE = ScheduleSpec("jobs", "* * * * *", missed="all")


def sent_ticks(mailbox: OwnedMailbox) -> list[str]:
    """Return the ticks of the messages that the log has, in its order."""
    events = [each.event for each in mailbox.engine.log.read()]
    return [
        open_envelope(each.envelope).extensions["scheduled_at"].decode()
        for each in events
        if isinstance(each, MessageSent) and each.topic == "jobs"
    ]


async def measured(mailbox: OwnedMailbox, name: str) -> dict[str, object]:
    """Return a metric of each schedule."""
    (metric,) = [each for each in await mailbox.measure() if each.name == f"postroom_schedule_{name}"]
    return {labels["schedule"]: value for labels, value in metric.samples}


@asynccontextmanager
async def owner(log: MemoryEventLog, clock: ManualClock) -> AsyncIterator[MemoryMailbox]:
    """Take a mailbox over, as another process does."""
    engine = MailboxEngine(log, clock)
    await engine.open("test")
    mailbox = MemoryMailbox(engine, clock)
    clock._mailboxes.append(mailbox)
    mailbox.run_schedules()
    try:
        yield mailbox
    finally:
        clock._mailboxes.remove(mailbox)
        await engine.close()


async def test_ticks_come_at_their_times_with_the_name_of_the_schedule() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_schedule("often", ScheduleSpec("jobs", every_ms=30_000))
        await mailbox.clock.advance(29)
        assert await mailbox.receive_messages("jobs") == []
        await mailbox.clock.advance(1)
        (received,) = await mailbox.receive_messages("jobs")
        assert received.attrs == {"schedule": "often", "scheduled_at": "2030-01-01T00:00:30.000000Z"}
        (report,) = await mailbox.list_schedules()
        assert (report.last_run, report.next_run) == (
            "2030-01-01T00:00:30.000000Z",
            "2030-01-01T00:01:00.000000Z",
        )


steps = st.lists(
    st.one_of(
        st.tuples(st.just("advance"), st.integers(0, 5 * MINUTE)),
        st.sampled_from(["restart", "pause", "resume", "snapshot", "run"]).map(lambda name: (name, 0)),
    ),
    max_size=15,
)


@settings(max_examples=30, deadline=None)
@given(steps, st.sampled_from(["* * * * *", "*/3 * * * *", "*/20 * * * * *"]))
def test_each_tick_is_sent_once_and_none_early_over_restarts_pauses_and_jumps(
    steps: list[tuple[str, int]], cron: str
) -> None:
    asyncio.run(_run(steps, ScheduleSpec("jobs", cron, missed="all")))


async def _run(steps: list[tuple[str, int]], spec: ScheduleSpec) -> None:
    log, clock = MemoryEventLog("main@local"), ManualClock()
    expected: list[str] = []
    begins: int | None = clock.wall()  # the time since which ticks count; None while it is paused
    step_us = {"* * * * *": 60, "*/3 * * * *": 180, "*/20 * * * * *": 20}[spec.cron or ""] * 1_000_000
    names = iter(steps)
    is_over = False
    while not is_over:
        async with owner(log, clock) as mailbox:
            if not mailbox.engine.mailbox.schedules:
                await mailbox.set_schedule("jobs", spec)
            await clock.advance(0)
            for name, seconds in names:
                if name == "restart":
                    break
                if name == "advance":
                    await clock.advance(seconds)
                    now = clock.wall()
                    if begins is not None:
                        first = (begins // step_us + 1) * step_us
                        expected += [str(rfc3339(each)) for each in range(first, now + 1, step_us)]
                        begins = now
                elif name == "pause":
                    await mailbox.pause_schedule("jobs")
                    begins = None
                elif name == "resume":
                    await mailbox.resume_schedule("jobs")
                    begins = clock.wall() if begins is None else begins
                elif name == "snapshot":
                    await mailbox.engine.take_snapshot()
                else:
                    await mailbox.run_schedule("jobs")
            else:
                is_over = True
    async with owner(log, clock) as mailbox:
        ran = [each.event for each in log.read() if isinstance(each.event, ScheduleRan)]
        assert all(each.tick <= each.at for each in ran)
        runs = sum(name == "run" for name, _ in steps)
        ticks = sent_ticks(mailbox)
        assert len(ticks) == len(ran) == mailbox.engine.mailbox.schedules["jobs"].runs
        assert len(ticks) == len(expected) + runs
        assert not Counter(expected) - Counter(ticks)


async def test_a_clock_that_jumps_by_a_year_sends_the_last_thousand_ticks_and_holds_up_nobody() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_topic_policy("jobs", TopicPolicy(shards=1))
        await mailbox.set_schedule("jobs", EVERY_MINUTE)
        advancing = asyncio.create_task(mailbox.clock.advance(365 * 86_400))
        async with asyncio.timeout(SECONDS):
            await mailbox.send_message(NewMessage(topic="others", payload=b"x"))
            await advancing
        now = datetime.fromtimestamp(mailbox.clock.wall() / 1e6, UTC)
        expected = [now - timedelta(minutes=number) for number in reversed(range(1_000))]
        assert sent_ticks(mailbox) == [f"{each:%Y-%m-%dT%H:%M:%S}.000000Z" for each in expected]
        (report,) = await mailbox.list_schedules()
        assert report.runs == 1_000


@pytest.mark.parametrize(("missed", "count"), [("skip", 0), ("last", 1), ("all", 3)])
async def test_what_was_missed_is_sent_as_the_schedule_says(missed: str, count: int) -> None:
    async with open_memory_mailbox() as mailbox:
        spec = ScheduleSpec("jobs", "0 * * * *", missed=missed)  # type: ignore[arg-type] # one of Missed
        await mailbox.set_schedule("jobs", spec)
        await mailbox.clock.advance(3 * 3_600 + 10 * MINUTE)
        assert len(sent_ticks(mailbox)) == count
        await mailbox.clock.advance(50 * MINUTE)
        assert len(sent_ticks(mailbox)) == count + 1


async def test_a_tick_waits_until_its_topic_has_room_and_others_do_not_wait_for_it() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_topic_policy("jobs", TopicPolicy(shards=1, shard_capacity=2))
        await mailbox.set_schedule("full", EVERY_MINUTE)
        await mailbox.set_schedule("other", ScheduleSpec("others", "* * * * *", missed="all"))
        with capture_logs() as logs:
            for _ in range(5):
                await mailbox.clock.advance(MINUTE)
        assert [each["schedule"] for each in logs if each["event"] == "schedule.failed"] == ["full"]
        assert await measured(mailbox, "late_seconds") == {"full": 2 * MINUTE, "other": 0}
        assert await measured(mailbox, "runs") == {"full": 2, "other": 5}
        assert len(await mailbox.receive_messages("others", max_messages=10)) == 5
        received = await mailbox.receive_messages("jobs", max_messages=10)
        assert len(received) == 2
        await mailbox.ack_messages([each.receipt for each in received])
        await mailbox.clock.advance(0)
        received += await mailbox.receive_messages("jobs", max_messages=10)
        assert [each.attrs["scheduled_at"] for each in received] == [
            f"2030-01-01T00:0{number}:00.000000Z" for number in range(1, 5)
        ]
        await mailbox.clock.advance(MINUTE)
        assert (await measured(mailbox, "late_seconds"))["full"] == MINUTE
        await mailbox.pause_schedule("full")
        assert (await measured(mailbox, "late_seconds"))["full"] == 0


async def test_a_tick_that_failed_is_tried_again_after_a_pause_which_grows() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_topic_policy("jobs", TopicPolicy(shards=1, shard_capacity=1))
        await mailbox.set_schedule("jobs", EVERY_MINUTE)
        await mailbox.clock.advance(3 * MINUTE)
        assert mailbox._runner is not None

        async def refusals() -> float:
            (metric,) = [each for each in await mailbox.measure() if each.name == "postroom_rejected"]
            return sum(value for _, value in metric.samples if isinstance(value, int))

        assert await mailbox._runner.send_due() == 1
        for pause in (2, 4, 8, 10, 10):
            before = await refusals()
            assert (await mailbox._runner.send_due(is_patient=True) or 0) > 0
            assert await refusals() == before
            assert await mailbox._runner.send_due() == pause
            assert await refusals() == before + 1


async def test_ticks_that_are_left_out_are_logged_when_a_later_one_is_sent() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_topic_policy("jobs", TopicPolicy(shards=1, shard_capacity=1))
        await mailbox.set_schedule("jobs", EVERY_MINUTE)
        with capture_logs() as logs:
            for minutes in (1_010, 10, 10):
                await mailbox.clock.advance(minutes * MINUTE)
        since = {each["since"] for each in logs if each["event"] == "schedule.ticks_left_out"}
        assert since == {"2030-01-01T00:01:00.000000Z"}
        assert sent_ticks(mailbox) == ["2030-01-01T00:11:00.000000Z"]


async def test_a_tick_that_is_refused_is_left_out_and_the_next_one_is_sent() -> None:
    async with open_memory_mailbox() as mailbox:
        await mailbox.set_schedule(
            "jobs", ScheduleSpec("jobs", "* * * * *", missed="all", payload=b"x" * 2_000)
        )
        await mailbox.set_settings(SettingsChanges({"frame_bytes": 1_024}))
        await mailbox.clock.advance(2 * MINUTE)
        assert sent_ticks(mailbox) == []
        await mailbox.set_settings(SettingsChanges({"frame_bytes": 10_000}))
        await mailbox.clock.advance(MINUTE)
        assert sent_ticks(mailbox) == ["2030-01-01T00:03:00.000000Z"]


async def test_a_schedule_goes_on_with_the_next_owner_of_a_store(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as mailbox:
        await mailbox.set_schedule("often", ScheduleSpec("jobs", every_ms=1_000, missed="all"))
    async with open_mailbox(store) as mailbox:

        async def has_sent() -> bool:
            return (await mailbox.list_schedules())[0].runs >= 2

        await until_answer(has_sent)
        ticks = sent_ticks(mailbox)
        assert len({*ticks}) == len(ticks)
        events = [each.event for each in mailbox.engine.log.read()]
        assert sum(isinstance(each, OwnershipTaken) for each in events) == 2
    with read_mailbox(store) as reader:
        (report,) = reader.list_schedules()
        assert report.runs >= 2
        assert report.next_run is not None


async def test_a_mailbox_in_amnesia_mode_has_schedules_and_forgets_their_runs() -> None:
    async with open_mailbox("memory:", amnesia=True) as mailbox:
        await mailbox.set_schedule("often", ScheduleSpec("jobs", every_ms=1_000))

        async def has_sent() -> bool:
            return (await mailbox.list_schedules())[0].runs >= 1

        await until_answer(has_sent)
        (received,) = await mailbox.receive_messages("jobs")
        assert received.attrs["schedule"] == "often"


async def test_without_schedules_nothing_is_polled() -> None:
    async with open_mailbox("memory:") as mailbox:
        assert "schedules" not in {each.get_name() for each in mailbox.engine.tasks}
        await mailbox.set_schedule("daily", ScheduleSpec("jobs", "0 3 * * *"))
        await mailbox.delete_schedule("daily")
        assert mailbox._runner is not None
        assert await mailbox._runner.send_due() is None


async def test_one_mailbox_of_a_namespace_has_a_schedule_so_that_each_tick_is_sent_once() -> None:
    names = [f"acme@{name}" for name in ("one", "two", "three")]
    async with open_namespace(*names) as namespace:
        for number in range(5):
            await namespace.set_schedule(f"job-{number}", ScheduleSpec("jobs", "0 3 * * *"))
        await namespace.set_schedule("job-0", ScheduleSpec("others", "0 4 * * *"))
        reports = await namespace.list_schedules()
        assert [each.name for each in reports] == [f"job-{number}" for number in range(5)]
        assert reports[0].topic == "others"
        sent = await namespace.run_schedule("job-0")
        (received,) = await namespace.receive_messages("others")
        assert received.message_id == sent.message_id
        await namespace.delete_schedule("job-0")
        assert len(await namespace.list_schedules()) == 4
