"""Sessions of browsers end, are forgotten, and are not ended by those of others."""

import asyncio

import pytest

from postroom.adapters.console.sessions import (
    MAX_SESSIONS,
    MAX_SESSIONS_OF_CAPABILITY,
    Sessions,
    SignInThrottle,
)
from postroom.domain.errors import Saturated
from tests.support.waiting import until


class Clock:
    """A monotonic clock that tests move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_a_session_that_is_used_lasts_and_one_that_is_idle_is_forgotten() -> None:
    clock = Clock()
    sessions = Sessions(clock, 60)
    used, _ = sessions.start("token", "olga", "a")
    idle, _ = sessions.start("another", "igor", "b")
    for _ in range(4):
        clock.seconds += 20
        assert sessions.find(used) is not None
    assert (len(sessions), sessions.find(idle)) == (1, None)
    clock.seconds += 50
    assert sessions.find(used, touch=False) is not None
    clock.seconds += 20
    assert (sessions.find(used), len(sessions)) == (None, 0)


async def test_tokens_of_idle_sessions_are_forgotten_although_nobody_asks() -> None:
    clock, stopping = Clock(), asyncio.Event()
    sessions = Sessions(clock, 60)
    sessions.start("token")
    clock.seconds += 61
    running = asyncio.create_task(sessions.run(stopping))
    await until(lambda: not len(sessions))
    stopping.set()
    await running


def test_whoever_signs_in_ten_thousand_times_ends_no_session_of_another_capability() -> None:
    sessions = Sessions(Clock(), 60)
    first, _ = sessions.start("token", "olga", "a")
    for _ in range(9_999):
        sessions.start("attenuated", "igor", "b")
    last, _ = sessions.start("attenuated", "igor", "b")
    assert sessions.find(first) is not None
    assert sessions.find(last) is not None
    assert len(sessions) == 1 + MAX_SESSIONS_OF_CAPABILITY


def test_of_too_many_sessions_the_one_that_was_idle_for_longest_ends() -> None:
    clock = Clock()
    sessions = Sessions(clock, 60)
    cookies = [sessions.start("token", "olga", str(number))[0] for number in range(MAX_SESSIONS)]
    assert sessions.find(cookies[0]) is not None
    sessions.start("token", "olga", "last")
    assert [sessions.find(each) is None for each in cookies[:3]] == [False, True, False]
    assert len(sessions) == MAX_SESSIONS


def test_failures_to_sign_in_count_for_a_minute() -> None:
    clock = Clock()
    throttle = SignInThrottle(clock, 2)
    throttle.note_failure("a", "here")
    clock.seconds += 40
    throttle.note_failure("a", "here")
    for other in (("a", "there"), ("b", "here")):
        throttle.check(*other)
    with pytest.raises(Saturated) as refused:
        throttle.check("a", "here")
    assert refused.value.retry_after_ms == 20_000
    clock.seconds += 20
    throttle.check("a", "here")
    throttle.note_failure("a", "here")
    with pytest.raises(Saturated):
        throttle.check("a", "here")


def test_failures_to_sign_in_take_a_bounded_memory() -> None:
    throttle = SignInThrottle(Clock(), 1)
    for number in range(3 * MAX_SESSIONS):
        throttle.note_failure(str(number), "here")
    throttle.check("0", "here")  # forgotten
    with pytest.raises(Saturated):
        throttle.check(str(3 * MAX_SESSIONS - 1), "here")
