"""Topics and consumers; a part of `MailboxConformance`."""

import asyncio

import pytest
from msgspec.structs import replace

from postroom.application.operations.mailbox import Mailbox
from postroom.application.worker_reports import HandlerState, WorkerState
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.counts import KeyCount
from postroom.domain.subscription import SubscriptionFilter
from tests.support.stores import message
from tests.support.waiting import until_answer

ID = "0199d3a0-0000-4000-8000-000000000001"
WEEK_MS = 7 * 86_400_000


class MailboxTopicConformance:
    async def test_a_topic_is_described_with_its_policy_its_consumers_and_what_happened(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", {"max_attempts": 1})
        for _ in range(4):
            await mailbox.send_message(message())
        one, two, _ = await mailbox.receive_messages("orders", max_messages=3, consumer="ship@host:1")
        await one.ack()
        await two.nack(reason="no such customer")
        report = await mailbox.describe_topic("orders")
        topic = report.summary
        assert (topic.topic, topic.ready, topic.in_flight, topic.dead) == ("orders", 1, 1, 1)
        assert report.policy == await mailbox.get_topic_policy("orders")
        assert (report.sections["max_attempts"], report.sections["shards"]) == ("orders", "policy")
        assert [each.period_ms for each in report.periods] == [3_600_000, 86_400_000, WEEK_MS]
        for period in report.periods:
            assert (period.sent, period.received, period.acked) == (4, 3, 1)
            assert (period.failed, period.dead, period.is_whole) == (1, 1, True)
            assert period.work_p50_ms == period.work_p99_ms is not None
            assert period.queue_p95_ms is not None
            assert sum(each.sent for each in period.steps) == 4
        (consumer,) = report.consumers
        assert (consumer.consumer, consumer.topic, consumer.in_flight) == ("ship@host:1", "orders", 1)
        assert (consumer.received, consumer.acked, consumer.failed) == (3, 1, 1)
        assert consumer.last_error == "no such customer"
        assert consumer.in_flight_since is not None
        assert report.events >= 4
        assert consumer in await mailbox.list_consumers()

    async def test_a_worker_is_listed_as_it_reported_last_until_it_ends(self, mailbox: Mailbox) -> None:
        handler = HandlerState("orders.*", "ship", "shop/ship@host-1:7", 4, 2, 10, 1)
        worker = WorkerState("shop", "host-1", 7, "2026.11", "0.1.0", 90_000, (handler,))
        await mailbox.report_worker(ID, worker)
        await mailbox.report_worker(ID, replace(worker, handlers=(replace(handler, in_use=3),)))
        (report,) = await mailbox.list_workers()
        assert (report.id, report.name, report.host, report.process) == (ID, "shop", "host-1", 7)
        assert (report.version, report.postroom_version) == ("2026.11", "0.1.0")
        assert report.handlers == [replace(handler, in_use=3)]
        assert not report.is_stale
        for wrong in (replace(worker, name=""), replace(worker, host="\ud800"), replace(worker, process=-1)):
            with pytest.raises(InvalidRequest):
                await mailbox.report_worker(ID, wrong)
        await mailbox.report_worker(ID, worker, ended=True)
        assert await mailbox.list_workers() == []

    async def test_a_topic_that_does_not_exist_is_described_as_empty(self, mailbox: Mailbox) -> None:
        await mailbox.set_subscription("copies", SubscriptionFilter(("or*",)))
        report = await mailbox.describe_topic("orders")
        assert (report.summary.ready, report.consumers, report.keys) == (0, [], [])
        assert report.subscriptions == ["copies"]
        assert [each.sent for each in report.periods] == [0, 0, 0]
        assert report.periods[0].total_p95_ms is None
        assert await mailbox.list_consumers() == []

    async def test_keys_of_a_topic_are_listed_those_that_a_dead_letter_holds_first(
        self, mailbox: Mailbox
    ) -> None:
        changes = {"ordered_keys": True, "dead_letters_hold_keys": True, "max_attempts": 1}
        await mailbox.set_topic_policy("steps", changes)
        for key in ("a", "a", "b", "b", "b"):
            await mailbox.send_message(message(topic="steps", sticky_key=key))
        received = await mailbox.receive_messages("steps")
        held = next(each for each in received if each.ordered_key == "a")
        await held.nack(reason="bad")
        assert (await mailbox.describe_topic("steps")).keys == [
            KeyCount("a", 1, 0, True, False),
            KeyCount("b", 2, 1, False, False),
        ]

    async def test_receivers_that_wait_are_listed(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message(topic="others"))
        receiving = asyncio.create_task(
            mailbox.receive_messages("orders", wait_ms=60_000, consumer="patient")
        )

        async def is_listed() -> bool:
            topic = (await mailbox.describe_topic("orders")).summary.receivers > 0
            consumers = await mailbox.list_consumers()
            return topic and any(each.consumer == "patient" and each.receivers for each in consumers)

        await until_answer(is_listed)
        await mailbox.send_message(message())
        (received,) = await receiving
        assert received.topic == "orders"
        assert (await mailbox.describe_topic("orders")).summary.receivers == 0
