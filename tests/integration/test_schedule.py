"""Schedules send one message a tick, however many processes there are and whatever their clocks do."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from postroom.adapters.compose.schedule import ScheduleSettings, make_scheduler, make_schedules
from postroom.adapters.compose.testing import open_memory_mailbox
from postroom.application.cron import cron_ticks
from postroom.application.messages import NewMessage, Sent
from postroom.application.schedule import Missed, Schedule, Scheduler
from postroom.domain.errors import IdempotencyConflict, InvalidRequest, Unavailable

START = datetime(2026, 1, 1, tzinfo=UTC)
Send = Callable[[NewMessage], Awaitable[Sent]]


class Clock:
    """A clock that moves when somebody sleeps, and may jump."""

    def __init__(self) -> None:
        self.time = START
        self.jumps: list[timedelta] = []

    async def now(self) -> datetime:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)
        if self.jumps:
            self.time += self.jumps.pop(0)
        await asyncio.get_running_loop().run_in_executor(None, lambda: None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(asyncio, "sleep", clock.sleep)
    return clock


def every_minute(missed: Missed = "last") -> Schedule:
    return Schedule("job", cron_ticks("* * * * *"), NewMessage(topic="jobs", payload=b"x"), missed)


async def run(
    clock: Clock, send: Send, until: Callable[[], bool], count: int = 1, missed: Missed = "last"
) -> None:
    """Run schedulers until a condition holds."""
    schedulers = [Scheduler(send, [every_minute(missed)], now=clock.now) for _ in range(count)]
    tasks = [asyncio.create_task(each.run()) for each in schedulers]
    async with asyncio.timeout(240):
        while not until():
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    for each in schedulers:
        each.stop()
    await asyncio.gather(*tasks)


class Outgoing:
    """What was sent; a message id is accepted once."""

    def __init__(self, *failures: Exception) -> None:
        self.ids: list[str] = []
        self.failures = list(failures)

    async def send(self, message: NewMessage) -> Sent:
        if self.failures:
            raise self.failures.pop(0)
        assert message.message_id is not None
        duplicate = message.message_id in self.ids
        if not duplicate:
            self.ids.append(message.message_id)
        return Sent(message.message_id, duplicate)


async def test_every_tick_is_sent_once_by_any_number_of_schedulers(clock: Clock) -> None:
    outgoing = Outgoing()
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 5, count=3)
    assert outgoing.ids[:3] == [f"job@2026-01-01T00:0{n}:00Z" for n in (1, 2, 3)]


async def test_a_jump_ahead_sends_only_the_last_missed_tick(clock: Clock) -> None:
    clock.jumps = [timedelta(0), timedelta(hours=2)]
    outgoing = Outgoing()
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 2)
    assert outgoing.ids[:2] == ["job@2026-01-01T02:01:00Z", "job@2026-01-01T02:02:00Z"]


async def test_a_jump_ahead_by_decades_does_not_compute_each_tick_in_between(clock: Clock) -> None:
    next_tick = cron_ticks("* * * * *")
    computed = 0

    def count(after: datetime) -> datetime:
        nonlocal computed
        computed += 1
        assert computed < 1_000
        return next_tick(after)

    clock.jumps = [timedelta(0), timedelta(days=20_000)]
    outgoing = Outgoing()
    scheduler = Scheduler(outgoing.send, [every_minute()._replace(next_tick=count)], now=clock.now)
    running = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(240):
        while not outgoing.ids and not running.done():
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    scheduler.stop()
    await running
    assert outgoing.ids[0] == "job@2080-10-04T00:01:00Z"


async def test_a_jump_back_sends_no_tick_twice(clock: Clock) -> None:
    clock.jumps = [timedelta(0)] * 6 + [timedelta(minutes=-2)]
    outgoing = Outgoing()
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 5)
    assert outgoing.ids[:5] == [f"job@2026-01-01T00:0{n}:00Z" for n in range(1, 6)]


async def test_a_jump_ahead_and_back_is_followed_by_the_ticks_of_the_time_it_is(clock: Clock) -> None:
    clock.jumps = [timedelta(0), timedelta(hours=1), timedelta(0), timedelta(hours=-1)]
    outgoing = Outgoing()
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 6)
    ahead = [n for n, id_ in enumerate(outgoing.ids) if "T01:" in id_]
    assert ahead
    assert any("T00:" in id_ for id_ in outgoing.ids[ahead[0] :])


@pytest.mark.parametrize(
    ("missed", "sent"), [("last", ["10", "15"]), ("all", ["05", "10", "15"]), ("none", ["15", "20"])]
)
async def test_the_ticks_of_an_outage_are_sent_as_the_schedule_says(
    clock: Clock, missed: Missed, sent: list[str]
) -> None:
    outages = [timedelta(minutes=12)]

    async def now() -> datetime:
        if clock.time > START and outages:
            clock.time = START + outages.pop()
            raise Unavailable("down")
        return clock.time

    outgoing = Outgoing()
    schedule = every_minute(missed)._replace(next_tick=cron_ticks("*/5 * * * *"))
    scheduler = Scheduler(outgoing.send, [schedule], now=now)
    running = asyncio.create_task(scheduler.run())
    async with asyncio.timeout(240):
        while len(outgoing.ids) < len(sent):
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
    scheduler.stop()
    await running
    assert [id_[-6:-4] for id_ in outgoing.ids[: len(sent)]] == sent


async def test_ticks_follow_the_log_time_of_the_owner_and_not_the_wall_clock() -> None:
    sent: list[str] = []
    async with open_memory_mailbox() as mailbox:
        scheduler = make_scheduler(mailbox, make_schedules({"job": ScheduleSettings("* * * * * *", "jobs")}))
        running = asyncio.create_task(scheduler.run())
        began = datetime.fromisoformat((await mailbox.get_backlog()).as_of)
        async with asyncio.timeout(240):
            while not sent:
                await mailbox.clock.advance(1)
                await asyncio.get_running_loop().run_in_executor(None, lambda: None)
                sent = (
                    [each.message_id for each in await mailbox.receive_messages("jobs")]
                    if scheduler.sent
                    else []
                )
        ended = datetime.fromisoformat((await mailbox.get_backlog()).as_of)
        scheduler.stop()
        await running
    tick = datetime.fromisoformat(sent[0].partition("@")[2])
    assert began - timedelta(seconds=1) <= tick <= ended


async def test_a_tick_is_sent_after_an_outage(clock: Clock) -> None:
    outgoing = Outgoing(Unavailable("down"), Unavailable("down"))
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 1)
    assert outgoing.ids[0] == "job@2026-01-01T00:01:00Z"


async def test_a_tick_that_was_sent_with_another_payload_is_left_alone(clock: Clock) -> None:
    outgoing = Outgoing(IdempotencyConflict("differs"))
    await run(clock, outgoing.send, lambda: len(outgoing.ids) >= 1)
    assert outgoing.ids[0] == "job@2026-01-01T00:02:00Z"


@pytest.mark.parametrize(
    ("expression", "timezone"),
    [("", "UTC"), ("* * * *", "UTC"), ("* * 31 2 *", "UTC"), ("x * * * *", "UTC"), ("* * * * *", "Mars")],
)
def test_what_is_no_schedule_is_refused(expression: str, timezone: str) -> None:
    with pytest.raises(InvalidRequest, match=r"cron expression|time zone"):
        cron_ticks(expression, timezone)


@pytest.mark.parametrize("settings", [{"topic": "two words"}, {"topic": "jobs", "ttl_seconds": -1}])
def test_a_schedule_whose_message_is_invalid_is_refused_at_the_start(settings: dict[str, Any]) -> None:
    schedules = {"job": ScheduleSettings("* * * * *", **settings)}
    with pytest.raises(InvalidRequest, match="Schedule job: "):
        make_schedules(schedules)


def test_a_time_that_the_change_of_clocks_omits_is_not_left_out() -> None:
    next_tick = cron_ticks("30 2 * * *", "Europe/Berlin")
    ticks, tick = [], datetime(2026, 3, 28, tzinfo=UTC)
    for _ in range(3):
        tick = next_tick(tick)
        ticks.append(tick.astimezone(UTC))
    assert [each.day for each in ticks] == [28, 29, 30]
