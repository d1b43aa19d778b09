"""What every message outbox promises: an adapter's test inherits the suite and provides two fixtures.

`record` commits messages with `MailboxOutbox`, in the database of `outbox`, whose mailbox is `MAILBOX`.
"""

import asyncio
from collections.abc import Callable

from postroom.application.messages import NewMessage
from postroom.application.outbox.events import read_message
from postroom.application.ports.outbox import MessageOutbox
from tests.support.stores import MAILBOX, message

Record = Callable[..., list[str]]
"""`record(*messages, mailbox=MAILBOX)` returns their ids."""
WAIT_SECONDS = 60


class MessageOutboxConformance:
    async def test_messages_are_found_in_the_order_of_recording(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        ids = record(message(b"1"), message(b"2", message_id="two")) + record(message(b"3", "other"))
        rows = await outbox.find(10)
        assert [row.id for row in rows] == ids
        assert ids[1] == "two"
        assert [read_message(row).payload for row in rows] == [b"1", b"2", b"3"]
        assert [row.id for row in await outbox.find(2)] == ids[:2]
        assert [row.id for row in await outbox.find(10, {"other"})] == ids[:2]

    async def test_a_message_keeps_all_its_fields(self, outbox: MessageOutbox, record: Record) -> None:
        new = NewMessage(
            topic="orders",
            payload=b"\x00\xff",
            idem_key="k\x00ü",
            sticky_key="s",
            attrs={"text": "ü", "bytes": b"\xff"},
            message_id="m",
            deliver_after_ms=5,
            ttl_seconds=7,
            published_at_us=11,
            content_type="a/b",
            correlation_id="c",
            causality_parent="p",
            principal="me",
            priority=9,
            trace_id="t",
            span_id="s",
            schema_url="u",
            schema_version="1",
        )
        record(new)
        (row,) = await outbox.find(1)
        found = read_message(row)
        assert found.attrs == {"text": "ü".encode(), "bytes": b"\xff"}
        assert {name: getattr(found, name) for name in new.__struct_fields__ if name != "attrs"} == {
            name: getattr(new, name) for name in new.__struct_fields__ if name != "attrs"
        }

    async def test_refused_messages_are_listed_with_their_errors_and_found_again_when_they_are_retried(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        assert await outbox.find_refused(10) == []
        record(message(b"1", message_id="foreign"), mailbox="other@local")
        record(*(message(b"1", message_id=each) for each in ("one", "two", "'three\x01\"")))
        rows = await outbox.find(10)
        await outbox.settle([], [(row, f"no {row.id}") for row in rows])
        refused = await outbox.find_refused(10)
        assert [(each.id, each.topic, each.error) for each in refused] == [
            (each, "orders", f"no {each}") for each in ("one", "two", "'three\x01\"")
        ]
        assert await outbox.find_refused(1) == refused[:1]
        assert await outbox.retry(["two", "foreign", "\x00", "unknown"]) == 1
        assert [row.id for row in await outbox.find(10)] == ["two"]
        assert await outbox.retry([]) == 0
        assert await outbox.retry(None) == 2
        assert await outbox.find_refused(10) == []
        assert len(await outbox.find(10)) == 3

    async def test_a_sent_message_is_gone_and_a_refused_one_is_not_found_again(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        record(message(b"1"), message(b"2"), message(b"3"))
        first, second, third = await outbox.find(10)
        await outbox.settle([first], [(second, "too\x00 large")])
        assert list(await outbox.find(10)) == [third]
        await outbox.settle([first], [])
        assert list(await outbox.find(10)) == [third]

    async def test_a_row_that_was_sent_already_deletes_no_later_one(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        record(message(b"1"))
        (first,) = await outbox.find(10)
        await outbox.settle([first], [])
        (later,) = record(message(b"2"))
        await outbox.settle([first], [])
        assert [row.id for row in await outbox.find(10)] == [later]
        (row,) = await outbox.find(10)
        await outbox.settle([first._replace(position=row.position)], [])
        await outbox.settle([], [(first._replace(position=row.position), "refused")])
        assert list(await outbox.find(10)) == [row]

    async def test_messages_of_other_mailboxes_are_not_found(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        record(message(b"1"), mailbox="acme@two")
        assert list(await outbox.find(10)) == []
        assert record(message(b"2"), mailbox=MAILBOX) == [row.id for row in await outbox.find(10)]

    async def test_large_messages_are_found_in_several_calls(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        ids = [id_ for n in range(15) for id_ in record(message(b"%d" % n + bytes(900_000)))]
        found: list[str] = []
        while rows := await outbox.find(100):
            assert len(rows) < 15
            found += [row.id for row in rows]
            await outbox.settle(rows, [])
        assert found == ids

    async def test_waiting_ends_when_a_message_is_committed(
        self, outbox: MessageOutbox, record: Record
    ) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not await outbox.find(1):
                waiting = asyncio.create_task(outbox.wait())
                await asyncio.sleep(0)
                await asyncio.to_thread(record, message(b"1"))
                await waiting

    async def test_closing_twice_is_fine(self, outbox: MessageOutbox, record: Record) -> None:
        record(message(b"1"))
        await outbox.find(1)
        await outbox.close()
        await outbox.close()
