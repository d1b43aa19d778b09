"""The public handlers, end to end, on every store."""

import asyncio
from collections.abc import Iterator
from uuid import UUID

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.http_server.handlers import to_envelope
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.messages import Sent, read_receipt, write_receipt
from postroom.domain.commit import Commit
from postroom.domain.envelope.validation import ValidationMode
from postroom.domain.errors import FrameTooLarge, IdempotencyConflict, InvalidRequest, NotFound, StaleReceipt
from postroom.domain.integrity import payload_hash
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from tests.support.stores import MAILBOX, Place, envelope, message
from tests.support.waiting import SECONDS

LONG_MS = 60_000


# -- a message's life ---


async def test_a_message_is_sent_received_and_acked(mailbox: OwnedMailbox) -> None:
    sent = await mailbox.send_message(
        message(b"\x00hello", attrs={"k": "v", "raw": b"\xff"}, correlation_id="corr-1", idem_key="key-1")
    )
    assert not sent.duplicate
    assert UUID(sent.message_id).version == 7

    (received,) = await mailbox.receive_messages("orders", consumer="worker-1")
    assert (received.message_id, received.topic, received.attempt) == (sent.message_id, "orders", 1)
    assert (received.payload, received.idem_key, received.correlation_id) == (b"\x00hello", "key-1", "corr-1")
    assert received.attrs["k"] == "v"
    assert await mailbox.receive_messages("orders") == []

    assert await mailbox.ack_messages([received.receipt]) == [None]
    assert await mailbox.ack_messages([received.receipt]) == [None]
    assert (await mailbox.get_backlog()).shards == []
    history = [entry.event for entry in (await mailbox.get_message(sent.message_id)).history]
    assert history == ["MessageSent", "MessageReceived", "MessageAcked"]


