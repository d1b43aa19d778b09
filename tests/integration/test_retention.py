"""Retention: what it removes, what it leaves, and what opens afterwards."""

import asyncio
import sqlite3
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import retention as retention_module
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.messages import NewMessage
from postroom.domain.errors import BrokenLog, ImplausibleClock, InvalidRequest, NotFound
from postroom.domain.mailbox.ownership import EXPIRY_GRACE_MS
from postroom.domain.message import MessageAcked
from postroom.domain.policy import DAY_MS, MailboxLimits
from tests.support.logs import capture_logs
from tests.support.snapshots import take_snapshot
from tests.support.stores import MAILBOX, Place, live, memory_place, message, receive_one, sqlite_place

TOPIC = "orders"
HANG_SECONDS = 240


async def test_retention_removes_the_settled_past_and_everything_goes_on(place: Place) -> None:
    limits = MailboxLimits(history_retention_ms=DAY_MS)
    async with place.open(limits=limits) as mailbox:
        await mailbox.send_message(message(message_id="old"))
        old = await receive_one(mailbox)
        await mailbox.ack_messages([old.receipt])
        await live(mailbox, 90)
        await mailbox.purge_topic(TOPIC, ready=True)
        assert await mailbox.retention.enforce_age() == 0  # too young
        place.clock.advance(2 * DAY_MS)
        await mailbox.receive_messages(TOPIC)
        assert await mailbox.retention.enforce_age() < 10  # what is unsettled keeps what came after it
        await mailbox.send_message(message(b"kept", message_id="kept"))

        place.clock.advance(40_000)
        for received in await mailbox.receive_messages(TOPIC, max_messages=100):
            if received.message_id != "kept":
                await mailbox.ack_messages([received.receipt])
        assert await mailbox.retention.enforce_age() > 90
        assert await mailbox.retention.enforce_age() == 0
        with pytest.raises(NotFound, match="has no message old"):
            await mailbox.get_message("old")
        assert isinstance((await mailbox.ack_messages([old.receipt]))[0], NotFound)

    async with place.open(limits=limits) as mailbox:
        place.clock.advance(30_000)
        again = await receive_one(mailbox)
        assert (again.message_id, again.payload) == ("kept", b"kept")
        await mailbox.ack_messages([again.receipt])
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(fold(mailbox.engine.log))


async def test_retention_pauses_after_a_discontinuity_of_log_time(place: Place) -> None:
    limits = MailboxLimits(history_retention_ms=DAY_MS)
    async with place.open(limits=limits) as mailbox:
        await live(mailbox, 20)
        await mailbox.purge_topic(TOPIC, ready=True)
    place.clock.reboot(after_ms=2 * DAY_MS)
    async with place.open(limits=limits) as mailbox:
        place.clock.advance(EXPIRY_GRACE_MS - 1)
        assert await mailbox.retention.enforce_age() == 0
        place.clock.advance(1)
        assert await mailbox.retention.enforce_age() > 0


