"""What a mailbox is after a restart, a reboot, a failed append, a flipped bit, a damaged snapshot."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import Postroom, open_mailbox, read_mailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application import engine as engine_module
from postroom.application.engine import MailboxEngine
from postroom.application.fold import fold
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.event_log import StoredSnapshot
from postroom.application.retention import keep_enforcing_retention
from postroom.domain.errors import BrokenLog, Fenced, NotFound, StaleReceipt, Unavailable, WrongPosition
from postroom.domain.mailbox.snapshot import take_snapshot
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.policy import DAY_MS, MailboxLimits, TopicPolicy
from postroom.domain.record import Record
from tests.integration.stores import MAILBOX, ManualClock, Place, memory_place, postgres_place, sqlite_place

TOPIC = "orders"
HANG_SECONDS = 30


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    places: dict[str, Callable[[], Place]] = {
        "memory": memory_place,
        "sqlite": lambda: sqlite_place(tmp_path),
        "postgres": lambda: postgres_place(request.getfixturevalue("postgres_store")),
    }
    return places[request.param]()


def message(payload: bytes = b"hello", **fields: Any) -> NewMessage:
    return NewMessage(topic=TOPIC, payload=payload, **fields)


async def receive_one(mailbox: Postroom) -> Any:
    (received,) = await mailbox.receive_messages(TOPIC, max_messages=1)
    return received


# -- restarts ---


async def test_after_a_restart_messages_are_delivered_from_the_log(place: Place) -> None:
    async with place.open() as mailbox:
        sent = await mailbox.send_message(message(b"\x00body", attrs={"k": "v"}, idem_key="k"))
        first = await receive_one(mailbox)
        await mailbox.nack_messages([first.receipt], reason="boom", delay_ms=0)
    async with place.open() as mailbox:
        second = await receive_one(mailbox)
        assert (second.message_id, second.attempt, second.payload) == (sent.message_id, 2, b"\x00body")
        assert (second.attrs, second.idem_key, second.receipt.epoch) == ({"k": "v"}, "k", 2)
        assert await mailbox.send_message(message(b"\x00body", idem_key="k")) == Sent(
            sent.message_id, duplicate=True
        )
        assert await mailbox.ack_messages([second.receipt]) == [None]
        assert mailbox.get_message(sent.message_id).status == "acked"


async def test_a_delivery_goes_on_over_a_restart(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        first = await receive_one(mailbox)
    place.clock.advance(4_999)
    async with place.open() as mailbox:
        assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(1)
        assert (await receive_one(mailbox)).attempt == 2
        assert isinstance((await mailbox.ack_messages([first.receipt]))[0], StaleReceipt)


async def test_a_consumer_may_ack_to_the_next_owner(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        first = await receive_one(mailbox)
    async with place.open() as mailbox:
        assert await mailbox.ack_messages([first.receipt]) == [None]
    async with place.open() as mailbox:
        assert await mailbox.ack_messages([first.receipt]) == [None]  # settled long ago, it says so again


async def test_after_a_reboot_a_delivery_has_its_full_visibility_again(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
    place.clock.reboot(after_ms=60_000)
    async with place.open() as mailbox:
        place.clock.advance(4_999)
        assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(1)
        assert (await receive_one(mailbox)).attempt == 2


async def test_a_wall_clock_that_jumps_changes_no_deadline(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
        for jump in (-119_000_000, 238_000_000, -86_400_000_000):
            place.clock.wall_us += jump
            assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(5_000)
        assert (await receive_one(mailbox)).attempt == 2


async def test_dead_letters_outlive_a_restart(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    async with place.open(policy=TopicPolicy(max_attempts=1)) as mailbox:
        sent = await mailbox.send_message(message())
        await mailbox.nack_messages([(await receive_one(mailbox)).receipt], reason="boom")
        before = mailbox.list_dead_letters()
    async with place.open() as mailbox:
        assert mailbox.list_dead_letters() == before
        assert [(each.message_id, each.last_error) for each in before] == [(sent.message_id, "boom")]


async def test_a_message_that_outgrew_the_cache_is_read_from_the_log(place: Place) -> None:
    async with place.open(cache_bytes=1_000) as mailbox:
        await mailbox.send_batch([message(bytes([n]) * 600) for n in range(10)])
        received = await mailbox.receive_messages(TOPIC)
        assert [each.payload for each in received] == [bytes([n]) * 600 for n in range(10)]


# -- flipped bits (G-7) ---


def flip_a_bit(path: Path, position: int) -> None:
    """Change one bit of a stored envelope."""
    with closing(sqlite3.connect(path)) as connection, connection:
        place, blob = connection.execute(
            "SELECT place, envelope FROM log WHERE place % (1 << 40) = ?", (position,)
        ).fetchone()
        at = blob.index(b"precious")
        flipped = blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]
        connection.execute("UPDATE log SET envelope = ? WHERE place = ?", (flipped, place))


async def test_a_message_whose_bytes_were_altered_is_quarantined_and_never_delivered(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    async with place.open() as mailbox:
        await mailbox.send_batch(
            [message(b"precious 1", message_id="m1"), message(b"precious 2", message_id="m2")]
        )
    flip_a_bit(tmp_path / "store.db", position=3)
    async with place.open() as mailbox:
        assert [each.message_id for each in await mailbox.receive_messages(TOPIC)] == ["m2"]
        (letter,) = mailbox.list_dead_letters()
        assert (letter.message_id, letter.reason, letter.attempt) == ("m1", "integrity", 0)
        assert letter.last_error == "stored bytes do not match their hash"
        assert not mailbox.get_message("m1").intact
        assert await mailbox.reprocess_dead_letters(TOPIC) == 1
        assert await mailbox.receive_messages(TOPIC) == []
        assert [each.reason for each in mailbox.list_dead_letters()] == ["integrity"]
    broken = pytest.raises(BrokenLog, match="position 3 does not match its hash")
    with read_mailbox(str(tmp_path / "store.db"), MAILBOX) as reader, broken:
        reader.verify_log()


# -- snapshots ---


class WatchedLog(MemoryEventLog):
    """A log that remembers from where it was folded."""

    folded_after: int

    def replay(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        self.folded_after = after
        return super().replay(after)


async def live(mailbox: Postroom, count: int) -> None:
    """Send and settle messages, a third of each, and leave a third in flight."""
    await mailbox.send_batch([message(b"%d" % n, sticky_key=str(n)) for n in range(count)])
    received: list[Any] = []
    while more := await mailbox.receive_messages(TOPIC, max_messages=200):
        received += more
    await mailbox.ack_messages([each.receipt for each in received[::3]])
    await mailbox.nack_messages([each.receipt for each in received[1::3]], reason="boom")


def folded_whole(log: MemoryEventLog) -> Mailbox:
    """Fold all of a log, as if it had no snapshot."""
    bare = MemoryEventLog(log.mailbox)
    bare.append(list(log.read()))
    return fold(bare)


async def test_reopening_folds_only_what_came_after_the_snapshot() -> None:
    log = WatchedLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await live(mailbox, 600)
    (snapshot,) = log.snapshots()
    assert snapshot.position > 1_000
    async with place.open() as mailbox:
        assert log.folded_after == snapshot.position
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(folded_whole(log))
        await live(mailbox, 10)
    assert take_snapshot(fold(log)) == take_snapshot(folded_whole(log))


async def test_a_log_that_grew_little_is_not_worth_a_snapshot() -> None:
    log = WatchedLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 10)
    assert list(log.snapshots()) == []


@pytest.mark.parametrize("damage", ["corrupt", "foreign version", "of another log", "beyond the end"])
async def test_a_snapshot_that_does_not_fit_is_passed_over(damage: str) -> None:
    log = WatchedLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await live(mailbox, 600)
    (good,) = log.snapshots()
    head = log.head()
    assert head is not None
    damaged = {
        "corrupt": StoredSnapshot(head.position, head.chain, good.state[:-1]),
        "foreign version": StoredSnapshot(head.position, head.chain, b"\x9d\x7f" + good.state[2:]),
        "of another log": StoredSnapshot(head.position, bytes(32), good.state),
        "beyond the end": StoredSnapshot(head.position + 1, head.chain, good.state),
    }[damage]
    log.save_snapshot(damaged)
    async with place.open() as mailbox:
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(folded_whole(log))


# -- retention ---


async def test_retention_removes_the_settled_past_and_everything_goes_on(place: Place) -> None:
    limits = MailboxLimits(history_retention_ms=DAY_MS)
    async with place.open(limits=limits) as mailbox:
        await mailbox.send_message(message(message_id="old"))
        old = await receive_one(mailbox)
        await mailbox.ack_messages([old.receipt])
        await live(mailbox, 90)
        await mailbox.purge_topic(TOPIC, ready=True)
        assert await mailbox.engine.enforce_retention() == 0  # too young
        place.clock.advance(2 * DAY_MS)
        await mailbox.receive_messages(TOPIC)
        assert await mailbox.engine.enforce_retention() < 10  # what is unsettled keeps what came after it
        await mailbox.send_message(message(b"kept", message_id="kept"))

        place.clock.advance(10_000)
        for received in await mailbox.receive_messages(TOPIC, max_messages=100):
            if received.message_id != "kept":
                await mailbox.ack_messages([received.receipt])
        assert await mailbox.engine.enforce_retention() > 90
        assert await mailbox.engine.enforce_retention() == 0
        with pytest.raises(NotFound, match="has no message old"):
            mailbox.get_message("old")
        assert isinstance((await mailbox.ack_messages([old.receipt]))[0], NotFound)

    async with place.open(limits=limits) as mailbox:
        place.clock.advance(10_000)
        again = await receive_one(mailbox)
        assert (again.message_id, again.payload) == ("kept", b"kept")
        await mailbox.ack_messages([again.receipt])
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(fold(mailbox.engine.log))


async def test_a_log_cut_by_retention_verifies_and_one_cut_by_hand_does_not(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    store = str(tmp_path / "store.db")
    async with place.open(limits=MailboxLimits(history_retention_ms=DAY_MS)) as mailbox:
        await mailbox.send_batch([message(b"%d" % n) for n in range(20)])
        received = await mailbox.receive_messages(TOPIC)
        await mailbox.ack_messages([each.receipt for each in received])
        place.clock.advance(2 * DAY_MS)
        await mailbox.send_message(message())
        assert await mailbox.engine.enforce_retention() > 0
        first = mailbox.engine.log.first_position()
        assert first is not None
    with read_mailbox(store, MAILBOX) as reader:
        verified = reader.verify_log()
        assert (verified.first, verified.messages) == (first, 1)
    with closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("DELETE FROM log WHERE place = (SELECT min(place) FROM log)")
    with (
        read_mailbox(store, MAILBOX) as reader,
        pytest.raises(BrokenLog, match=f"starts at position {first + 1}"),
    ):
        reader.verify_log()


async def test_a_mailbox_whose_whole_past_was_removed_opens_again(place: Place) -> None:
    limits = MailboxLimits(history_retention_ms=1)
    async with place.open(limits=limits) as mailbox:
        await mailbox.send_message(message())
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(DAY_MS)
        end = mailbox.engine.mailbox.position
        assert await mailbox.engine.enforce_retention() == end
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
        await mailbox.engine.enforce_retention()
        assert mailbox.get_message("settled").status == "acked"
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
        await mailbox.engine.enforce_retention()
        assert [r.type for r in mailbox.engine.log.history(received.receipt.message)] == ["MessageAcked.1"]
        (refusal,) = await mailbox.ack_messages([received.receipt])
        assert isinstance(refusal, NotFound)


async def test_a_log_whose_start_is_gone_without_a_snapshot_is_not_opened() -> None:
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 30)
    log.truncate(through=5, limit=100)
    with pytest.raises(BrokenLog, match="starts at position 6, and no snapshot covers what came before"):
        async with Place(lambda: log).open():
            pytest.fail("opened")


# -- appends that fail ---


class FailingLog(MemoryEventLog):
    """A log whose next append fails when told to, before or after it kept the records."""

    fails: str | None = None

    def append(self, records: Sequence[Record]) -> None:
        failure, self.fails = self.fails, None
        if failure == "before":
            raise Unavailable("The disk is full.")
        super().append(records)
        if failure == "after":
            raise Unavailable("The connection was lost.")


async def test_a_mailbox_whose_append_failed_ends_deliveries_without_being_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "RECOVERY_SECONDS", 0.01)
    log = FailingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
        log.fails = "before"
        with pytest.raises(Unavailable):
            await mailbox.send_message(message())
        place.clock.advance(10_000)
        async with asyncio.timeout(HANG_SECONDS):
            while all(record.type != "MessageRequeued.1" for record in log.read()):
                await asyncio.sleep(0.001)


class LosingLog(MemoryEventLog):
    """A log that keeps snapshots, but whose record under the newest one is never there."""

    def at_positions(self, positions: Sequence[int]) -> dict[int, Record]:
        newest = max((snapshot.position for snapshot in self.snapshots()), default=0)
        return {p: r for p, r in super().at_positions(positions).items() if p != newest}


async def test_the_log_is_not_cut_by_a_snapshot_that_does_not_stand_in_it() -> None:
    log = LosingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open(limits=MailboxLimits(history_retention_ms=1)) as mailbox:
        await live(mailbox, 20)
        await mailbox.purge_topic(TOPIC, ready=True)
        place.clock.advance(DAY_MS)
        with pytest.raises(Unavailable, match="too busy to cut its log"):
            await mailbox.engine.enforce_retention()
        assert log.first_position() == 1


async def test_an_open_mailbox_keeps_enforcing_its_retention(place: Place) -> None:
    async with place.open(limits=MailboxLimits(history_retention_ms=1)) as mailbox:
        await mailbox.send_message(message())
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        place.clock.advance(DAY_MS)
        task = asyncio.create_task(keep_enforcing_retention(mailbox.engine, every_seconds=0))
        async with asyncio.timeout(HANG_SECONDS):
            while mailbox.engine.log.first_position() == 1:
                await asyncio.sleep(0.001)
        task.cancel()


@pytest.mark.parametrize("failure", ["before", "after"])
async def test_after_a_failed_append_the_mailbox_is_what_its_log_says(failure: str) -> None:
    log = FailingLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        first = await mailbox.send_message(message(b"1", idem_key="1"))
        log.fails = failure
        with pytest.raises(Unavailable, match=r"disk is full|connection was lost"):
            await mailbox.send_message(message(b"2", idem_key="2"))

        again = await mailbox.send_message(
            message(b"2", idem_key="2")
        )  # the sender tries again, as it should
        assert again.duplicate == (failure == "after")
        received = await mailbox.receive_messages(TOPIC)
        assert [each.payload for each in received] == [b"1", b"2"]
        assert received[0].message_id == first.message_id
        assert take_snapshot(mailbox.engine.mailbox) == take_snapshot(folded_whole(log))


async def test_a_failed_receive_promises_nothing_and_loses_nothing() -> None:
    log = FailingLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message())
        log.fails = "before"
        with pytest.raises(Unavailable):
            await mailbox.receive_messages(TOPIC)
        received = await receive_one(mailbox)
        assert (received.attempt, received.payload) == (1, b"hello")


async def test_an_owner_that_was_taken_over_writes_no_more_and_says_why() -> None:
    log = MemoryEventLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as old:
        await old.send_message(message(b"1"))
        async with place.open() as new:
            with pytest.raises(Fenced, match="taken over by epoch 2 while this process held epoch 1"):
                await old.send_message(message(b"2"))
            with pytest.raises(Fenced):
                await old.receive_messages(TOPIC)
            assert [each.payload for each in await new.receive_messages(TOPIC)] == [b"1"]


class RacedLog(MemoryEventLog):
    """A log to which somebody else appends just before the next append."""

    late: Sequence[Record] = ()

    def append(self, records: Sequence[Record]) -> None:
        late, self.late = self.late, ()
        super().append(late)
        super().append(records)


async def test_a_new_owner_reads_again_when_the_old_ones_last_batch_lands_first() -> None:
    log, ahead = RacedLog(MAILBOX), MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await mailbox.send_message(message(b"1"))
        ahead.append(list(log.read()))
    async with Place(lambda: ahead).open() as mailbox:
        await mailbox.send_message(message(b"2"))
    log.late = list(ahead.read(after=3))
    async with Place(lambda: log).open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages(TOPIC)] == [b"1", b"2"]
        assert mailbox.engine.mailbox.epoch == 3


async def test_opening_gives_up_when_somebody_else_keeps_appending() -> None:
    class Contended(MemoryEventLog):
        def append(self, records: Sequence[Record]) -> None:
            raise WrongPosition(self.mailbox, records[0].position - 1, records[0].position)

    with pytest.raises(WrongPosition, match="open the mailbox again"):
        await MailboxEngine(Contended(MAILBOX), ManualClock()).open("test")


# -- a store on disk, as a user opens it ---


async def test_durability_is_what_was_asked_for(tmp_path: Path) -> None:
    for asked, said in (("full", "power-cut"), ("relaxed", "process-crash")):
        async with open_mailbox(str(tmp_path / f"{asked}.db"), durability=asked) as mailbox:  # type: ignore[arg-type]
            assert mailbox.engine.log.durability == said
    async with open_mailbox("memory:") as mailbox:
        assert mailbox.engine.log.durability == "nothing"
