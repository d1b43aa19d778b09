"""Explanations of a message are sentences derived from its events."""

from collections.abc import Sequence

from postroom.application.messages import rfc3339
from postroom.application.queries.explain_message import explain
from postroom.application.query_results import Explanation
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import MS, MessageSent
from postroom.domain.message_history import trace
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from tests.unit.domain.scenario import NAME, Life, taken_over

POLICY = TopicPolicy(max_attempts=2)


def explained(events: Sequence[Event], *, now: int, policy: TopicPolicy | None = None) -> Explanation:
    """Return the explanation of one message from these events, at positions 1, 2, ...; `now` in ms."""
    epoch = 1
    items = []
    for position, event in enumerate(events, 1):
        epoch = event.epoch if isinstance(event, OwnershipTaken) else epoch
        items.append((position, epoch, event, policy))
    sent = next(event for event in events if isinstance(event, MessageSent))
    history = trace(items)  # type: ignore[arg-type]  # they are of a message, or takeovers
    assert history is not None
    return explain(NAME, sent, history, now * MS, lambda: "for a consumer to receive it")


def at(ms: int) -> str:
    return rfc3339(ms * MS) or ""


def texts(explanation: Explanation) -> list[str]:
    return [step.text for step in explanation.story]


def test_a_waiting_message_has_been_ready_since_it_was_sent() -> None:
    m = Life("m")
    explanation = explained([m.sent(at=100, idem_key="order-1")], now=200)
    assert explanation.now == f"It has been ready since {at(100)}, and waits for a consumer to receive it."
    assert texts(explanation) == [
        (
            "Sent to orders, shard 6, with idempotency key 'order-1', to be delivered at once; it becomes a "
            f"dead letter if it is not delivered by {at(100 + POLICY.ready_retention_ms)}."
        )
    ]
    assert explanation.deliveries == []


def test_a_message_sent_with_a_later_due_time_is_delayed_by_its_sender() -> None:
    explanation = explained([Life("m").sent(at=100, due=900)], now=200)
    assert explanation.now == f"It is delayed by its sender: it may be delivered from {at(900)} on."


def test_a_rescheduled_message_is_delayed_by_who_did_it_until_it_is_delivered_and_fails() -> None:
    m = Life("m")
    past = [m.sent(at=100), m.rescheduled(at=200, due=900, principal="ann")]
    assert explained(past, now=300).now.startswith("It is delayed by ann: it may be delivered from ")
    past += [m.received(at=900), m.requeued(at=950, due=2_000)]
    later = explained(past, now=1_000)
    assert later.now.startswith(f"It is delayed after attempt 1 failed: it may be delivered from {at(2_000)}")
    assert texts(later)[1].startswith(f"Rescheduled by ann: it may be delivered from {at(900)} on, ")
    past.append(m.expired(at=1_100, reason="cancelled", note="ordered twice"))
    assert texts(explained(past, now=1_200))[-1] == "Cancelled by an operator: ordered twice."


def test_a_message_whose_sender_named_a_priority_has_it_in_its_story() -> None:
    (sent,) = texts(explained([Life("m").sent(at=100, priority=9)], now=200))
    assert sent.startswith("Sent to orders, shard 6, with priority 9, without an idempotency key, ")


def test_an_expired_message_waits_for_an_owner_to_dead_letter_it() -> None:
    explanation = explained([Life("m").sent(at=100, ttl=50)], now=200)
    assert explanation.now.startswith(
        f"It is waiting, but its retention ended at {at(150)}: it becomes a dead letter as soon"
    )


def test_a_message_in_flight_has_a_consumer_and_a_deadline() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=10, consumer="worker-1", visibility=500),
        m.extended(at=300, due=900),
    ]
    explanation = explained(events, now=400)
    assert explanation.now == (
        f"It is in flight: delivered to worker-1 as attempt 1 at {at(10)}, hidden until {at(900)} unless it "
        "is acked, nacked or extended."
    )
    assert texts(explanation)[1:] == [
        f"Delivered to worker-1 as attempt 1, hidden for 500 ms, until {at(510)}.",
        f"Its consumer extended the visibility timeout: hidden until {at(900)}.",
    ]
    assert "so it is requeued as soon as a process owns the mailbox" in explained(events, now=901).now


def test_a_nack_explains_the_next_delivery() -> None:
    m = Life("m")
    explanation = explained(
        [
            m.sent(at=0),
            m.received(at=10, consumer="w"),
            m.requeued(at=30, due=230, error="no disk"),
            m.received(at=300),
            m.acked(at=400),
        ],
        now=500,
    )
    assert texts(explanation)[2] == (
        "Nacked by its consumer after 20 ms: no disk. It is delayed by 200 ms; it may be delivered again "
        f"from {at(230)} on."
    )
    assert [each.why for each in explanation.deliveries] == [
        "It was sent at position 1 and was ready for 10 ms.",
        (
            f"Delivery 1 (position 2, {at(10)}) ended at position 3, {at(30)}: nacked by its consumer "
            "after 20 ms: no disk. It was then ready for 70 ms."
        ),
    ]
    assert [(each.ended, each.ended_position, each.error) for each in explanation.deliveries] == [
        ("nacked", 3, "no disk"),
        ("acked", 5, None),
    ]
    assert explanation.now == f"It is settled: its consumer acked it at {at(400)}."


