"""What consumers give with their settlements: results and tracebacks; a part of `MailboxConformance`."""

import asyncio
from typing import Any

import pytest

from postroom.application.messages import MessageResult
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import FrameTooLarge, InvalidRequest, NotFound, StaleReceipt
from postroom.domain.settings import SettingsChanges
from tests.support.stores import message, receive_one

WAIT_MS = 30_000
LIMIT = 65_536
OVERHEAD = 33
"""Bytes that encryption adds to a result, which count."""


class MailboxResultConformance:
    async def test_a_sender_that_waits_gets_the_result_of_the_consumer(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        received = await receive_one(mailbox)
        await received.ack(result=b'{"sum": 3}', content_type="application/json")
        async with asyncio.timeout(WAIT_MS / 2_000):
            outcome = await waiting
        assert (outcome.message_id, outcome.topic, outcome.status) == (sent.message_id, "orders", "acked")
        assert outcome.result == MessageResult(b'{"sum": 3}', "application/json")
        assert outcome.payload == b'{"sum": 3}'
        assert (await mailbox.get_message(sent.message_id)).result == outcome.result
        assert await mailbox.wait_for_result(sent.message_id) == outcome

    async def test_of_messages_acked_together_each_has_its_own_result(self, mailbox: Mailbox) -> None:
        sent = [await mailbox.send_message(message(message_id=f"order {n}")) for n in range(4)]
        received = {each.message_id: each.receipt for each in await mailbox.receive_messages("orders")}
        receipts = [received[each.message_id] for each in sent]
        results = [MessageResult(b"\x00\xff"), None, MessageResult(b"", ""), MessageResult("é".encode())]
        assert await mailbox.ack_messages(receipts, results=results) == [None] * 4
        answers = [await mailbox.wait_for_result(each.message_id) for each in sent]
        assert [each.result for each in answers] == results
        with pytest.raises(NotFound, match="order 1 on topic orders has no result: its consumer returned"):
            answers[1].payload  # noqa: B018 # raises

    async def test_the_first_ack_counts_and_a_repeated_one_changes_nothing(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        received = await receive_one(mailbox)
        await received.ack(result=b"first")
        await received.ack(result=b"second")
        await received.ack()
        assert (await mailbox.wait_for_result(sent.message_id)).payload == b"first"

    async def test_a_result_above_the_limit_leaves_its_message_in_flight(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(), message()])
        first, second = await mailbox.receive_messages("orders")
        receipts = [first.receipt, second.receipt]
        results = [MessageResult(bytes(LIMIT + 1)), MessageResult(bytes(LIMIT - OVERHEAD))]
        refusal, done = await mailbox.ack_messages(receipts, results=results)
        assert isinstance(refusal, FrameTooLarge)
        assert "limit result_bytes of 65,536" in str(refusal)
        assert done is None
        assert (await mailbox.wait_for_result(first.message_id)).status == "in_flight"
        assert len((await mailbox.wait_for_result(second.message_id)).payload) == LIMIT - OVERHEAD
        await mailbox.set_settings(SettingsChanges(limits={"result_bytes": 100_000}))
        await first.ack(result=bytes(LIMIT + 1))

    async def test_many_large_results_are_acked_together(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message() for _ in range(20)])
        received = await mailbox.receive_messages("orders")
        results = [MessageResult(bytes([n]) * 60_000) for n in range(len(received))]
        receipts = [each.receipt for each in received]
        assert await mailbox.ack_messages(receipts, results=results) == [None] * 20
        assert (await mailbox.get_message(received[-1].message_id)).result == results[-1]

    async def test_who_waits_for_a_dead_letter_learns_the_reason(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        await (await receive_one(mailbox)).reject("no such customer")
        async with asyncio.timeout(WAIT_MS / 2_000):
            outcome = await waiting
        assert (outcome.status, outcome.reason, outcome.last_error) == (
            "dead",
            "rejected",
            "no such customer",
        )
        with pytest.raises(NotFound, match=r"it is a dead letter \(rejected: no such customer\)"):
            outcome.payload  # noqa: B018 # raises
        assert await mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS) == outcome

    async def test_who_waits_for_a_cancelled_message_learns_it(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        await mailbox.cancel_messages([sent.message_id])
        async with asyncio.timeout(WAIT_MS / 2_000):
            outcome = await waiting
        assert (outcome.status, outcome.reason, outcome.is_final) == ("expired", "cancelled", True)

    async def test_a_wait_ends_in_time_with_the_status_then(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=500))
        received = await receive_one(mailbox)
        outcome = await waiting
        assert (outcome.status, outcome.is_final, outcome.result) == ("in_flight", False, None)
        with pytest.raises(NotFound, match="it is in flight; wait again"):
            outcome.payload  # noqa: B018 # raises
        await received.nack(delay_ms=60_000)
        assert (await mailbox.wait_for_result(sent.message_id)).status == "delayed"

    async def test_a_redelivery_does_not_end_a_wait(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        waiting = asyncio.create_task(mailbox.wait_for_result(sent.message_id, wait_ms=WAIT_MS))
        failed = await receive_one(mailbox)
        await failed.nack(delay_ms=0)
        await (await receive_one(mailbox)).ack(result=b"at the second attempt")
        with pytest.raises(StaleReceipt):
            await failed.ack(result=b"late")
        assert (await waiting).payload == b"at the second attempt"

    async def test_an_unknown_message_is_not_waited_for(self, mailbox: Mailbox) -> None:
        async with asyncio.timeout(WAIT_MS / 2_000):
            with pytest.raises(NotFound):
                await mailbox.wait_for_result("unknown", wait_ms=WAIT_MS)

    async def test_malformed_results_and_waits_are_refused_and_nothing_is_acked(
        self, mailbox: Mailbox
    ) -> None:
        sent = await mailbox.send_message(message())
        received, result = await receive_one(mailbox), MessageResult(b"x")
        number: Any = 1
        lists: list[Any] = [[], [result, result], result, [MessageResult(number)], ["x"], [b"x"], {0: result}]
        for results in lists:
            with pytest.raises(InvalidRequest):
                await mailbox.ack_messages([received.receipt], results=results)
        types: list[Any] = [1, b"text/plain", "x" * 256]
        for content_type in types:
            with pytest.raises(InvalidRequest, match="content_type"):
                await received.ack(result=b"x", content_type=content_type)
        with pytest.raises(InvalidRequest, match="content_type must be absent"):
            await received.ack(content_type="text/plain")
        payloads: list[Any] = ["x", bytearray(b"x"), 1, memoryview(b"x")]
        for payload in payloads:
            with pytest.raises(InvalidRequest, match="payload of a result"):
                await received.ack(result=payload)
        waits: list[Any] = [-1, 60_001, 1.5, "1", None, True]
        for wait_ms in waits:
            with pytest.raises(InvalidRequest, match="wait_ms"):
                await mailbox.wait_for_result(sent.message_id, wait_ms=wait_ms)
        ids: list[Any] = ["", 1, None, "x" * 256, b"x"]
        for id_ in ids:
            with pytest.raises(InvalidRequest, match="message id"):
                await mailbox.wait_for_result(id_)
        assert await mailbox.ack_messages([], results=[]) == []
        assert (await mailbox.wait_for_result(sent.message_id)).status == "in_flight"
        receipts: list[Any] = [received.receipt, "r.x"]
        answers = await mailbox.ack_messages(receipts, results=[result, result])
        assert answers[0] is None
        assert isinstance(answers[1], InvalidRequest)

    async def test_a_dead_letter_keeps_the_traceback_of_the_delivery_that_made_it_one(
        self, mailbox: Mailbox
    ) -> None:
        sent = await mailbox.send_message(message())
        received = await receive_one(mailbox)
        settle = mailbox.nack_messages
        assert await settle([received.receipt], reason="first", traceback="of the first", delay_ms=0) == [
            None
        ]
        assert (await mailbox.get_message(sent.message_id)).traceback is None  # it is delivered again
        received = await receive_one(mailbox)
        text = "Traceback (most recent call last):\n  Fílë\nValueError: \x01\u202e"
        options: Any = {"reason": "boom", "traceback": text, "action": "reject"}
        assert await settle([received.receipt], **options) == [None]
        detail = await mailbox.get_message(sent.message_id)
        assert (detail.status, detail.last_error, detail.traceback) == ("dead", "boom", text)
        assert not any("traceback" in each.facts for each in detail.history)
        assert await mailbox.redrive_dead_letters("orders") == 1
        await (await receive_one(mailbox)).reject("no more")
        assert (await mailbox.get_message(sent.message_id)).traceback == text

    async def test_the_middle_of_a_traceback_above_the_limit_is_left_out(self, mailbox: Mailbox) -> None:
        ids = [(await mailbox.send_message(message())).message_id for _ in range(4)]
        receipts = {each.message_id: each.receipt for each in await mailbox.receive_messages("orders")}

        async def keep(index: int, text: str) -> str | None:
            await mailbox.nack_messages([receipts[ids[index]]], traceback=text, action="reject")
            return (await mailbox.get_message(ids[index])).traceback

        kept = await keep(0, "é" * 100_000) or ""
        assert (kept[:2], kept[-2:], "\n...\n" in kept) == ("éé", "éé", True)
        assert 16_000 < len(kept.encode()) <= 16_384
        await mailbox.set_settings(SettingsChanges(limits={"traceback_bytes": 7}))
        assert await keep(1, "0123456789") == "0\n...\n9"
        await mailbox.set_settings(SettingsChanges(limits={"traceback_bytes": 3}))
        assert await keep(2, "é€") == "é"
        await mailbox.set_settings(SettingsChanges(limits={"traceback_bytes": 0}))
        assert await keep(3, "text") is None

    @pytest.mark.parametrize("wrong", [b"bytes", 1, ["line"], "\ud800"])
    async def test_a_traceback_that_is_no_text_is_refused(self, mailbox: Mailbox, wrong: Any) -> None:
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        with pytest.raises(InvalidRequest, match="traceback"):
            await mailbox.nack_messages([received.receipt], traceback=wrong)
        await received.ack()
