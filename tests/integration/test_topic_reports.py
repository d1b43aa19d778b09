"""Reports of topics and consumers, from the state and the latest events of the log."""

import os
from collections import Counter
from datetime import datetime
from pathlib import Path
from socket import gethostname

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.compose import open_mailbox
from postroom.application.cluster.namespace_merges import merge_topic_reports
from postroom.application.queries import describe_topic
from postroom.application.queries.mailbox_past import to_us
from postroom.application.workers.worker import Worker
from postroom.domain.errors import Forbidden
from postroom.domain.mailbox.counts import count_keys
from postroom.domain.message import IN_FLIGHT, READY
from postroom.domain.subscription import SubscriptionFilter
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.messages import message
from tests.support.stores import Place, memory_place, sqlite_place

HOUR_MS = 3_600_000
POLICIES = (
    {"ordered_keys": True},
    {"ordered_keys": True, "dead_letters_hold_keys": True, "max_attempts": 1},
    {"fair_keys": True},
    {"fair_keys": True, "max_in_flight_per_key": 1},
    {"fair_keys": True, "ordered_keys": True, "priorities": True},
)


async def handle(place: Place, wait_ms: int, work_ms: int) -> None:
    """Send a message, and receive and ack it after these times."""
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        place.clock.advance(wait_ms)
        (received,) = await mailbox.receive_messages("orders", consumer="one")
        place.clock.advance(work_ms)
        await received.ack()


async def test_messages_count_in_the_periods_in_which_they_were_sent_also_after_restarts(
    tmp_path: Path,
) -> None:
    place = sqlite_place(tmp_path)
    await handle(place, 1_000, 400)
    place.clock.advance(3 * 24 * HOUR_MS)
    await handle(place, 3_000, 200)
    place.clock.advance(2 * HOUR_MS)
    await handle(place, 2_000, 300)
    async with place.open() as mailbox:
        hour, day, week = (await mailbox.describe_topic("orders")).periods
    assert [each.sent for each in (hour, day, week)] == [1, 2, 3]
    assert (hour.queue_p50_ms, hour.work_p50_ms, hour.total_p50_ms) == (2_000, 300, 2_300)
    assert (day.queue_p50_ms, day.queue_p95_ms) == (2_000, 3_000)
    assert (week.queue_p50_ms, week.work_p50_ms, week.work_p99_ms) == (2_000, 300, 400)
    assert [each.seconds for each in (hour, day, week)] == [3_600, 86_400, 7 * 86_400]


async def test_messages_count_in_the_step_in_which_they_were_sent() -> None:
    place = memory_place()
    for minutes, work_ms in ((0, 100), (0, 300), (3, 700)):
        place.clock.advance(minutes * 60_000)
        await handle(place, 0, work_ms)
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await (await mailbox.receive_messages("orders", consumer="one"))[0].reject("bad")
        hour, day, week = (await mailbox.describe_topic("orders")).periods
    assert [each.step_ms for each in (hour, day, week)] == [60_000, 1_800_000, 10_800_000]
    first, last = hour.steps
    assert (first.sent, first.acked, first.failed, first.dead) == (2, 2, 0, 0)
    assert (first.total_p50_ms, first.total_p95_ms, first.total_p99_ms) == (100, 300, 300)
    assert (last.sent, last.acked, last.failed, last.dead) == (2, 1, 1, 1)
    assert last.total_p99_ms == 700
    for period in (day, week):
        (step,) = period.steps
        assert (step.sent, step.acked, step.failed, step.dead) == (4, 3, 1, 1)
        assert step.at <= first.at


@given(
    st.lists(st.tuples(st.integers(0, 20 * HOUR_MS), st.booleans()), max_size=12), st.integers(0, 3 * HOUR_MS)
)
async def test_the_steps_of_a_period_add_up_to_it(sends: list[tuple[int, bool]], after_ms: int) -> None:
    place = memory_place()
    async with place.open() as mailbox:
        for pause_ms, is_acked in sends:
            place.clock.advance(pause_ms)
            await mailbox.send_message(message(topic="one" if is_acked else "orders"))
            if is_acked:
                await (await mailbox.receive_messages("one"))[0].ack()
        place.clock.advance(after_ms)
        for topic in ("one", "orders"):
            for period in (await mailbox.describe_topic(topic)).periods:
                assert sum(each.sent for each in period.steps) == period.sent
                assert sum(each.acked for each in period.steps) == period.acked
                starts = [to_us(datetime.fromisoformat(each.at)) for each in period.steps]
                assert starts == sorted(set(starts))
                assert all(each % (period.step_ms * 1_000) == 0 for each in starts)


