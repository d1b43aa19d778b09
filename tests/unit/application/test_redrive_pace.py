import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.application.redrive.copies import Pace


@given(
    rate=st.integers(1, 10_000),
    waits=st.lists(st.floats(0, 0.5), min_size=1, max_size=50),
    maximum=st.integers(1, 500),
)
def test_a_rate_is_never_exceeded(rate: int, waits: list[float], maximum: int) -> None:
    pace, now, total = Pace(rate, 0.0), 0.0, 0
    for wait in waits:
        now += wait
        messages = pace.allowance(now, maximum)
        assert messages <= maximum
        pace.spend(messages)
        total += messages
    assert total <= rate * now + 1e-6


@pytest.mark.parametrize("rate", [1, 7, 500, 5_000])
def test_a_rate_is_held_though_each_step_is_late(rate: int) -> None:
    pace, now, total = Pace(rate, 0.0), 0.0, 0
    while now < 100:
        messages = pace.allowance(now, 500)
        pace.spend(messages)
        total += messages
        now += pace.pause() + 0.013
    assert total == pytest.approx(rate * 100, rel=0.05)


def test_a_clock_that_jumps_ahead_is_made_up_for_by_a_second_at_most() -> None:
    pace = Pace(100, 0.0)
    assert pace.allowance(1e9, 500) == 100
    pace.spend(100)
    assert pace.allowance(1e9 + 0.5, 500) == 50


def test_a_clock_that_jumps_back_does_not_hold_up_a_job() -> None:
    pace = Pace(100, 1_000.0)
    assert pace.allowance(0.0, 500) == 0
    assert pace.pause() <= 0.05
    assert pace.allowance(0.5, 500) == 50


def test_without_a_rate_nothing_is_waited_for() -> None:
    pace = Pace(None, 0.0)
    assert (pace.allowance(0.0, 500), pace.pause()) == (500, 0.0)
