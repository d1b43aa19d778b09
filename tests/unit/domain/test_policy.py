"""Policies: their defaults (svc-mailbox C-12), their bounds, and when they may change (P-9)."""

import msgspec
import pytest

from postroom.domain.errors import InvalidRequest, Saturated
from postroom.domain.mailbox.commands import SetPolicy
from postroom.domain.mailbox.counts import summarize_topics
from postroom.domain.mailbox.state import shard_of
from postroom.domain.message import MS, MessageSent
from postroom.domain.policy import DAY_MS, UNLIMITED, MailboxLimits, TopicPolicy
from tests.unit.domain.scenario import NOTHING, POLICY, TOPIC, Life, given, policy_set

FLAGS = (
    "priorities",
    "ordered_keys",
    "dead_letters_hold_keys",
    "fair_keys",
    "shared_limits",
    "subscriptions_only",
)
NUMBERS = [name for name in TopicPolicy.__struct_fields__ if name not in (*FLAGS, "key_weights")]


def test_the_defaults_are_those_of_the_specification() -> None:
    policy, limits = TopicPolicy(), MailboxLimits()
    assert policy.replay_window_ms == 300_000
    assert policy.backoff_max_ms == 60_000
    assert policy.ready_retention_ms == 7 * DAY_MS
    assert policy.in_flight_retention_visibilities == 10
    assert policy.dead_retention_ms == 14 * DAY_MS
    assert limits.frame_bytes == 1 << 20
    assert limits.history_retention_ms == 90 * DAY_MS
    assert policy.validate() is policy


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [0, -1])
def test_every_number_is_at_least_one_or_zero_for_no_limit(field: str, value: int) -> None:
    if field in UNLIMITED:
        assert msgspec.structs.replace(TopicPolicy(fair_keys=True), **{field: 0}).validate()
        value = min(value, -1)
    policy = msgspec.structs.replace(TopicPolicy(), **{field: value})
    with pytest.raises(InvalidRequest, match=rf"Topic policy {field} must be at least \d+; it was {value}"):
        policy.validate()


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("bits", [62, 70, 100_000])
def test_every_number_has_an_upper_bound(field: str, bits: int) -> None:
    policy = msgspec.structs.replace(TopicPolicy(), **{field: 1 << bits})
    with pytest.raises(InvalidRequest, match=rf"Topic policy {field} must be at most \d+; it was "):
        policy.validate()


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [1_000.0, float("nan"), True, "1000", None])
def test_every_number_is_an_int(field: str, value: object) -> None:
    policy = msgspec.structs.replace(TopicPolicy(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"Topic policy {field} must be of type int, not "):
        policy.validate()


@pytest.mark.parametrize("value", [1, 0, "true", None])
@pytest.mark.parametrize("name", FLAGS)
def test_every_flag_is_on_or_off(name: str, value: object) -> None:
    policy = msgspec.structs.replace(TopicPolicy(), **{name: value})
    with pytest.raises(InvalidRequest, match=f"Topic policy {name} must be of type bool, not "):
        policy.validate()


@pytest.mark.parametrize("field", MailboxLimits.__struct_fields__)
@pytest.mark.parametrize("value", [0, -5, 2**70, 1_000.0, float("nan"), True, "1000"])
def test_every_limit_is_an_int_within_bounds(field: str, value: object) -> None:
    if field == "traceback_bytes" and value == 0:  # none are kept
        value = -1
    limits = msgspec.structs.replace(MailboxLimits(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"Mailbox limit {field} must be "):
        limits.validate()


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (TopicPolicy(visibility_ms=249), "visibility_ms must be at least 250; it was 249"),
        (
            TopicPolicy(visibility_ms=5_000, replay_window_ms=9_999),
            r"at least twice visibility_ms \(10000\); it was 9999",
        ),
        (
            TopicPolicy(backoff_base_ms=2, backoff_max_ms=1),
            "backoff_max_ms must not be below backoff_base_ms",
        ),
        (
            TopicPolicy(priorities=True, ready_retention_ms=6_000_000),
            r"priority_aging_ms must be below a tenth of ready_retention_ms \(600000\), .* it was 600000",
        ),
        (TopicPolicy(key_weights={"a": 2}), "key_weights needs fair_keys"),
        (TopicPolicy(max_in_flight_per_key=1), "max_in_flight_per_key needs fair_keys"),
        (TopicPolicy(rate_per_key=1), "rate_per_key needs fair_keys"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(policy: TopicPolicy, match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        policy.validate()


@pytest.mark.parametrize(
    "policy",
    [
        TopicPolicy(visibility_ms=250),
        TopicPolicy(visibility_ms=5_000, replay_window_ms=10_000),
        TopicPolicy(backoff_max_ms=200),
        TopicPolicy(priorities=True, ready_retention_ms=6_000_001),
        TopicPolicy(priorities=False, ready_retention_ms=1),
    ],
)
def test_a_field_may_stand_on_its_bound(policy: TopicPolicy) -> None:
    assert policy.validate() is policy


def test_policies_are_set_for_a_bounded_number_of_topics() -> None:
    full = given([policy_set(TopicPolicy(shards=2))], limits=MailboxLimits(topics=1))
    full.when(SetPolicy("another", TopicPolicy()), at=1).then_rejected(Saturated, "its limit of 1 topics")
    changed = policy_set(TopicPolicy(shards=3), at=1, version=4)
    full.when(SetPolicy(TOPIC, TopicPolicy(shards=3)), at=1).then([changed])


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `shardz`"):
        msgspec.json.decode(b'{"shardz": 9}', type=TopicPolicy)


# -- setting one ---


def test_a_policy_is_set_before_or_after_the_topic_has_messages() -> None:
    policy = TopicPolicy(max_attempts=9)
    given(NOTHING).when(SetPolicy(TOPIC, policy), at=1).then([policy_set(policy, at=1)])
    scenario = (
        given([Life("a").sent(at=0)]).when(SetPolicy(TOPIC, policy), at=1).then([policy_set(policy, at=1)])
    )
    assert scenario.mailbox.policy(TOPIC) == policy
    assert scenario.mailbox.policy("another") == POLICY


def test_setting_the_same_policy_again_changes_nothing() -> None:
    policy = TopicPolicy(max_attempts=9)
    given([policy_set(policy)]).when(SetPolicy(TOPIC, policy), at=1).then_nothing_happens()


def test_an_invalid_policy_is_not_set() -> None:
    given(NOTHING).when(SetPolicy(TOPIC, TopicPolicy(shards=0)), at=1).then_rejected(InvalidRequest, "shards")


def test_another_shard_count_waits_while_the_topic_holds_anything() -> None:
    more = TopicPolicy(shards=16)
    a, b = Life("a"), Life("b")
    steps = [a.sent(at=0), a.received(at=1), a.dead(at=2)]
    for count in (1, 2, 3):
        scenario = given(steps[:count]).when(SetPolicy(TOPIC, more), at=3).then([policy_set(more, at=3)])
        (topic,) = summarize_topics(scenario.mailbox, 3 * MS)
        assert (topic.policy, topic.shards_in_use) == (more, 8)
        for key in ("user-1", "user-2"):
            (sent,) = scenario.when(b.send(sticky_key=key), at=3).events
            assert isinstance(sent, MessageSent)
            assert sent.shard == shard_of(key, 8)
    emptied = given([*steps, policy_set(more, at=3), a.expired(at=4, reason="purged")])
    (topic,) = summarize_topics(emptied.mailbox, 4 * MS)
    assert topic.shards_in_use is None
    (sent,) = emptied.when(b.send(sticky_key="user-1"), at=4).events
    assert isinstance(sent, MessageSent)
    assert sent.shard == shard_of("user-1", 16) != shard_of("user-1", 8)
