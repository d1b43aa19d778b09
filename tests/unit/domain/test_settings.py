"""Settings of a mailbox: sections, changes, conflicts, and logs from before they were stored (ADR 0098)."""

from typing import Any

import pytest

from postroom.domain.errors import Difference, InvalidRequest, SettingsConflict
from postroom.domain.mailbox.commands import SetPolicy, SetSettings, TakeOwnership
from postroom.domain.mailbox.events import MailboxCreated, MailboxSettingsChanged, OwnershipTaken
from postroom.domain.message import MS, MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import (
    MAX_GLOBS,
    MailboxSettings,
    Resolved,
    SettingsChanges,
    change_settings,
    check_settings,
    explain_policy,
    resolve_policy,
)
from postroom.domain.subject import SubjectPolicy
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import BOOT, NAME, NOTHING, TOPIC, Life, given, policy_set, taken_over

OWN = mailbox_stream(NAME)


def settings_of(topics: Any, **policy: Any) -> MailboxSettings:
    return MailboxSettings(default_policy=TopicPolicy(**policy), topics=topics)


def changed(settings: MailboxSettings, *, at: int = 1, version: int = 3) -> MailboxSettingsChanged:
    return MailboxSettingsChanged(OWN, version, at * MS, settings)


def take(settings: SettingsChanges | None = None, owner: str = "process 2", **more: Any) -> TakeOwnership:
    return TakeOwnership(NAME, None, owner, BOOT, 0, True, None, settings or SettingsChanges(), **more)


# -- sections ---


def test_the_more_literal_characters_a_glob_has_the_more_specific_it_is() -> None:
    settings = settings_of(
        {
            "pay.cards": {"max_attempts": 1},
            "*": {"max_attempts": 9, "shards": 9, "visibility_ms": 9_000, "backoff_base_ms": 9},
            "pay.*": {"max_attempts": 2, "shards": 2, "visibility_ms": 2_000},
            "*.cards": {"max_attempts": 3, "shards": 3},
            "other.*": {"shards": 7},
        }
    )
    assert resolve_policy(settings, "pay.cards") == TopicPolicy(
        max_attempts=1, shards=3, visibility_ms=2_000, backoff_base_ms=9
    )
    assert explain_policy(settings, "pay.cards") == {
        **{name: Resolved(getattr(TopicPolicy(), name), "policy") for name in TopicPolicy.__struct_fields__},
        "max_attempts": Resolved(1, "pay.cards"),
        "shards": Resolved(3, "*.cards"),
        "visibility_ms": Resolved(2_000, "pay.*"),
        "backoff_base_ms": Resolved(9, "*"),
    }
    assert resolve_policy(settings, "pay").shards == 9


def test_of_two_globs_of_the_same_length_the_later_by_name_wins() -> None:
    settings = settings_of({"a*": {"shards": 1}, "*a": {"shards": 2}})
    assert resolve_policy(settings, "aa").shards == 1  # "*" comes before "a"


