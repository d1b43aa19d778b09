"""Limits that the topics of a section share."""

from collections.abc import Mapping

import msgspec
import pytest

from postroom.domain.mailbox.batch import decide_batch, evolve_batch
from postroom.domain.mailbox.commands import Ack, Receive, SetSettings
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import IN_FLIGHT, MS
from postroom.domain.policy import PolicyValue, TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, Life, given

SHARED: Mapping[str, PolicyValue] = {"shared_limits": True, "max_in_flight": 3}
POLICY = TopicPolicy(visibility_ms=5_000)
TOPICS = ("mail.a", "mail.b", "mail.c")


def section(mailbox: Mailbox, name: str, fields: Mapping[str, PolicyValue], at: int = 0) -> None:
    changes = SettingsChanges(topics={name: fields})
    for event in decide(SetSettings(changes), mailbox, at * MS):
        evolve(mailbox, event)


def waiting(count: int = 4, topics: tuple[str, ...] = TOPICS, **shared: PolicyValue) -> Mailbox:
    """Return a mailbox with messages in topics that share their limits by the section `mail.*`."""
    mailbox = given([], policy=POLICY).mailbox
    section(mailbox, "mail.*", shared or SHARED)
    send(mailbox, *topics * count)
    return mailbox


def send(mailbox: Mailbox, *topics: str, at: int = 0) -> None:
    for topic in topics:
        number = len(mailbox.messages) + mailbox.position
        life = Life(f"m{number}", topic=topic, policy=POLICY)
        for event in decide(life.send(), mailbox, at * MS):
            evolve(mailbox, event)


def deliver(mailbox: Mailbox, *topics: str, most: int = 9, at: int = 1) -> str:
    """Deliver messages, and return the last letters of their topics."""
    events = decide(Receive(topics, most, 1 << 20), mailbox, at * MS)
    names = "".join(mailbox.messages[event.stream].topic[-1] for event in events)
    for event in events:
        evolve(mailbox, event)
    return names


def ack(mailbox: Mailbox, count: int, at: int = 1, *, in_batch: bool = False) -> None:
    receipts = [each.receipt for each in mailbox.messages.values() if each.status == IN_FLIGHT][:count]
    if in_batch:
        events = decide_batch([Ack(each) for each in receipts], mailbox, at * MS)
        assert events is not None
        evolve_batch(mailbox, events)
        return
    for receipt in receipts:
        for event in decide(Ack(receipt), mailbox, at * MS):
            evolve(mailbox, event)


@pytest.mark.parametrize("in_batch", [False, True])
def test_topics_of_a_section_have_together_as_many_messages_in_flight_as_it_allows(in_batch: bool) -> None:
    mailbox = waiting()
    assert deliver(mailbox, "mail.a", most=2) == "aa"
    assert deliver(mailbox, "mail.b", "mail.c") == "b"
    assert [deliver(mailbox, topic) for topic in TOPICS] == ["", "", ""]
    assert mailbox.count_deliverable("mail.c", MS, 9) == 0
    assert mailbox.next_due("mail.c", MS) is None
    ack(mailbox, 2, in_batch=in_batch)
    assert mailbox.count_deliverable("mail.c", MS, 9) == 2
    assert deliver(mailbox, "mail.c") == "cc"


def test_a_receive_of_several_topics_gets_no_more_than_their_limit() -> None:
    assert deliver(waiting(), *TOPICS) == "aaa"
    assert deliver(waiting(1), *TOPICS) == "abc"
    assert deliver(waiting(1, ("mail.a", "mail.b", "mail.c", "mail.d")), "mail.d", *TOPICS) == "dab"


def test_topics_of_a_section_share_the_tokens_of_its_rate() -> None:
    mailbox = waiting(shared_limits=True, rate=4, rate_burst=3)
    assert deliver(mailbox, "mail.a", most=2) == "aa"
    assert deliver(mailbox, "mail.b") == "b"
    assert mailbox.next_due("mail.c", 2 * MS) == 251 * MS
    assert deliver(mailbox, "mail.c", at=250) == ""
    assert deliver(mailbox, "mail.c", at=251) == "c"
    assert deliver(mailbox, "mail.a", at=252) == ""


def test_a_topic_that_first_appears_later_shares_the_limit() -> None:
    mailbox = waiting(topics=("mail.a",))
    assert deliver(mailbox, "mail.a") == "aaa"
    send(mailbox, "mail.z", at=1)
    assert deliver(mailbox, "mail.z") == ""


def test_a_section_of_its_own_takes_a_topic_out_if_it_changes_a_limit_or_shared_limits() -> None:
    for own, got in (
        ({"max_attempts": 2}, ""),
        ({"max_in_flight": 2}, "bb"),
        ({"shared_limits": False}, "bbb"),
        ({"shared_limits": True}, "bbb"),
    ):
        mailbox = waiting()
        section(mailbox, "mail.b", own)
        assert deliver(mailbox, "mail.a") == "aaa"
        assert deliver(mailbox, "mail.b") == got


def test_limits_are_shared_after_a_restart_also_by_topics_without_messages_in_flight() -> None:
    mailbox = waiting(shared_limits=True, rate=4, rate_burst=3, max_in_flight=2)
    assert deliver(mailbox, "mail.a") == "aa"
    restored = restore(take_snapshot(mailbox), NAME)
    assert restored is not None
    assert deliver(restored, "mail.b", at=2) == ""
    ack(restored, 2, at=3)
    assert deliver(restored, "mail.b", at=4) == "b"
    assert deliver(restored, "mail.c", at=5) == ""


def test_changes_of_settings_keep_what_is_in_flight_and_the_tokens() -> None:
    mailbox = waiting(max_in_flight=2)
    assert deliver(mailbox, *TOPICS[:1]) + deliver(mailbox, *TOPICS[1:2]) == "aabb"
    section(mailbox, "mail.*", {"shared_limits": True, "max_in_flight": 5, "rate": 2}, at=2)
    assert deliver(mailbox, *TOPICS, at=3) == "a"
    section(mailbox, "mail.*", {"max_in_flight": 9}, at=4)
    assert deliver(mailbox, *TOPICS, at=5) == "a"
    section(mailbox, "mail.*", {"rate": 4}, at=6)
    assert deliver(mailbox, "mail.c", at=7) == ""
    section(mailbox, "mail.*", {"shared_limits": False}, at=8)
    assert deliver(mailbox, "mail.c", at=9) == ""  # a topic that leaves takes what is left of the tokens
    section(mailbox, "mail.*", {"rate": 0}, at=10)
    assert deliver(mailbox, "mail.c", at=11) == "cccc"


def test_a_topic_that_is_dropped_leaves_the_tokens_to_the_others() -> None:
    policy = msgspec.structs.replace(POLICY, replay_window_ms=10_000)
    mailbox = given([], policy=policy).mailbox
    section(mailbox, "mail.*", {"shared_limits": True, "rate": 2, "rate_period_ms": 10_000_000})
    send(mailbox, "mail.a", "mail.b")
    assert deliver(mailbox, "mail.a") + deliver(mailbox, "mail.b") == "ab"
    ack(mailbox, 2)
    mailbox.drop_idle_topics(20_000 * MS)
    assert len(mailbox.topics) == 1
    send(mailbox, "mail.c", at=20_000)
    assert deliver(mailbox, "mail.c", at=20_001) == ""
