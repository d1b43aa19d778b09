from time import time_ns
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from postroom.application.mailbox.settle import DeliveryWindow
from postroom.application.messages import MessageDelivery
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.message import Receipt

HOUR_MS = 3_600_000
CAPACITY = 5


def receipt(number: int) -> Receipt:
    return Receipt(bytes(15) + bytes([number]), 1, 1)


def delivered(number: int, hours: int) -> ReceivedMessage:
    due = time_ns() // 1_000 + hours * HOUR_MS * 1_000
    delivery = MessageDelivery(receipt(number), "orders", 0, 1, due, None, None, b"", b"", b"")
    unused: Any = None  # nothing is settled through these messages
    return ReceivedMessage(delivery, unused)


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "settle", "extend"]), st.integers(0, 9), st.sampled_from([-1, 1])),
        max_size=20,
    )
)
def test_the_deliveries_that_are_neither_settled_nor_timed_out_take_room(
    steps: list[tuple[str, int, int]],
) -> None:
    window = DeliveryWindow(CAPACITY)
    hours: dict[int, int] = {}  # until the visibility timeout ends; negative if it has
    for step, number, until in steps:
        if step == "add":
            window.add([delivered(number, until)])
            hours[number] = until
        elif step == "settle":
            window.settle(receipt(number))
            hours.pop(number, None)
        else:
            window.extend(receipt(number), until * HOUR_MS)
            hours |= {number: until} if number in hours else {}
        hours = {number: left for number, left in hours.items() if left > 0}
        assert window.room == CAPACITY - len(hours)
        assert {each.message[-1] for each in window.unsettled} == hours.keys()
