"""Fair keys: each has its turn; and limits of topics and keys."""

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st

from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.batch import decide_batch, evolve_batch
from postroom.domain.mailbox.commands import Ack, Receive, Sweep
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.key_ring import Rate, TokenBucket
from postroom.domain.mailbox.state import Mailbox, shard_of
from postroom.domain.message import MS
from postroom.domain.policy import MAX_COUNT, MAX_DURATION_MS, PolicyValue, TopicPolicy
from postroom.domain.record import Event
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, Life, given, policy_set

FAIR = TopicPolicy(visibility_ms=5_000, fair_keys=True)
RECEIVE = Receive(("orders",), 9, 1 << 20)
ONE = Receive(("orders",), 1, 1 << 20)


def changed(**fields: PolicyValue) -> TopicPolicy:
    return msgspec.structs.replace(FAIR, **fields)


def waiting(keys: str, policy: TopicPolicy = FAIR) -> Mailbox:
    """Return a mailbox with a message for each letter, which is its key; a dot stands for none."""
    lives = [Life(f"{key}{number}", policy=policy) for number, key in enumerate(keys)]
    sent = [
        each.sent(at=0, sticky_key=None if key == "." else key) for key, each in zip(keys, lives, strict=True)
    ]
    return given(sent, policy=policy).mailbox


def deliver(mailbox: Mailbox, command: Receive = RECEIVE, at: int = 1) -> str:
    """Deliver messages, and return their keys in the order of delivery."""
    return "".join(name[0] for name in delivered(mailbox, command, at))


def delivered(mailbox: Mailbox, command: Receive = RECEIVE, at: int = 1) -> list[str]:
    """Deliver messages, and return their names in the order of delivery."""
    events = decide(command, mailbox, at * MS)
    apply(mailbox, events)
    return [event.stream.decode().lstrip("-") for event in events]


def apply(mailbox: Mailbox, events: Sequence[Event]) -> None:
    for event in events:
        evolve(mailbox, event)


def ack_all(mailbox: Mailbox, at: int = 1) -> None:
    for message in list(mailbox.messages.values()):
        if message.delivery:
            apply(mailbox, decide(Ack(message.receipt), mailbox, at * MS))


def test_keys_take_turns_and_each_is_in_order() -> None:
    assert delivered(waiting("aaabbc.")) == ["a0", "b3", "c5", ".6", "a1", "b4", "a2"]


def test_turns_go_on_from_one_receive_to_the_next() -> None:
    mailbox = waiting("aaabbc")
    assert "".join(deliver(mailbox, ONE) for _ in range(6)) == "abcaba"


def test_a_quiet_key_waits_for_one_message_of_each_other_key() -> None:
    mailbox = waiting("a" * 3_000 + "bcdefgh")
    assert deliver(mailbox, Receive(("orders",), 8, 1 << 20)) == "abcdefgh"


def test_a_key_has_as_many_messages_in_its_turn_as_its_weight() -> None:
    weighted = changed(key_weights={"a": 3, "b": 2, "z": 9})
    assert deliver(waiting("aaaaabbbc..", weighted)) == "aaabbc.aa"
    mailbox = waiting("aaaaabbbc..", weighted)
    assert "".join(deliver(mailbox, ONE) for _ in range(11)) == "aaabbc.aab."


def test_a_turn_ends_when_its_key_has_no_more_messages_and_goes_on_when_it_has() -> None:
    policy = changed(key_weights={"a": 3})
    mailbox = waiting("abb", policy)
    assert deliver(mailbox, ONE) + deliver(mailbox, ONE) == "ab"
    apply(mailbox, [Life(f"a{n}", policy=policy).sent(at=1, sticky_key="a") for n in (5, 6, 7)])
    assert "".join(deliver(mailbox, ONE) for _ in range(4)) == "aaba"


def test_a_turn_goes_on_after_an_ordered_key_is_settled_or_its_limit_allows_it() -> None:
    for policy in (changed(ordered_keys=True), changed(max_in_flight_per_key=1)):
        mailbox = waiting("aaaabcd", msgspec.structs.replace(policy, key_weights={"a": 2}))
        order = ""
        for _ in range(7):
            order += deliver(mailbox, ONE)
            ack_all(mailbox)
        assert order == "aabcdaa"


def test_a_batch_is_within_one_turn_of_its_key() -> None:
    mailbox = waiting("aaaaaaab", changed(ordered_keys=True, key_batch=2, key_weights={"a": 3}))
    order = []
    for _ in range(5):
        order.append(deliver(mailbox, Receive(("orders",), 2, 1 << 20)))
        ack_all(mailbox)
    assert order == ["aa", "aa", "ba", "aa", ""]


