"""A replay window keeps its keys in the order of time, however they are added, dropped and reused."""

from collections.abc import Sequence
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import Saturated
from postroom.domain.mailbox import replay
from postroom.domain.mailbox.replay import ReplayEntry, ReplayWindow

WINDOW = 10
names = st.integers(0, 30).map(str)
additions = st.tuples(st.integers(0, 4), st.lists(names, min_size=1, max_size=9, unique=True))


def _entry(at: int) -> ReplayEntry:
    return ReplayEntry(b"message", b"hash", at)


def _joined(blocks: Sequence[Sequence[str]]) -> list[str]:
    return list(chain.from_iterable(blocks))


@given(history=st.lists(additions, max_size=30), through=st.integers(-1, 40), together=st.booleans())
def test_a_window_has_the_keys_of_its_time_in_the_order_of_time(
    history: list[tuple[int, list[str]]], through: int, together: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "BLOCK_KEYS", 4)
        window, expected, at = ReplayWindow(), dict[str, int](), 0
        for step, keys in history:
            at += step
            expected = {key: time for key, time in expected.items() if time > at - WINDOW}
            if together:
                window.add_all({key: _entry(at) for key in keys}, at, WINDOW)
            for key in keys:
                if not together:
                    window.add(key, _entry(at), WINDOW)
                expected.pop(key, None)
                expected[key] = at
            assert window.take_uncollected() == list(expected)[-len(keys) :]
            assert window.keys() == list(expected)
            assert len(window) == len(expected)
            earlier = [key for key, time in expected.items() if time <= through]
            blocks = _joined(window.blocks_through(through))
            assert blocks == list(expected)[: len(blocks)]
            assert blocks[: len(earlier)] == earlier
            assert {key: entry.at for key, entry in window.entries(expected, at - WINDOW).items()} == expected
            assert window.is_expired(at)
            assert not window.is_expired(at - 1)
        window.drop_until(at)
        assert (window.keys(), len(window), window.is_expired(0)) == ([], 0, True)
        assert not window.blocks_through(at)


@given(count=st.integers(1, 30), capacity=st.integers(1, 30), gone=st.integers(0, 10))
def test_a_full_window_asks_to_retry_when_enough_of_its_keys_expire(
    count: int, capacity: int, gone: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "BLOCK_KEYS", 4)
        window = ReplayWindow()
        for number in range(count):
            window.add(str(number), _entry(number * 1_000), 1_000_000)
        window.drop_until((gone - 1) * 1_000)
        left, now = max(0, count - gone), count * 1_000
        arguments = {"capacity": capacity, "window": 1_000_000, "now": now}
        if left < capacity:
            assert window.admit("topic", "new", b"hash", **arguments)
            return
        with pytest.raises(Saturated) as refusal:
            window.admit("topic", "new", b"hash", **arguments)
        oldest = gone + left - capacity  # with it and all before it gone, there is room
        assert refusal.value.retry_after_ms == (oldest * 1_000 + 1_000_000 - now) // 1_000


def test_keys_that_are_added_while_blocks_are_read_are_not_collected() -> None:
    window = ReplayWindow({"a": _entry(1), "b": _entry(2)})
    window.drop_until(1)
    blocks = window.blocks_through(2)
    window.add("a", _entry(3), 10)
    assert window.take_uncollected() == ["a"]
    assert _joined(blocks) == ["b"]


@given(
    times=st.lists(st.integers(0, 30), min_size=1, max_size=40).map(sorted),
    reused=st.integers(0, 39),
    most=st.integers(0, 3),
)
def test_expired_keys_that_are_not_dropped_yet_are_new(times: list[int], reused: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "DROPPED_KEYS", most + 1)
        window = ReplayWindow()
        for number, at in enumerate(times):
            window.add(f"{number}", _entry(at), 1_000)
        later = 31 + WINDOW
        key = f"{reused % len(times)}"
        assert window.find(key, later - WINDOW) is None
        assert window.admit("orders", key, b"other", capacity=1, window=WINDOW, now=later)
        assert not window.has_room_for([key], 1_000)  # it is decided by `admit`
        window.add(key, _entry(later), WINDOW)
        assert window.entries(window.keys(), later - WINDOW) == {key: _entry(later)}
        assert window.take_uncollected()[-1] == key
        for number in range(40):
            window.add_all({f"new-{number}": _entry(later)}, later, WINDOW)
        assert window.keys() == [key, *(f"new-{number}" for number in range(40))]
