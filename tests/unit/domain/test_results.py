"""Acks with results."""

import pytest

from postroom.domain.errors import FrameTooLarge, StaleReceipt
from postroom.domain.mailbox.batch import decide_batch
from postroom.domain.mailbox.commands import Ack, Receive
from postroom.domain.message import Message, MessageEvent
from postroom.domain.message_decider import evolve
from postroom.domain.policy import MailboxLimits
from tests.unit.domain.scenario import Life, given

LIMIT = MailboxLimits().result_bytes


def test_an_ack_has_its_result() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=1)])
    done = scenario.when(Ack(a.receipt, None, b"3", "application/json"), at=2).then(
        [a.acked(at=2, result=b"3", type_="application/json")]
    )
    assert (done.mailbox.in_flight, done.mailbox.messages) == (0, {})


def test_a_result_may_be_empty_and_as_large_as_the_limit() -> None:
    for result in (b"", bytes(LIMIT)):
        a = Life("a")
        scenario = given([a.sent(at=0), a.received(at=1)])
        scenario.when(Ack(a.receipt, None, result), at=2).then([a.acked(at=2, result=result)])


def test_a_result_above_the_limit_is_refused_and_its_message_stays_in_flight() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=1)])
    refused = scenario.when(Ack(a.receipt, None, bytes(LIMIT + 1)), at=2)
    refused.then_rejected(FrameTooLarge, "has 65,537 bytes, above the limit result_bytes of 65,536")
    assert scenario.mailbox.in_flight == 1
    scenario.when(Ack(a.receipt), at=3).then([a.acked(at=3)])


def test_the_limit_is_one_of_the_mailbox() -> None:
    a = Life("a")
    limits = MailboxLimits(result_bytes=2)
    scenario = given([a.sent(at=0), a.received(at=1)], limits=limits)
    scenario.when(Ack(a.receipt, None, b"123"), at=2).then_rejected(FrameTooLarge, "result_bytes of 2")
    scenario.when(Ack(a.receipt, None, b"12"), at=2).then([a.acked(at=2, result=b"12")])


def test_the_first_ack_counts_whatever_result_a_repeated_one_has() -> None:
    a = Life("a")
    events: list[MessageEvent] = [a.sent(at=0), a.received(at=1), a.acked(at=2, result=b"first")]
    stored: Message | None = None
    for event in events:
        stored = evolve(stored, event, epoch=1)
    scenario = given(events)
    for result in (b"second", bytes(LIMIT + 1), None):
        scenario.when(Ack(a.receipt, stored, result), at=3).then_nothing_happens()


def test_the_result_of_an_earlier_delivery_is_refused() -> None:
    a = Life("a")
    scenario = given([a.sent(at=0), a.received(at=1), a.timed_out(at=5_001)])
    first = a.receipt
    again = scenario.when(Receive(("orders",), 1, 1 << 20), at=6_000).then([a.received(at=6_000)])
    again.when(Ack(first, None, b"late"), at=6_001).then_rejected(StaleReceipt, "earlier delivery")
    again.when(Ack(a.receipt, None, b"3"), at=6_001).then([a.acked(at=6_001, result=b"3")])


@pytest.mark.parametrize("result", [b"", b"3"])
def test_acks_with_results_are_decided_one_by_one(result: bytes) -> None:
    a, b = Life("a"), Life("b")
    scenario = given([a.sent(at=0), b.sent(at=0), a.received(at=1), b.received(at=1)])
    assert decide_batch([Ack(a.receipt), Ack(b.receipt)], scenario.mailbox, 2) is not None
    assert decide_batch([Ack(a.receipt), Ack(b.receipt, None, result)], scenario.mailbox, 2) is None
