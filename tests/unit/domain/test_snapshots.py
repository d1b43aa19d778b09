"""A mailbox restored from a snapshot equals the fold of the whole log."""

from random import Random

import msgspec
import pytest
import zstandard
from blake3 import blake3

from postroom.application.mailbox import snapshots
from postroom.application.mailbox.snapshots import Collector
from postroom.application.mailbox.stored_snapshots import decode_part, encode_part
from postroom.domain.mailbox.commands import Ack, Command, Receive, Redrive, Send, Sweep
from postroom.domain.mailbox.counts import count
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.snapshot import EVER, VERSION, restore_snapshot
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, TOPIC, Given, Life, given, policy_set

POLICY = TopicPolicy(max_attempts=2, shard_capacity=50)


def busy() -> tuple[Given, dict[str, Life]]:
    """Return a mailbox with a message in every status, and their lives."""
    lives = {
        name: Life(name, policy=POLICY) for name in ("ready", "delayed", "flight", "dead", "back", "acked")
    }
    ready, delayed, flight, dead, back, acked = lives.values()
    past: list[Event] = [
        policy_set(POLICY),
        *(life.sent(at=0, idem_key=name) for name, life in lives.items()),
    ]
    past += [flight.received(at=1), dead.received(at=1), back.received(at=1), acked.received(at=1)]
    past += [dead.requeued(at=2, due=2), dead.received(at=3), dead.dead(at=4, error="boom")]
    past += [
        back.requeued(at=5, due=6_000),
        acked.acked(at=5),
        Life("x", topic="invoices").sent(at=6, due=7_000),
    ]
    assert delayed.version == ready.version == 1
    return given(past), lives


def reopened(scenario: Given) -> Given:
    mailbox = restore(take_snapshot(scenario.mailbox), NAME)
    assert mailbox is not None
    return Given(mailbox)


def test_a_restored_mailbox_is_the_same() -> None:
    scenario, _ = busy()
    again = reopened(scenario)
    assert take_snapshot(again.mailbox) == take_snapshot(scenario.mailbox)
    assert count(again.mailbox, 100_000) == count(scenario.mailbox, 100_000)
    assert again.mailbox.next_timer() == scenario.mailbox.next_timer()
    assert again.mailbox.in_flight == 1
    assert again.mailbox.policy(TOPIC) == POLICY


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("block", [1, 4, 100])
def test_a_part_is_of_the_mailbox_as_it_is_when_the_part_is_complete(
    block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "BLOCK_ITEMS", block)
    monkeypatch.setattr(snapshots, "CHUNK_ITEMS", 2)
    chance = Random(seed)
    waiting = [Life(f"early-{n}") for n in range(30)]
    mailbox = given([policy_set(POLICY), *(life.sent(at=0) for life in waiting)]).mailbox
    collector = Collector(mailbox, EVER, notes_unsettled=True)
    for life in [Life(f"later-{n}") for n in range(20)]:
        assert not collector.step(1)
        if chance.random() < 0.6:
            settled = waiting.pop(chance.randrange(len(waiting)))
            evolve(mailbox, settled.received(at=1))
            evolve(mailbox, settled.acked(at=1))
        evolve(mailbox, life.sent(at=1))
        waiting.append(life)
    while not collector.step(1):
        pass
    restored = restore_snapshot([collector.finish(0, b"")], NAME)
    assert restored is not None
    assert take_snapshot(restored) == take_snapshot(mailbox)
    assert collector.unsettled == mailbox.messages.keys() == {life.stream for life in waiting}


def test_a_restored_mailbox_decides_like_the_original() -> None:
    lives = busy()[1]
    commands: list[tuple[Command, int]] = [
        (Receive((TOPIC,), 10, 1 << 20), 10),
        (Receive((TOPIC,), 10, 1 << 20), 6_000),
        (Ack(lives["flight"].receipt), 10),
        (Redrive(TOPIC, 10), 10),
        (Sweep(), 10_000_000),
        (lives["ready"].send(idem_key="acked"), 10),
        (Life("new").send(), 10),
    ]
    for command, at in commands:
        expected = busy()[0].when(command, at=at).events
        assert reopened(busy()[0]).when(command, at=at).events == expected
        assert expected or isinstance(command, Send)


def test_an_expired_key_is_not_stored() -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0, idem_key="old"), b.sent(at=300_000, idem_key="new")])
    window = reopened(scenario).mailbox.topics[TOPIC].window
    assert len(window) == 1
    assert window.find("new", 0) is not None


def test_the_keys_that_a_policy_made_void_stay_void_when_no_others_are_left() -> None:
    a = Life("a")
    longer = msgspec.structs.replace(POLICY, replay_window_ms=600_000)
    past = [policy_set(POLICY), a.sent(at=0, idem_key="old"), policy_set(longer, at=300_000, version=4)]
    scenario = given(past)
    window, again = scenario.mailbox.topics[TOPIC].window, reopened(scenario).mailbox.topics[TOPIC].window
    assert (len(window), window.dropped_until) == (len(again), again.dropped_until) == (0, 0)


def test_a_snapshot_of_another_version_or_with_invalid_bytes_is_ignored() -> None:
    state = take_snapshot(busy()[0].mailbox)
    part = decode_part(state)
    assert part is not None
    foreign = encode_part(msgspec.structs.replace(part, version=VERSION + 1))
    altered = bytes([*state[:-1], state[-1] ^ 1])
    for unreadable in (foreign, altered, b"", b"nonsense", state[:-1], state[1:]):
        assert decode_part(unreadable) is None


def test_a_row_that_does_not_decompress_to_the_size_that_it_states_is_ignored() -> None:
    whole = msgspec.msgpack.encode(decode_part(take_snapshot(busy()[0].mailbox)))
    compressed = zstandard.compress(whole)
    stated = len(whole) - 256  # sizes below 64 KiB are stored in two bytes, less 256
    assert stated.to_bytes(2, "little") in compressed[:10]
    for wrong in (stated - 1, stated + 1, 0):
        row = compressed.replace(stated.to_bytes(2, "little"), wrong.to_bytes(2, "little"), 1)
        assert decode_part(blake3(row).digest() + row) is None
    assert decode_part(blake3(compressed).digest() + compressed) is not None
