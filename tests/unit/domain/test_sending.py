"""SEND (svc-mailbox C-1): accepting, refusing, and recognising what was sent before."""

import hypothesis
import msgspec
import pytest
from hypothesis import strategies as st

from postroom.domain.errors import FrameTooLarge, IdempotencyConflict, InvalidRequest, Saturated
from postroom.domain.integrity import payload_hash
from postroom.domain.mailbox.commands import Purge, Sweep
from postroom.domain.mailbox.state import shard_of
from postroom.domain.message import MS, MessageSent
from postroom.domain.policy import ARCHIVE_ROOM_BYTES, DAY_MS, MailboxLimits, TopicPolicy
from tests.unit.domain.scenario import NOTHING, TOPIC, Life, given, policy_set

WINDOW = 300_000
"""The default T_replay, ms (svc-mailbox I-13)."""


def test_a_message_is_ready_at_once_and_kept_for_a_week() -> None:
    a = Life("a")
    sent = a.sent(at=7)
    given(NOTHING).when(a.send(), at=7).then([sent])
    assert (sent.due, sent.expires_at) == (7 * MS, (7 + 7 * DAY_MS) * MS)


# -- idempotency (I-2, I-13, C-2, G-2, G-8) ---


def test_the_same_key_and_payload_is_sent_once() -> None:
    a, again = Life("a"), Life("b")
    given([a.sent(at=0, idem_key="k")]).when(again.send(idem_key="k"), at=1).then_nothing_happens()


@pytest.mark.parametrize("later", [0, 1, WINDOW - 1])
def test_a_key_is_remembered_for_its_whole_window(later: int) -> None:
    a, again = Life("a"), Life("b")
    given([a.sent(at=5, idem_key="k")]).when(again.send(idem_key="k"), at=5 + later).then_nothing_happens()


def test_a_key_is_free_again_after_its_window() -> None:
    a, again = Life("a"), Life("b")
    resent = again.sent(at=5 + WINDOW, idem_key="k")
    after = given([a.sent(at=5, idem_key="k")]).when(again.send(idem_key="k"), at=5 + WINDOW).then([resent])
    third = Life("c").send(idem_key="k")
    after.when(third, at=5 + 2 * WINDOW - 1).then_nothing_happens()  # the window began anew


def test_a_key_outlives_its_message() -> None:
    a, again = Life("a"), Life("b")
    settled = [a.sent(at=0, idem_key="k"), a.received(at=1), a.acked(at=2)]
    given(settled).when(again.send(idem_key="k"), at=3).then_nothing_happens()


def test_the_same_key_with_another_payload_is_a_conflict() -> None:
    a, other = Life("a"), Life("b")
    scenario = given([a.sent(at=0, idem_key="k")])
    scenario.when(other.send(b"changed", idem_key="k"), at=1).then_rejected(
        IdempotencyConflict,
        "'k' on topic orders was used for another payload",
        code="E_DUPLICATE",
        status=409,
    )


def test_a_conflict_ends_with_the_window() -> None:
    a, other = Life("a"), Life("b")
    sent = other.sent(at=WINDOW, payload=b"changed", idem_key="k")
    given([a.sent(at=0, idem_key="k")]).when(other.send(b"changed", idem_key="k"), at=WINDOW).then([sent])


def test_topics_do_not_share_keys() -> None:
    a, b = Life("a"), Life("b", topic="invoices")
    sent = b.sent(at=1, idem_key="k")
    given([a.sent(at=0, idem_key="k")]).when(b.send(idem_key="k"), at=1).then([sent])


def test_messages_without_a_key_are_never_duplicates() -> None:
    a, b = Life("a"), Life("b")
    given([a.sent(at=0)]).when(b.send(), at=0).then([b.sent(at=0)])


