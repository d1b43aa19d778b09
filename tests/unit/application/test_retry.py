"""What a consumer's `Retry` decides about a delivery that failed."""

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import InvalidRequest, PoisonMessage, Reject, Retry, RetryLater, exponential
from postroom.application.mailbox.settle import NackOptions
from postroom.application.messages import MessageDelivery
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.message import Receipt


def delivered(attempt: int) -> ReceivedMessage:
    receipt = Receipt(b"m" * 16, 2, 1)
    return ReceivedMessage(
        MessageDelivery(receipt, "orders", 0, attempt, 0, None, None, b"", b"", envelope=b"")
    )


def decided(retry: Retry, error: BaseException, attempt: int = 1) -> NackOptions:
    return retry.decide(delivered(attempt), error, "why")


def test_a_handler_decides_by_what_it_raises() -> None:
    retry = Retry(never=(ZeroDivisionError,))
    assert decided(retry, ValueError()) == NackOptions("why")
    assert decided(retry, ZeroDivisionError()) == NackOptions("why", action="reject")
    for error in (Reject("no"), PoisonMessage("no")):
        assert decided(retry, error) == NackOptions("why", action="reject")
    assert decided(retry, RetryLater("30s")) == NackOptions("why", 30_000)
    assert decided(retry, RetryLater(timedelta(minutes=1), count=False)) == NackOptions(
        "why", 60_000, "release"
    )


def test_a_handler_may_retry_although_no_exception_is_retried() -> None:
    retry = Retry(never=(Exception,))
    assert decided(retry, RetryLater("30s")) == NackOptions("why", 30_000)
    assert decided(retry, ValueError()).action == "reject"


def test_the_last_attempt_is_the_last_unless_it_does_not_count() -> None:
    retry = Retry(attempts=2)
    assert decided(retry, ValueError(), 1).action == "retry"
    for error in (ValueError(), RetryLater("1s")):
        assert decided(retry, error, 2).action == "reject"
    assert decided(retry, RetryLater("1s", count=False), 2).action == "release"


@given(
    attempt=st.integers(1, 10_000),
    factor=st.floats(1, 1_000),
    jitter=st.floats(0, 0.5),
    random=st.floats(0, 1, exclude_max=True),
)
def test_no_retry_is_earlier_than_half_of_its_backoff_or_later_than_the_longest(
    attempt: int, factor: float, jitter: float, random: float
) -> None:
    backoff = exponential("1s", max="5m", factor=factor, jitter=jitter)
    full = exponential("1s", max="5m", factor=factor, jitter=0).pause_ms(attempt, 0)
    assert 1_000 <= full <= 300_000
    assert full // 2 <= backoff.pause_ms(attempt, random) <= full


def test_pauses_grow_up_to_the_longest_and_by_default_vary_by_a_fifth() -> None:
    backoff = exponential("200ms", max="1s")
    assert [backoff.pause_ms(attempt, 0) for attempt in range(1, 6)] == [200, 400, 800, 1_000, 1_000]
    assert backoff.pause_ms(1, 0.999) == 160


@pytest.mark.parametrize(
    "make",
    [
        lambda: RetryLater("soon"),
        lambda: RetryLater("-1s"),
        lambda: RetryLater(30),  # type: ignore[arg-type] # wrong on purpose
        lambda: RetryLater(timedelta(seconds=-1)),
        lambda: RetryLater("40000d"),
        lambda: RetryLater("9" * 400 + "d"),
        lambda: RetryLater("1s", count=1),  # type: ignore[arg-type] # wrong on purpose
        lambda: exponential("2s", max="1s"),
        lambda: exponential("1s", jitter=0.6),
        lambda: exponential("1s", jitter=float("nan")),
        lambda: exponential("1s", factor=True),
        lambda: exponential("1s", factor=0.5),
        lambda: Retry(attempts=0).validate(),
        lambda: Retry(attempts=True).validate(),
        lambda: Retry(backoff="1s").validate(),  # type: ignore[arg-type] # wrong on purpose
        lambda: Retry(never=ValueError).validate(),  # type: ignore[arg-type] # wrong on purpose
        lambda: Retry(never=(ValueError(),)).validate(),  # type: ignore[arg-type] # wrong on purpose
    ],
)
def test_a_wrong_argument_is_refused(make: Any) -> None:
    with pytest.raises(InvalidRequest):
        make()