async def test_an_implausible_clock_leaves_the_log_as_it_is_and_the_mailbox_can_be_opened_later(
    place: Place,
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
    place.clock.reboot(after_ms=8 * DAY_MS)
    with closing(place.open_log()) as log:
        end = log.head()
        with pytest.raises(ImplausibleClock):
            async with place.open():
                pass
        assert log.head() == end
    place.clock.wall_us -= 8 * DAY_MS * 1_000
    async with place.open() as mailbox:
        await receive_one(mailbox)


async def test_a_log_cut_by_retention_verifies_and_one_cut_by_hand_does_not(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    store = str(tmp_path / "store.db")
    async with place.open(limits=MailboxLimits(history_retention_ms=DAY_MS)) as mailbox:
        await mailbox.send_batch([message(b"%d" % n) for n in range(20)])
        received = await mailbox.receive_messages(TOPIC)
        await mailbox.ack_messages([each.receipt for each in received])
        place.clock.advance(2 * DAY_MS)
        await mailbox.send_message(message())
        assert await mailbox.retention.enforce_age() > 0
        first, second = [commit.first for commit in islice(mailbox.engine.log.commits(), 2)]
    with read_mailbox(store, MAILBOX) as reader:
        verified = reader.verify_log()
        assert (verified.first, verified.messages) == (first, 1)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("DELETE FROM log WHERE place = (SELECT min(place) FROM log)")
    with (
        read_mailbox(store, MAILBOX) as reader,
        pytest.raises(BrokenLog, match=f"starts at position {second}"),
    ):
        reader.verify_log()


async def test_a_mailbox_whose_whole_past_was_removed_opens_again(place: Place) -> None:
    limits = MailboxLimits(history_retention_ms=1)
    async with place.open(limits=limits) as mailbox:
        await mailbox.send_message(message())
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(DAY_MS)
        end = mailbox.engine.mailbox.position
        assert await mailbox.retention.enforce_age() == end
    async with place.open(limits=limits) as mailbox:
        assert mailbox.engine.log.first_position() == end + 1
        await mailbox.send_message(message(b"goes on"))
        assert (await receive_one(mailbox)).payload == b"goes on"


async def test_a_message_still_waiting_keeps_its_past(place: Place) -> None:
    async with place.open(limits=MailboxLimits(history_retention_ms=1_000)) as mailbox:
        await mailbox.send_message(message(message_id="waiting"))
        await mailbox.send_message(message(message_id="settled"))
        first, second = await mailbox.receive_messages(TOPIC)
        await mailbox.ack_messages([second.receipt])
        await mailbox.nack_messages([first.receipt], delay_ms=0)
        place.clock.advance(DAY_MS)
        await mailbox.retention.enforce_age()
        assert (await mailbox.get_message("settled")).status == "acked"
        received = await receive_one(mailbox)
        assert (received.message_id, received.payload) == ("waiting", b"hello")


async def test_a_receipt_of_a_message_of_which_only_the_end_is_left_is_refused_and_nothing_else(
    place: Place,
) -> None:
    async with place.open(limits=MailboxLimits(history_retention_ms=1_000)) as mailbox:
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        place.clock.advance(4_000)
        await mailbox.ack_messages([received.receipt])
        place.clock.advance(500)
        await mailbox.retention.enforce_age()
        events = [event for _, event in mailbox.engine.log.replay()]
        assert [type(event) for event in events if event.stream == received.receipt.message] == [MessageAcked]
        (refusal,) = await mailbox.ack_messages([received.receipt])
        assert isinstance(refusal, NotFound)


async def test_a_log_whose_start_is_gone_without_a_snapshot_is_not_opened() -> None:
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 30)
    log.truncate(through=5, limit=100)
    first = log.first_position()
    with pytest.raises(
        BrokenLog, match=f"starts at position {first}, and no snapshot covers the records before"
    ):
        async with Place(lambda: log).open():
            pytest.fail("opened")


async def test_old_events_are_deleted_before_the_time_that_is_asked_for(place: Place) -> None:
    async with place.open() as mailbox:  # whose history retention is 90 days
        first = await mailbox.send_message(message(b"first"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(1_000)
        between = place.clock.wall()
        second = await mailbox.send_message(message(b"second"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        assert await mailbox.delete_old_events(0) == 0
        assert await mailbox.delete_old_events(older_than=between) > 0
        assert await mailbox.delete_old_events(older_than=between) == 0
        with pytest.raises(NotFound):
            await mailbox.get_message(first.message_id)
        assert (await mailbox.get_message(second.message_id)).status == "acked"


@pytest.mark.parametrize("older_than", [-1, 1 << 70, 1.0, "2026-01-01", None, True])
async def test_a_time_that_is_no_number_of_microseconds_deletes_nothing(older_than: Any) -> None:
    async with memory_place().open() as mailbox:
        with pytest.raises(InvalidRequest, match="older_than must be"):
            await mailbox.delete_old_events(older_than)
        assert mailbox.engine.log.first_position() == 1


async def test_the_message_that_holds_back_retention_is_named_until_it_is_settled(place: Place) -> None:
    async def settle_one() -> None:
        await mailbox.send_message(message(b"secret"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(1_000)

    async with place.open() as mailbox:
        await settle_one()
        unsettled = await mailbox.send_message(NewMessage(topic="forgotten", payload=b"secret"))
        await settle_one()
        with capture_logs() as logged:
            assert await mailbox.delete_old_events(place.clock.wall()) > 0
        assert logged[0] == {
            "event": "mailbox.retention_blocked",
            "log_level": "warning",
            "mailbox": MAILBOX,
            "topic": "forgotten",
            "message_id": unsettled.message_id,
            "status": "ready",
            "position": mailbox.engine.log.first_position(),
            "records": 4,
        }
        await mailbox.purge_topic("forgotten", ready=True)
        place.clock.advance(1_000)
        with capture_logs() as logged:
            assert await mailbox.delete_old_events(place.clock.wall()) >= 4
        assert [entry["event"] for entry in logged] == ["mailbox.log_truncated"]


async def test_open_mailbox_enforces_retention_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention_module, "AGE_SECONDS", 0.01)
    store, limits = str(tmp_path / "store.db"), MailboxLimits(history_retention_ms=1)
    async with open_mailbox(store, MAILBOX, limits=limits) as mailbox:
        await mailbox.send_message(message())
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        async with asyncio.timeout(HANG_SECONDS):
            while mailbox.engine.log.first_position() == 1:
                await asyncio.sleep(0.01)


async def test_an_open_mailbox_keeps_enforcing_its_retention(place: Place) -> None:
    async with place.open(limits=MailboxLimits(history_retention_ms=1)) as mailbox:
        await mailbox.send_message(message())
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(DAY_MS)
        task = asyncio.create_task(mailbox.retention.run(every_seconds=0))
        async with asyncio.timeout(HANG_SECONDS):
            while mailbox.engine.log.first_position() == 1:
                await asyncio.sleep(0.001)
        task.cancel()
