"""The scanner, the dead letters and what operators do with them (svc-mailbox I-4, C-3, C-4, P-9)."""

import pytest

from postroom.domain.errors import NotFound, Saturated
from postroom.domain.mailbox.commands import Purge, Receive, Redrive, Sweep
from postroom.domain.policy import DAY_MS, TopicPolicy
from postroom.domain.record import Event
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, NOTHING, TOPIC, Given, Life, given, policy_set

ONCE = TopicPolicy(max_attempts=1)


def dead(name: str, *, at: int, policy: TopicPolicy = ONCE) -> tuple[Life, list[Event]]:
    """Return a message that died at `at`, and its events."""
    life = Life(name, policy=policy)
    return life, [life.sent(at=0), life.received(at=0), life.dead(at=at, error="boom")]


# -- the scanner ---


def test_a_timed_out_delivery_is_requeued_until_the_last_attempt() -> None:
    policy = TopicPolicy(max_attempts=2, visibility_ms=5_000)
    a = Life("a", policy=policy)
    scenario = given([a.sent(at=0), a.received(at=0)], policy=policy)
    scenario = scenario.when(Sweep(), at=5_000).then([a.timed_out(at=5_000)])
    scenario = scenario.when(Receive((TOPIC,), 1, 99), at=5_000).then([a.received(at=5_000)])
    scenario = scenario.when(Sweep(), at=10_000).then([a.dead(at=10_000, error="visibility expired")])
    assert scenario.mailbox.messages[a.stream].attempt == 2


def test_a_last_time_out_keeps_the_error_of_the_nack_before() -> None:
    policy = TopicPolicy(max_attempts=2, visibility_ms=5_000)
    a = Life("a", policy=policy)
    past = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1, error="boom"), a.received(at=1)]
    given(past, policy=policy).when(Sweep(), at=5_001).then([a.dead(at=5_001, error="boom")])


def test_an_extended_delivery_times_out_at_its_new_deadline() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.extended(at=4_000, due=9_000)])
    scenario.when(Sweep(), at=8_999).then_nothing_happens()
    scenario.when(Sweep(), at=9_000).then([a.timed_out(at=9_000)])


def test_a_message_undelivered_for_its_ttl_is_dead_lettered() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0, ttl=2_000)])
    scenario.when(Sweep(), at=1_999).then_nothing_happens()
    scenario.when(Sweep(), at=2_000).then([a.dead(at=2_000, reason="ttl_expired")])


def test_a_message_undelivered_for_the_topics_retention_is_dead_lettered() -> None:
    a = Life("a")
    week = 7 * DAY_MS
    scenario = given([a.sent(at=0)])
    scenario.when(Sweep(), at=week - 1).then_nothing_happens()
    scenario.when(Sweep(), at=week).then([a.dead(at=week, reason="retention_expired")])


def test_a_ttl_that_ends_in_flight_dead_letters_the_message_after_the_time_out() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0, ttl=2_000), a.received(at=1_000)])
    scenario.when(Sweep(), at=3_000).then_nothing_happens()
    scenario = scenario.when(Sweep(), at=6_000).then([a.timed_out(at=6_000)])
    scenario.when(Sweep(), at=6_000).then([a.dead(at=6_000, reason="ttl_expired")])


def test_dead_letters_expire_after_two_weeks() -> None:
    a, past = dead("a", at=100)
    scenario = given(past, policy=ONCE)
    scenario.when(Sweep(), at=100 + 14 * DAY_MS - 1).then_nothing_happens()
    gone = scenario.when(Sweep(), at=100 + 14 * DAY_MS).then(
        [a.expired(at=100 + 14 * DAY_MS, reason="retention")]
    )
    assert gone.mailbox.messages == {}


def test_a_sweep_is_bounded_and_the_next_continues() -> None:
    lives = [Life(str(n)) for n in range(5)]
    scenario = given([event for life in lives for event in (life.sent(at=0), life.received(at=0))])
    scenario = scenario.when(Sweep(limit=3), at=5_000).then([life.timed_out(at=5_000) for life in lives[:3]])
    assert scenario.mailbox.needs_sweep(5_000_000)
    scenario = scenario.when(Sweep(limit=3), at=5_000).then([life.timed_out(at=5_000) for life in lives[3:]])
    assert not scenario.mailbox.needs_sweep(5_000_000)


def test_the_next_timer_is_when_a_sweep_causes_events() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=10), a.extended(at=20, due=9_000)])
    assert scenario.mailbox.next_timer() == 9_000_000
    assert not scenario.mailbox.needs_sweep(8_999_999)
    assert scenario.mailbox.needs_sweep(9_000_000)
    assert given(NOTHING).mailbox.next_timer() is None


# -- the dead letters' capacity ---


def dead_letters_over_capacity() -> tuple[Given, list[Life]]:
    """Return a topic with three dead letters and room for two; `b` died first."""
    policy = TopicPolicy(max_attempts=1, dead_capacity=2)
    lives = [Life(name, policy=policy) for name in "abc"]
    past: list[Event] = [event for life in lives for event in (life.sent(at=0), life.received(at=0))]
    past += [lives[n].dead(at=when) for n, when in ((1, 1), (0, 2), (2, 3))]
    return given(past, policy=policy), lives


def test_dead_letters_beyond_their_capacity_expire_oldest_first() -> None:
    scenario, (_, b, _) = dead_letters_over_capacity()
    assert scenario.mailbox.needs_sweep(4_000)
    scenario = scenario.when(Sweep(), at=4).then([b.expired(at=4, reason="capacity")])
    assert not scenario.mailbox.needs_sweep(4_000)
    scenario.when(Sweep(), at=5).then_nothing_happens()


