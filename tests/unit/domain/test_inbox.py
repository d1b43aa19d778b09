"""Given what happened to a message, when something is done with it, then this follows; times in µs."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import DuplicateInboxMessage, InvalidTimestamp
from postroom.domain.inbox import (
    Acknowledge,
    DeliveryPolicy,
    HandlerResult,
    InboxEvent,
    InboxMessage,
    InboxMessageDeadLettered,
    InboxMessageFailed,
    InboxMessageProcessed,
    InboxMessageReceived,
    Redeliver,
    RouteToDeadLetter,
    dead_letter,
    evolve,
    fail,
    give_up,
    inbox_stream,
    process,
    receive,
    settle,
)

ID = UUID("550e8400-e29b-41d4-a716-446655440000")
SUBJECT = "vibespro.event.vibe_created.v1"
STREAM = inbox_stream(ID, "inbox_messages")
POLICY = DeliveryPolicy(max_deliver=3, backoff_base_ms=1_000, backoff_max_ms=8_000)
FAILURE = HandlerResult("failed", "HTTP 503")


def received(version: int = 1, at: int = 10, attempt: int = 1) -> InboxMessageReceived:
    return InboxMessageReceived(STREAM, version, at, str(ID), SUBJECT, attempt)


def failed(version: int, at: int = 20, attempt: int = 1) -> InboxMessageFailed:
    return InboxMessageFailed(STREAM, version, at, attempt, "HTTP 503")


def processed(version: int, at: int = 30, attempt: int = 1) -> InboxMessageProcessed:
    return InboxMessageProcessed(STREAM, version, at, attempt)


def dead(version: int, at: int = 40, attempts: int = 1) -> InboxMessageDeadLettered:
    return InboxMessageDeadLettered(STREAM, version, at, str(ID), SUBJECT, "poison", attempts)


def after(*events: InboxEvent) -> InboxMessage:
    message = None
    for event in events:
        message = evolve(message, event)
    assert message is not None
    return message


def begin(message: InboxMessage | None, now: int = 50, *, redrive: bool = False) -> list[InboxEvent]:
    return receive(message, ID, "inbox_messages", SUBJECT, now, redrive=redrive)


def test_a_new_message_is_received() -> None:
    assert begin(None, 10) == [received()]
    assert after(received()) == InboxMessage(STREAM, 1, ID, SUBJECT, 10, in_flight_since=10)


def test_a_message_that_failed_is_received_again_and_its_attempts_are_counted() -> None:
    message = after(received(), failed(2))
    assert message.last_error == "HTTP 503"
    assert begin(message) == [received(3, 50, 2)]
    assert after(received(), failed(2), received(3, 50, 2)).attempts == 2


def test_a_delivery_that_ended_without_a_word_counts_as_an_attempt() -> None:
    assert begin(after(received())) == [received(2, 50, 2)]


def test_a_processed_message_is_a_duplicate() -> None:
    with pytest.raises(DuplicateInboxMessage, match="already processed") as caught:
        begin(after(received(), processed(2)))
    assert caught.value.code == "DUPLICATE_MESSAGE"


def test_a_dead_letter_is_a_duplicate_unless_it_is_redriven() -> None:
    message = after(received(), dead(2))
    with pytest.raises(DuplicateInboxMessage, match="dead letter"):
        begin(message)
    assert begin(message, redrive=True) == [received(3, 50, 2)]
    assert not after(received(), dead(2), received(3, 50, 2)).is_settled


def test_a_processed_message_is_a_duplicate_for_a_redrive_too() -> None:
    with pytest.raises(DuplicateInboxMessage):
        begin(after(received(), processed(2)), redrive=True)


def test_processing_settles_a_message_once() -> None:
    assert process(after(received()), 30) == [processed(2)]
    settled = after(received(), processed(2))
    assert settled.is_settled
    assert settled.processed_at == 30
    assert process(settled, 99) == []


def test_a_message_cannot_be_processed_before_it_was_received() -> None:
    assert process(after(received(at=10)), 10) == [processed(2, 10)]
    with pytest.raises(InvalidTimestamp, match="before it was received") as caught:
        process(after(received(at=10)), 9)
    assert caught.value.code == "INVALID_TIMESTAMP"


@given(received_at=st.integers(0, 1 << 60), later=st.integers(-2, 2), was_dead=st.booleans())
def test_no_message_is_processed_before_it_was_received(received_at: int, later: int, was_dead: bool) -> None:
    """Policy POL-047-004, also for a dead letter whose handler succeeds late."""
    now = received_at + later
    message = after(received(at=received_at), *[dead(2, at=received_at)] * was_dead)
    if later < 0:
        with pytest.raises(InvalidTimestamp):
            process(message, now)
        return
    (event,) = process(message, now)
    assert evolve(message, event).processed_at == now >= message.received_at


def test_a_handler_that_succeeds_late_settles_a_dead_letter() -> None:
    message = after(received(), dead(2), processed(3))
    assert message.processed_at == 30
    assert message.dead_lettered_at is None


def test_late_failures_change_nothing() -> None:
    for settled in (after(received(), processed(2)), after(received(), dead(2))):
        assert fail(settled, "HTTP 503", 60) == []
        assert dead_letter(settled, "poison", 60) == []


def test_failures_and_dead_letters_tell_why() -> None:
    assert fail(after(received()), "HTTP 503", 20) == [failed(2)]
    assert dead_letter(after(received()), "poison", 40) == [dead(2)]
    (event,) = fail(after(received()), "x" * 5_000, 20)
    assert isinstance(event, InboxMessageFailed)
    assert len(event.reason) == 1_000


def test_a_history_begins_with_being_received() -> None:
    with pytest.raises(ValueError, match="can't start with InboxMessageProcessed"):
        evolve(None, processed(1))


def test_an_inbox_never_shares_a_history_with_the_outbox_or_another_inbox() -> None:
    assert len({ID.bytes, inbox_stream(ID, "inbox_messages"), inbox_stream(ID, "billing.inbox")}) == 3


def test_success_is_acknowledged() -> None:
    for outcome in ("processed", "already_processed"):
        assert settle(HandlerResult(outcome), 1, 1, POLICY, 0.5) == Acknowledge()


def test_poison_is_dead_lettered_at_once() -> None:
    assert settle(HandlerResult("poison", "no total"), 1, 1, POLICY, 0.5) == RouteToDeadLetter(
        "poison", "no total"
    )
    assert settle(HandlerResult("unreadable", "not JSON"), 1, 1, POLICY, 0.5) == RouteToDeadLetter(
        "unreadable", "not JSON"
    )


def test_a_failure_is_delivered_again_after_a_while() -> None:
    assert settle(FAILURE, 1, 1, POLICY, 0.5) == Redeliver(1_000, "HTTP 503")
    assert settle(FAILURE, 2, 2, POLICY, 0.5) == Redeliver(2_000, "HTTP 503")


def test_the_last_attempt_is_dead_lettered_and_never_dropped() -> None:
    assert settle(FAILURE, 3, 3, POLICY, 0.5) == RouteToDeadLetter("max_deliver", "HTTP 503")


def test_deliveries_that_were_no_attempts_do_not_count() -> None:
    assert isinstance(settle(FAILURE, 1, 1_000, POLICY, 0.5), Redeliver)


def test_where_the_server_has_a_limit_its_last_delivery_is_the_last_attempt() -> None:
    limited = DeliveryPolicy(max_deliver=20, server_limit=5)
    assert isinstance(settle(FAILURE, 1, 4, limited, 0.5), Redeliver)
    assert settle(FAILURE, 1, 5, limited, 0.5) == RouteToDeadLetter("max_deliver", "HTTP 503")


def test_a_handler_may_say_when_to_try_again_within_bounds() -> None:
    soon, in_an_hour = HandlerResult("failed", "busy", 5_000), HandlerResult("failed", "busy", 3_600_000)
    assert settle(soon, 1, 1, POLICY, 0.0) == Redeliver(5_000, "busy")
    assert settle(in_an_hour, 1, 1, POLICY, 0.0) == Redeliver(8_000, "busy")


def test_one_attempt_more_than_allowed_is_not_made() -> None:
    last: list[InboxEvent] = [
        received(),
        failed(2),
        received(3, attempt=2),
        failed(4),
        received(5, attempt=3),
    ]
    assert give_up(after(*last), POLICY) is None
    assert give_up(after(*last, received(6, attempt=4)), POLICY) == RouteToDeadLetter(
        "max_deliver", "HTTP 503"
    )
    silent = after(received(), received(2, attempt=2), received(3, attempt=3), received(4, attempt=4))
    assert give_up(silent, POLICY) == RouteToDeadLetter(
        "max_deliver", "the worker ended during the last attempt"
    )


STEPS = st.lists(st.sampled_from(["receive", "redrive", "process", "fail", "dead_letter"]), max_size=30)


@given(STEPS)
def test_whatever_happens_versions_have_no_gaps_and_processed_is_for_ever(steps: list[str]) -> None:
    message: InboxMessage | None = None
    version, was_processed = 0, False
    for at, step in enumerate(steps, 1):
        try:
            if step in ("receive", "redrive"):
                events = begin(message, at, redrive=step == "redrive")
            elif message is None:
                continue
            elif step == "process":
                events = process(message, at)
            else:
                events = (fail if step == "fail" else dead_letter)(message, "why", at)
        except DuplicateInboxMessage:
            assert message is not None
            assert message.is_settled
            continue
        for event in events:
            message = evolve(message, event)
            version += 1
            assert event.version == message.version == version
        assert message is not None
        assert message.attempts >= 1
        was_processed = was_processed or message.processed_at is not None
        assert (message.processed_at is not None) == was_processed