def test_a_delivery_that_was_not_settled_ended_with_its_visibility_timeout() -> None:
    m = Life("m")
    explanation = explained([m.sent(at=0), m.received(at=10, visibility=300), m.timed_out(at=310)], now=400)
    assert texts(explanation)[2] == (
        f"Its visibility timeout ended at {at(310)} without ack, nack or extend. It was ready "
        "again immediately."
    )
    assert explanation.now == (
        f"It has been ready since {at(310)} after attempt 1 failed, and waits for a consumer to receive it."
    )


def test_a_visibility_timeout_without_an_owner_is_detected_by_the_next_owner() -> None:
    m = Life("m")
    explanation = explained(
        [
            m.sent(at=0),
            m.received(at=10, visibility=300),
            taken_over(epoch=2, version=3, at=5_000, continues=True),
            m.timed_out(at=5_001),
            m.received(at=5_002),
        ],
        now=5_003,
    )
    assert explanation.deliveries[1].why == (
        f"Delivery 1 (position 2, {at(10)}) ended at position 4, {at(5_001)}: its visibility timeout ended "
        f"at {at(310)} without ack, nack or extend; no process owned the mailbox then, and process 2 "
        "detected it when it took over (epoch 2, position 3). It was then ready for 1 ms."
    )
    assert [each.epoch for each in explanation.deliveries] == [1, 2]


def test_a_new_clock_restarts_the_visibility_timeout() -> None:
    m = Life("m")
    explanation = explained(
        [
            m.sent(at=0),
            m.received(at=10, visibility=300),
            m.extended(at=200, due=700),
            taken_over(epoch=2, version=3, at=600),
        ],
        now=650,
    )
    assert texts(explanation)[3] == (
        "process 2 took over the mailbox (epoch 2) with a new clock, as after a reboot. The "
        f"elapsed time is unknown, so the visibility timeout started again: hidden until {at(1_100)}."
    )
    assert f"hidden until {at(1_100)}" in explanation.now


def test_a_late_ack_settles_a_message_that_was_not_received_again() -> None:
    m = Life("m")
    explanation = explained(
        [m.sent(at=0), m.received(at=10, visibility=300), m.timed_out(at=310), m.acked(at=450)], now=500
    )
    assert texts(explanation)[3] == (
        "Acked by its consumer 140 ms after the visibility timeout; it had not been received again, so the "
        "ack is valid and it is settled."
    )
    assert (explanation.deliveries[0].ended, explanation.deliveries[0].ended_position) == ("acked_late", 4)
    assert explanation.now == f"It is settled: its consumer acked it at {at(450)}."


def test_a_message_is_dead_lettered_for_the_failure_of_its_last_attempt() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=10),
        m.requeued(at=20, due=20, error="bad"),
        m.received(at=30),
        m.dead(at=40, error="worse"),
    ]
    explanation = explained(events, now=100, policy=POLICY)
    expiry = at(40 + POLICY.dead_retention_ms)
    assert texts(explanation)[4] == (
        "Nacked by its consumer after 10 ms: worse. That was attempt 2 of 2, the last one (max_attempts of "
        f"the topic). It became a dead letter, retained until {expiry}."
    )
    assert explanation.now == (
        f"It has been a dead letter since {at(40)} and is retained until {expiry}. It has no attempts left. "
        "It can be redriven."
    )
    timed_out = explained([*events[:-2], Life.received(m, at=30, visibility=300), m.dead(at=330)], now=500)
    assert f"Its visibility timeout ended at {at(330)}" in texts(timed_out)[4]


def test_a_message_may_be_dead_lettered_without_a_delivery() -> None:
    for reason, why in [("ttl_expired", "time to live"), ("integrity", "no longer match their hash")]:
        m = Life("m")
        explanation = explained([m.sent(at=0, ttl=50), m.dead(at=50, reason=reason)], now=60)  # type: ignore[arg-type]
        assert why in texts(explanation)[1]
        assert why in explanation.now
        assert explanation.deliveries == []


def test_attempts_beyond_a_maximum_that_was_lowered_are_not_counted_as_of_it() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        *(event for at in (10, 30) for event in (m.received(at=at), m.requeued(at=at + 10, due=at + 10))),
        m.received(at=50),
        m.dead(at=60, error="bad"),
    ]
    text = texts(explained(events, now=100, policy=TopicPolicy(max_attempts=1)))[-1]
    assert "That was attempt 3, and max_attempts of the topic was lowered to 1." in text


def test_a_redrive_explains_the_next_delivery() -> None:
    m = Life("m")
    explanation = explained(
        [m.sent(at=0), m.received(at=10), m.dead(at=20), m.redriven(at=50), m.received(at=60)], now=70
    )
    assert explanation.deliveries[1].why == (
        f"It became a dead letter after delivery 1 (position 2, {at(10)}), and an operator redrove it at "
        f"position 4, {at(50)}."
    )


def test_a_purged_message_is_removed_by_an_operator() -> None:
    m = Life("m")
    explanation = explained([m.sent(at=0), m.expired(at=20, reason="purged")], now=30)
    assert explanation.now == f"It was removed at {at(20)}. Removed by an operator, who purged the topic."
