"""What every mailbox promises of streams of messages; a part of `MailboxConformance`."""

import asyncio

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import InvalidRequest
from tests.support.stores import message
from tests.support.waiting import SECONDS

LONG_MS = 60_000


class MailboxStreamConformance:
    async def test_a_stream_delivers_what_is_there_and_what_comes(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message(b"1"))
        async with mailbox.stream_messages(["orders", "others"], consumer="shop", heartbeat_ms=250) as stream:
            first = await anext(stream)
            assert (first.payload, first.attempt) == (b"1", 1)
            await asyncio.sleep(0.6)  # heartbeats
            await mailbox.send_message(message(b"2", topic="others"))
            second = await anext(stream)
            assert second.payload == b"2"
            await first.ack()
            await second.ack()
        assert (await mailbox.get_backlog()).shards == []

    async def test_a_stream_has_no_more_unsettled_messages_than_it_may(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(str(number).encode()) for number in range(4)])
        async with mailbox.stream_messages("orders", max_messages=2, visibility_ms=LONG_MS) as stream:
            first, second = await anext(stream), await anext(stream)
            third = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.3)
            (row,) = (await mailbox.get_backlog("orders")).shards
            assert (row.ready, row.in_flight) == (2, 2)
            assert not third.done()
            await first.ack()
            assert (await third).attempt == 1
            await second.nack(delay_ms=LONG_MS)
            assert (await anext(stream)).attempt == 1

    async def test_a_delivery_of_a_stream_that_times_out_makes_room(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        async with mailbox.stream_messages("orders", max_messages=1, visibility_ms=250) as stream:
            assert [(await anext(stream)).attempt for _ in range(2)] == [1, 2]

    async def test_what_a_stream_leaves_unsettled_is_ready_again_at_once(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(b"1"), message(b"2"), message(b"3")])
        async with mailbox.stream_messages("orders", visibility_ms=LONG_MS) as stream:
            settled = await anext(stream)
            await settled.ack()
            await anext(stream)
        again: list[ReceivedMessage] = []
        while len(again) < 2:
            again += await mailbox.receive_messages("orders", wait_ms=LONG_MS)
        assert {each.attempt for each in again} == {2}
        assert settled.message_id not in {each.message_id for each in again}

    async def test_a_stream_whose_caller_is_cancelled_leaves_nothing_in_flight(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.send_message(message())
        began = asyncio.Event()

        async def consume() -> None:
            async with mailbox.stream_messages("orders", visibility_ms=LONG_MS) as stream:
                async for _ in stream:
                    began.set()

        consumer = asyncio.create_task(consume())
        async with asyncio.timeout(SECONDS):
            await began.wait()
        consumer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consumer
        (again,) = await mailbox.receive_messages("orders", wait_ms=LONG_MS)
        assert again.attempt == 2

    async def test_a_caller_may_stop_waiting_for_a_stream_and_go_on_later(self, mailbox: Mailbox) -> None:
        async with mailbox.stream_messages("orders") as stream:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(stream), 0.05)
            await mailbox.send_message(message())
            assert (await anext(stream)).attempt == 1

    async def test_a_stream_with_a_wait_ends_when_it_is_over(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(b"1"), message(b"2")])
        async with mailbox.stream_messages("orders", wait_ms=1_000) as stream:
            assert sorted([each.payload async for each in stream]) == [b"1", b"2"]

    async def test_a_stream_of_a_wrong_topic_or_limit_is_refused(self, mailbox: Mailbox) -> None:
        for topic, options in (
            ("no spaces", {}),
            ([], {}),
            ("orders", {"max_messages": 0}),
            ("orders", {"max_messages": 257}),
            ("orders", {"heartbeat_ms": 1}),
            ("orders", {"wait_ms": 0}),
            ("orders", {"visibility_ms": 1}),
        ):
            with pytest.raises(InvalidRequest):
                async with mailbox.stream_messages(topic, **options):  # type: ignore[arg-type]
                    pass
