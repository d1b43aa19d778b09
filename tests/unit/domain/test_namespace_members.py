"""Homes of keys, and which members of a namespace are older than others."""

import pytest

from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.counts import TopicCount
from postroom.domain.namespace import (
    MembersRecord,
    check_members,
    find_predecessors,
    home_of,
    undrained_topics,
)

A, B, C = "acme@a", "acme@b", "acme@c"
KEYS = [str(number) for number in range(300)]


def test_one_more_member_takes_keys_only_for_itself_and_its_share_of_them() -> None:
    before = {key: home_of(key, [A, B]) for key in KEYS}
    after = {key: home_of(key, [C, B, A]) for key in KEYS}
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {after[key] for key in moved} == {C}
    assert 60 < len(moved) < 140


def test_a_member_is_older_if_it_recorded_members_without_the_other_one() -> None:
    histories = {
        A: [MembersRecord((A,), 10), MembersRecord((A, B, C), 30)],
        B: [MembersRecord((A, B, C), 5)],
        C: [MembersRecord((A, B, C), 40)],
    }
    assert find_predecessors(A, histories) == {}
    assert find_predecessors(B, histories) == find_predecessors(C, histories) == {A: 30}


def test_a_member_without_records_is_older_than_none() -> None:
    assert find_predecessors(A, {A: [], B: [MembersRecord((B,), 1)], C: []}) == {}


def test_a_topic_is_drained_when_nothing_of_before_the_cut_off_is_ready() -> None:
    counts = [
        TopicCount("ready", 0, 1, 0, 0, 0, 100),
        TopicCount("ready", 1, 0, 0, 0, 0, None),
        TopicCount("in flight", 0, 0, 1, 0, 0, 50),
        TopicCount("newer", 0, 1, 0, 0, 0, 101),
        TopicCount("dead", 0, 0, 0, 0, 1, None),
    ]
    assert undrained_topics(counts, 100) == {"ready"}


def test_only_mailboxes_of_the_namespace_are_members() -> None:
    assert check_members([B, A, "other@a", A], "acme") == (A, B)
    with pytest.raises(InvalidRequest):
        check_members(["acme@"], "acme")
