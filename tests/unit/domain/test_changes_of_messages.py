"""Rejecting, releasing, cancelling and rescheduling single messages."""

import pytest

from postroom.domain.errors import InvalidRequest, StaleReceipt
from postroom.domain.mailbox.commands import Ack, Cancel, Nack, Receive, Reschedule
from postroom.domain.message import MS
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.job import (
    AdvanceRedrive,
    RedriveAdvanced,
    RedriveCompleted,
    RedriveSkipped,
    RedriveStarted,
    StartRedrive,
)
from postroom.domain.redrive.spec import RedriveSpec, SkipReason, WaitingStatus
from tests.unit.domain.scenario import Given, Life, given

RECEIVE = Receive(("orders",), 9, 1 << 20)


# -- rejecting ---


def test_a_rejected_message_is_a_dead_letter_after_its_first_attempt() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=1)])
    rejected = scenario.when(Nack(a.receipt, 0.5, "no such customer", action="reject"), at=2).then(
        [a.dead(at=2, reason="rejected", error="no such customer")]
    )
    assert (rejected.mailbox.in_flight, list(rejected.mailbox.topics["orders"].dead)) == (0, [a.stream])
    rejected.when(Ack(a.receipt), at=3).then_rejected(StaleReceipt, "the message is now dead")


def test_a_delivery_that_timed_out_can_be_rejected_until_the_message_is_redelivered() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000)])
    rejected = scenario.when(Nack(a.receipt, 0.5, "late", action="reject"), at=6_000).then(
        [a.dead(at=6_000, reason="rejected", error="late")]
    )
    rejected.when(RECEIVE, at=6_000).then_nothing_happens()


# -- releasing ---


def test_a_released_message_is_ready_at_once_and_has_all_its_attempts() -> None:
    a = Life("a", policy=TopicPolicy(visibility_ms=5_000, max_attempts=1))
    scenario = given([a.sent(at=0)], policy=a.policy)
    for at in range(1, 9, 2):
        delivered = scenario.when(RECEIVE, at=at).then([a.received(at=at)])
        assert a.attempt == 1
        scenario = delivered.when(Nack(a.receipt, 0.5, action="release"), at=at + 1).then(
            [a.requeued(at=at + 1, due=at + 1, reason="released")]
        )
        scenario.when(Ack(a.receipt), at=at + 1).then_rejected(StaleReceipt, "earlier delivery")


def test_a_released_message_waits_for_its_delay_and_keeps_the_error_of_an_earlier_attempt() -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1, error="it broke"), a.received(at=2)]
    scenario = given(past)
    released = scenario.when(Nack(a.receipt, 0.5, None, 1_000, action="release"), at=3).then(
        [a.requeued(at=3, due=1_003, reason="released")]
    )
    assert (released.mailbox.messages[a.stream].attempt, released.mailbox.messages[a.stream].last_error) == (
        1,
        "it broke",
    )
    released.when(RECEIVE, at=1_002).then_nothing_happens()
    released.when(RECEIVE, at=1_003).then([a.received(at=1_003)])
    assert a.attempt == 2


def test_a_release_after_the_visibility_timeout_changes_nothing() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000)])
    scenario.when(Nack(a.receipt, 0.5, action="release"), at=5_001).then_nothing_happens()


# -- cancelling ---


def waiting(a: Life) -> Given:
    return given([a.sent(at=0)])


def delayed(a: Life) -> Given:
    return given([a.sent(at=0, due=9_000)])


def in_flight(a: Life) -> Given:
    return given([a.sent(at=0), a.received(at=1)])


@pytest.mark.parametrize("state", [waiting, delayed, in_flight])
def test_a_message_that_is_cancelled_never_comes_back(state: object) -> None:
    a = Life("a")
    scenario: Given = state(a)  # type: ignore[operator] # it is one of the functions above
    message = scenario.mailbox.messages[a.stream]
    cancelled = scenario.when(Cancel(a.stream, "ordered twice", "ann"), at=2).then(
        [a.expired(at=2, reason="cancelled", note="ordered twice", principal="ann")]
    )
    mailbox = cancelled.mailbox
    assert (mailbox.messages, mailbox.in_flight, mailbox.topics["orders"].is_empty) == ({}, 0, True)
    assert (mailbox.next_timer(), mailbox.next_due("orders", 0)) == (None, None)
    cancelled.when(Cancel(a.stream), at=3).then_nothing_happens()
    if a.receipts:
        late = Ack(a.receipt, stored_message=message)
        cancelled.when(late, at=3).then_rejected(StaleReceipt, "the message is now expired")


def test_a_dead_letter_and_an_unknown_message_are_not_cancelled() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.dead(at=1)])
    scenario.when(Cancel(a.stream), at=2).then_nothing_happens()
    scenario.when(Cancel(b"?" * 16), at=2).then_nothing_happens()


# -- rescheduling ---


def test_a_delayed_message_is_delivered_at_once_when_it_is_rescheduled_to_now() -> None:
    a = Life("a")
    scenario = delayed(a).when(Reschedule(a.stream, principal="ann"), at=100)
    expedited = scenario.then([a.rescheduled(at=100, due=100, principal="ann")])
    expedited.when(RECEIVE, at=100).then([a.received(at=100)])


