"""Ordered keys: a message with a key waits for the earlier ones of its key, whatever fails (ADR 0115)."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given as given_choices
from hypothesis import strategies as st

from postroom.domain.errors import InvalidRequest, StaleReceipt
from postroom.domain.mailbox import keyed_shard
from postroom.domain.mailbox.batch import decide_batch
from postroom.domain.mailbox.commands import (
    Ack,
    Cancel,
    Extend,
    Nack,
    Purge,
    Receive,
    Redrive,
    Reschedule,
    SetPolicy,
    Sweep,
)
from postroom.domain.mailbox.queues import Shard
from postroom.domain.message import IN_FLIGHT, READY, MessageReceived
from postroom.domain.policy import TopicPolicy
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import Given, Life, given

ORDERED = TopicPolicy(shards=1, visibility_ms=5_000, max_attempts=2, ordered_keys=True)
HOLDING = msgspec.structs.replace(ORDERED, dead_letters_hold_keys=True)
ALL = Receive(("orders",), 99, 1 << 20)


def lives(names: str, policy: TopicPolicy = ORDERED) -> tuple[Given, list[Life]]:
    """Return a mailbox with messages, each named by its key and a number; "-1" has no key."""
    made = [Life(name, policy=policy) for name in names.split()]
    past = [
        life.sent(at=0, sticky_key=None if name[0] == "-" else name[0])
        for life, name in zip(made, names.split(), strict=True)
    ]
    return given(past, policy=policy), made


def receive(scenario: Given, at: int, command: Receive = ALL) -> tuple[Given, list[str]]:
    """Receive messages, and return their names."""
    events = scenario.when(command, at=at).events
    names = [each.stream.decode().lstrip("-") for each in events if isinstance(each, MessageReceived)]
    return scenario.when(command, at=at).then(events), names


def settle(scenario: Given, life: Life, command: str, at: int) -> Given:
    message = scenario.mailbox.messages[life.stream]
    made = Ack(message.receipt) if command == "ack" else Nack(message.receipt, 0.5, "no", delay_ms=100)
    if command == "reject":
        made = Nack(message.receipt, 0.5, "no", action="reject")
    return scenario.when(made, at=at).then(scenario.when(made, at=at).events)


def test_of_each_key_one_message_is_delivered_at_a_time_while_other_keys_go_on() -> None:
    scenario, (a1, _a2, b1, _n1, _n2) = lives("a1 a2 b1 -1 -2")
    scenario, names = receive(scenario, 1)
    assert names == ["a1", "b1", "1", "2"]
    scenario, names = receive(settle(scenario, b1, "ack", 2), 3)
    assert names == []
    scenario, names = receive(settle(scenario, a1, "ack", 4), 5)
    assert names == ["a2"]


def test_no_message_passes_one_of_its_key_that_waits_for_its_retry() -> None:
    scenario, (a1, _a2, _b1) = lives("a1 a2 b1")
    scenario, _ = receive(scenario, 1)
    scenario = settle(scenario, a1, "nack", 10)
    scenario, names = receive(scenario, 20)
    assert names == []
    assert scenario.mailbox.next_due("orders", 0) == 110_000
    scenario, names = receive(scenario, 110)
    assert names == ["a1"]
    scenario, names = receive(settle(scenario, a1, "ack", 111), 112)
    assert names == ["a2"]


def test_no_message_passes_one_of_its_key_that_was_sent_with_a_delay_or_rescheduled() -> None:
    a1, a2, b1 = (Life(name, policy=ORDERED) for name in ("a1", "a2", "b1"))
    past = [
        a1.sent(at=0, due=50, sticky_key="a"),
        a2.sent(at=1, sticky_key="a"),
        b1.sent(at=1, sticky_key="b"),
    ]
    scenario, names = receive(given(past, policy=ORDERED), 2)
    assert names == ["b1"]
    moved = scenario.when(Reschedule(a1.stream, 100), at=3)
    scenario, names = receive(moved.then(moved.events), 102)
    assert names == []
    scenario, names = receive(scenario, 103)
    assert names == ["a1"]


def test_a_dead_letter_lets_its_key_continue_and_a_redrive_returns_it_to_its_place() -> None:
    scenario, (a1, a2, _a3) = lives("a1 a2 a3")
    scenario, _ = receive(scenario, 1)
    scenario, names = receive(settle(scenario, a1, "reject", 2), 3)
    assert names == ["a2"]
    redriven = scenario.when(Redrive("orders", 9), at=4)
    scenario, names = receive(redriven.then(redriven.events), 5)
    assert names == []
    scenario, names = receive(settle(scenario, a2, "ack", 6), 7)
    assert names == ["a1"]
    scenario, names = receive(settle(scenario, a1, "ack", 8), 9)
    assert names == ["a3"]


@pytest.mark.parametrize("ends", ["redriven", "purged"])
def test_a_dead_letter_holds_its_key_until_it_is_redriven_or_removed(ends: str) -> None:
    scenario, (a1, _a2, b1, _b2) = lives("a1 a2 b1 b2", HOLDING)
    scenario, _ = receive(scenario, 1)
    scenario = settle(settle(scenario, a1, "reject", 2), b1, "ack", 2)
    scenario, names = receive(scenario, 3)
    assert names == ["b2"]
    topic = scenario.mailbox.topics["orders"]
    assert topic.held_keys == 1
    assert [topic.held_key(each) for each in topic.dead.values()] == [("a", 1)]
    change = scenario.when(Redrive("orders", 9) if ends == "redriven" else Purge("orders", ready=False), at=4)
    scenario = change.then(change.events)
    assert scenario.mailbox.topics["orders"].held_keys == 0
    scenario, names = receive(scenario, 5)
    assert names == (["a1"] if ends == "redriven" else ["a2"])


def test_the_next_message_of_a_key_follows_one_that_is_cancelled() -> None:
    scenario, (a1, a2, _a3) = lives("a1 a2 a3")
    for life, at in ((a1, 1), (a2, 2)):  # the oldest, and one that waits behind it
        cancelled = scenario.when(Cancel(life.stream), at=at)
        scenario = cancelled.then(cancelled.events)
    scenario, names = receive(scenario, 3)
    assert names == ["a3"]


def test_a_delivery_that_timed_out_comes_again_before_later_messages_of_its_key() -> None:
    scenario, _ = lives("a1 a2")
    scenario, names = receive(scenario, 0)
    assert names == ["a1"]
    swept = scenario.when(Sweep(), at=5_000)
    scenario, names = receive(swept.then(swept.events), 5_000)
    assert names == ["a1"]


@pytest.mark.parametrize("names", ["a1 a2 b1 -1", "a1 b1 b2 a2"])
@pytest.mark.parametrize("priorities", [False, True])
def test_a_restored_snapshot_delivers_the_same_messages(names: str, priorities: bool) -> None:
    policy = msgspec.structs.replace(HOLDING, priorities=priorities)
    scenario, made = lives(names, policy)
    scenario, _ = receive(scenario, 1, Receive(("orders",), 1, 1 << 20))
    scenario = settle(scenario, made[0], "reject", 2)
    scenario, _ = receive(scenario, 3, Receive(("orders",), 1, 1 << 20))
    restored = restore(take_snapshot(scenario.mailbox), scenario.mailbox.name)
    assert restored is not None
    copy = Given(restored)
    assert copy.mailbox.topics["orders"].held_keys == 1
    assert rounds(copy) == rounds(scenario)


def test_a_change_of_the_policy_applies_to_messages_that_wait_and_are_in_flight() -> None:
    plain = msgspec.structs.replace(ORDERED, ordered_keys=False)
    scenario, (a1, a2, _a3) = lives("a1 a2 a3", plain)
    scenario, names = receive(scenario, 1, Receive(("orders",), 2, 1 << 20))
    assert names == ["a1", "a2"]
    changed = scenario.when(SetPolicy("orders", ORDERED), at=2)
    scenario = changed.then(changed.events)
    scenario, names = receive(settle(scenario, a1, "ack", 3), 4)
    assert names == []
    scenario, names = receive(settle(scenario, a2, "nack", 5), 6)
    assert names == []
    scenario, names = receive(scenario, 105)
    assert names == ["a2"]
    back = scenario.when(SetPolicy("orders", plain), at=106)
    scenario, names = receive(back.then(back.events), 107)
    assert names == ["a3"]


@pytest.mark.parametrize("policy", [TopicPolicy(dead_letters_hold_keys=True), TopicPolicy(key_batch=2)])
def test_dead_letters_hold_only_ordered_keys_and_only_those_have_batches(policy: TopicPolicy) -> None:
    with pytest.raises(InvalidRequest, match="needs ordered_keys"):
        policy.validate()


BATCHES = msgspec.structs.replace(ORDERED, key_batch=3)


@pytest.mark.parametrize("ordered", [BATCHES, msgspec.structs.replace(BATCHES, fair_keys=True)])
def test_a_receive_gets_a_batch_of_a_key_and_the_next_one_follows_when_all_of_it_is_acked(
    ordered: TopicPolicy,
) -> None:
    scenario, made = lives("a1 a2 b1 a3 a4 -1", ordered)
    scenario, names = receive(scenario, 1)
    assert names == ["a1", "a2", "a3", "b1", "1"]
    for life in (made[0], made[1]):
        scenario, names = receive(settle(scenario, life, "ack", 2), 2)
        assert names == []
    scenario, names = receive(settle(scenario, made[3], "ack", 3), 3)
    assert names == ["a4"]


def test_a_batch_of_a_key_ends_at_a_message_that_is_delayed_or_has_expired_and_at_each_limit() -> None:
    first, second, third = (
        Life(name, policy=BATCHES).sent(at=0, sticky_key="a") for name in ("a1", "a2", "a3")
    )
    for change in ({"due": 50_000}, {"expires_at": 1_000}):
        past = [first, msgspec.structs.replace(second, **change), third]
        assert receive(given(past, policy=BATCHES), 1)[1] == ["a1"]
    for limits in (
        {"max_in_flight": 2},
        {"rate": 2},
        {"fair_keys": True, "max_in_flight_per_key": 2},
        {"fair_keys": True, "rate_per_key": 2},
    ):
        scenario, _ = lives("a1 a2 a3", msgspec.structs.replace(BATCHES, **limits))
        assert receive(scenario, 1)[1] == ["a1", "a2"], limits
    scenario, _ = lives("a1 a2 a3", BATCHES)
    assert receive(scenario, 1, Receive(("orders",), 2, 1 << 20))[1] == ["a1", "a2"]


def test_a_message_is_acked_only_after_the_earlier_ones_of_its_key_that_are_in_flight() -> None:
    scenario, (a1, a2, b1) = lives("a1 a2 b1", BATCHES)
    scenario, _ = receive(scenario, 1)
    receipts = {life: scenario.mailbox.messages[life.stream].receipt for life in (a1, a2, b1)}
    scenario.when(Ack(receipts[a2]), at=2).then_rejected(InvalidRequest, "before the earlier messages")
    for order, is_batch in (((b1, a1, a2), True), ((a2, a1), False)):
        events = decide_batch([Ack(receipts[life]) for life in order], scenario.mailbox, 2_000)
        assert (events is not None) == is_batch
    scenario = settle(settle(scenario, a1, "ack", 3), a2, "ack", 3)
    assert [*scenario.mailbox.messages] == [b1.stream]


@pytest.mark.parametrize("fails", ["nack", "release", "time out"])
def test_when_one_of_a_batch_fails_the_later_ones_return_behind_it_and_count_no_attempt(fails: str) -> None:
    scenario, (a1, a2, a3) = lives("a1 a2 a3", BATCHES)
    scenario, _ = receive(scenario, 0)
    scenario = settle(scenario, a1, "ack", 1)
    stale = Ack(scenario.mailbox.messages[a3.stream].receipt)
    if fails == "time out":
        swept = scenario.when(Sweep(), at=5_000)
        scenario = swept.then(swept.events)
    elif fails == "release":
        receipt = scenario.mailbox.messages[a2.stream].receipt
        released = scenario.when(Nack(receipt, 0.5, delay_ms=100, action="release"), at=2)
        scenario = released.then(released.events)
    else:
        scenario = settle(scenario, a2, "nack", 2)
    states = [scenario.mailbox.messages[life.stream] for life in (a2, a3)]
    assert [(each.status, each.attempt) for each in states] == [(0, int(fails != "release")), (0, 0)]
    scenario.when(stale, at=5_000).then_rejected(StaleReceipt, "receipt")
    scenario, names = receive(scenario, 5_001)
    assert names == ["a2", "a3"]


def test_a_late_ack_of_one_that_timed_out_is_refused_while_an_earlier_one_of_its_key_is_unsettled() -> None:
    scenario, (a1, a2) = lives("a1 a2", BATCHES)
    scenario, _ = receive(scenario, 0)
    receipts = [scenario.mailbox.messages[life.stream].receipt for life in (a1, a2)]
    extended = scenario.when(Extend(receipts[0], 9_000), at=1)
    swept = extended.then(extended.events).when(Sweep(), at=5_000)
    scenario = swept.then(swept.events)
    scenario.when(Ack(receipts[1]), at=5_001).then_rejected(StaleReceipt, "waits for an earlier message")
    scenario = settle(scenario, a1, "ack", 5_002)
    scenario = settle(scenario, a2, "ack", 5_003)
    assert not scenario.mailbox.messages


def test_the_later_ones_of_a_batch_stay_in_flight_unless_a_dead_letter_holds_their_key() -> None:
    for holds in (False, True):
        policy = msgspec.structs.replace(BATCHES, dead_letters_hold_keys=holds)
        scenario, (a1, a2) = lives("a1 a2", policy)
        scenario, _ = receive(scenario, 0)
        scenario = settle(scenario, a1, "reject", 1)
        assert scenario.mailbox.messages[a2.stream].status == (READY if holds else IN_FLIGHT)
        assert receive(scenario, 2)[1] == []


def test_an_unreadable_message_ends_the_batch_of_its_key() -> None:
    scenario, (a1, a2, b1) = lives("a1 a2 b1", msgspec.structs.replace(BATCHES, dead_letters_hold_keys=True))
    command = msgspec.structs.replace(ALL, corrupt=frozenset([a1.stream]))
    events = scenario.when(command, at=1).events
    assert [(type(each).__name__, each.stream) for each in events] == [
        ("MessageDeadLettered", a1.stream),
        ("MessageReceived", b1.stream),
    ]
    assert a2.stream not in {each.stream for each in events}


def test_messages_in_flight_of_a_key_are_acked_in_order_from_the_time_when_keys_are_ordered() -> None:
    scenario, (a1, a2) = lives("a1 a2", msgspec.structs.replace(ORDERED, ordered_keys=False))
    scenario, _ = receive(scenario, 1)
    changed = scenario.when(SetPolicy("orders", ORDERED), at=2)
    scenario = changed.then(changed.events)
    restored = restore(take_snapshot(scenario.mailbox), scenario.mailbox.name)
    assert restored is not None
    for each in (scenario, Given(restored)):
        receipt = each.mailbox.messages[a2.stream].receipt
        each.when(Ack(receipt), at=3).then_rejected(InvalidRequest, "before the earlier messages")
        settle(settle(each, a1, "ack", 4), a2, "ack", 4)


def rounds(scenario: Given) -> Sequence[Sequence[str]]:
    """Receive and ack until nothing is left, and return the names of each round."""
    taken: list[Sequence[str]] = []
    at = 10_000
    while True:
        scenario, names = receive(scenario, at)
        if not names:
            return taken
        taken.append(names)
        for message in [m for m in scenario.mailbox.messages.values() if m.status == 1]:
            acked = scenario.when(Ack(message.receipt), at=at)
            scenario = acked.then(acked.events)
        at += 1


@given_choices(st.lists(st.tuples(st.sampled_from(("remove", "return", "head")), st.integers(0, 99))))
def test_messages_of_a_long_key_stay_in_their_order_whatever_is_removed_and_returned(
    steps: list[tuple[str, int]],
) -> None:
    scenario = given(
        [Life(f"{number}", policy=ORDERED).sent(at=0, sticky_key="a") for number in range(100)],
        policy=ORDERED,
    )
    messages = list(scenario.mailbox.messages.values())
    shard = keyed_shard.KeyedShard(Shard())
    shard.restore(messages, 1)
    waiting = list(range(100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed_shard, "MAX_STALE", 3)
        for step, number in [*steps, *(("remove", each) for each in range(0, 98, 2)), *steps]:
            if step == "return" and number not in waiting:
                shard.enqueue(messages[number], 1)
                waiting = sorted([*waiting, number])
            elif step != "return" and waiting:
                gone = number if step == "remove" and number in waiting else waiting[0]
                shard.dequeue(messages[gone], 1)
                waiting.remove(gone)
            assert list(shard.ready(1)) == [messages[each] for each in waiting[:1]]
            assert shard.followers("a", 100, 1) == [messages[each] for each in waiting[1:]]
            assert (shard.size, shard.count_behind("a")) == (len(waiting), max(0, len(waiting) - 1))