async def test_a_delivery_is_written_with_the_names_of_its_fields_and_over_http_with_those_of_c_9(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_message(
        message(b"hi", attrs={"k": "v"}, idem_key="key-1", published_at_us=1_700_000_000_000_000)
    )
    (received,) = await mailbox.receive_messages("orders")
    written = received.to_json()
    over_http = to_envelope(received, with_envelope=False)
    assert written["timestamp"] == over_http.timestamp == 1_700_000_000_000
    assert over_http.ts == "2023-11-14T22:13:20.000000Z"
    assert written["payload_hash"] == f"b3:{payload_hash(b'hi').hex()}"
    assert written["hash_chain"].startswith("b3:")
    assert written["correlation_id"] == written["message_id"] == received.message_id
    assert over_http.corr_id == over_http.msg_id == over_http.message_id == received.message_id
    assert (written["topic"], written["idem_key"], written["attempt"]) == ("orders", "key-1", 1)
    assert (written["attrs"], written["shard"], written["payload_b64"]) == (
        {"k": "v"},
        received.shard,
        "aGk=",
    )
    assert read_receipt(written["receipt"]) == received.receipt


async def test_the_receipt_survives_as_text(mailbox: OwnedMailbox) -> None:
    await mailbox.send_message(message())
    (received,) = await mailbox.receive_messages("orders")
    receipt = read_receipt(write_receipt(received.receipt))
    assert await mailbox.ack_messages([receipt]) == [None]
    for nonsense in ("", "nonsense", "é", write_receipt(receipt) + "AAAA"):
        with pytest.raises(InvalidRequest, match="is not a receipt"):
            read_receipt(nonsense)


async def test_a_nacked_message_comes_again_with_its_next_attempt(mailbox: OwnedMailbox) -> None:
    sent = await mailbox.send_message(message())
    (first,) = await mailbox.receive_messages("orders")
    assert await mailbox.nack_messages([first.receipt], reason="boom", delay_ms=0) == [None]
    (second,) = await mailbox.receive_messages("orders")
    assert (second.message_id, second.attempt, second.payload) == (sent.message_id, 2, b"hello")
    (refused,) = await mailbox.ack_messages([first.receipt])
    assert isinstance(refused, StaleReceipt)
    assert await mailbox.extend_visibility([second.receipt], 30_000) == [None]
    assert await mailbox.ack_messages([second.receipt]) == [None]


async def test_answers_come_in_the_order_of_the_receipts(mailbox: OwnedMailbox) -> None:
    await mailbox.send_batch([message(b"1"), message(b"2")])
    one, two = await mailbox.receive_messages("orders")
    unknown = Receipt(b"?" * 16, 2, 1)
    answers = await mailbox.ack_messages([one.receipt, unknown, two.receipt, one.receipt])
    assert [type(answer) for answer in answers] == [type(None), NotFound, type(None), type(None)]
    assert await mailbox.ack_messages([]) == []


async def test_acks_that_are_repeated_in_one_batch_are_answered_by_one_read_of_the_log() -> None:
    class Counted(MemoryEventLog):
        reads = 0

        def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
            self.reads += 1
            return super().commits(after, envelopes=envelopes)

    log = Counted(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_batch([message() for _ in range(30)])
        settled = [each.receipt for each in await mailbox.receive_messages("orders", max_messages=20)]
        assert await mailbox.ack_messages(settled) == [None] * 20
        (waiting,) = await mailbox.receive_messages("orders", max_messages=1)
        older = Receipt(settled[0].message, settled[0].delivery + 1, settled[0].epoch)
        unknown = Receipt(b"nobody sent this", 2, settled[0].epoch)
        before = log.reads
        answers = await mailbox.ack_messages([*settled, older, unknown, waiting.receipt, settled[0]])
        assert log.reads == before + 1
    *repeated, stale, missing, late, last = answers
    assert repeated == [None] * 20
    assert (late, last) == (None, None)
    assert isinstance(stale, StaleReceipt)
    assert isinstance(missing, NotFound)


async def test_two_callers_that_ack_one_delivery_at_once_are_both_told_it_is_settled(
    mailbox: OwnedMailbox,
) -> None:
    await mailbox.send_batch([message(b"1"), message(b"2")])
    one, two = await mailbox.receive_messages("orders")
    calls = [mailbox.ack_messages([each]) for each in (one.receipt, one.receipt, two.receipt)]
    assert await asyncio.gather(*calls) == [[None]] * 3
    refused, settled = await asyncio.gather(
        mailbox.nack_messages([one.receipt]), mailbox.ack_messages([two.receipt])
    )
    assert isinstance(refused[0], StaleReceipt)
    assert settled == [None]


async def test_a_late_ack_that_meets_a_purge_is_refused_and_harms_nobody(mailbox: OwnedMailbox) -> None:
    await mailbox.send_batch([message(b"1"), message(b"2", topic="invoices")])
    (late,) = await mailbox.receive_messages("orders", visibility_ms=250)
    (other,) = await mailbox.receive_messages("invoices", visibility_ms=LONG_MS)
    async with asyncio.timeout(SECONDS):
        while not (await mailbox.get_backlog()).ready:  # until the scanner comes by
            await asyncio.sleep(0.01)
    purged, refused, settled = await asyncio.gather(
        mailbox.purge_topic("orders", ready=True),
        mailbox.ack_messages([late.receipt]),
        mailbox.ack_messages([other.receipt]),
    )
    assert (purged, settled) == (1, [None])
    assert isinstance(refused[0], StaleReceipt)


# -- batches and duplicates ---


async def test_each_message_of_a_batch_is_accepted_or_refused_by_itself(mailbox: OwnedMailbox) -> None:
    answers = await mailbox.send_batch(
        [
            message(b"1", idem_key="k"),
            message(b"2", topic="no spaces"),
            message(b"1", idem_key="k"),
            message(b"changed", idem_key="k"),
            message(bytes(1 << 20)),
            message(b"3"),
            message(b"4", deliver_after_ms=-1),
            message(b"5", idem_key=""),
        ]
    )
    kinds = [type(answer) for answer in answers]
    assert kinds == [
        Sent,
        InvalidRequest,
        Sent,
        IdempotencyConflict,
        FrameTooLarge,
        Sent,
        InvalidRequest,
        InvalidRequest,
    ]
    first, again = answers[0], answers[2]
    assert isinstance(first, Sent)
    assert isinstance(again, Sent)
    assert again == Sent(first.message_id, duplicate=True)
    assert [m.payload for m in await mailbox.receive_messages("orders")] == [b"1", b"3"]
    assert await mailbox.send_batch([]) == []


async def test_n_duplicates_yield_one_delivery(mailbox: OwnedMailbox) -> None:
    answers = await asyncio.gather(*(mailbox.send_message(message(idem_key="k")) for _ in range(50)))
    assert len({answer.message_id for answer in answers}) == 1
    assert sum(not answer.duplicate for answer in answers) == 1
    assert len(await mailbox.receive_messages("orders")) == 1


async def test_an_external_id_is_stored_as_it_is_and_unique_for_ever(mailbox: OwnedMailbox) -> None:
    ids = ["order-1", "0198c0de-0000-7000-8000-000000000001", "0198C0DE-0000-7000-8000-000000000001", "ü/1"]
    for id_ in ids:
        assert await mailbox.send_message(message(message_id=id_)) == Sent(id_, duplicate=False)
    received = await mailbox.receive_messages("orders")
    assert [each.message_id for each in received] == ids
    assert await mailbox.ack_messages([each.receipt for each in received]) == [None] * 4
    for id_ in ids:  # settled and out of memory, but still in the log
        assert await mailbox.send_message(message(message_id=id_)) == Sent(id_, duplicate=True)
        assert (await mailbox.get_message(id_)).message_id == id_


async def test_one_external_id_twice_in_a_batch_is_sent_once(mailbox: OwnedMailbox) -> None:
    answers = await mailbox.send_batch([message(b"1", message_id="x")] * 2)
    assert answers == [Sent("x", duplicate=False), Sent("x", duplicate=True)]
    assert [m.payload for m in await mailbox.receive_messages("orders")] == [b"1"]


async def test_an_external_id_whose_first_send_was_refused_may_be_sent(mailbox: OwnedMailbox) -> None:
    answers = await mailbox.send_batch(
        [message(bytes(1 << 20), message_id="x"), message(b"small", message_id="x")]
    )
    assert isinstance(answers[0], FrameTooLarge)
    assert answers[1] == Sent("x", duplicate=False)
    assert [m.payload for m in await mailbox.receive_messages("orders")] == [b"small"]


# -- envelopes and archives ---


async def test_an_archive_stores_envelopes_byte_for_byte_and_never_delivers(store: str) -> None:
    async with open_mailbox(store, MAILBOX, mode="archive") as archive:
        blob = envelope("event-1", principal="alice") + b"\xd2\x3e\x03new"  # with a field of the future
        answers = await archive.send_envelopes(
            [blob, envelope("event-2"), blob], validation=ValidationMode.DISABLED
        )
        sent = [
            Sent("event-1", duplicate=False),
            Sent("event-2", duplicate=False),
            Sent("event-1", duplicate=True),
        ]
        assert answers == sent
        assert await archive.receive_messages("orders") == []
        found = await archive.get_message("event-1")
        assert (found.status, found.item.principal, found.intact) == ("archived", "alice", True)
        assert found.item.envelope_blob == blob
        backlog = await archive.get_backlog()
        assert (backlog.archived, backlog.shards) == (2, [])
        assert await archive.send_envelopes([blob]) == [Sent("event-1", duplicate=True)]


async def test_a_malformed_envelope_is_refused_and_the_others_are_stored(mailbox: OwnedMailbox) -> None:
    problems: list[int] = []
    answers = await mailbox.send_envelopes(
        [b"\xff\xff nonsense", envelope("event-1")], on_problem=lambda index, problem: problems.append(index)
    )
    assert [type(answer) for answer in answers] == [InvalidRequest, Sent]
    assert 0 in problems
    (received,) = await mailbox.receive_messages("orders")
    assert (received.message_id, received.payload) == ("event-1", b"hi")


# -- operators ---


async def test_dead_letters_are_listed_redriven_and_purged(mailbox: OwnedMailbox) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=1))
    await mailbox.send_batch([message(b"%d" % n, message_id=f"m{n}") for n in range(3)])
    deliveries = await mailbox.receive_messages("orders")
    await mailbox.nack_messages([each.receipt for each in deliveries], reason="boom")

    letters = (await mailbox.list_dead_letters("orders")).items
    assert [(each.message_id, each.reason, each.attempt, each.last_error) for each in letters] == [
        (f"m{n}", "max_attempts", 1, "boom") for n in range(3)
    ]
    assert (await mailbox.list_dead_letters(limit=2)).items == letters[:2]
    assert (await mailbox.list_dead_letters(cursor=str(letters[1].position))).items == letters[2:]
    assert (await mailbox.list_dead_letters(reason="integrity")).items == ()
    with pytest.raises(InvalidRequest, match="limit must be at least 1; it was 0"):
        await mailbox.list_dead_letters(limit=0)

    assert await mailbox.redrive_dead_letters("orders", message_ids=["m1", "unknown"]) == 1
    (again,) = await mailbox.receive_messages("orders")
    assert (again.message_id, again.attempt) == ("m1", 1)
    (stale,) = await mailbox.ack_messages([deliveries[1].receipt])
    assert isinstance(stale, StaleReceipt)
    assert await mailbox.redrive_dead_letters("orders", limit=1) == 1
    assert await mailbox.purge_topic("orders") == 1
    assert (await mailbox.get_message("m2")).status == "expired"
    assert await mailbox.purge_topic("orders", dead=False, ready=True) == 1
    with pytest.raises(NotFound, match="no topic invoices"):
        await mailbox.purge_topic("invoices")
    with pytest.raises(InvalidRequest, match="limit must be at least 1"):
        await mailbox.redrive_dead_letters("orders", limit=0)


