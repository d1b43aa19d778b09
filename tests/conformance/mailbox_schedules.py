"""Schedules; a part of `MailboxConformance`."""

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.subscription import SubscriptionFilter
from tests.support.stores import message, receive_one

DAILY = ScheduleSpec("reports", "0 3 * * *", "Europe/Madrid", payload=b"\xff", headers={"kind": "a"})


class MailboxScheduleConformance:
    async def test_a_schedule_sends_its_message(self, mailbox: Mailbox) -> None:
        spec = ScheduleSpec(
            "reports",
            every_ms=86_400_000,
            payload=b"\xff",
            headers={"kind": "a"},
            content_type="a/b",
            sticky_key="k",
            priority=7,
        )
        report = await mailbox.set_schedule("daily", spec)
        assert (report.name, report.topic, report.every_ms, report.runs) == (
            "daily",
            "reports",
            86_400_000,
            0,
        )
        assert report.next_run is not None
        assert report.next_run > report.created_at
        await mailbox.run_schedule("daily")
        received = await receive_one(mailbox, "reports")
        assert (received.payload, received.content_type, received.priority) == (b"\xff", "a/b", 7)
        assert (received.attrs["kind"], received.attrs["schedule"]) == ("a", "daily")
        (listed,) = await mailbox.list_schedules()
        assert (listed.runs, listed.last_message_id) == (1, received.message_id)
        assert (report.last_result, listed.last_result) == (None, "in_flight")
        await received.reject("bad")
        assert (await mailbox.list_schedules())[0].last_result == "dead"
        await mailbox.purge_topic("reports")
        assert (await mailbox.list_schedules())[0].last_result == "settled"
        assert listed.last_run is not None
        assert str(received.attrs["scheduled_at"]) <= listed.last_run < report.next_run

    async def test_a_schedule_is_set_again_without_effect_and_changed(self, mailbox: Mailbox) -> None:
        first = await mailbox.set_schedule("daily", DAILY)
        assert (first.cron, first.timezone, first.payload_bytes) == ("0 3 * * *", "Europe/Madrid", 1)
        assert (await mailbox.set_schedule("daily", DAILY)).changed_at == first.changed_at
        changed = await mailbox.set_schedule("daily", ScheduleSpec("others", "0 4 * * *", priority=0))
        assert (changed.topic, changed.headers, changed.priority) == ("others", {}, 0)
        assert changed.created_at == first.created_at
        assert [each.name for each in await mailbox.list_schedules()] == ["daily"]
        await mailbox.delete_schedule("daily")
        assert await mailbox.list_schedules() == []

    async def test_a_worker_leaves_what_an_operator_changed_until_its_code_changes(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_schedule("daily", DAILY, from_code=True)
        await mailbox.set_schedule("daily", ScheduleSpec("reports", "0 4 * * *"))
        kept = await mailbox.set_schedule("daily", DAILY, from_code=True)
        assert (kept.cron, kept.from_code, kept.overridden) == ("0 4 * * *", True, True)
        newer = ScheduleSpec("reports", "0 5 * * *")
        changed = await mailbox.set_schedule("daily", newer, from_code=True)
        assert (changed.cron, changed.overridden) == ("0 5 * * *", False)

    async def test_a_schedule_is_paused_resumed_and_run_now(self, mailbox: Mailbox) -> None:
        await mailbox.set_schedule("daily", DAILY)
        paused = await mailbox.pause_schedule("daily")
        assert (paused.paused, paused.next_run) == (True, None)
        assert await mailbox.pause_schedule("daily") == paused
        sent = await mailbox.run_schedule("daily")
        received = await receive_one(mailbox, "reports")
        assert (received.message_id, sent.duplicate) == (sent.message_id, False)
        resumed = await mailbox.resume_schedule("daily")
        assert (resumed.paused, resumed.runs, resumed.last_message_id) == (False, 1, sent.message_id)
        assert resumed.next_run is not None
        again = await mailbox.run_schedule("daily")
        assert again.message_id != sent.message_id

    async def test_a_schedule_that_cannot_run_is_refused(self, mailbox: Mailbox) -> None:
        await mailbox.set_subscription("copies", SubscriptionFilter(("orders",)))
        for spec, error in (
            (ScheduleSpec("reports", "99 * * * *"), "not a cron expression"),
            (ScheduleSpec("reports", "0 0 31 2 *"), "not a cron expression"),
            (ScheduleSpec("reports", "* * * * *", "Europe/Nowhere"), "Unknown time zone"),
            (ScheduleSpec("reports"), "either a cron expression or an interval"),
            (ScheduleSpec("copies", "* * * * *"), "queue of subscription copies"),
        ):
            with pytest.raises(InvalidRequest, match=error):
                await mailbox.set_schedule("daily", spec)
        with pytest.raises(InvalidRequest, match="The name of a schedule must have no spaces"):
            await mailbox.set_schedule("a b", DAILY)
        for call in (
            mailbox.pause_schedule,
            mailbox.resume_schedule,
            mailbox.run_schedule,
            mailbox.delete_schedule,
        ):
            with pytest.raises(NotFound, match="has no schedule daily"):
                await call("daily")
        assert await mailbox.list_schedules() == []
        await mailbox.send_message(message(topic="reports"))