def test_a_full_replay_table_refuses_new_keys_until_the_oldest_may_be_forgotten() -> None:
    policy = TopicPolicy(replay_capacity=2, replay_window_ms=10_000)
    a, b, c = (Life(name, policy=policy) for name in "abc")
    full = given([a.sent(at=0, idem_key="1"), b.sent(at=4_000, idem_key="2")], policy=policy)
    full.when(c.send(idem_key="3"), at=9_000).then_rejected(
        Saturated,
        "remembers its limit of 2 idempotency keys",
        retry_after_ms=1_000,
        code="E_SATURATED",
        status=429,
    )
    full.when(c.send(b"hello", idem_key="1"), at=9_000).then_nothing_happens()  # known keys still answer
    full.when(Life("d", policy=policy).send(), at=9_000).then([Life("d", policy=policy).sent(at=9_000)])
    full.when(c.send(idem_key="3"), at=10_000).then([c.sent(at=10_000, idem_key="3")])


def test_a_full_replay_table_says_to_retry_in_no_less_than_a_millisecond() -> None:
    policy = TopicPolicy(replay_capacity=1, replay_window_ms=10_000)
    a, b = Life("a", policy=policy), Life("b", policy=policy)
    early = a.sent(at=0, idem_key="1")
    late = msgspec.structs.replace(early, at=1)  # 1 µs past 0
    given([late], policy=policy).when(b.send(idem_key="2"), at=10_000).then_rejected(
        Saturated, "idempotency keys", retry_after_ms=1
    )


def test_an_external_id_that_is_stored_is_a_duplicate_for_ever() -> None:
    a = Life("a").send(b"same", has_external_id=True)
    for existing in (payload_hash(b"same"), b""):  # empty where retention removed the beginning
        repeated = msgspec.structs.replace(a, existing_hash=existing)
        given(NOTHING).when(repeated, at=99 * DAY_MS).then_nothing_happens()


def test_an_external_id_that_is_stored_with_another_payload_is_a_conflict_that_shows_no_hash() -> None:
    changed = Life("a").send(b"new", has_external_id=True, existing_hash=payload_hash(b"old"))
    without_hash = r"^Message id \S+ exists with another payload than the one sent now to topic \S+; \D+\.$"
    given(NOTHING).when(changed, at=0).then_rejected(
        IdempotencyConflict, without_hash, code="E_DUPLICATE", status=409
    )


def test_an_id_that_the_mailbox_holds_is_a_duplicate() -> None:
    a = Life("a")
    given([a.sent(at=0)]).when(a.send(b"whatever", has_external_id=True), at=1).then_nothing_happens()


# -- bounds (I-5, I-6, C-5) ---


def test_a_frame_holds_a_mebibyte_and_not_a_byte_more() -> None:
    a = Life("a")
    largest = a.send(envelope=bytes(1 << 20))
    sent = msgspec.structs.replace(a.sent(at=0), envelope=largest.envelope)
    given(NOTHING).when(largest, at=0).then([sent])
    given(NOTHING).when(a.send(envelope=bytes((1 << 20) + 1)), at=0).then_rejected(
        FrameTooLarge, "1048577 bytes.*at most 1048576", code="E_FRAME_TOO_LARGE", status=413
    )


@hypothesis.given(limit=st.integers(1, 1 << 20), excess=st.integers(-300, 300), archives=st.booleans())
def test_a_frame_is_accepted_up_to_its_limit_and_no_further(limit: int, excess: int, archives: bool) -> None:
    """An archive has room for headers that others wrote, beside the frame."""
    size = max(0, limit + (ARCHIVE_ROOM_BYTES if archives else 0) + excess)
    limits = MailboxLimits(frame_bytes=limit)
    scenario = given(NOTHING, mode="archive" if archives else "queue", limits=limits)
    command = Life("a").send(envelope=bytes(size))
    if excess > 0:
        scenario.when(command, at=0).then_rejected(FrameTooLarge, f"{size} bytes", status=413)
    else:
        assert [type(event) for event in scenario.when(command, at=0).events] == [MessageSent]


def test_a_full_shard_refuses_while_other_shards_accept() -> None:
    policy = TopicPolicy(shard_capacity=2)
    a, b, c = (Life(name, policy=policy) for name in "abc")
    assert shard_of("user-1", 8) != shard_of("user-2", 8)
    full = given([a.sent(at=0, sticky_key="user-1"), b.sent(at=0, sticky_key="user-1")], policy=policy)
    full.when(c.send(sticky_key="user-1"), at=1).then_rejected(
        Saturated, "Shard 0 of topic orders is full with 2 messages", retry_after_ms=1_000
    )
    full.when(c.send(sticky_key="user-2"), at=1).then([c.sent(at=1, sticky_key="user-2")])


