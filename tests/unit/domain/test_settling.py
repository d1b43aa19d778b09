"""ACK, NACK, EXTEND (svc-mailbox C-1, I-3, P-7, P-9): which receipts count, and what comes of them."""

import msgspec
import pytest

from postroom.domain.errors import InvalidRequest, NotFound, StaleReceipt
from postroom.domain.mailbox.commands import Ack, Erase, Extend, Nack
from postroom.domain.message import MessageRequeued, Receipt
from postroom.domain.policy import TopicPolicy, backoff_ms
from tests.unit.domain.scenario import NOTHING, Given, Life, given, taken_over

STALE = "is of an earlier delivery"


def settle(receipt: Receipt) -> list[Ack | Nack | Extend]:
    """Return one command of each kind that needs a receipt."""
    return [Ack(receipt), Nack(receipt, 0.5), Extend(receipt, 10_000)]


# -- ACK ---


def test_an_ack_is_final() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=1)])
    settled = scenario.when(Ack(a.receipt), at=2).then([a.acked(at=2)])
    assert settled.mailbox.messages == {}
    assert settled.mailbox.in_flight == 0


def test_an_ack_repeated_by_a_consumer_that_lost_the_answer_is_fine() -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=1), a.acked(at=2)]
    scenario = given(past[:2])
    message = scenario.mailbox.messages[a.stream]
    settled = scenario.when(Ack(a.receipt), at=2).then([past[2]])
    settled.when(Ack(a.receipt, stored_message=message), at=3).then_nothing_happens()
    for command in (
        Nack(a.receipt, 0.5, stored_message=message),
        Extend(a.receipt, 10_000, stored_message=message),
    ):
        settled.when(command, at=3).then_rejected(StaleReceipt, f"{STALE}; the message is now acked")


def test_a_late_ack_counts_until_the_message_is_redelivered() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000)])
    settled = scenario.when(Ack(a.receipt), at=60_000).then([a.acked(at=60_000)])
    assert settled.mailbox.messages == {}


def test_a_late_ack_counts_before_the_sweep() -> None:
    a = Life("a")
    given([a.sent(at=0), a.received(at=0)]).when(Ack(a.receipt), at=60_000).then([a.acked(at=60_000)])


@pytest.mark.parametrize("is_late", [False, True])
def test_a_delivery_of_an_erased_message_can_be_settled_but_never_comes_back(is_late: bool) -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0), *([a.timed_out(at=5_000)] if is_late else [])]
    scenario = given(past)
    message = scenario.mailbox.messages[a.stream]
    erased = scenario.when(Erase(frozenset({a.stream})), at=6_000).then(
        [a.expired(reason="erased", at=6_000)]
    )
    assert (erased.mailbox.messages, erased.mailbox.in_flight, erased.mailbox.next_timer()) == ({}, 0, None)
    erased.when(Ack(a.receipt, stored_message=message), at=6_001).then_nothing_happens()
    erased.when(Nack(a.receipt, 0.5, stored_message=message), at=6_001).then_nothing_happens()
    erased.when(Extend(a.receipt, 10_000, stored_message=message), at=6_001).then_rejected(
        StaleReceipt, f"{STALE}; the message is now expired"
    )
    other = msgspec.structs.replace(a.receipt, delivery=a.receipt.delivery + 1)
    for command in (Ack(other, stored_message=message), Nack(other, 0.5, stored_message=message)):
        erased.when(command, at=6_001).then_rejected(StaleReceipt, STALE)


# -- stale receipts ---


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_receipt_is_stale_once_the_message_was_delivered_again(kind: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000), a.received(at=5_000)])
    first, second = a.receipts
    scenario.when(settle(first)[kind], at=5_001).then_rejected(
        StaleReceipt,
        f"{STALE}; the message is now in flight with attempt 2",
        code="E_STALE_RECEIPT",
        status=409,
    )
    scenario.when(Ack(second), at=5_001).then([a.acked(at=5_001)])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_nacked_receipt_is_stale(kind: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.requeued(at=1, due=2)])
    scenario.when(settle(a.receipt)[kind], at=1).then_rejected(
        StaleReceipt, f"{STALE}; the message is now ready"
    )


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_dead_letter_can_not_be_settled(kind: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.dead(at=1)])
    scenario.when(settle(a.receipt)[kind], at=1).then_rejected(
        StaleReceipt, f"{STALE}; the message is now dead"
    )


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_receipts_from_before_a_redrive_stay_stale(kind: int) -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0), a.dead(at=1), a.redriven(at=2), a.received(at=3)]
    scenario = given(past)
    old, new = a.receipts
    assert a.attempt == 1  # the same attempt as the old receipt's
    scenario.when(settle(old)[kind], at=4).then_rejected(StaleReceipt, STALE)
    scenario.when(Ack(new), at=4).then([a.acked(at=4)])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_no_receipt_fits_a_message_that_was_never_delivered(kind: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0)])
    scenario.when(settle(Receipt(a.stream, 0, 0))[kind], at=1).then_rejected(StaleReceipt, STALE)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_no_receipt_fits_a_message_that_was_nacked_or_redriven(kind: int) -> None:
    a = Life("a")
    nacked = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1)]
    forged = settle(Receipt(a.stream, 0, 1))[kind]
    given(nacked).when(forged, at=1).then_rejected(StaleReceipt, STALE)
    given([*nacked, a.received(at=2), a.dead(at=3), a.redriven(at=4)]).when(forged, at=5).then_rejected(
        StaleReceipt, STALE
    )


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_receipt_of_another_epoch_is_stale(kind: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0)])
    forged = msgspec.structs.replace(a.receipt, epoch=2)
    scenario.when(settle(forged)[kind], at=1).then_rejected(StaleReceipt, STALE)


