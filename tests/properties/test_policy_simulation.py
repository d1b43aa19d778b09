"""What another policy would have made of generated histories."""

from collections.abc import Iterator

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from postroom.adapters.compose.queries import Reader
from postroom.application.queries.mailbox_past import read_mailbox_past
from postroom.application.queries.simulate_policy import Simulation
from postroom.domain.message import MessageEvent
from postroom.domain.message_history import MessageHistory
from postroom.domain.policy import Changes
from postroom.domain.policy_grid import simulate_grid
from postroom.domain.policy_simulation import observe, simulate
from tests.properties.pasts import (
    POLICY,
    Past,
    Receive,
    Send,
    Settle,
    Step,
    as_time,
    histories,
    live,
    without_retention,
)
from tests.properties.tracing import message_histories
from tests.support.steps import Operate, Wait
from tests.support.stores import memory_place

SAME = Changes(
    max_attempts=POLICY.max_attempts,
    backoff_base_ms=POLICY.backoff_base_ms,
    backoff_max_ms=POLICY.backoff_max_ms,
    visibility_ms=POLICY.visibility_ms,
)


def lived(past: Past) -> Iterator[tuple[MessageHistory, int]]:
    """Yield the histories of queued messages, and when the log ends."""
    head = past.log.head()
    assert head is not None
    return ((history, head.at) for history in message_histories(past.log) if history.rounds)


def under_one_policy(taken: list[Step]) -> list[Step]:
    """Return the steps that leave everything to the default policy."""
    return [
        step
        for step in taken
        if not (isinstance(step, Receive) and step.visibility_ms is not None)
        and not (isinstance(step, Operate) and step.how == "policy")
    ]


DELIVERED: list[Step] = [Send("orders"), Receive("orders")]
REJECTED_LATE: list[Step] = [*DELIVERED, Wait(300), Receive("mail"), Settle("reject", 0)]
"""A message whose consumer rejects it after its visibility timeout."""
CANCELLED_IN_FLIGHT: list[Step] = [*DELIVERED, Operate("cancel", "orders")]
RESCHEDULED: list[Step] = [
    *DELIVERED,
    Settle("nack", 0, 5_000),
    Operate("reschedule", "orders"),
    Wait(400),
    Receive("orders"),
]
"""A message that an operator has delivered before the delay ends that its consumer set."""


@given(histories)
@example(REJECTED_LATE)
@example(CANCELLED_IN_FLIGHT)
@example(RESCHEDULED)
def test_no_change_changes_nothing(taken: list[Step]) -> None:
    for history, end in lived(live(memory_place(), taken)):
        was = observe(history, end)
        assert simulate(history, Changes(), end) == (was, was)


@given(histories.map(under_one_policy))
@example(REJECTED_LATE)
@example(CANCELLED_IN_FLIGHT)
@example(RESCHEDULED)
def test_the_same_policy_again_gives_exactly_what_was_observed(taken: list[Step]) -> None:
    for history, end in lived(live(memory_place(), taken)):
        was = observe(history, end)
        assert simulate(history, SAME, end) == (was, was)


def without_operators(taken: list[Step]) -> list[Step]:
    """Return the steps of senders and consumers, under one policy."""
    return [step for step in under_one_policy(taken) if not isinstance(step, Operate)]


changes = st.builds(
    Changes,
    max_attempts=st.none() | st.integers(1, 6),
    backoff_base_ms=st.none() | st.sampled_from([1, 50, 100, 400]),
    backoff_max_ms=st.none() | st.sampled_from([400, 500, 5_000]),
    visibility_ms=st.none() | st.sampled_from([250, 300, 2_000]),
)


@given(histories, changes)
def test_the_best_is_no_worse_than_the_worst_and_equal_where_nothing_is_assumed(
    taken: list[Step], changed: Changes
) -> None:
    for history, end in lived(live(memory_place(), taken)):
        best, worst = simulate(history, changed, end)
        assert (best.dead_letterings > 0) <= (worst.dead_letterings > 0)
        assert best.assumed <= worst.assumed or best.status == "settled"
        assert 0 <= best.queued <= end - history.sent.at
        assert 0 <= worst.queued <= end - history.sent.at
        if not worst.assumed:
            assert best == worst
        assert simulate(history, changed, end) == (best, worst)