async def test_an_operators_command_reaches_beyond_one_append(mailbox: OwnedMailbox) -> None:
    await mailbox.send_batch([message(topic=f"t{n % 2}", sticky_key=str(n)) for n in range(2_400)])
    assert await mailbox.purge_topic("t0", ready=True) == 1_200
    assert sum(shard.ready for shard in (await mailbox.get_backlog("t1")).shards) == 1_200


async def test_the_backlog_counts_by_topic_shard_and_status(mailbox: OwnedMailbox) -> None:
    await mailbox.set_topic_policy("orders", TopicPolicy(shards=1))
    await mailbox.send_batch(
        [message(), message(), message(deliver_after_ms=LONG_MS), message(topic="invoices")]
    )
    await mailbox.receive_messages("orders", max_messages=1)
    (row,) = (await mailbox.get_backlog("orders")).shards
    assert (row.topic, row.shard, row.ready, row.in_flight, row.delayed, row.dead) == (
        "orders",
        0,
        1,
        1,
        1,
        0,
    )
    assert (await mailbox.get_backlog()).ready == 2


async def test_a_message_that_never_was_is_not_found(mailbox: OwnedMailbox) -> None:
    with pytest.raises(NotFound, match="has no message order-9"):
        await mailbox.get_message("order-9")