def test_messages_in_flight_and_delayed_count_against_a_shards_capacity() -> None:
    policy = TopicPolicy(shard_capacity=2)
    a, b, c = (Life(name, policy=policy) for name in "abc")
    past = [a.sent(at=0), a.received(at=1), b.sent(at=1, due=9_000)]
    full = given(past, policy=policy)
    full.when(c.send(), at=2).then_rejected(Saturated, "is full with 2 messages")
    settled = given([*past, a.acked(at=2)], policy=policy)
    settled.when(c.send(), at=2).then([c.sent(at=2)])


def test_dead_letters_do_not_count_against_a_shards_capacity() -> None:
    policy = TopicPolicy(shard_capacity=1, max_attempts=1)
    a, b = Life("a", policy=policy), Life("b", policy=policy)
    past = [a.sent(at=0), a.received(at=0), a.dead(at=1)]
    given(past, policy=policy).when(b.send(), at=2).then([b.sent(at=2)])


def test_a_duplicate_is_recognised_though_its_shard_is_full() -> None:
    policy = TopicPolicy(shard_capacity=1)
    a = Life("a", policy=policy)
    full = given([a.sent(at=0, idem_key="k")], policy=policy)
    full.when(Life("b").send(idem_key="k"), at=1).then_nothing_happens()


def test_a_mailbox_has_a_bounded_number_of_topics() -> None:
    limits = MailboxLimits(topics=2)
    past = [Life("a", topic="one").sent(at=0), Life("b", topic="two").sent(at=0)]
    scenario = given(past, limits=limits)
    scenario.when(Life("c", topic="three").send(), at=1).then_rejected(Saturated, "its limit of 2 topics")
    c = Life("c", topic="two")
    scenario.when(c.send(), at=1).then([c.sent(at=1)])


def test_a_topic_without_messages_and_keys_does_not_count_against_the_number_of_topics() -> None:
    limits, window = MailboxLimits(topics=1), 300_000
    a, b = Life("a", topic="one"), Life("b", topic="two")
    acked = given([a.sent(at=0), a.received(at=1), a.acked(at=2)], limits=limits)
    then = acked.when(b.send(), at=3).then([b.sent(at=3)])
    assert list(then.mailbox.topics) == ["two"]

    a, b = Life("a", topic="one"), Life("b", topic="two")
    remembers = given([a.sent(at=0, idem_key="k"), a.received(at=1), a.acked(at=2)], limits=limits)
    remembers.when(b.send(), at=window - 1).then_rejected(Saturated, "its limit of 1 topics")
    remembers.when(b.send(), at=window).then([b.sent(at=window)])


def test_a_topic_with_a_dead_letter_counts_against_the_number_of_topics() -> None:
    a = Life("a", topic="one")
    past = [a.sent(at=0), a.received(at=1), a.dead(at=2)]
    full = given(past, limits=MailboxLimits(topics=1))
    full.when(Life("b", topic="two").send(), at=3).then_rejected(Saturated, "its limit of 1 topics")


# -- shards (P-1, P-6) ---


def test_messages_share_a_shard_by_topic_or_by_their_sticky_key() -> None:
    def shard(sticky_key: str | None = None) -> int:
        outcome = given(NOTHING).when(Life("a").send(sticky_key=sticky_key), at=0)
        (event,) = outcome.events
        assert isinstance(event, MessageSent)
        return event.shard

    assert shard() == shard_of(TOPIC, 8)
    assert shard(sticky_key="user-2") == shard_of("user-2", 8)


def test_a_topics_own_policy_says_how_many_shards_it_has() -> None:
    policy = TopicPolicy(shards=1_024)
    a = Life("a", policy=policy)
    given([policy_set(policy)]).when(a.send(), at=0).then([a.sent(at=0)])
    assert a.version == 1