@given(histories, changes, st.integers(1, 5))
def test_with_more_attempts_no_message_dies_that_would_have_lived(
    taken: list[Step], changed: Changes, attempts: int
) -> None:
    fewer, more = (msgspec.structs.replace(changed, max_attempts=n) for n in (attempts, attempts + 1))
    for history, end in lived(live(memory_place(), taken)):
        pairs = zip(simulate(history, fewer, end), simulate(history, more, end), strict=True)
        for under_fewer, under_more in pairs:
            if not under_fewer.dead_letterings:
                assert under_more == under_fewer


@given(histories.map(without_operators), st.integers(1, 400), st.integers(0, 400))
def test_a_longer_backoff_makes_no_message_come_sooner_or_more_often(
    taken: list[Step], base: int, more: int
) -> None:
    for history, end in lived(live(memory_place(), taken)):
        short = simulate(history, Changes(backoff_base_ms=base, backoff_max_ms=1_000), end)
        long = simulate(history, Changes(backoff_base_ms=base + more, backoff_max_ms=1_000), end)
        for before, after in zip(short, long, strict=True):
            if not before.assumed and not after.assumed:
                assert after.deliveries <= before.deliveries
                if (
                    not before.dead_letterings and not after.dead_letterings
                ):  # what waits too long dies sooner
                    assert after.queued >= before.queued


@given(histories.map(without_retention), changes, st.integers(0, 30), st.sampled_from(["", "orders", "m*"]))
def test_a_simulation_adds_up_the_messages_that_were_asked_for(
    taken: list[Step], changed: Changes, first: int, topic: str
) -> None:
    past = live(memory_place(), taken)
    simulation = Simulation(changed)
    Reader(past.log, past.place.clock).simulate_policy(
        simulation, start=first, end=as_time(past.place.clock.wall_us), topics=[topic] if topic else []
    )
    one_by_one = Simulation(changed)
    for history, end in lived(past):
        is_in_time = history.sent.position >= first and history.sent.at < past.place.clock.wall_us
        if is_in_time and (topic in ("", history.topic) or (topic == "m*" and history.topic == "mail")):
            one_by_one.add(history, end)
    assert simulation.comparison() == one_by_one.comparison()


@given(histories, st.lists(changes, min_size=1, max_size=4))
def test_a_grid_has_the_outcomes_of_each_policy_alone(taken: list[Step], grid: list[Changes]) -> None:
    for history, end in lived(live(memory_place(), taken)):
        outcomes = simulate_grid(history, grid, end)
        for index, changed in enumerate(grid):
            (of_policy,) = (each for each in outcomes if each.policies & 1 << index)
            assert (of_policy.best, of_policy.worst) == simulate(history, changed, end)
        pairs = [(each.best, each.worst) for each in outcomes]
        assert all(pair not in pairs[:number] for number, pair in enumerate(pairs))


@given(histories)
def test_the_past_of_a_mailbox_and_the_events_of_a_message_make_its_history(taken: list[Step]) -> None:
    log = live(memory_place(), taken).log
    head = log.head()
    assert head is not None
    past = read_mailbox_past(log, head.position, head.at)
    events: dict[bytes, list[tuple[int, int, MessageEvent]]] = {}
    for record in log.read():
        if isinstance(record.event, MessageEvent):
            events.setdefault(record.stream, []).append((record.position, record.epoch, record.event))
    simulated = [
        simulate(history, Changes(max_attempts=2), head.at)
        for each in events.values()
        for history in past.histories(each)
    ]
    expected = [
        simulate(history, Changes(max_attempts=2), head.at)
        for history in message_histories(log)
        if history.rounds
    ]
    assert simulated == expected


def test_a_comparison_says_what_is_sure_and_what_is_not() -> None:
    poison: list[Step] = [Receive("mail"), Settle("nack", 0, 0)] * 3
    slow: list[Step] = [Receive("orders"), Wait(100), Settle("ack", 0)]
    past = live(memory_place(), [Send("mail"), *poison, Send("orders"), *slow, Wait(60_000), Send("mail")])
    simulation = Simulation(Changes(max_attempts=5))
    Reader(past.log, past.place.clock).simulate_policy(simulation)
    compared = simulation.comparison()
    assert (compared.messages, compared.unchanged, compared.undecided, compared.more_deliveries) == (
        3,
        2,
        1,
        2,
    )
    assert (compared.observed.dead_lettered, compared.best.dead_lettered, compared.worst.dead_lettered) == (
        1,
        0,
        1,
    )
    assert (compared.observed.deliveries, compared.best.deliveries, compared.worst.deliveries) == (4, 5, 6)
    assert (compared.observed.queued_p50_ms, compared.observed.queued_max_ms) == (6, 103)
    assert (compared.avoided, compared.pending, compared.caused) == (0, 0, 0)
