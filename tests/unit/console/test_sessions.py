"""Sessions of browsers end, are forgotten, and are not ended by those of others."""

import asyncio

from postroom.adapters.console.sessions import MAX_SESSIONS, MAX_SESSIONS_OF_CAPABILITY, Sessions
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
