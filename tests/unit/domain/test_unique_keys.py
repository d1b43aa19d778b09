"""Unique keys: of the unsettled messages of a topic, dead letters aside, one has the key."""

import tracemalloc

import msgspec
import pytest

from postroom.domain.errors import Saturated
from postroom.domain.mailbox.commands import Cancel, Purge, Receive, Redrive
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.message import MS, OnConflict
from postroom.domain.policy import TopicPolicy
from tests.unit.domain.scenario import NOTHING, Life, given

RECEIVE = Receive(("orders",), 9, 1 << 20)


def test_while_a_message_waits_another_one_with_its_unique_key_is_a_duplicate() -> None:
    a, b = Life("a"), Life("b")
    sent = given(NOTHING).when(a.send(unique_key="k"), at=0).then([a.sent(at=0, unique_key="k")])
    sent.when(b.send(b"other", unique_key="k"), at=1).then_nothing_happens()
    sent.when(b.send(unique_key="l"), at=1).then([b.sent(at=1, unique_key="l")])


def test_a_key_is_unique_in_its_topic() -> None:
    a, b = Life("a"), Life("b", topic="news")
    sent = given([a.sent(at=0, unique_key="k")])
    sent.when(b.send(unique_key="k"), at=1).then([b.sent(at=1, unique_key="k")])


def test_a_message_in_flight_or_delayed_has_its_unique_key() -> None:
    a, b, c = Life("a"), Life("b"), Life("c")
    for past in ([a.sent(at=0, unique_key="k"), a.received(at=1)], [b.sent(at=0, due=9, unique_key="k")]):
        given(past).when(c.send(unique_key="k"), at=2).then_nothing_happens()


@pytest.mark.parametrize("end", ["acked", "dead", "expired"])
def test_the_unique_key_of_a_message_that_is_settled_or_dead_is_free(end: str) -> None:
    a, b = Life("a"), Life("b")
    past = [a.sent(at=0, unique_key="k"), a.received(at=1)]
    if end == "dead":
        past.append(a.dead(at=2, reason="rejected"))
    else:
        past.append(a.acked(at=2) if end == "acked" else a.expired(at=2, reason="cancelled"))
    given(past).when(b.send(unique_key="k"), at=3).then([b.sent(at=3, unique_key="k")])


def test_a_message_that_replaces_another_leaves_its_receipt_stale() -> None:
    a, b = Life("a"), Life("b")
    in_flight = given([a.sent(at=0, unique_key="k"), a.received(at=1)])
    replaced = in_flight.when(b.send(b"new", unique_key="k", on_conflict="replace"), at=2).then(
        [b.sent(at=2, payload=b"new", unique_key="k"), a.expired(at=2, reason="superseded", note=b.shown)]
    )
    assert list(replaced.mailbox.messages) == [b.stream]
    assert replaced.mailbox.in_flight == 0
    replaced.when(RECEIVE, at=3).then([b.received(at=3)])


def test_a_message_replaces_another_in_a_shard_that_is_full() -> None:
    policy = TopicPolicy(visibility_ms=5_000, shards=1, shard_capacity=1)
    a, b, c = Life("a", policy=policy), Life("b", policy=policy), Life("c", policy=policy)
    full = given([a.sent(at=0, unique_key="k")], policy=policy)
    full.when(c.send(unique_key="l"), at=1).then_rejected(Saturated, "is full")
    full.when(b.send(unique_key="k", on_conflict="replace"), at=1).then(
        [b.sent(at=1, unique_key="k"), a.expired(at=1, reason="superseded", note=b.shown)]
    )


def test_a_send_may_give_its_delay_to_the_message_that_waits() -> None:
    a, b = Life("a"), Life("b")
    waiting = given([a.sent(at=0, unique_key="k")])
    send = b.send(unique_key="k", on_conflict="reschedule", deliver_after_ms=500)
    later = waiting.when(send, at=2).then([a.rescheduled(at=2, due=502)])
    later.when(RECEIVE, at=501).then_nothing_happens()
    in_flight = later.when(RECEIVE, at=502).then([a.received(at=502)])
    in_flight.when(send, at=503).then_nothing_happens()


def test_a_dead_letter_stays_dead_while_another_message_has_its_unique_key() -> None:
    a, b, c = Life("a"), Life("b"), Life("c")
    dead = [[each.sent(at=0, unique_key="k"), each.dead(at=1)] for each in (a, b)]
    both = given([*dead[0], *dead[1]])
    once = both.when(Redrive("orders", 9), at=2).then([a.redriven(at=2)])
    once.when(Redrive("orders", 9), at=3).then_nothing_happens()
    free = once.when(Cancel(a.stream), at=4).then([a.expired(at=4, reason="cancelled")])
    sent = free.when(c.send(unique_key="k"), at=5).then([c.sent(at=5, unique_key="k")])
    sent.when(Redrive("orders", 9), at=6).then_nothing_happens()
    purged = sent.when(Purge("orders", dead=False), at=7).then([c.expired(at=7, reason="purged")])
    purged.when(Redrive("orders", 9), at=8).then([b.redriven(at=8)])


@pytest.mark.parametrize("on_conflict", ["keep", "replace", "reschedule"])
def test_a_message_that_is_the_first_with_its_unique_key_is_sent(on_conflict: OnConflict) -> None:
    a = Life("a")
    send = a.send(unique_key="k", on_conflict=on_conflict)
    given(NOTHING).when(send, at=0).then([a.sent(at=0, unique_key="k")])


@pytest.mark.parametrize(
    "policy",
    [
        TopicPolicy(),
        TopicPolicy(priorities=True),
        TopicPolicy(ordered_keys=True),
        TopicPolicy(fair_keys=True),
        TopicPolicy(fair_keys=True, rate_per_key=1, rate_period_ms=3_600_000),
    ],
)
@pytest.mark.parametrize(
    ("on_conflict", "delay_ms"), [("replace", 0), ("replace", 60_000), ("reschedule", 60_000)]
)
def test_messages_that_were_replaced_or_rescheduled_take_no_memory(
    policy: TopicPolicy, on_conflict: OnConflict, delay_ms: int
) -> None:
    mailbox = given([Life("first", policy=policy).sent(at=0)], policy=policy).mailbox
    command = Life("0").send(unique_key="k", on_conflict=on_conflict, deliver_after_ms=delay_ms)
    tracemalloc.start()
    try:
        for number in range(12_000):
            send = msgspec.structs.replace(command, message=b"%016d" % number)
            for event in decide(send, mailbox, number * MS):
                evolve(mailbox, event)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(mailbox.messages) == 2
    assert size < 1_000_000
