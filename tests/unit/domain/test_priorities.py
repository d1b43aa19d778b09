"""Priorities within a shard (ADR 0048): the most urgent first, FIFO among equals, and nothing starves."""

from typing import Any

import msgspec
import pytest
from hypothesis import given as given_
from hypothesis import strategies as st

from postroom.domain.mailbox.commands import Receive, Redrive, SetPolicy, Sweep
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS
from postroom.domain.policy import TopicPolicy
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, NOTHING, TOPIC, Given, Life, given, policy_set

AGING = 1_000
POLICY = TopicPolicy(shards=1, priorities=True, priority_aging_ms=AGING)
FIFO = msgspec.structs.replace(POLICY, priorities=False)
DELAYS = [0, 0, 0, 1, 700, 2_500, 6_000]


def message(name: str) -> Life:
    return Life(name, policy=POLICY)


def delivered(scenario: Given, *, at: int, limit: int = 10) -> str:
    """Return the names of the messages that a RECV delivers, in their order."""
    events = scenario.when(Receive((TOPIC,), limit, 1 << 20), at=at).events
    return "".join(event.stream.decode().strip("-") for event in events)


def test_the_most_urgent_message_is_delivered_first_and_equals_in_the_order_in_which_they_were_sent() -> None:
    sent = [message(n).sent(at=0, priority=p) for n, p in zip("abcdef", (5, 0, 10, 5, 10, 0), strict=True)]
    scenario = given(sent, policy=POLICY)
    assert delivered(scenario, at=1) == "ceadbf"
    assert delivered(scenario, at=1, limit=3) == "cea"


def test_a_topic_without_priorities_in_its_policy_is_first_in_first_out() -> None:
    sent = [message(n).sent(at=0, priority=p) for n, p in zip("abc", (0, 10, 5), strict=True)]
    assert TopicPolicy().priorities is False
    assert delivered(given(sent), at=1) == "abc"


def test_a_message_counts_one_priority_higher_for_each_aging_that_it_has_been_ready() -> None:
    old, equal, newer = message("o"), message("e"), message("n")
    sent = [
        old.sent(at=0, priority=4),
        equal.sent(at=AGING, priority=5),
        newer.sent(at=AGING + 1, priority=5),
    ]
    assert delivered(given(sent, policy=POLICY), at=AGING + 1) == "oen"
    young = [message("o").sent(at=1, priority=4), message("e").sent(at=AGING, priority=5)]
    assert delivered(given(young, policy=POLICY), at=AGING) == "eo"


def test_a_redelivered_message_keeps_its_priority_and_its_place() -> None:
    urgent, first, second = message("u"), message("a"), message("b")
    past = [
        urgent.sent(at=0, priority=9),
        first.sent(at=1),
        second.sent(at=2),
        urgent.received(at=3),
        first.received(at=3),
        first.requeued(at=4, due=600),
        urgent.timed_out(at=5_003),
    ]
    scenario = given(past, policy=POLICY)
    assert delivered(scenario, at=5_003) == "uab"


def test_a_delayed_message_ages_from_when_it_is_due() -> None:
    delayed, urgent = message("d"), message("u")
    past = [delayed.sent(at=0, due=60_000, priority=5), urgent.sent(at=60_000, priority=6)]
    scenario = given(past, policy=POLICY)
    assert delivered(scenario, at=59_999) == "u"
    assert delivered(scenario, at=60_000) == "ud"


def test_a_redriven_message_ages_from_when_it_was_redriven() -> None:
    dead, urgent = message("d"), message("u")
    past = [dead.sent(at=0, priority=5), dead.received(at=1), dead.dead(at=2)]
    scenario = given([*past, urgent.sent(at=60_000, priority=6)], policy=POLICY)
    back = scenario.when(Redrive(TOPIC, 1), at=60_000).then([dead.redriven(at=60_000)])
    assert delivered(back, at=60_000) == "ud"


def test_a_change_of_the_policy_changes_the_order_of_the_messages_that_wait() -> None:
    lives = {name: message(name) for name in "abcd"}
    flight = lives["d"]
    sent = [life.sent(at=0, priority=p) for life, p in zip(lives.values(), (0, 9, 5, 10), strict=True)]
    scenario = given([*sent, flight.received(at=1)], policy=FIFO)
    assert delivered(scenario, at=2) == "abc"
    by_priority = scenario.when(SetPolicy(TOPIC, POLICY), at=3).then([policy_set(POLICY, at=3)])
    assert delivered(by_priority, at=3) == "bca"
    assert by_priority.mailbox.topics[TOPIC].shards[0].size == 4
    fifo = by_priority.when(SetPolicy(TOPIC, FIFO), at=4).then([policy_set(FIFO, at=4, version=4)])
    assert delivered(fifo, at=4) == "abc"
    again = fifo.when(Sweep(), at=30_001).then([flight.timed_out(at=30_001)])
    assert delivered(again, at=30_001) == "abcd"


def test_another_aging_reorders_the_messages_that_wait() -> None:
    sent = [message("o").sent(at=0, priority=0), message("u").sent(at=5_000, priority=10)]
    slow = msgspec.structs.replace(POLICY, priority_aging_ms=10_000)
    quick = msgspec.structs.replace(POLICY, priority_aging_ms=499)
    scenario = given(sent, policy=slow)
    assert delivered(scenario, at=5_000) == "uo"
    changed = scenario.when(SetPolicy(TOPIC, quick), at=5_000).then([policy_set(quick, at=5_000)])
    assert delivered(changed, at=5_000) == "ou"


