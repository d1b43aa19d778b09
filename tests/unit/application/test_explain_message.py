"""Given what happened to a message, this is why."""

from collections.abc import Sequence

from postroom.application.messages import rfc3339
from postroom.application.queries.explain_message import Account, explain
from postroom.domain.course import trace
from postroom.domain.event import Event
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import MS, MessageSent
from postroom.domain.policy import TopicPolicy
from tests.unit.domain.scenario import NAME, Life, taken_over

POLICY = TopicPolicy(max_attempts=2)


def account(events: Sequence[Event], *, now: int, policy: TopicPolicy | None = None) -> Account:
    """Return the account of these events of one message, at positions 1, 2, ...; `now` in ms."""
    epoch = 1
    happenings = []
    for position, event in enumerate(events, 1):
        epoch = event.epoch if isinstance(event, OwnershipTaken) else epoch
        happenings.append((position, epoch, event, policy))
    sent = next(event for event in events if isinstance(event, MessageSent))
    course = trace(happenings)  # type: ignore[arg-type]  # they are of a message, or takeovers
    assert course is not None
    return explain(NAME, sent, course, now * MS)


def at(ms: int) -> str:
    return rfc3339(ms * MS) or ""


def texts(told: Account) -> list[str]:
    return [happened.text for happened in told.story]


def test_a_message_that_waits_is_ready_since_it_was_sent() -> None:
    m = Life("m")
    told = account([m.sent(at=100, idem_key="order-1")], now=200)
    assert told.now == f"It is ready since {at(100)}, and waits for a consumer to receive it."
    assert texts(told) == [
        (
            "Sent to orders, shard 6, with idempotency key 'order-1', to be delivered at once; it becomes a "
            f"dead letter if it is not delivered by {at(100 + POLICY.ready_retention_ms)}."
        )
    ]
    assert told.deliveries == []


def test_a_message_sent_for_later_is_delayed_as_its_sender_asked() -> None:
    told = account([Life("m").sent(at=100, due=900)], now=200)
    assert told.now == f"It is delayed as its sender asked: it may be delivered from {at(900)} on."


def test_a_message_whose_time_to_live_is_over_waits_for_an_owner_to_notice() -> None:
    told = account([Life("m").sent(at=100, ttl=50)], now=200)
    assert told.now.startswith(f"It waits, but its time ended at {at(150)}: it becomes a dead letter as soon")


def test_a_message_in_flight_says_with_whom_and_until_when() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=10, consumer="worker-1", visibility=500),
        m.extended(at=300, due=900),
    ]
    told = account(events, now=400)
    assert told.now == (
        f"It is in flight: delivered to worker-1 as attempt 1 at {at(10)}, hidden until {at(900)} unless it "
        "is acked, nacked or extended."
    )
    assert texts(told)[1:] == [
        f"Delivered to worker-1 as attempt 1, hidden for 500 ms, until {at(510)}.",
        f"The consumer asked for more time: hidden until {at(900)}.",
    ]
    assert "so it comes back as soon as a process owns the mailbox" in account(events, now=901).now


def test_a_nacked_message_was_delivered_again_because_of_that() -> None:
    m = Life("m")
    told = account(
        [
            m.sent(at=0),
            m.received(at=10, consumer="w"),
            m.requeued(at=30, due=230, error="no disk"),
            m.received(at=300),
            m.acked(at=400),
        ],
        now=500,
    )
    assert texts(told)[2] == (
        f"Its consumer gave it back (nack) after 20 ms: no disk. It waits 200 ms, until {at(230)}, before it "
        "may be delivered again."
    )
    assert [each.why for each in told.deliveries] == [
        "It was sent at position 1, and was ready for 10 ms.",
        (
            f"Delivery 1 (position 2, {at(10)}) ended at position 3, {at(30)}: its consumer gave it back "
            "(nack) after 20 ms: no disk. Then it was ready for 70 ms."
        ),
    ]
    assert [(each.ended, each.ended_position, each.error) for each in told.deliveries] == [
        ("nacked", 3, "no disk"),
        ("acked", 5, None),
    ]
    assert told.now == f"It is settled: its consumer acked it at {at(400)}, and it never comes again."


def test_a_delivery_that_nobody_settled_ended_by_time() -> None:
    m = Life("m")
    told = account([m.sent(at=0), m.received(at=10, visibility=300), m.timed_out(at=310)], now=400)
    assert texts(told)[2] == (
        f"Its visibility ended at {at(310)} without ack, nack or extend. It was ready again at once."
    )
    assert (
        told.now
        == f"It is ready after attempt 1 failed since {at(310)}, and waits for a consumer to receive it."
    )