def test_the_order_of_dead_letters_survives_a_restart() -> None:
    scenario, (_, b, _) = dead_letters_over_capacity()
    reopened = restore(take_snapshot(scenario.mailbox), NAME)
    assert reopened is not None
    Given(reopened).when(Sweep(), at=4).then([b.expired(at=4, reason="capacity")])


def test_lowering_the_capacity_expires_the_oldest_dead_letters() -> None:
    a, past = dead("a", at=1)
    b, more = dead("b", at=2)
    scenario = given([*past, *more, policy_set(TopicPolicy(dead_capacity=1))], policy=ONCE)
    scenario.when(Sweep(), at=3).then([a.expired(at=3, reason="capacity")])
    assert b.version == 3


# -- redriving ---


def test_only_a_redrive_returns_a_dead_letter_and_resets_its_attempts() -> None:
    a, past = dead("a", at=1)
    scenario = given(past, policy=ONCE)
    scenario.when(Receive((TOPIC,), 1, 99), at=DAY_MS).then_nothing_happens()
    scenario = scenario.when(Redrive(TOPIC, 10), at=DAY_MS).then([a.redriven(at=DAY_MS)])
    scenario = scenario.when(Receive((TOPIC,), 1, 99), at=DAY_MS).then([a.received(at=DAY_MS)])
    assert a.attempt == 1
    assert scenario.mailbox.messages[a.stream].redriven == 1


def test_a_redrive_restarts_the_retention() -> None:
    a, past = dead("a", at=1)
    scenario = given([*past, a.redriven(at=DAY_MS)], policy=ONCE)
    scenario.when(Sweep(), at=8 * DAY_MS - 1).then_nothing_happens()
    scenario.when(Sweep(), at=8 * DAY_MS).then(
        [a.dead(at=8 * DAY_MS, reason="retention_expired", error="boom")]
    )


def test_redriving_takes_the_oldest_first_up_to_a_limit() -> None:
    a, past = dead("a", at=1)
    b, more = dead("b", at=2)
    scenario = given([*past, *more], policy=ONCE)
    scenario = scenario.when(Redrive(TOPIC, 1), at=3).then([a.redriven(at=3)])
    scenario.when(Redrive(TOPIC, 1), at=4).then([b.redriven(at=4)])


def test_redriving_filters_by_reason_or_by_message() -> None:
    a, past = dead("a", at=1)
    b = Life("b", policy=ONCE)
    scenario = given([*past, b.sent(at=0, ttl=1), b.dead(at=1, reason="ttl_expired")], policy=ONCE)
    scenario.when(Redrive(TOPIC, 9, reason="integrity"), at=2).then_nothing_happens()
    scenario.when(Redrive(TOPIC, 9, messages=frozenset({b"?" * 16})), at=2).then_nothing_happens()
    scenario = scenario.when(Redrive(TOPIC, 9, reason="ttl_expired"), at=2).then([b.redriven(at=2)])
    scenario.when(Redrive(TOPIC, 9, messages=frozenset({a.stream})), at=2).then([a.redriven(at=2)])


def test_redriving_stops_where_the_shard_is_full() -> None:
    policy = TopicPolicy(max_attempts=1, shard_capacity=2)
    past: list[Event] = []
    lives = [Life(name, policy=policy) for name in "abc"]
    for life in lives:
        past += [life.sent(at=0), life.received(at=0), life.dead(at=1)]
    full = (
        given(past, policy=policy)
        .when(Redrive(TOPIC, 9), at=2)
        .then([life.redriven(at=2) for life in lives[:2]])
    )
    full.when(Redrive(TOPIC, 9), at=3).then_rejected(Saturated, "full with 2 messages; receive some before")


def test_redriving_an_unknown_topic_is_not_found() -> None:
    given(NOTHING).when(Redrive("missing", 1), at=0).then_rejected(NotFound, "no topic missing")


# -- purging ---


@pytest.mark.parametrize(("which", "gone"), [({"ready": False}, "a"), ({"dead": False}, "bc"), ({}, "abc")])
def test_purging_removes_dead_letters_ready_messages_or_both(which: dict[str, bool], gone: str) -> None:
    a, past = dead("a", at=1)
    lives = {"a": a, "b": Life("b", policy=ONCE), "c": Life("c", policy=ONCE), "d": Life("d", policy=ONCE)}
    past += [
        lives["b"].sent(at=2),
        lives["c"].sent(at=2, due=9_000),
        lives["d"].sent(at=2),
        lives["d"].received(at=2),
    ]
    scenario = given([*past, Life("e", topic="other").sent(at=2)], policy=ONCE)
    expired = [lives[name].expired(at=3, reason="purged") for name in gone]
    scenario = scenario.when(Purge(TOPIC, **which), at=3).then(expired)
    assert len(scenario.mailbox.messages) == 5 - len(gone)
    scenario.when(Purge(TOPIC, **which), at=4).then_nothing_happens()


def test_purging_is_bounded() -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0), b.sent(at=0)])
    scenario.when(Purge(TOPIC, limit=1), at=1).then([a.expired(at=1, reason="purged")])


def test_purging_an_unknown_topic_is_not_found() -> None:
    given(NOTHING).when(Purge("missing"), at=0).then_rejected(NotFound, "no topic missing")