# -- delay, TTL, archive ---


def test_a_delayed_message_waits_and_its_ttl_runs_meanwhile() -> None:
    a = Life("a")
    given(NOTHING).when(a.send(deliver_after_ms=500, ttl_ms=2_000), at=100).then(
        [a.sent(at=100, due=600, ttl=2_000)]
    )


def test_a_ttl_never_reaches_beyond_the_topics_retention() -> None:
    policy = TopicPolicy(ready_retention_ms=1_000)
    a = Life("a", policy=policy)
    given(NOTHING, policy=policy).when(a.send(ttl_ms=DAY_MS), at=0).then([a.sent(at=0, ttl=1_000)])


def test_a_delay_that_outlasts_the_ttl_is_refused() -> None:
    policy = TopicPolicy(ready_retention_ms=5_000)
    a = Life("a", policy=policy)
    empty = given(NOTHING, policy=policy)
    empty.when(a.send(deliver_after_ms=2_000, ttl_ms=2_000), at=0).then_rejected(
        InvalidRequest, "deliver_after_ms must be below the 2000 ms .* it was 2000"
    )
    empty.when(a.send(deliver_after_ms=1_999, ttl_ms=2_000), at=0).then([a.sent(at=0, due=1_999, ttl=2_000)])


def test_the_retention_of_a_delayed_message_begins_when_it_is_due() -> None:
    policy = TopicPolicy(ready_retention_ms=5_000)
    a = Life("a", policy=policy)
    past = (
        given(NOTHING, policy=policy)
        .when(a.send(deliver_after_ms=9_000), at=1)
        .then([a.sent(at=1, due=9_001)])
    )
    past.when(Sweep(), at=14_000).then_nothing_happens()
    past.when(Sweep(), at=14_001).then([a.dead(at=14_001, reason="retention_expired")])


def test_an_archive_stores_messages_and_never_delivers_them() -> None:
    limits = MailboxLimits(topics=1)
    archive = given(NOTHING, mode="archive", limits=limits)
    for number, topic in enumerate(["one", "two", "three"]):
        life = Life(str(number), topic=topic)
        stored = msgspec.structs.replace(life.sent(at=number), shard=0, due=None, expires_at=0)
        archive = archive.when(life.send(), at=number).then([stored])
    assert (archive.mailbox.archived, archive.mailbox.messages, archive.mailbox.topics) == (3, {}, {})


def test_an_archive_refuses_a_key_that_came_with_another_payload_and_bounds_topics_with_keys() -> None:
    a, b = Life("a"), Life("b", topic="other")
    stored = msgspec.structs.replace(a.sent(at=0, idem_key="k"), shard=0, due=None, expires_at=0)
    limits = MailboxLimits(topics=1)
    archive = given([stored], mode="archive", limits=limits)
    archive.when(Life("c").send(idem_key="k"), at=1).then_nothing_happens()
    archive.when(Life("c").send(b"other", idem_key="k"), at=1).then_rejected(IdempotencyConflict, "'k'")
    archive.when(b.send(idem_key="k"), at=1).then_rejected(Saturated, "its limit of 1 topics")
    without_key = msgspec.structs.replace(b.sent(at=1), shard=0, due=None, expires_at=0)
    archive.when(b.send(), at=1).then([without_key])


def test_an_archive_refuses_frames_that_are_too_large_and_ids_it_knows() -> None:
    archive = given(NOTHING, mode="archive")
    most = (1 << 20) + ARCHIVE_ROOM_BYTES
    archive.when(Life("a").send(envelope=bytes(most + 1)), at=0).then_rejected(
        FrameTooLarge, f"{most + 1} bytes"
    )
    archive.when(Life("a").send(existing_hash=b""), at=0).then_nothing_happens()


def test_a_purged_topic_retains_its_idempotency_keys() -> None:
    a = Life("a")
    purged = (
        given([a.sent(at=0, idem_key="k")]).when(Purge(TOPIC), at=1).then([a.expired(at=1, reason="purged")])
    )
    purged.when(Life("b").send(idem_key="k"), at=2).then_nothing_happens()