def test_a_visibility_that_ended_while_nobody_owned_the_mailbox_was_noticed_by_the_next_owner() -> None:
    m = Life("m")
    told = account(
        [
            m.sent(at=0),
            m.received(at=10, visibility=300),
            taken_over(epoch=2, version=3, at=5_000, continues=True),
            m.timed_out(at=5_001),
            m.received(at=5_002),
        ],
        now=5_003,
    )
    assert told.deliveries[1].why == (
        f"Delivery 1 (position 2, {at(10)}) ended at position 4, {at(5_001)}: its visibility ended at "
        f"{at(310)} without ack, nack or extend; no process owned the mailbox then, so that was noticed when "
        "process 2 had taken it over (epoch 2, position 3). Then it was ready for 1 ms."
    )
    assert [each.epoch for each in told.deliveries] == [1, 2]


def test_a_new_clock_hides_a_delivery_for_its_full_time_again() -> None:
    m = Life("m")
    told = account(
        [
            m.sent(at=0),
            m.received(at=10, visibility=300),
            m.extended(at=200, due=700),
            taken_over(epoch=2, version=3, at=600),
        ],
        now=650,
    )
    assert texts(told)[3] == (
        "process 2 took the mailbox over (epoch 2) on a new clock, as after a reboot: nobody knows how much "
        f"of its time had passed, so it was hidden for its full time again, until {at(1_100)}."
    )
    assert f"hidden until {at(1_100)}" in told.now


def test_a_late_ack_settles_what_nobody_received_again() -> None:
    m = Life("m")
    told = account(
        [m.sent(at=0), m.received(at=10, visibility=300), m.timed_out(at=310), m.acked(at=450)], now=500
    )
    assert texts(told)[3] == (
        "Acked by its consumer 140 ms after its visibility had ended; nobody had received it again, so it is "
        "settled for good."
    )
    assert (told.deliveries[0].ended, told.deliveries[0].ended_position) == ("acked_late", 4)
    assert told.now == f"It is settled: its consumer acked it at {at(450)}, and it never comes again."


def test_a_message_out_of_attempts_died_of_its_last_failure() -> None:
    m = Life("m")
    events = [
        m.sent(at=0),
        m.received(at=10),
        m.requeued(at=20, due=20, error="bad"),
        m.received(at=30),
        m.dead(at=40, error="worse"),
    ]
    told = account(events, now=100, policy=POLICY)
    kept = at(40 + POLICY.dead_retention_ms)
    assert texts(told)[4] == (
        "Its consumer gave it back (nack) after 10 ms: worse. That was attempt 2 of 2, the last one: "
        f"max_attempts of the topic. It is a dead letter now, kept until {kept}."
    )
    assert told.now == (
        f"It is a dead letter since {at(40)}, kept until {kept}. It has no attempts left. "
        "postroom dlq reprocess puts it back."
    )
    timed_out = account([*events[:-2], Life.received(m, at=30, visibility=300), m.dead(at=330)], now=500)
    assert f"Its visibility ended at {at(330)}" in texts(timed_out)[4]


def test_a_message_may_die_without_being_delivered() -> None:
    for reason, why in [("ttl_expired", "time to live"), ("integrity", "no longer match their hash")]:
        m = Life("m")
        told = account([m.sent(at=0, ttl=50), m.dead(at=50, reason=reason)], now=60)  # type: ignore[arg-type]
        assert why in texts(told)[1]
        assert why in told.now
        assert told.deliveries == []


def test_a_redriven_message_was_delivered_again_because_an_operator_put_it_back() -> None:
    m = Life("m")
    told = account(
        [m.sent(at=0), m.received(at=10), m.dead(at=20), m.redriven(at=50), m.received(at=60)], now=70
    )
    assert told.deliveries[1].why == (
        f"After delivery 1 (position 2, {at(10)}) it became a dead letter, and an operator put it back at "
        f"position 4, {at(50)}."
    )


def test_a_purged_message_is_gone_and_says_so() -> None:
    m = Life("m")
    told = account([m.sent(at=0), m.expired(at=20, reason="purged")], now=30)
    assert told.now == f"It is gone since {at(20)}. Removed by an operator, who purged the topic."
