"""RECV (svc-mailbox C-1, I-3): what is delivered, in which order, and how much of it."""

import pytest

from postroom.domain.errors import InvalidRequest, Saturated
from postroom.domain.mailbox.commands import Receive, Sweep
from postroom.domain.mailbox.state import shard_of
from postroom.domain.message import MessageReceived
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from tests.unit.domain.scenario import NOTHING, TOPIC, Given, Life, given

ANY_SIZE = 1 << 20
ONE_SHARD = TopicPolicy(shards=1)


def receive(
    limit: int = 10, *, max_bytes: int = ANY_SIZE, visibility: int | None = None, **fields: object
) -> Receive:
    return Receive((TOPIC,), limit, max_bytes, visibility, **fields)  # type: ignore[arg-type]


def delivered(scenario: Given, *, at: int, limit: int = 10) -> str:
    """Return the names of the messages that a RECV delivers, in their order."""
    events = scenario.when(receive(limit), at=at).events
    assert all(isinstance(event, MessageReceived) for event in events)
    return "".join(event.stream.decode().strip("-") for event in events)


def test_a_received_message_is_hidden_until_its_visibility_ends() -> None:
    a = Life("a")
    sent = given([a.sent(at=0)])
    in_flight = sent.when(receive(consumer="worker-1"), at=10).then([a.received(at=10, consumer="worker-1")])
    in_flight.when(receive(), at=5_009).then_nothing_happens()
    in_flight.when(Sweep(), at=5_009).then_nothing_happens()
    ready = in_flight.when(Sweep(), at=5_010).then([a.timed_out(at=5_010)])
    ready.when(receive(), at=5_010).then([a.received(at=5_010)])
    assert a.attempt == 2


def test_a_consumer_may_choose_its_visibility() -> None:
    a = Life("a")
    given([a.sent(at=0)]).when(receive(visibility=60_000), at=0).then([a.received(at=0, visibility=60_000)])


def test_visibility_below_a_quarter_second_is_refused() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0)])
    scenario.when(receive(visibility=249), at=0).then_rejected(
        InvalidRequest, "at least 250; it was 249", code="E_SCHEMA", status=400
    )
    scenario.when(receive(visibility=250), at=0).then([a.received(at=0, visibility=250)])


@pytest.mark.parametrize("limit", [0, -1, 257])
def test_a_receive_asks_for_1_to_256_messages(limit: int) -> None:
    given(NOTHING).when(receive(limit), at=0).then_rejected(
        InvalidRequest, f"between 1 and 256; it was {limit}"
    )


def test_nothing_is_delivered_where_nothing_is() -> None:
    given(NOTHING).when(receive(), at=0).then_nothing_happens()
    given([Life("a", topic="invoices").sent(at=0)]).when(receive(), at=1).then_nothing_happens()


# -- order (I-14, G-9) ---


def test_a_shard_is_first_in_first_out() -> None:
    scenario = given([Life(name).sent(at=n) for n, name in enumerate("abcde")])
    assert delivered(scenario, at=9) == "abcde"
    assert delivered(scenario, at=9, limit=2) == "ab"


def test_order_survives_a_redelivery() -> None:
    a, b, c, d = (Life(name) for name in "abcd")
    past: list[Event] = [a.sent(at=0), b.sent(at=0), c.sent(at=0)]
    past += [
        a.received(at=1),
        b.received(at=1),
        b.requeued(at=2, due=2),
        a.timed_out(at=5_001),
        d.sent(at=5_001),
    ]
    assert delivered(given(past), at=5_001) == "abcd"


def test_a_message_whose_delay_ended_goes_before_those_sent_after_it() -> None:
    past = [Life("a").sent(at=0, due=100), Life("b").sent(at=1), Life("c").sent(at=2)]
    scenario = given(past)
    assert delivered(scenario, at=99) == "bc"
    assert delivered(scenario, at=100) == "abc"


def test_of_two_delayed_messages_the_one_sent_first_goes_first() -> None:
    scenario = given([Life("a").sent(at=0, due=100), Life("b").sent(at=1, due=50)])
    assert delivered(scenario, at=60) == "b"
    assert delivered(scenario, at=100) == "ab"


