"""What is measured, without servers."""

from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.prometheus.text import write_metrics
from postroom.application import metrics as mailbox_metrics
from postroom.application.messages import NewMessage
from postroom.application.metrics import Metric, Progress, counter, histogram, merge, new_histogram
from postroom.application.service import SurfaceMetrics
from postroom.domain.errors import InvalidRequest, StaleReceipt, Unavailable
from postroom.domain.policy import TopicPolicy
from tests.support.waiting import until

ONE_SHARD = TopicPolicy(shards=1, visibility_ms=250, shard_capacity=4)


async def values(mailbox: OwnedMailbox, name: str) -> dict[str, Any]:
    """Return the samples of a metric by their labels."""
    (metric,) = [each for each in await mailbox.measure() if each.name == f"postroom_{name}"]
    return {",".join(labels.values()): value for labels, value in metric.samples}


async def test_latencies_are_counted_wherever_a_call_comes_from() -> None:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.receive_messages("orders")  # delivers nothing
        await mailbox.send_batch(
            [NewMessage(topic="orders", payload=b"1"), NewMessage(topic="orders", payload=b"2")]
        )
        for message in await mailbox.receive_messages("orders"):
            await message.ack()
        counts = {
            name: sum((await values(mailbox, f"{name}_seconds"))[""].counts) for name in ("enqueue", "ack")
        }
        assert counts == {"enqueue": 1, "ack": 2}
        assert sum((await values(mailbox, "dequeue_seconds"))[""].counts) == 1
        batches = (await values(mailbox, "commit_records"))[""]
        assert sum(batches.counts) == sum((await values(mailbox, "commit_seconds"))[""].counts) > 0


async def test_the_state_of_shards_and_topics_is_measured() -> None:
    async with open_mailbox("memory:", default_policy=ONE_SHARD) as mailbox:
        await mailbox.send_batch([NewMessage(topic="orders", payload=b"") for _ in range(6)])
        await mailbox.receive_messages("orders", max_messages=1, visibility_ms=60_000)
        await mailbox.pause_topic("orders")
        assert await values(mailbox, "queue_depth") == {"orders,0": 3}
        assert await values(mailbox, "inflight") == {"orders,0": 1}
        assert await values(mailbox, "saturation") == {"orders,0": 1.0}
        assert await values(mailbox, "topic_paused") == {"orders": 1}
        assert await values(mailbox, "rejected") == {"E_SATURATED": 2}


async def test_the_settings_in_force_are_measured() -> None:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.set_topic_policy("short", TopicPolicy(ready_retention_ms=60_000))
        assert await values(mailbox, "ready_retention_seconds") == {"*": 7 * 86_400, "short": 60}
        assert await values(mailbox, "in_flight_retention_seconds") == {"*": 300, "short": 300}
        assert (await values(mailbox, "dead_retention_seconds"))["*"] == 14 * 86_400
        assert (await values(mailbox, "replay_window_seconds"))["*"] == 300
        assert (await values(mailbox, "backoff_max_seconds"))["*"] == 60
        assert await values(mailbox, "visibility_min_seconds") == {"": 0.25}


async def test_topics_beyond_the_largest_hundred_are_added_up() -> None:
    async with open_mailbox("memory:", default_policy=TopicPolicy(shards=1)) as mailbox:
        await mailbox.send_batch([NewMessage(topic=f"t{n:03}", payload=b"") for n in range(120)])
        depths = await values(mailbox, "queue_depth")
        assert (len(depths), depths["*,0"], sum(depths.values())) == (101, 20, 120)


async def test_deliveries_in_order_have_no_reorder_depth() -> None:
    async with open_mailbox("memory:", default_policy=TopicPolicy(shards=1)) as mailbox:
        await mailbox.send_batch([NewMessage(topic="orders", payload=b"") for _ in range(20)])
        for message in await mailbox.receive_messages("orders", max_messages=20):
            await message.nack(delay_ms=0)
        assert len(await mailbox.receive_messages("orders", max_messages=20)) == 20
        assert await values(mailbox, "reorder_depth_max") == {"0": 0}


