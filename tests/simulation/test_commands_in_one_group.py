"""What callers ask for at the same time is decided in one group, before any of it is in the log."""

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest_asyncio

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.application.messages import NewMessage
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, StaleReceipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.support.waiting import until

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


async def test_sends_with_copies_for_many_subscriptions_hold_up_other_topics_by_few_of_them(
    mailbox: OwnedMailbox,
) -> None:
    for number in range(64):
        await mailbox.set_subscription(f"service-{number}", SubscriptionFilter(("orders",)))
    sends = [asyncio.create_task(mailbox.send_message(NEW)) for _ in range(50)]
    await asyncio.create_task(mailbox.send_message(NewMessage(topic="others", payload=b"x")))
    assert sum(each.done() for each in sends) < 20  # each has 64 copies
    await asyncio.gather(*sends)
    assert len(await mailbox.receive_messages("service-63", max_messages=100)) == 50


async def test_other_calls_run_while_a_batch_with_many_copies_is_decided(mailbox: OwnedMailbox) -> None:
    for number in range(64):
        await mailbox.set_subscription(f"service-{number}", SubscriptionFilter(("orders",)))
    sent = asyncio.create_task(mailbox.send_batch([NEW] * 50))
    positions = [mailbox.engine.mailbox.position]
    while not sent.done():
        await asyncio.sleep(0)
        positions.append(mailbox.engine.mailbox.position)
    assert positions[-1] - positions[0] == 50 * 65
    assert max(after - before for before, after in pairwise(positions)) < 50 * 65 / 2


async def test_the_delivery_to_a_waiting_receiver_is_stored_in_the_commit_of_the_message(
    mailbox: OwnedMailbox,
) -> None:
    waiting = {
        topic: asyncio.create_task(mailbox.receive_messages(topic, wait_ms=60_000))
        for topic in ("orders", "bills")
    }
    await until(lambda: mailbox.engine.long_polls.count("bills"))
    await mailbox.send_message(NEW)
    (message,) = await waiting["orders"]
    assert (message.payload, message.attempt) == (b"x", 1)
    *_, commit = mailbox.engine.log.commits()
    assert commit.event_count == 2
    assert not waiting["bills"].done()
    await cancel_and_wait(waiting["bills"])
    await mailbox.send_message(NewMessage("bills", b"y"))
    (bill,) = await mailbox.receive_messages("bills")
    assert bill.attempt == 1
    assert await mailbox.ack_messages([message.receipt, bill.receipt]) == [None, None]


async def test_a_receiver_that_gives_up_when_it_is_woken_leaves_the_message_to_the_next_one(
    mailbox: OwnedMailbox,
) -> None:
    first, second = (
        asyncio.create_task(mailbox.receive_messages("orders", wait_ms=60_000)) for _ in range(2)
    )
    await until(lambda: mailbox.engine.long_polls.count("orders") == 2)
    first.cancel()  # takes effect with the next turn of the loop, as does the send
    sending = asyncio.create_task(mailbox.send_message(NEW))
    (message,) = await second
    assert (message.payload, message.attempt) == (b"x", 1)
    assert not (await sending).duplicate
    assert first.cancelled()
