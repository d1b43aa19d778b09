"""Ordered keys: a message with a key waits for the earlier ones of its key, whatever fails (ADR 0115)."""

from collections.abc import Sequence

import msgspec
import pytest

from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.commands import (
    Ack,
    Cancel,
    Nack,
    Purge,
    Receive,
    Redrive,
    Reschedule,
    SetPolicy,
    Sweep,
)
from postroom.domain.message import MessageReceived
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


def test_dead_letters_hold_only_ordered_keys() -> None:
    with pytest.raises(InvalidRequest, match="needs ordered_keys"):
        TopicPolicy(dead_letters_hold_keys=True).validate()


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