async def test_the_reorder_depth_is_the_number_of_later_messages_that_overtook_a_lost_one() -> None:
    async with open_mailbox("memory:", default_policy=TopicPolicy(shards=1)) as mailbox:
        await mailbox.send_batch([NewMessage(topic="orders", payload=bytes([n])) for n in range(6)])
        (lost,) = await mailbox.receive_messages("orders", max_messages=1, visibility_ms=250)
        for message in await mailbox.receive_messages("orders", max_messages=3, visibility_ms=60_000):
            await message.ack()

        async def redelivered() -> bool:
            again = await mailbox.receive_messages(
                "orders", max_messages=1, visibility_ms=60_000, wait_ms=60_000
            )
            return [each.payload for each in again] == [lost.payload]

        assert await values(mailbox, "reorder_depth_max") == {"0": 0}
        await until(lambda: mailbox.engine.mailbox.count_deliverable("orders", mailbox.engine.now(), 9) == 3)
        assert await redelivered()
        assert await values(mailbox, "reorder_depth_max") == {"0": 3}


async def test_a_refusal_is_counted_once_whichever_surface_reports_it() -> None:
    async with open_mailbox("memory:") as mailbox:
        surfaces = SurfaceMetrics(mailbox.measure)
        await mailbox.send_message(NewMessage(topic="orders", payload=b""))
        (message,) = await mailbox.receive_messages("orders")
        await mailbox.nack_messages([message.receipt])
        (refusal,) = await mailbox.ack_messages([message.receipt])
        assert isinstance(refusal, StaleReceipt)
        surfaces.refused(refusal)
        surfaces.refused(InvalidRequest("no topic"))
        (metric,) = [each for each in await surfaces.collect() if each.name == "postroom_rejected"]
        assert metric.samples == [({"reason": "E_STALE_RECEIPT"}, 1), ({"reason": "E_SCHEMA"}, 1)]


async def test_metrics_of_surfaces_are_served_while_the_mailbox_can_not_be_used() -> None:
    async def fail() -> list[Metric]:
        raise Unavailable("no owner")

    surfaces = SurfaceMetrics(fail)
    surfaces.answered_http("GET", "/readyz", 503)
    samples = {each.name: each.samples for each in await surfaces.collect()}
    assert samples["postroom_mailbox_up"] == [({}, False)]
    assert samples["postroom_http_requests"] == [({"method": "GET", "route": "/readyz", "status": "503"}, 1)]


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    values = new_histogram((1, 2))
    for value in (1, 1.5, 2, 3):
        values.observe(value)
    text = write_metrics([histogram("x", "X.", values)])[0].decode()
    assert [line for line in text.splitlines() if not line.startswith("#")] == [
        'x_bucket{le="1.0"} 1.0',
        'x_bucket{le="2.0"} 3.0',
        'x_bucket{le="+Inf"} 4.0',
        "x_count 4.0",
        "x_sum 7.5",
    ]


def test_openmetrics_is_served_to_those_who_ask_for_it() -> None:
    text, content_type = write_metrics([counter("x", "X.", 1)], "application/openmetrics-text; version=1.0.0")
    assert (text.endswith(b"# EOF\n"), content_type.split(";")[0]) == (True, "application/openmetrics-text")


def test_metrics_of_one_name_are_one_metric() -> None:
    first = Metric("x", "counter", "X.", [({"a": "1"}, 1), ({"a": "2"}, 1)])
    (merged,) = merge([first, Metric("x", "counter", "X.", [({"a": "2"}, 3)])])
    assert merged.samples == [({"a": "1"}, 1), ({"a": "2"}, 4)]


@pytest.mark.parametrize(("seconds", "is_made"), [(0, True), (60, True), (61, False)])
def test_a_loop_that_ends_no_pass_for_too_long_makes_no_progress(seconds: float, is_made: bool) -> None:
    times = iter((0.0, seconds))
    assert Progress(60, lambda: next(times)).is_made == is_made


@pytest.mark.parametrize("recovers", [False, True])
def test_a_loop_whose_last_pass_failed_makes_no_progress(recovers: bool) -> None:
    progress = Progress()
    progress.failed()
    if recovers:
        progress.succeeded()
    assert progress.is_made == recovers


async def test_later_topics_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_metrics, "MAX_TOPICS", 2)
    async with open_mailbox("memory:") as mailbox:
        for topic in ("a", "b", "c", "d", "a"):
            await mailbox.send_message(NewMessage(topic=topic, payload=b""))
        assert await values(mailbox, "topic_messages") == {"sent,a": 2, "sent,b": 1, "sent,*": 2}