def test_a_delivery_of_the_owner_before_may_be_settled_with_the_next() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), taken_over(epoch=2, version=3, at=1, continues=True)])
    scenario.when(Ack(a.receipt), at=2).then([a.acked(at=2)])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_receipt_of_an_unknown_message_is_not_found(kind: int) -> None:
    command = settle(Receipt(b"?" * 16, 2, 1))[kind]
    given(NOTHING).when(command, at=0).then_rejected(
        NotFound, "has no message 3f3f3f3f-3f3f-", code="E_NOT_FOUND", status=404
    )


# -- NACK (P-7) ---


def nacked(scenario: Given, life: Life, jitter: float, *, at: int) -> int:
    """Return for how many ms a nack hides the message."""
    (event,) = scenario.when(Nack(life.receipt, jitter), at=at).events
    assert isinstance(event, MessageRequeued)
    return (event.due - event.at) // 1_000


@pytest.mark.parametrize(("jitter", "hidden"), [(0.0, 0), (0.25, 100), (0.5, 200), (0.9999, 399)])
def test_a_nack_hides_a_random_part_of_the_backoff(jitter: float, hidden: int) -> None:
    a = Life("a")
    assert nacked(given([a.sent(at=0), a.received(at=0)]), a, jitter, at=1) == hidden


@pytest.mark.parametrize(
    ("attempt", "ceiling"),
    [(1, 400), (2, 800), (3, 1_600), (8, 51_200), (9, 60_000), (10, 60_000), (40, 60_000), (5_000, 60_000)],
)
def test_the_backoff_doubles_with_each_attempt_up_to_a_minute(attempt: int, ceiling: int) -> None:
    assert backoff_ms(TopicPolicy(), attempt, 0.0) == 0
    assert backoff_ms(TopicPolicy(), attempt, 0.5) == ceiling // 2
    assert ceiling - 2 <= backoff_ms(TopicPolicy(), attempt, 1 - 2**-53) <= ceiling


def test_the_second_nack_backs_off_twice_as_far() -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1), a.received(at=1)]
    assert nacked(given(past), a, 0.5, at=2) == 400


@pytest.mark.parametrize("delay", [0, 1, 3_600_000])
def test_a_consumer_may_choose_the_delay_itself(delay: int) -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0)])
    requeued = a.requeued(at=7, due=7 + delay, error="try later")
    scenario.when(Nack(a.receipt, 0.9, "try later", delay), at=7).then([requeued])


def test_a_nack_of_the_last_attempt_dead_letters_the_message() -> None:
    policy = TopicPolicy(max_attempts=2)
    a = Life("a", policy=policy)
    past = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1, error="first"), a.received(at=2)]
    scenario = given(past, policy=policy)
    dead = scenario.when(Nack(a.receipt, 0.5, "second", 9), at=3).then([a.dead(at=3, error="second")])
    message = dead.mailbox.messages[a.stream]
    assert (message.reason, message.attempt, message.last_error) == ("max_attempts", 2, "second")


def test_a_last_nack_without_a_reason_keeps_the_error_before() -> None:
    policy = TopicPolicy(max_attempts=2)
    a = Life("a", policy=policy)
    past = [a.sent(at=0), a.received(at=0), a.requeued(at=1, due=1, error="first"), a.received(at=2)]
    given(past, policy=policy).when(Nack(a.receipt, 0.5), at=3).then([a.dead(at=3, error="first")])


def test_a_nack_after_the_time_out_changes_nothing() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000)])
    scenario.when(Nack(a.receipt, 0.5, "late"), at=5_001).then_nothing_happens()


# -- EXTEND (P-9) ---


def test_an_extension_counts_from_now() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0)])
    scenario.when(Extend(a.receipt, 5_000), at=4_000).then([a.extended(at=4_000, due=9_000)])


def test_a_delivery_is_held_for_ten_times_its_visibility_at_most() -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=100, visibility=1_000), a.extended(at=900, due=9_000)]
    scenario = given(past)
    capped = scenario.when(Extend(a.receipt, 60_000), at=8_000).then([a.extended(at=8_000, due=10_100)])
    capped.when(Extend(a.receipt, 1_000), at=10_100).then_rejected(StaleReceipt, "is over; receive it again")


def test_a_new_delivery_may_be_held_as_long_as_the_first() -> None:
    a = Life("a")
    past = [a.sent(at=0), a.received(at=0, visibility=1_000), a.timed_out(at=1_000), a.received(at=90_000)]
    given(past).when(Extend(a.receipt, 300_000), at=91_000).then([a.extended(at=91_000, due=140_000)])


def test_a_delivery_that_timed_out_can_not_be_extended() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0), a.timed_out(at=5_000)])
    scenario.when(Extend(a.receipt, 5_000), at=5_001).then_rejected(StaleReceipt, "is over; receive it again")


def test_an_extension_is_no_shorter_than_any_visibility() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=0)])
    scenario.when(Extend(a.receipt, 249), at=1).then_rejected(InvalidRequest, "at least 250; it was 249")
