"""Keys of a fair queue are served in turns, in proportion to nothing but their own demand."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from postroom.application.mailbox.command_queue import FairQueue, PendingRequests
from postroom.application.mailbox.groups import LoadedMailbox, Request
from postroom.application.ports.event_log import Answer
from postroom.domain.commit import GENESIS
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.subscription import Subscription, SubscriptionFilter
from tests.unit.domain.scenario import Life

QUANTUM = 10
KEYS = st.sampled_from("abc")
ITEMS = st.lists(st.tuples(KEYS, st.integers(1, 40)), max_size=60)


def filled(items: list[tuple[str, int]]) -> FairQueue[tuple[str, int]]:
    """Return a queue of items that are numbered by their order of arrival."""
    queue: FairQueue[tuple[str, int]] = FairQueue(10_000, QUANTUM)
    for number, (key, cost) in enumerate(items):
        queue.push(key, (key, number), cost)
    return queue


@given(ITEMS)
def test_every_item_comes_out_once_and_in_the_order_of_its_key(items: list[tuple[str, int]]) -> None:
    queue = filled(items)
    popped: list[tuple[str, int]] = []
    while queue:
        popped += queue.take(1)
    assert queue.cost == 0
    for each in "abc":
        arrived = [number for number, (key, _) in enumerate(items) if key == each]
        assert [number for key, number in popped if key == each] == arrived


@given(ITEMS)
def test_keys_with_items_get_the_same_share_of_the_cost(items: list[tuple[str, int]]) -> None:
    queue = filled(items)
    remaining = {key: sum(cost for each, cost in items if each == key) for key in "abc"}
    largest = max((cost for _, cost in items), default=0)
    served = dict.fromkeys("abc", 0)
    while all(remaining.values()):
        ((key, number),) = queue.take(1)
        cost = items[number][1]
        served[key] += cost
        remaining[key] -= cost
        assert max(served.values()) - min(served.values()) <= 2 * (QUANTUM + largest)


def test_an_item_of_a_new_key_waits_for_one_turn_of_the_others() -> None:
    queue = filled([("a", 1)] * 1_000)
    queue.push("b", ("b", -1), 1)
    order = [queue.take(1)[0][0] for _ in range(1_001)]
    assert order.index("b") <= QUANTUM


def test_what_an_item_costs_in_addition_delays_its_key_and_takes_no_room() -> None:
    queue: FairQueue[str] = FairQueue(100, QUANTUM)
    for each in ("a1", "a2", "b1"):
        queue.push(each[0], each, 1, 50 if each[0] == "a" else 0)
    assert queue.cost == 3
    assert queue.take(50) == ["a1", "b1"]
    assert queue.take(50) == ["a2"]


async def test_a_batch_with_very_many_copies_waits_for_few_commands_of_another_topic() -> None:
    mailbox = Mailbox("main@local")
    every = SubscriptionFilter(("orders",))
    names = [f"s{number}" for number in range(256)]
    mailbox.set_subscriptions({each: Subscription(each, b"", 1, every, "live", 0, 0, 0) for each in names})
    state, queue = LoadedMailbox(mailbox, GENESIS), PendingRequests("main@local", lambda: 0)
    answers: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
    other = Life("m", topic="others").send()
    batch = Request([Life("m").send()] * 256, answers, 0.0)
    queue.add(batch, state)
    for _ in range(20_000):
        queue.add(Request([other], answers, 0.0), state)
    before = 0
    while batch not in (group := queue.take()):
        before += len(group)
    assert before < 5_000


@given(ITEMS)
def test_items_taken_together_are_in_order_of_arrival(items: list[tuple[str, int]]) -> None:
    queue = filled(items)
    while queue:
        numbers = [number for _, number in queue.take(100)]
        assert numbers == sorted(numbers)


def test_one_key_fills_half_of_the_capacity_and_leaves_room_for_others() -> None:
    queue: FairQueue[int] = FairQueue(100, QUANTUM)
    while queue.has_room("a", 1):
        queue.push("a", 0, 1)
    assert queue.cost == 50
    assert queue.has_room("b", 1)


@given(st.lists(st.tuples(st.text(max_size=2), st.integers(1, 30)), max_size=200))
def test_no_number_of_keys_exceeds_the_capacity(pushes: list[tuple[str, int]]) -> None:
    queue: FairQueue[int] = FairQueue(100, QUANTUM)
    for key, cost in pushes:
        if queue.has_room(key, cost):
            queue.push(key, 0, cost)
    assert queue.cost <= 100


def test_an_empty_queue_takes_an_item_of_any_cost() -> None:
    assert FairQueue[int](100, QUANTUM).has_room("a", 1_000)