def test_a_ready_message_waits_again_and_keeps_its_place_in_the_queue() -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0), b.sent(at=0)])
    moved = scenario.when(Reschedule(a.stream, 50), at=10).then([a.rescheduled(at=10, due=60)])
    moved.when(Receive(("orders",), 1, 1), at=59).then([b.received(at=59)])
    moved.when(RECEIVE, at=60).then([a.received(at=60)])


def test_a_message_is_rescheduled_to_a_time_and_one_in_the_past_is_now() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0)])
    moved = scenario.when(Reschedule(a.stream, at=60 * MS), at=10).then([a.rescheduled(at=10, due=60)])
    moved.when(Reschedule(a.stream, at=19 * MS), at=20).then([a.rescheduled(at=20, due=20)])


def test_a_message_is_not_rescheduled_beyond_the_time_to_live_of_its_sender() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0, ttl=1_000)])
    scenario.when(Reschedule(a.stream, 990), at=10).then_rejected(InvalidRequest, "below the 990 ms")
    scenario.when(Reschedule(a.stream, 989), at=10).then([a.rescheduled(at=10, due=999, expires=1_000)])


@pytest.mark.parametrize("state", ["in flight", "dead", "unknown"])
def test_only_a_waiting_message_is_rescheduled(state: str) -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0), *([a.dead(at=1)] if state == "dead" else [])]
    stream = b"?" * 16 if state == "unknown" else a.stream
    given(past).when(Reschedule(stream, 5), at=2).then_nothing_happens()


# -- jobs on the messages of a query ---

JOB = b"j" * 16


def started(a: Life, b: Life, c: Life, spec: RedriveSpec) -> Given:
    """Start a job after three sends; the third message is in flight, and the first fails once."""
    past = [a.sent(at=0), b.sent(at=0), c.sent(at=0), c.received(at=1), a.received(at=1)]
    scenario = given([*past, a.requeued(at=2, due=2)])
    cutoff = scenario.mailbox.position
    return scenario.when(StartRedrive(JOB, spec, cutoff, 3, "ann"), at=3).then(
        [RedriveStarted(JOB, 1, 3 * MS, spec, cutoff, 3, "ann")]
    )


def test_a_job_on_some_statuses_skips_what_has_another_by_then() -> None:
    cases: list[tuple[WaitingStatus, SkipReason]] = [("ready", "in_flight"), ("in_flight", "ready")]
    for status, reason in cases:
        a, b, c = Life("a"), Life("b"), Life("c")
        scenario = started(a, b, c, RedriveSpec(action="cancel", statuses=(status,)))
        cutoff = scenario.mailbox.redrives[JOB].cutoff
        step = AdvanceRedrive(JOB, (b.stream, c.stream), cutoff, True)
        changed, left = (b, c) if status == "ready" else (c, b)
        scenario.when(step, at=5).then(
            [
                changed.expired(at=5, reason="cancelled", principal="ann"),
                RedriveAdvanced(JOB, 2, 5 * MS, cutoff, 1, 2),
                RedriveSkipped(JOB, 3, 5 * MS, left.stream, reason),
                RedriveCompleted(JOB, 4, 5 * MS),
            ]
        )


def test_a_job_cancels_by_the_positions_of_the_sends_and_a_repeated_step_changes_nothing_more() -> None:
    a, b, c, late = Life("a"), Life("b"), Life("c"), Life("late")
    scenario = started(a, b, c, RedriveSpec(action="cancel", note="over"))
    sent = late.send()
    scenario = scenario.when(sent, at=4).then([late.sent(at=4)])
    step = AdvanceRedrive(JOB, (a.stream, late.stream), scenario.mailbox.messages[a.stream].position, False)
    first = scenario.when(step, at=5)
    cutoff = scenario.mailbox.redrives[JOB].cutoff
    scenario = first.then(
        [
            a.expired(at=5, reason="cancelled", note="over", principal="ann"),
            RedriveAdvanced(JOB, 2, 5 * MS, step.cursor, 1, 1),
            RedriveSkipped(JOB, 3, 5 * MS, late.stream, "dead_again"),
        ]
    )
    last = AdvanceRedrive(JOB, (b.stream, c.stream), cutoff, True)
    scenario = scenario.when(last, at=6).then(
        [
            b.expired(at=6, reason="cancelled", note="over", principal="ann"),
            c.expired(at=6, reason="cancelled", note="over", principal="ann"),
            RedriveAdvanced(JOB, 4, 6 * MS, cutoff, 2, 0),
            RedriveCompleted(JOB, 5, 6 * MS),
        ]
    )
    assert list(scenario.mailbox.messages) == [late.stream]
    scenario.when(last, at=7).then_nothing_happens()


def test_a_job_reschedules_what_waits_and_leaves_what_is_in_flight() -> None:
    a, b, c = Life("a"), Life("b"), Life("c")
    scenario = started(a, b, c, RedriveSpec(action="reschedule", delay_ms=1_000))
    cutoff = scenario.mailbox.redrives[JOB].cutoff
    step = AdvanceRedrive(JOB, (a.stream, b.stream, c.stream), cutoff, True)
    scenario.when(step, at=5).then(
        [
            a.rescheduled(at=5, due=1_005, principal="ann"),
            b.rescheduled(at=5, due=1_005, principal="ann"),
            RedriveAdvanced(JOB, 2, 5 * MS, cutoff, 2, 1),
            RedriveSkipped(JOB, 3, 5 * MS, c.stream, "in_flight"),
            RedriveCompleted(JOB, 4, 5 * MS),
        ]
    )
