"""Paused topics: nothing is delivered, and everything else goes on."""

import pytest

from postroom.domain.errors import NotFound, Saturated
from postroom.domain.mailbox.commands import Command, Pause, Receive, Resume, Sweep
from postroom.domain.mailbox.counts import summarize_topics
from postroom.domain.mailbox.events import TopicPaused, TopicResumed
from postroom.domain.message import MS
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from tests.support.snapshots import restore, take_snapshot
from tests.unit.domain.scenario import NAME, NOTHING, TOPIC, Given, Life, given, policy_set, taken_over

OTHER = "invoices"


def paused(*, at: int = 0, version: int = 3, topic: str = TOPIC) -> TopicPaused:
    return TopicPaused(mailbox_stream(NAME), version, at * MS, topic)


def resumed(*, at: int, version: int = 4, topic: str = TOPIC) -> TopicResumed:
    return TopicResumed(mailbox_stream(NAME), version, at * MS, topic)


def receive(*topics: str) -> Receive:
    return Receive(topics or (TOPIC,), 10, 1 << 20)


def test_a_paused_topic_delivers_nothing_until_it_is_resumed() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0)]).when(Pause(TOPIC), at=1).then([paused(at=1)])
    scenario.when(receive(), at=2).then_nothing_happens()
    scenario = scenario.when(Resume(TOPIC), at=3).then([resumed(at=3)])
    scenario.when(receive(), at=4).then([a.received(at=4)])


def test_the_other_topics_of_a_receive_are_served() -> None:
    a, b = Life("a"), Life("b", topic=OTHER)
    scenario = given([a.sent(at=0), b.sent(at=0), paused()])
    scenario.when(receive(TOPIC, OTHER), at=1).then([b.received(at=1)])


@pytest.mark.parametrize(("command", "past"), [(Pause(TOPIC), [paused()]), (Resume(TOPIC), [])])
def test_pausing_and_resuming_again_changes_nothing(command: Command, past: list[Event]) -> None:
    given([Life("a").sent(at=0), *past]).when(command, at=1).then_nothing_happens()


def test_sends_settlements_and_expiry_go_on_while_a_topic_is_paused() -> None:
    policy = TopicPolicy(max_attempts=1, visibility_ms=5_000)
    a, b, c, d = (Life(name, policy=policy) for name in "abcd")
    past = [a.sent(at=0), b.sent(at=0), c.sent(at=0, ttl=9_000), a.received(at=1), b.received(at=1)]
    scenario = given([*past, paused(at=2)], policy=policy)
    scenario = scenario.when(d.send(), at=3).then([d.sent(at=3)])
    scenario = scenario.when(Sweep(), at=5_001).then(
        [each.dead(at=5_001, error="visibility expired") for each in (a, b)]
    )
    scenario.when(Sweep(), at=9_000).then([c.dead(at=9_000, reason="ttl_expired")])


def test_an_unknown_topic_is_answered_with_the_closest_one_and_the_others() -> None:
    topics = [TOPIC, OTHER, *(f"topic.{n:02}" for n in range(12))]
    scenario = given([Life(topic, topic=topic).sent(at=0) for topic in topics])
    for command in (Pause("odrers"), Resume("odrers")):
        scenario.when(command, at=1).then_rejected(
            NotFound,
            r"has no topic odrers; did you mean orders\? Others are invoices, topic.00, .* and 4 more\.$",
        )
    given(NOTHING).when(Pause(TOPIC), at=1).then_rejected(NotFound, "no topic orders; there is none yet")
    given([Life("a").sent(at=0)]).when(Pause("zzz"), at=1).then_rejected(NotFound, "choose one of orders")


def test_a_topic_that_has_only_a_policy_can_be_paused() -> None:
    given([policy_set(TopicPolicy())]).when(Pause(TOPIC), at=1).then([paused(at=1, version=4)])


def test_the_number_of_paused_topics_is_bounded() -> None:
    scenario = given([paused(topic="a"), Life("b").sent(at=0)], limits=MailboxLimits(topics=1))
    scenario.when(Pause(TOPIC), at=1).then_rejected(Saturated, "paused its limit of 1 topics")


def test_a_pause_outlasts_its_owner_and_a_snapshot() -> None:
    a = Life("a", epoch=2)
    scenario = given([a.sent(at=0), paused(at=1), taken_over(epoch=2, version=4, at=2)])
    restored = restore(take_snapshot(scenario.mailbox), NAME)
    assert restored is not None
    for each in (scenario, Given(restored)):
        each.when(receive(), at=3).then_nothing_happens()
        (topic,) = summarize_topics(each.mailbox, 3 * MS)
        assert (topic.topic, topic.paused, topic.ready) == (TOPIC, True, 1)


def test_dead_letterings_are_counted_by_topic_and_reason_across_snapshots() -> None:
    policy = TopicPolicy(max_attempts=1)
    a, b = Life("a", policy=policy), Life("b", policy=policy)
    past = [a.sent(at=0), a.received(at=1), a.dead(at=2), a.redriven(at=3), a.received(at=4), a.dead(at=5)]
    past += [b.sent(at=6), b.dead(at=7, reason="ttl_expired"), b.expired(at=8, reason="purged")]
    scenario = given(past, policy=policy)
    restored = restore(take_snapshot(scenario.mailbox), NAME)
    assert restored is not None
    for mailbox in (scenario.mailbox, restored):
        (topic,) = summarize_topics(mailbox, 9 * MS)
        assert topic.dead_letterings == {"max_attempts": 2, "ttl_expired": 1}
        assert topic.dead == 1