@pytest.mark.parametrize(
    ("topics", "problem"),
    [
        ({"a b": {"shards": 1}}, "Topic name 'axb'|must be 1 to 255"),
        ({"a?": {"shards": 1}}, "without spaces, control characters or any of"),
        ({"a": {"shardz": 1}}, "section of topic a has no field 'shardz'; did you mean shards"),
        ({"a": {"shards": 0}}, r'\[topics\."a"\]: Topic policy shards must be at least 1'),
        ({"a": {"shards": True}}, "shards must be of type int"),
        ({"a": 1}, "must be a mapping"),
        ({"a*": {"visibility_ms": 200_000}}, r'\[topics\."a\*"\]: Topic policy replay_window_ms must be'),
        (
            {"a*": {"visibility_ms": 140_000}, "*b": {"replay_window_ms": 100_000}},
            r'\[topics\."\*b"\] and \[topics\."a\*"\]: Topic policy replay_window_ms',
        ),
        (
            {
                "a*": {"priorities": True},
                "*b": {"priority_aging_ms": 86_000_000, "ready_retention_ms": 870_000_000},
                "ab*": {"ready_retention_ms": 850_000_000},
            },
            "priority_aging_ms must be below a tenth",
        ),
        ({f"{n}*": {"shards": 1} for n in range(MAX_GLOBS + 1)}, "use at most 50"),
        ({str(n): {"shards": 1} for n in range(10_001)}, "the limit is 10000"),
    ],
)
def test_sections_that_are_wrong_alone_or_together_are_refused(topics: Any, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        change_settings(MailboxSettings(), SettingsChanges(topics=topics))


def test_globs_that_match_no_topic_together_are_checked_alone() -> None:
    topics = {"a.*": {"visibility_ms": 140_000}, "b.*": {"replay_window_ms": 100_000}}
    assert change_settings(MailboxSettings(), SettingsChanges(topics=topics)).topics == topics


# -- changes ---


def test_a_change_is_decided_on_the_settings_as_they_are() -> None:
    first = MailboxSettings(default_policy=TopicPolicy(max_attempts=9))
    scenario = given(NOTHING, policy=TopicPolicy())
    scenario = scenario.when(SetSettings(SettingsChanges(default_policy={"max_attempts": 9})), at=1).then(
        [changed(first)]
    )
    second = MailboxSettings(MailboxLimits(topics=5), first.default_policy, {"a": {"shards": 1}})
    command = SetSettings(SettingsChanges({"topics": 5}, topics={"a": {"shards": 1}}))
    scenario = scenario.when(command, at=2).then([changed(second, at=2, version=4)])
    scenario = scenario.when(command, at=3).then_nothing_happens()
    whole = SetSettings(SettingsChanges({"topics": 5}), replace=True)
    scenario.when(whole, at=4).then([changed(MailboxSettings(MailboxLimits(topics=5)), at=4, version=5)])
    wrong = SetSettings(SettingsChanges({"topicz": 5}))
    scenario.when(wrong, at=4).then_rejected(InvalidRequest, "has no field 'topicz'; did you mean topics")


def test_a_policy_that_an_operator_sets_is_the_section_of_the_topic() -> None:
    policy = TopicPolicy(max_attempts=2)
    scenario = given(NOTHING, policy=TopicPolicy()).when(SetPolicy(TOPIC, policy), at=1)
    state = scenario.then([policy_set(policy, at=1)])
    assert state.mailbox.policy(TOPIC) == policy
    back = SetSettings(SettingsChanges(topics={TOPIC: None}))
    state = state.when(back, at=2).then([changed(MailboxSettings(), at=2, version=4)])
    assert state.mailbox.policy(TOPIC) == TopicPolicy()


def test_a_change_applies_to_topics_that_hold_messages() -> None:
    a = Life("a")
    state = given([a.sent(at=0)]).when(SetSettings(SettingsChanges(topics={"ord*": {"shards": 3}})), at=1)
    (event,) = state.events
    mailbox = state.then([event]).mailbox
    assert (mailbox.policy(TOPIC).shards, mailbox.shard_count(TOPIC)) == (3, 8)
    assert mailbox.shard_count("ordinary") == 3


# -- a change of owner ---


def test_an_owner_that_states_the_present_default_number_of_topics_accepts_the_former_one() -> None:
    former = MailboxSettings(MailboxLimits(topics=1_024))
    check_settings("acme@one", former, SettingsChanges.of(MailboxLimits(), None))
    with pytest.raises(SettingsConflict, match="topics"):
        check_settings("acme@one", former, SettingsChanges({"topics": 9_999}))
    with pytest.raises(SettingsConflict, match="topics"):
        check_settings(
            "acme@one", MailboxSettings(MailboxLimits(topics=9_999)), SettingsChanges({"topics": 10_000})
        )


def test_an_owner_that_gives_other_settings_is_refused() -> None:
    settings = SettingsChanges(
        {"topics": 9},
        {"max_attempts": 1},
        {"a": {"shards": 8}, "a*": {"shards": 8}},
        {"*": SubjectPolicy("principal")},
    )
    given(NOTHING, policy=TopicPolicy()).when(take(settings), at=5).then_rejected(
        SettingsConflict,
        f"to change it, run `postroom apply --mailbox {NAME}` with a settings file",
        differences=(
            Difference("limits.topics", 10_000, 9),
            Difference("policy.max_attempts", 5, 1),
            Difference("topics.a*.shards", None, 8),  # of a topic, 8 is in force; a glob has no section
            Difference("erasure.topics.*", None, "principal"),
        ),
    )
    check_settings(NAME, MailboxSettings(), SettingsChanges.of(MailboxLimits(), TopicPolicy()))


def test_the_command_of_a_conflict_is_one_that_a_shell_runs_as_it_is() -> None:
    stored = MailboxSettings(MailboxLimits(max_store_bytes=9))
    settings = SettingsChanges({"max_store_bytes": None}, {"priorities": True}, {"a*": {"shards": 8}})
    with pytest.raises(SettingsConflict) as refusal:
        check_settings(NAME, stored, settings)
    assert (
        f"run `postroom mailbox set --mailbox {NAME} --unset limits.max_store_bytes policy.priorities=true "
        f"'topics.a*.shards=8'` or `postroom apply --mailbox {NAME}`."
    ) in str(refusal.value)


def test_an_owner_without_the_key_store_cannot_own_a_mailbox_that_encrypts() -> None:
    policies = {"*": SubjectPolicy("principal")}
    scenario = given([changed(MailboxSettings(subject_policies=policies))])
    scenario.when(take(can_encrypt=False), at=5).then_rejected(InvalidRequest, "name the key store")
    scenario.when(Life("a").send(), at=5).then_rejected(
        InvalidRequest, "encrypts the messages of topic orders"
    )
    assert len(scenario.when(take(), at=5).events) == 1


# -- logs without settings ---


def old_log(owner: str) -> list[Any]:
    return [
        MailboxCreated(OWN, 1, 0, NAME, "queue"),
        OwnershipTaken(OWN, 2, 0, 1, owner, BOOT, 0, False),
    ]


@pytest.mark.parametrize(("owner", "visibility_ms"), [("postroom send, process 7", 30_000), ("app", 5_000)])
def test_the_first_owner_stores_what_the_last_one_had(owner: str, visibility_ms: int) -> None:
    policy = TopicPolicy(max_attempts=2)
    scenario = given([policy_set(policy)], before=old_log(owner))
    assert scenario.mailbox.policy("another").visibility_ms == visibility_ms
    given_too = SettingsChanges({"topics": 5}, {"max_attempts": 7})
    outcome = scenario.when(take(given_too), at=5)
    stored, taken = outcome.events
    assert isinstance(stored, MailboxSettingsChanged)
    assert stored.settings.default_policy == TopicPolicy(visibility_ms=visibility_ms, max_attempts=7)
    assert (stored.settings.limits.topics, resolve_policy(stored.settings, TOPIC)) == (5, policy)
    assert (stored.version, taken.version) == (4, 5)
    state = outcome.then(outcome.events)
    assert state.mailbox.stored_settings.is_stored
    assert len(state.when(take(given_too), at=6).events) == 1
    state.when(take(SettingsChanges({"topics": 6})), at=6).then_rejected(
        SettingsConflict, "limits.topics is 5"
    )


def test_a_topic_of_an_old_log_keeps_at_least_the_shards_that_it_used() -> None:
    lives = {name: Life(name, policy=TopicPolicy(shards=64)) for name in "abcdef"}
    sent = [life.sent(at=0, sticky_key=name) for name, life in lives.items()]
    highest = max(event.shard for event in sent)
    assert highest >= 8
    outcome = given(sent, before=old_log("app")).when(take(), at=5)
    state = outcome.then(outcome.events)
    assert state.mailbox.shard_count(TOPIC) == highest + 1
    outcome = given(sent, before=old_log("app")).when(
        take(SettingsChanges(default_policy={"shards": 64})), at=5
    )
    state = outcome.then(outcome.events)
    (again,) = state.when(Life("again").send(sticky_key="a"), at=6).events
    assert isinstance(again, MessageSent)
    assert again.shard == sent[0].shard


@pytest.mark.parametrize(
    "labels",
    [
        None,
        "x",
        [],
        {1: {}},
        {"a b": {}},
        {"a": []},
        {"a": {1: "x"}},
        {"a": {"": "x"}},
        {"a": {"x": 1}},
        {"a": {"x": "\0"}},
        {"a": {"x": "y" * 4_097}},
        {"a": {str(i): "" for i in range(201)}},
    ],
)
def test_labels_out_of_bounds_are_refused(labels: Any) -> None:
    with pytest.raises(InvalidRequest):
        change_settings(MailboxSettings(), SettingsChanges(labels=labels))


def test_more_topics_with_labels_than_topics_are_refused() -> None:
    labels = {f"topic-{i}": {"a": "b"} for i in range(3)}
    with pytest.raises(InvalidRequest, match="3 topics have labels, and the limit is 2"):
        change_settings(MailboxSettings(MailboxLimits(topics=2)), SettingsChanges(labels=labels))


def test_settings_outlive_a_snapshot() -> None:
    a = Life("a")
    settings = settings_of({"ord*": {"shards": 3}}, max_attempts=9)
    mailbox = given([a.sent(at=0), changed(settings), taken_over(epoch=2, version=4, at=2)]).mailbox
    restored = restore(take_snapshot(mailbox), NAME)
    assert restored is not None
    assert restored.stored_settings == mailbox.stored_settings
    assert restored.shard_count(TOPIC) == mailbox.shard_count(TOPIC) == 8
    assert take_snapshot(restored) == take_snapshot(mailbox)