@examples(
    st.text("aaabbcd.", max_size=40),
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5)),
    st.lists(st.integers(1, 7), min_size=40, max_size=40),
)
def test_receives_of_any_sizes_get_messages_in_the_order_of_single_ones(
    keys: str, weights: dict[str, int], sizes: list[int]
) -> None:
    policy = changed(key_weights=weights)
    singly, together = waiting(keys, policy), waiting(keys, policy)
    one_by_one = [delivered(singly, ONE) for _ in keys]
    groups = [delivered(together, Receive(("orders",), size, 1 << 20)) for size in sizes]
    order = [*chain(*one_by_one)]
    assert [*chain(*groups)] == order
    counts: Counter[str] = Counter()
    for name in order:
        counts[name[0]] += 1
        others = {key for key in keys if counts[key] == 0}
        assert not others or counts[name[0]] <= weights.get(name[0], 1)


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({"a": 0}, "weight of key 'a' in topic policy key_weights must be at least 1"),
        ({"a": 1_001}, "must be at most 1000"),
        ({"a": True}, "must be of type int"),
        ({1: 1}, "A key of topic policy key_weights must be of type str"),
        ({str(n): 1 for n in range(101)}, "has 101 keys; use at most 100"),
        (3, "must be of type dict"),
    ],
)
def test_weights_out_of_bounds_are_refused(weights: dict[str, int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        changed(key_weights=weights).validate()


def test_a_message_that_failed_has_no_turn_before_others() -> None:
    mailbox = waiting("aab")
    assert deliver(mailbox, ONE) == "a"
    for message in mailbox.messages.values():
        if message.delivery:
            a0 = message.stream
    at = 6_000  # its visibility timeout is over
    assert mailbox.needs_sweep(at * MS)
    apply(mailbox, decide(Sweep(), mailbox, at * MS))
    assert delivered(mailbox, RECEIVE, at) == ["b2", "a0", "a1"]
    assert mailbox.messages[a0].attempt == 2


def test_a_priority_decides_among_the_messages_of_a_key_only() -> None:
    policy = changed(priorities=True)
    lives = [Life(name, policy=policy) for name in ("a0", "a1", "b0")]
    events = [
        lives[0].sent(at=0, sticky_key="a"),
        lives[1].sent(at=0, sticky_key="a", priority=10),
        lives[2].sent(at=0, sticky_key="b", priority=0),
    ]
    assert delivered(given(events, policy=policy).mailbox) == ["a1", "b0", "a0"]


def test_an_ordered_key_has_its_turn_after_its_message_is_settled() -> None:
    mailbox = waiting("aab", changed(ordered_keys=True))
    assert deliver(mailbox) == "ab"
    assert deliver(mailbox) == ""
    ack_all(mailbox)
    assert deliver(mailbox) == "a"


def test_a_policy_that_is_set_later_applies_to_messages_that_wait() -> None:
    mailbox = waiting("aab", TopicPolicy(visibility_ms=5_000, shards=1))
    evolve(mailbox, policy_set(FAIR, at=1))
    assert deliver(mailbox, at=2) == "aba"


# -- limits ---


def test_a_topic_has_no_more_messages_in_flight_than_its_limit() -> None:
    mailbox = waiting("....", TopicPolicy(visibility_ms=5_000, max_in_flight=3))
    assert deliver(mailbox, Receive(("orders",), 2, 1 << 20)) == ".."
    assert deliver(mailbox) == "."
    assert deliver(mailbox) == ""
    ack_all(mailbox)
    assert deliver(mailbox) == "."


def test_a_key_has_no_more_messages_in_flight_than_its_limit_and_others_go_on() -> None:
    mailbox = waiting("aaaab..", changed(max_in_flight_per_key=2))
    assert deliver(mailbox) == "ab.a."
    assert mailbox.count_deliverable("orders", MS, 9) == 0
    ack_all(mailbox)
    assert deliver(mailbox) == "aa"


def test_a_rate_allows_a_burst_and_then_one_delivery_at_a_time() -> None:
    mailbox = waiting("." * 9, TopicPolicy(visibility_ms=5_000, rate=4, rate_burst=2))
    assert deliver(mailbox, at=1) == ".."
    assert deliver(mailbox, at=250) == ""
    assert mailbox.next_due("orders", 250 * MS) == 251 * MS
    assert deliver(mailbox, at=251) == "."
    assert deliver(mailbox, at=900) == ".."
    assert deliver(mailbox, at=1_000) == ""


def test_a_rate_of_keys_is_of_each_of_them() -> None:
    mailbox = waiting("aaabb", changed(rate_per_key=1, rate_period_ms=100))
    assert deliver(mailbox, at=1) == "ab"
    assert deliver(mailbox, at=100) == ""
    assert mailbox.next_due("orders", 100 * MS) == 101 * MS
    assert deliver(mailbox, at=101) == "ab"
    assert deliver(mailbox, at=9_999) == "a"


def test_limits_hold_after_a_restart() -> None:
    policy = changed(rate=3, rate_per_key=1, max_in_flight_per_key=1, rate_period_ms=1_000)
    mailbox = waiting("aaabbc", policy)
    assert deliver(mailbox, at=1) == "abc"
    restored = restore(take_snapshot(mailbox), NAME)
    assert restored is not None
    assert deliver(restored, at=2) == ""
    ack_all(restored, at=3)
    assert deliver(restored, at=1_000) == ""
    assert deliver(restored, at=1_001) == "ab"


def test_the_largest_rates_can_be_stored() -> None:
    most = {"rate": MAX_COUNT, "rate_per_key": MAX_COUNT, "rate_burst": MAX_COUNT}
    mailbox = waiting("ab", changed(**most, rate_period_ms=MAX_DURATION_MS).validate())
    assert deliver(mailbox, ONE) == "a"
    restored = restore(take_snapshot(mailbox), NAME)
    assert restored is not None
    topic, again = mailbox.topics["orders"], restored.topics["orders"]
    assert topic.rate is not None
    assert topic.allowed(2 * MS) == again.allowed(2 * MS) == MAX_COUNT - 1
    assert deliver(restored, at=2) == "b"


@pytest.mark.parametrize("way", ["one by one", "batch", "snapshot", "policy"])
def test_keys_take_turns_in_the_order_of_their_oldest_messages_over_all_shards(way: str) -> None:
    keys, policy = "cafb", changed(shards=2)
    assert [shard_of(key, 2) for key in keys] == [0, 1, 0, 1]
    mailbox = waiting(
        "." if way == "batch" else "." + keys, TopicPolicy(shards=2) if way == "policy" else policy
    )
    if way == "batch":
        events = decide_batch([Life(f"{key}1").send(sticky_key=key) for key in keys], mailbox, 0)
        assert events is not None
        evolve_batch(mailbox, events)
    elif way == "snapshot":
        restored = restore(take_snapshot(mailbox), NAME)
        assert restored is not None
        mailbox = restored
    elif way == "policy":
        apply(mailbox, [policy_set(policy, version=4)])
    assert deliver(mailbox) == "." + keys


def test_expired_messages_do_not_count() -> None:
    policy = changed(max_in_flight=1, rate_per_key=1)
    old, new = Life("old", policy=policy), Life("new", policy=policy)
    past = [old.sent(at=0, ttl=5, sticky_key="a"), new.sent(at=0, sticky_key="a")]
    assert delivered(given(past, policy=policy).mailbox, at=6) == ["new"]


@examples(
    st.lists(st.integers(0, 400), max_size=60),
    st.integers(1, 7),
    st.integers(1, 300),
    st.integers(1, 9),
)
def test_no_window_of_time_has_more_deliveries_than_the_rate_and_its_burst(
    pauses: list[int], deliveries: int, period: int, burst: int
) -> None:
    rate, now = Rate(deliveries, period, burst), 0
    bucket = TokenBucket.full(rate, now)
    times: list[int] = []
    for pause in pauses:
        now += pause
        taken = bucket.tokens(rate, now)
        if taken:
            bucket.take(rate, taken, now)
        else:
            assert bucket.next_at(rate) > now
        times += [now] * taken
    for first in range(len(times)):
        for last in range(first, len(times)):
            count = last - first + 1
            assert (count - burst) * period <= (times[last] - times[first]) * deliveries


@pytest.mark.parametrize("keys", ["ab" * 50, "a" * 50 + "bcd"])
def test_every_message_is_delivered_once(keys: str) -> None:
    mailbox = waiting(keys, changed(max_in_flight_per_key=1, max_in_flight=2))
    counts: Counter[str] = Counter()
    while some := delivered(mailbox):
        counts.update(some)
        ack_all(mailbox)
    assert set(counts.values()) == {1}
    assert len(counts) == len(keys)
