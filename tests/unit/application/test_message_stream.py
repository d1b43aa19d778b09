"""Deliveries that time out before a stream's caller takes them."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from postroom.application.message_stream import MessageStream
from postroom.application.messages import MessageDelivery
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.message import Receipt
from tests.support.waiting import SECONDS


def delivery(message: bytes, number: int = 1) -> ReceivedMessage:
    """Return the delivery of a message that timed out long ago by this machine's clock."""
    return ReceivedMessage(
        MessageDelivery(
            Receipt(message * 16, number, 1), "orders", 0, number, 0, None, None, bytes(32), bytes(32), b""
        ),
        None,  # nothing is settled
    )


@pytest.mark.parametrize(
    ("batches", "taken"),
    [
        ([[delivery(b"a"), delivery(b"b")], [delivery(b"a", 2)]], [(b"b", 1), (b"a", 2)]),
        ([[delivery(b"a"), delivery(b"b")], [delivery(b"c")]], [(b"b", 1), (b"c", 1)]),
    ],
    ids=["of the same message", "of another message"],
)
async def test_a_delivery_that_timed_out_is_left_out_when_another_takes_its_place(
    batches: list[list[ReceivedMessage]], taken: list[tuple[bytes, int]]
) -> None:
    received = asyncio.Event()

    async def receive() -> AsyncIterator[list[ReceivedMessage]]:
        for batch in batches:
            yield batch
        received.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(SECONDS), MessageStream(receive(), max_messages=2, wait_ms=None) as stream:
        await received.wait()
        messages = [await anext(stream) for _ in taken]
        assert [(each.receipt.message[:1], each.attempt) for each in messages] == taken