def test_a_nacked_message_waits_for_its_backoff_while_others_go_on() -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0), b.sent(at=0), a.received(at=1), a.requeued(at=2, due=500)])
    assert delivered(scenario, at=499) == "b"
    assert delivered(scenario, at=500) == "ab"


def test_a_redriven_message_keeps_its_place() -> None:
    policy = TopicPolicy(max_attempts=1)
    a, b = Life("a", policy=policy), Life("b", policy=policy)
    past = [a.sent(at=0), a.received(at=0), a.dead(at=1), b.sent(at=2), a.redriven(at=3)]
    assert delivered(given(past, policy=policy), at=3) == "ab"


def test_messages_with_one_sticky_key_keep_their_order_among_other_keys() -> None:
    keys = {"a": "user-1", "b": "user-2", "c": "user-1", "d": "user-2", "e": "user-1"}
    assert len({shard_of(key, 8) for key in keys.values()}) == 2
    order = delivered(given([Life(n).sent(at=0, sticky_key=key) for n, key in keys.items()]), at=1)
    assert order in {"acebd", "bdace"}


def test_no_shard_starves_when_each_receive_takes_one_message() -> None:
    lives = {name: Life(name) for name in "abcdef"}
    scenario = given(
        [life.sent(at=0, sticky_key=f"user-{1 + n % 3}") for n, life in enumerate(lives.values())]
    )
    first: set[str] = set()
    for _ in range(3):
        (event,) = scenario.when(receive(1), at=1).events
        name = event.stream.decode().strip("-")
        first.add("abc"["abcdef".index(name) % 3])
        scenario = scenario.when(receive(1), at=1).then([lives[name].received(at=1)])
    assert len(first) >= 2


# -- how much (C-1 max_messages, max_bytes; I-5) ---


def test_a_delivery_stays_within_its_bytes_but_one_message_always_fits() -> None:
    a, b, c = (Life(name) for name in "abc")
    scenario = given(
        [a.sent(at=0, payload=bytes(600)), b.sent(at=0, payload=bytes(400)), c.sent(at=0, payload=b"c")]
    )
    names = {
        limit: len(scenario.when(receive(max_bytes=limit), at=1).events)
        for limit in (1, 599, 600, 999, 1_000, 1_001)
    }
    assert names == {1: 1, 599: 1, 600: 1, 999: 1, 1_000: 2, 1_001: 3}


def test_empty_payloads_are_bounded_by_their_number_only() -> None:
    scenario = given([Life(name).sent(at=0, payload=b"") for name in "abc"])
    assert delivered(scenario, at=1) == "abc"


def test_the_in_flight_ceiling_bounds_all_topics_together() -> None:
    limits = MailboxLimits(in_flight_ceiling=2)
    other, a, b = Life("x", topic="invoices"), Life("a"), Life("b")
    scenario = given([other.sent(at=0), other.received(at=0), a.sent(at=1), b.sent(at=1)], limits=limits)
    full = scenario.when(receive(), at=2).then([a.received(at=2)])
    full.when(receive(), at=3).then_rejected(
        Saturated, "limit of 2 messages in flight", retry_after_ms=4_997, code="E_SATURATED"
    )
    full.when(Sweep(), at=5_000).then([other.timed_out(at=5_000)]).when(receive(), at=5_000).then(
        [b.received(at=5_000)]
    )


# -- integrity (I-12, C-4) ---


def test_a_corrupt_message_is_quarantined_and_never_delivered() -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0), b.sent(at=0)])
    error = "stored bytes do not match their hash"
    scenario = scenario.when(receive(1, corrupt=frozenset({a.stream})), at=1).then(
        [a.dead(at=1, reason="integrity", error=error), b.received(at=1)]
    )
    assert scenario.mailbox.messages[a.stream].attempt == 0


def test_corrupt_messages_take_no_room_of_the_delivery() -> None:
    a, b, c = (Life(name, policy=ONE_SHARD) for name in "abc")
    scenario = given([a.sent(at=0), b.sent(at=0), c.sent(at=0)], policy=ONE_SHARD)
    corrupt = receive(1, corrupt=frozenset({a.stream, b.stream}))
    error = "stored bytes do not match their hash"
    dead = [life.dead(at=1, reason="integrity", error=error) for life in (a, b)]
    scenario.when(corrupt, at=1).then([*dead, c.received(at=1)])