async def test_a_namespace_adds_the_steps_of_its_mailboxes() -> None:
    reports = []
    for count in (1, 2):
        place = memory_place()
        for _ in range(count):
            await handle(place, 0, 100 * count)
        async with place.open() as mailbox:
            reports.append(await mailbox.describe_topic("orders"))
    merged = merge_topic_reports(reports)
    (step,) = merged.periods[0].steps
    assert (step.sent, step.acked, step.total_p50_ms) == (3, 3, 200)
    assert (merged.periods[0].sent, merged.periods[0].step_ms) == (3, 60_000)


async def test_a_report_that_reads_less_than_its_periods_says_since_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(describe_topic, "MAX_EVENTS", 3)
    place = memory_place()
    async with place.open() as mailbox:
        for _ in range(5):
            place.clock.advance(1_000)
            await mailbox.send_message(message())
        place.clock.advance(10_000)
        report = await mailbox.describe_topic("orders")
        week = report.periods[-1]
        assert (report.events, week.is_whole, week.sent) == (3, False, 3)
        assert week.seconds == 12
        place.clock.advance(HOUR_MS)
        hour, day, _ = (await mailbox.describe_topic("orders")).periods
        assert (hour.is_whole, hour.sent, day.is_whole, day.sent) == (True, 0, False, 3)
        received = await mailbox.receive_messages("orders", consumer="one")
        assert len(received) == 5
        consumers = await mailbox.list_consumers()
        assert [(each.topic, each.in_flight) for each in consumers] == [("", 5)]  # a commit is read whole
        assert (await mailbox.describe_topic("orders")).consumers == []


async def test_timeouts_are_failures_and_releases_are_none() -> None:
    place = memory_place()
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        (received,) = await mailbox.receive_messages("orders", consumer="one")
        await received.release()
        assert await mailbox.receive_messages("orders", consumer="one", visibility_ms=1_000)
        place.clock.advance(1_001)
        assert await mailbox.receive_messages("orders", consumer="two")
        one, two = sorted(await mailbox.list_consumers(), key=lambda each: each.consumer)
        assert (one.received, one.failed, one.in_flight) == (2, 1, 0)
        assert one.last_error == "The visibility timeout ended."
        assert (two.received, two.failed, two.in_flight) == (1, 0, 1)
        assert (await mailbox.describe_topic("orders")).periods[0].failed == 1


async def test_a_capability_of_some_topics_sees_their_consumers_and_subscriptions_only() -> None:
    async with controlled_mailbox() as place:
        for name in ("orders", "secret"):
            await place.mailbox.set_subscription(f"{name}.copies", SubscriptionFilter(("or*", "sec*")))
            await place.mailbox.send_message(message(topic=name))
            await place.mailbox.receive_messages(name, consumer="one")
        mailbox = await mailbox_of(place, topics=["orders*"])
        assert [each.topic for each in await mailbox.list_consumers()] == ["orders"]
        assert (await mailbox.describe_topic("orders")).subscriptions == ["orders.copies"]
        with pytest.raises(Forbidden):
            await mailbox.describe_topic("secret")


async def test_a_worker_tells_its_host_and_its_process() -> None:
    worker = Worker("shop")

    @worker.consumer("orders")
    def ship(payload: bytes) -> None:
        pass

    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(message())
        await worker.run(mailbox, once=True)
        (consumer,) = await mailbox.list_consumers()
    assert consumer.consumer == f"shop/{ship.__qualname__}@{gethostname()}:{os.getpid()}"
    assert (consumer.received, consumer.acked) == (1, 1)


@given(
    policy=st.sampled_from(POLICIES),
    keys=st.lists(st.sampled_from(["a", "b", "c", None]), max_size=12),
    steps=st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["ack", "nack", "keep"])), max_size=4),
)
async def test_keys_have_as_many_messages_as_a_look_at_each_counts(
    policy: dict[str, int], keys: list[str | None], steps: list[tuple[int, str]]
) -> None:
    async with memory_place().open() as mailbox:
        await mailbox.set_topic_policy("orders", policy)
        for key in keys:
            await mailbox.send_message(message(sticky_key=key))
        for count, outcome in steps:
            for each in await mailbox.receive_messages("orders", max_messages=count):
                if outcome == "ack":
                    await each.ack()
                elif outcome == "nack":
                    await each.nack(delay_ms=0)
        state = mailbox.engine.mailbox
        counted = count_keys(state, "orders", 100)
        messages = [each for each in state.messages.values() if each.sticky_key is not None]
        waiting = Counter(each.sticky_key for each in messages if each.status == READY)
        in_flight = Counter(each.sticky_key for each in messages if each.status == IN_FLIGHT)
        assert Counter({each.key: each.waiting for each in counted if each.waiting}) == waiting
        assert Counter({each.key: each.in_flight for each in counted if each.in_flight}) == in_flight
        topic = state.topics.get("orders")
        held = 0 if topic is None else topic.held_keys
        assert sum(each.is_held for each in counted) == held
