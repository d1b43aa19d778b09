"""Schedules of workers: registered when a worker starts, and handled by the decorated function."""

from typing import Any

import pytest

from postroom import Forbidden, InvalidRequest, ReceivedMessage, Retry, ScheduleSpec, Worker, every
from postroom.adapters.compose.testing import open_memory_mailbox
from postroom.domain.capability.rights import Right
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.waiting import SECONDS, until
from tests.support.worker_runs import running

MINUTE = 60


def worker_of(when: Any, **options: Any) -> tuple[Worker, list[str]]:
    worker, handled = Worker("shop"), list[str]()

    @worker.schedule(when, **options)
    async def report(message: ReceivedMessage) -> None:
        handled.append(str(message.attrs["scheduled_at"])[11:19])

    return worker, handled


async def test_the_function_handles_the_messages_of_its_schedule() -> None:
    async with open_memory_mailbox() as mailbox:
        worker, handled = worker_of("*/5 * * * *", tz="Europe/Madrid", missed="all", retry=Retry(attempts=2))
        assert (await worker.run(mailbox, once=True)).handled == 0
        (report,) = await mailbox.list_schedules()
        assert (report.name, report.topic, report.cron, report.timezone, report.from_code) == (
            *("shop.report", "shop.report"),
            *("*/5 * * * *", "Europe/Madrid", True),
        )
        await mailbox.clock.advance(11 * MINUTE)
        await worker.run(mailbox, once=True)
        assert handled == ["00:05:00", "00:10:00"]


async def test_a_function_without_parameters_is_called_without_the_message() -> None:
    async with open_memory_mailbox() as mailbox:
        worker, called = Worker("shop"), list[str]()

        @worker.schedule(every("1m"))
        async def coroutine() -> None:
            called.append("coroutine")

        @worker.schedule(every("1m"), name="thread")
        def function() -> None:
            called.append("function")

        await worker.run(mailbox, once=True)
        await mailbox.clock.advance(MINUTE)
        assert (await worker.run(mailbox, once=True)).handled == 2
        assert sorted(called) == ["coroutine", "function"]


async def test_several_workers_share_the_ticks_of_an_interval() -> None:
    async with open_memory_mailbox() as mailbox:
        one, handled = worker_of(every("30s"), missed="all")
        other, also = worker_of(every("30s"), missed="all")
        async with running(one, mailbox), running(other, mailbox):
            await until(lambda: bool(mailbox.engine.mailbox.schedules), SECONDS)
            await mailbox.clock.advance(2 * MINUTE)
            await until(lambda: len(handled + also) == 4, SECONDS)
        assert sorted(handled + also) == ["00:00:30", "00:01:00", "00:01:30", "00:02:00"]


async def test_what_an_operator_changed_or_paused_stays_until_the_code_changes() -> None:
    async with open_memory_mailbox() as mailbox:
        await worker_of("0 3 * * *")[0].run(mailbox, once=True)
        await mailbox.set_schedule("shop.report", ScheduleSpec("shop.report", "0 4 * * *"))
        await mailbox.pause_schedule("shop.report")
        await worker_of("0 3 * * *")[0].run(mailbox, once=True)
        (report,) = await mailbox.list_schedules()
        assert (report.cron, report.paused, report.overridden) == ("0 4 * * *", True, True)
        await worker_of("0 5 * * *")[0].run(mailbox, once=True)
        (report,) = await mailbox.list_schedules()
        assert (report.cron, report.paused, report.overridden) == ("0 5 * * *", True, False)


async def test_a_token_that_may_not_create_schedules_uses_those_that_exist() -> None:
    async with controlled_mailbox() as place:
        rights = [Right.RECV, Right.ACK, Right.NACK, Right.READ_HEADERS]
        mailbox = await mailbox_of(place, operations=rights, topics=["shop.*"])
        worker, _ = worker_of("0 3 * * *", tz="Europe/Madrid")
        command = (
            "postroom schedule set shop.report shop.report --cron '0 3 \\* \\* \\*' --timezone Europe/Madrid"
        )
        with pytest.raises(Forbidden, match=command):
            await worker.run(mailbox, once=True)
        await place.mailbox.set_schedule("shop.report", ScheduleSpec("shop.report", "0 9 * * *"))
        await worker.run(mailbox, once=True)
        assert (await place.mailbox.list_schedules())[0].cron == "0 9 * * *"


async def test_an_expression_that_does_not_exist_stops_the_worker_at_its_start() -> None:
    async with open_memory_mailbox() as mailbox:
        for when, tz, error in (
            ("99 * * * *", "UTC", "Bad minute"),
            ("* * * * *", "Nowhere", "Unknown time zone"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                await worker_of(when, tz=tz)[0].run(mailbox, once=True)


@pytest.mark.parametrize(
    ("when", "options", "error"),
    [
        (30, {}, "A schedule is a cron expression or every"),
        (None, {}, "not of type NoneType"),
        ("", {}, "cron must have at least 1 character"),
        ("* * * * *", {"tz": None}, "timezone must be of type str"),
        (every("5s"), {"tz": "Europe/Madrid"}, "An interval has no time zone"),
        ("* * * * *", {"missed": "none"}, "missed must be one of"),
        ("* * * * *", {"payload": "text"}, "payload must be of type bytes"),
        ("* * * * *", {"headers": []}, "must be of type dict"),
        ("* * * * *", {"name": "a b"}, "name of a schedule"),
        ("* * * * *", {"topic": "a b"}, "Topic"),
        ("* * * * *", {"concurrency": 0}, "concurrency"),
    ],
)
def test_an_argument_that_is_malformed_is_refused_when_it_is_registered(
    when: Any, options: dict[str, Any], error: str
) -> None:
    with pytest.raises(InvalidRequest, match=error):
        worker_of(when, **options)


@pytest.mark.parametrize("interval", ["999ms", "0", "-1s", "often", 5, None])
def test_an_interval_is_a_second_at_least(interval: Any) -> None:
    with pytest.raises(InvalidRequest, match="interval"):
        every(interval)


def test_a_worker_has_one_schedule_of_a_name() -> None:
    worker, _ = worker_of("* * * * *", name="nightly")
    with pytest.raises(InvalidRequest, match="has a schedule nightly already"):
        worker.schedule("* * * * *", name="nightly", topic="other")(print)