# -- for any messages ---


steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 10), st.sampled_from(DELAYS)),
        st.tuples(st.just("receive"), st.integers(1, 3), st.sampled_from([0, 0, 400, 3_000])),
    ),
    min_size=1,
    max_size=40,
)


@given_(steps=steps, pause=st.sampled_from([0, 1, 300, 1_000]))
def test_messages_are_delivered_by_their_age_and_priority_and_those_of_one_priority_in_order(
    steps: list[Any], pause: int
) -> None:
    """Some are requeued with a backoff; whatever is ready is delivered in the stated order."""
    mailbox, now = given(NOTHING, policy=POLICY).mailbox, 0
    waiting: dict[bytes, tuple[int, int, int]] = {}  # priority, ready time, number
    due: dict[bytes, int] = {}
    lives: dict[bytes, Life] = {}
    for number, (kind, amount, delay) in enumerate(steps):
        now += pause
        if kind == "send":
            life = message(str(number))
            evolve(mailbox, life.sent(at=now, due=now + delay, priority=amount))
            lives[life.stream], due[life.stream] = life, now + delay
            waiting[life.stream] = (amount, now + delay, number)
            continue
        ready = [stream for stream in waiting if due[stream] <= now]
        ready.sort(key=lambda s: (-(waiting[s][0] * AGING + now - waiting[s][1]), waiting[s][2]))
        events = decide(Receive((TOPIC,), amount, 1 << 20), mailbox, now * MS)
        assert [event.stream for event in events] == ready[:amount]
        for event in events:
            evolve(mailbox, lives[event.stream].received(at=now))
            if delay:
                evolve(mailbox, lives[event.stream].requeued(at=now, due=now + delay))
                due[event.stream] = now + delay
            else:
                del waiting[event.stream]
                evolve(mailbox, lives[event.stream].acked(at=now))
    assert_restored_mailbox_delivers_the_same(mailbox, now)


def assert_restored_mailbox_delivers_the_same(mailbox: Mailbox, now: int) -> None:
    restored = restore(take_snapshot(mailbox), NAME)
    assert restored is not None
    for later in (now, now + 700, now + 10_000):
        command = Receive((TOPIC,), 100, 1 << 20)
        assert decide(command, restored, later * MS) == decide(command, mailbox, later * MS)


@given_(
    priority=st.integers(0, 9),
    aging=st.sampled_from([1, 999, 1_000, 60_000]),
    every=st.sampled_from([0.03, 0.1, 1, 3]),
    backlog=st.integers(0, 5),
    delay=st.sampled_from([0, 0, 250]),
)
def test_no_endless_stream_of_urgent_messages_keeps_one_waiting_longer_than_its_bound(
    priority: int, aging: int, every: float, backlog: int, delay: int
) -> None:
    """As many urgent ones come as are consumed; the bound is (10 - priority) agings after it is ready."""
    policy = msgspec.structs.replace(POLICY, priority_aging_ms=aging)
    step = max(1, int(every * aging))
    mailbox = given(NOTHING, policy=policy).mailbox
    waiting = message("low")
    evolve(mailbox, waiting.sent(at=0, due=delay, priority=priority))
    urgent = [message(f"early {number}") for number in range(backlog)]
    for each in urgent:
        evolve(mailbox, each.sent(at=0, priority=10))
    lives = {each.stream: each for each in urgent}
    bound = delay + (10 - priority) * aging
    now = 0
    while True:
        now += step
        newest = message(f"urgent {now}")
        lives[newest.stream] = newest
        evolve(mailbox, newest.sent(at=now, priority=10))
        (event,) = decide(Receive((TOPIC,), 1, 1 << 20), mailbox, now * MS)
        if event.stream == waiting.stream:
            break
        # Those that were ready before the bound may be served first, one in each step; no other may.
        assert now <= bound + (backlog + 1) * step, f"still waiting at {now} ms"
        evolve(mailbox, lives[event.stream].received(at=now))
        evolve(mailbox, lives[event.stream].acked(at=now))


@pytest.mark.parametrize("overload", [2, 3])
def test_even_when_more_comes_than_is_consumed_only_what_came_within_the_bound_goes_first(
    overload: int,
) -> None:
    mailbox = given(NOTHING, policy=POLICY).mailbox
    waiting = message("low")
    evolve(mailbox, waiting.sent(at=0, priority=0))
    lives: dict[bytes, Life] = {}
    passed = 0
    for now in range(500, 30 * AGING, 500):
        for number in range(overload):
            life = message(f"{now} {number}")
            lives[life.stream] = life
            evolve(mailbox, life.sent(at=now, priority=10))
        (event,) = decide(Receive((TOPIC,), 1, 1 << 20), mailbox, now * MS)
        if event.stream == waiting.stream:
            break
        passed += 1
        evolve(mailbox, lives[event.stream].received(at=now))
        evolve(mailbox, lives[event.stream].acked(at=now))
    else:
        pytest.fail("the message was never received")
    assert passed == overload * (10 * AGING // 500 - 1)
