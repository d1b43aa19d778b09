"""The checker accepts what some order explains, and nothing else."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.linearizability.checker import Model, NotLinearizable, check
from tests.linearizability.history import Operation
from tests.linearizability.models import REFUSED, REFUSED_IN_DOUBT, lease_model, log_model, message_model
from tests.support.examples import examples


def step_register(state: int, operation: Operation) -> Iterator[int]:
    if operation.kind == "write":
        yield operation.input
    elif operation.output == state:
        yield state


REGISTER = Model("a register", 0, step_register)


def op(kind: str, call: int, end: int | None, input_: Any = None, output: Any = None) -> Operation:
    return Operation("p", call, end, kind, input_, output)


def is_linearizable(model: Model, history: list[Operation]) -> bool:
    try:
        check(model, history)
    except NotLinearizable:
        return False
    return True


def explain_by_trying(model: Model, history: list[Operation]) -> bool:
    """Return what the checker should, by trying every order of every subset that has all known outcomes."""
    unknown = [each for each in history if each.end is None]
    ended = [each for each in history if each.end is not None]
    for count in range(len(unknown) + 1):
        for effective in itertools.combinations(unknown, count):
            for order in itertools.permutations([*ended, *effective]):
                if any(
                    later.end is not None and later.end < earlier.call
                    for number, earlier in enumerate(order)
                    for later in order[number + 1 :]
                ):
                    continue
                states = {model.initial}
                for each in order:
                    states = {after for state in states for after in model.step(state, each)}
                if states:
                    return True
    return False


# -- a register, as papers have it ---


@pytest.mark.parametrize(
    ("history", "is_good"),
    [
        ([], True),
        ([op("write", 1, 2, 1), op("read", 3, 4, output=1)], True),
        ([op("write", 1, 2, 1), op("read", 3, 4, output=0)], False),
        ([op("write", 1, 4, 1), op("read", 2, 3, output=0)], True),
        ([op("write", 1, 4, 1), op("read", 2, 3, output=1)], True),
        ([op("write", 1, 9, 1), op("read", 2, 3, output=1), op("read", 4, 5, output=0)], False),
        ([op("write", 1, 9, 1), op("read", 2, 3, output=0), op("read", 4, 5, output=1)], True),
        ([op("write", 1, 2, 1), op("write", 1, 2, 2), op("read", 3, 4, output=1)], True),
        (
            [
                op("write", 1, 2, 1),
                op("write", 1, 2, 2),
                op("read", 3, 4, output=1),
                op("read", 5, 6, output=2),
            ],
            False,
        ),
        # Outcomes that nobody knows: at any later time, or never.
        ([op("write", 1, None, 1), op("read", 8, 9, output=0)], True),
        ([op("write", 1, None, 1), op("read", 8, 9, output=1)], True),
        ([op("write", 1, None, 1), op("read", 2, 3, output=0), op("read", 8, 9, output=1)], True),
        ([op("write", 1, None, 1), op("read", 2, 3, output=1), op("read", 8, 9, output=0)], False),
        ([op("write", 5, None, 1), op("read", 2, 3, output=1)], False),
    ],
)
def test_histories_of_a_register_are_told_apart(history: list[Operation], is_good: bool) -> None:
    assert is_linearizable(REGISTER, history) is is_good
    assert explain_by_trying(REGISTER, history) is is_good


operations = st.builds(
    lambda kind, value, call, length: op(
        kind,
        call,
        None if length is None and kind == "write" else call + (length or 1),
        value if kind == "write" else None,
        None if kind == "write" else value,
    ),
    st.sampled_from(["write", "read"]),
    st.integers(0, 2),
    st.integers(0, 9),
    st.none() | st.integers(1, 6),
)


@settings(max_examples=examples(60))
@given(st.lists(operations, max_size=5))
def test_the_checker_says_what_trying_every_order_says(history: list[Operation]) -> None:
    assert is_linearizable(REGISTER, history) is explain_by_trying(REGISTER, history)


def concurrent_history(seed: int, count: int) -> list[Operation]:
    """Return a history of a register that is linearizable: each takes effect at one moment of its time."""
    choice = random.Random(seed)
    moments = sorted(choice.sample(range(count * 10), count))
    state, history = 0, []
    for moment in moments:
        call, end = moment - choice.randrange(15), moment + choice.randrange(15)
        if choice.random() < 0.5:
            state = choice.randrange(5)
            history.append(op("write", call, None if choice.random() < 0.02 else end, state))
        else:
            history.append(op("read", call, end, output=state))
    return history


def test_long_histories_of_a_register_are_checked_quickly() -> None:
    for seed in range(2):
        history = concurrent_history(seed, 300)
        check(REGISTER, history)
        with pytest.raises(NotLinearizable):
            check(REGISTER, [*history, op("read", 3_100, 3_101, output=9)])


def test_a_violation_shows_the_longest_order_and_what_can_not_follow() -> None:
    history = [op("write", 1, 2, 1), op("read", 3, 4, output=1), op("read", 5, 6, output=7)]
    with pytest.raises(NotLinearizable, match="those of a register") as broken:
        check(REGISTER, history)
    assert broken.value.order == history[:2]
    assert broken.value.rest == history[2:]
    assert "read(None) -> 7" in str(broken.value)


# -- leases ---

ACQUIRED = op("acquire", 1, 2, ["a", "1"], 1)


@pytest.mark.parametrize(
    ("history", "is_good"),
    [
        ([ACQUIRED, op("own", 3, 4, ["a", 1], True), op("renew", 5, 6, ["a", 1], 1)], True),
        ([ACQUIRED, op("acquire", 3, 4, ["a", "1"], 1)], True),  # a repetition
        ([ACQUIRED, op("acquire", 3, 4, ["a", "1"], 2)], True),
        ([ACQUIRED, op("acquire", 3, 4, ["a", "2"], 1)], False),  # an epoch for two acquisitions
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], 1)], False),  # two owners of an epoch
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], 2)], True),  # after it expired
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], 2), op("own", 5, 6, ["a", 1], True)], False),
        ([ACQUIRED, op("acquire", 3, 7, ["b", "2"], 2), op("own", 5, 6, ["a", 1], True)], True),
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], 2), op("renew", 5, 6, ["a", 1], 1)], False),
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], 2), op("renew", 5, 6, ["a", 1], REFUSED)], True),
        ([ACQUIRED, op("renew", 3, 4, ["a", 1], REFUSED), op("own", 5, 6, ["a", 1], True)], False),
        ([ACQUIRED, op("acquire", 3, 4, ["b", "2"], REFUSED), op("own", 5, 6, ["a", 1], True)], True),
        ([ACQUIRED, op("release", 3, 4, ["a", 1], True), op("acquire", 5, 6, ["b", "2"], REFUSED)], False),
        ([ACQUIRED, op("release", 3, 4, ["a", 1], True), op("own", 5, 6, ["a", 1], True)], False),
        ([ACQUIRED, op("release", 3, None, ["a", 1]), op("own", 5, 6, ["a", 1], True)], True),
        ([ACQUIRED, op("release", 3, None, ["a", 1]), op("acquire", 5, 6, ["b", "2"], 2)], True),
        ([op("acquire", 1, None, ["a", "1"]), op("acquire", 5, 6, ["b", "2"], REFUSED)], True),
        ([op("acquire", 5, 6, ["b", "2"], REFUSED)], False),  # by nobody
        (
            [
                op("acquire", 1, None, ["a", "1"]),
                op("acquire", 5, 6, ["a", "1"], 1),
                op("own", 7, 8, ["a", 1], True),
            ],
            True,
        ),
        # A grant whose answer was lost refuses others until it expires, and its repetition is then refused.
        (
            [
                ACQUIRED,
                op("release", 3, 4, ["a", 1], True),
                op("acquire", 5, 8, ["b", "2"], REFUSED_IN_DOUBT),
                op("acquire", 6, 7, ["a", "3"], REFUSED),
            ],
            True,
        ),
        (
            [op("acquire", 1, 2, ["b", "2"], REFUSED_IN_DOUBT), op("acquire", 3, 4, ["b", "2"], 1)],
            False,
        ),
        # Believing that a write failed which timed out: another attempt gets an epoch that was given away.
        (
            [
                op("acquire", 1, 2, ["a", "1"], REFUSED),
                op("acquire", 3, 4, ["b", "2"], 1),
            ],
            False,
        ),
    ],
)
def test_histories_of_a_lease_are_told_apart(history: list[Operation], is_good: bool) -> None:
    assert is_linearizable(lease_model("m"), history) is is_good
    assert explain_by_trying(lease_model("m"), history) is is_good


# -- logs and messages ---


@pytest.mark.parametrize(
    ("history", "is_good"),
    [
        ([op("open", 1, 2, [1], True), op("append", 3, 4, [1], True)], True),
        ([op("open", 1, 2, [1], True), op("open", 3, 4, [1], True)], False),
        ([op("open", 1, 2, [2], True), op("append", 3, 4, [1], True)], False),
        ([op("open", 1, 2, [2], True), op("append", 3, 4, [1], REFUSED)], True),
        (
            [
                op("open", 1, 2, [1], True),
                op("open", 3, 4, [2], True),
                op("append", 5, 6, [1], True),
            ],
            False,
        ),
        (
            [
                op("open", 1, 2, [1], True),
                op("append", 3, 8, [1], True),
                op("open", 4, 7, [2], True),
            ],
            True,
        ),
        ([op("open", 1, None, [1]), op("append", 3, 4, [1], True)], True),
    ],
)
def test_histories_of_a_log_are_told_apart(history: list[Operation], is_good: bool) -> None:
    assert is_linearizable(log_model("m"), history) is is_good
    assert explain_by_trying(log_model("m"), history) is is_good


SENT, RECEIVED, ACKED = (
    op("send", 1, 2, [], True),
    op("receive", 3, 4, [], 1),
    op("ack", 5, 6, [1], True),
)


@pytest.mark.parametrize(
    ("history", "is_good"),
    [
        ([SENT, RECEIVED, ACKED, op("find", 7, 8, [], "acked")], True),
        ([SENT, RECEIVED, ACKED, op("find", 7, 8, [], "unsettled")], False),  # an ack is lost
        ([SENT, op("find", 7, 8, [], "absent")], False),  # a message is lost
        ([op("send", 1, None, []), op("find", 7, 8, [], "absent")], True),
        ([op("send", 1, None, []), op("find", 7, 8, [], "unsettled")], True),
        ([op("send", 1, 2, [], REFUSED), op("find", 7, 8, [], "unsettled")], False),
        ([op("send", 1, 2, [], REFUSED), op("receive", 3, 4, [], 1)], False),
        ([SENT, RECEIVED, ACKED, op("receive", 7, 8, [], 2)], False),  # delivered after its ack
        (
            [SENT, RECEIVED, ACKED, op("receive", 5, 8, [], 2)],
            False,
        ),  # at the same time, but the ack is stale
        ([SENT, RECEIVED, op("receive", 5, 8, [], 2), op("ack", 6, 7, [2], True)], True),
        ([SENT, RECEIVED, op("ack", 5, None, [1]), op("receive", 7, 8, [], 2)], True),
        ([SENT, RECEIVED, op("receive", 5, 6, [], 2), op("ack", 7, 8, [1], True)], False),
        ([SENT, RECEIVED, op("receive", 5, 6, [], 2), op("ack", 7, 8, [1], REFUSED)], True),
        ([SENT, RECEIVED, op("receive", 5, 6, [], 1)], False),  # one delivery twice
        ([SENT, RECEIVED, op("ack", 5, None, [1]), op("find", 9, 10, [], "acked")], True),
        ([op("receive", 3, 4, [], 1)], False),  # that nobody sent
    ],
)
def test_histories_of_a_message_are_told_apart(history: list[Operation], is_good: bool) -> None:
    assert is_linearizable(message_model("m"), history) is is_good
    assert explain_by_trying(message_model("m"), history) is is_good
