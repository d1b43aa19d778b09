"""What callers ask for at the same time is decided in one group, before any of it is in the log."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest, StaleReceipt
from postroom.domain.policy import TopicPolicy

NEW = NewMessage(topic="orders", payload=b"x")


@pytest_asyncio.fixture
async def mailbox() -> AsyncIterator[OwnedMailbox]:
    policy = TopicPolicy(max_attempts=1, dead_capacity=1)
    async with open_mailbox("memory:", default_policy=policy) as mailbox:
        yield mailbox


async def test_a_refused_receive_does_not_make_the_next_one_take_a_new_message_for_corrupt(
    mailbox: OwnedMailbox,
) -> None:
    _, refused, received = await asyncio.gather(
        mailbox.send_message(NEW),
        mailbox.receive_messages("orders", visibility_ms=1),
        mailbox.receive_messages("orders"),
        return_exceptions=True,
    )
    assert isinstance(refused, InvalidRequest)
    assert isinstance(received, list)
    assert [message.payload for message in received] == [b"x"]


async def test_two_acks_of_one_delivery_both_succeed_and_a_nack_among_them_is_refused(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_message(NEW)
    (message,) = await mailbox.receive_messages("orders")
    receipt = message.receipt
    first, nacked, second, together = await asyncio.gather(
        mailbox.ack_messages([receipt]),
        mailbox.nack_messages([receipt]),
        mailbox.ack_messages([receipt]),
        mailbox.ack_messages([receipt, receipt]),
    )
    assert (first, second, together) == ([None], [None], [None, None])
    assert isinstance(nacked[0], StaleReceipt)


async def test_a_mailbox_goes_on_when_more_dead_letters_are_allowed_before_the_excess_was_removed(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_batch([NEW, NEW])
    received = await mailbox.receive_messages("orders")
    await asyncio.gather(
        mailbox.nack_messages([message.receipt for message in received]),
        mailbox.set_topic_policy("orders", TopicPolicy(dead_capacity=2)),
    )
    assert len((await mailbox.list_dead_letters("orders")).items) == 2
    assert not (await mailbox.send_message(NEW)).duplicate
