"""Refused callers are told when the queue will have room, by the rate at which it is drained."""

from postroom.application.metrics import DrainRate

SECOND = 1_000_000


def steady(per_second: int, seconds: int = 30) -> DrainRate:
    """Return the rate of a queue that was drained evenly for some time."""
    rate = DrainRate()
    for second in range(seconds):
        for part in range(per_second):
            rate.record_drain(1, second * SECOND + part * SECOND // per_second)
    return rate


def test_each_refused_caller_is_told_to_wait_longer_than_the_one_before() -> None:
    rate = steady(10)
    waits = [rate.retry_ms(1, 30 * SECOND) for _ in range(100)]
    assert waits == sorted(waits)
    assert 8_000 <= waits[-1] <= 12_000


def test_departures_shorten_the_wait() -> None:
    rate = steady(10)
    for _ in range(100):
        rate.retry_ms(1, 30 * SECOND)
    rate.record_drain(50, 30 * SECOND)
    assert rate.retry_ms(1, 30 * SECOND) < 6_000


def test_a_queue_that_nothing_leaves_is_retried_after_a_second() -> None:
    assert DrainRate().retry_ms(1, SECOND) == 1_000
    assert steady(10).retry_ms(1, 600 * SECOND) == 1_000


def test_waits_are_bounded() -> None:
    assert steady(1_000).retry_ms(1, 30 * SECOND) == 100
    assert steady(10).retry_ms(1_000_000, 30 * SECOND) == 60_000


def test_a_clock_that_goes_back_does_not_break_the_rate() -> None:
    rate = steady(10)
    assert 100 <= rate.retry_ms(1, 0) <= 60_000
