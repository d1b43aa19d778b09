"""Snapshots: from where a log is folded, and which snapshots are passed over."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import snapshots
from postroom.application.mailbox.stored_snapshots import (
    UsableSnapshot,
    decode_part,
    encode_part,
    fold,
    fold_at,
    usable_snapshots,
)
from postroom.application.ports.event_log import StoredSnapshot
from postroom.domain.commit import Commit
from postroom.domain.errors import MailboxClosed, Unavailable
from postroom.domain.mailbox import snapshot
from postroom.domain.mailbox.snapshot import VERSION
from postroom.domain.policy import DAY_MS, MailboxLimits, TopicPolicy
from postroom.domain.record import Event
from tests.support.commits import as_appended
from tests.support.snapshots import take_snapshot
from tests.support.stores import MAILBOX, Place, folded_whole, live, memory_place, message
from tests.support.waiting import until

TOPIC = "orders"


class WatchedLog(MemoryEventLog):
    """A log that remembers from where it was folded."""

    folded_after: int

    def replay_runs(self, after: int = 0) -> Iterator[tuple[int, Sequence[Event]]]:
        self.folded_after = after
        return super().replay_runs(after)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mailboxes of some hundred messages have parts of several steps, and give old ones up."""
    monkeypatch.setattr(snapshots, "PART_EVENTS", 100)
    monkeypatch.setattr(snapshots, "STEP_CHUNKS", 1)
    monkeypatch.setattr(snapshots, "PART_WEIGHT", 10)
    monkeypatch.setattr(snapshots, "ALLOWED_WEIGHT", 200)
    monkeypatch.setattr(snapshots, "CHUNK_ITEMS", 25)
    monkeypatch.setattr(snapshots, "BLOCK_ITEMS", 10)
    monkeypatch.setattr(snapshot, "ROW_BYTES", 4_000)


def newest(log: MemoryEventLog) -> UsableSnapshot:
    """Return the newest snapshot that can be used."""
    return next(usable_snapshots(log))


def reached(log: MemoryEventLog) -> int:
    """Return the position of the newest snapshot, or 0."""
    return max((snapshot.position for snapshot in islice(usable_snapshots(log), 1)), default=0)


async def batches(mailbox: OwnedMailbox, count: int) -> None:
    """Send, receive and ack batches of 50 messages with idempotency keys."""
    for _ in range(count):
        await mailbox.send_batch([message(idem_key=str(uuid4())) for _ in range(50)])
        received = await mailbox.receive_messages(TOPIC, max_messages=50)
        await mailbox.ack_messages([each.receipt for each in received])


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


@pytest.mark.usefixtures("small_steps")
async def test_the_next_owner_of_one_that_was_killed_replays_few_records() -> None:
    log = WatchedLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 200)
        for _ in range(20):
            await batches(mailbox, 1)
            position = mailbox.engine.mailbox.position
            await until(partial(lambda last: reached(log) > last - 200, position))
            restored = newest(log).restore()
            assert restored is not None
            assert take_snapshot(restored) == take_snapshot(fold_at(folded_log(log), restored.position))
    assert take_snapshot(fold(log)) == take_snapshot(folded_whole(log))


@pytest.mark.usefixtures("small_steps")
async def test_a_large_backlog_is_not_saved_again_with_each_part() -> None:
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open(limits=MailboxLimits(topics=10)) as mailbox:
        for _ in range(3):
            await mailbox.send_batch([message(topic="backlog") for _ in range(1_000)])
        await mailbox.engine.take_snapshot()
        before = sum(len(each.state) for each in log.snapshots())
        for _ in range(5):
            await batches(mailbox, 1)
            await mailbox.engine.take_snapshot()
        assert len(newest(log).parts) > 3
        assert sum(len(each.state) for each in log.snapshots()) < 2 * before


@pytest.mark.usefixtures("small_steps")
async def test_snapshots_take_room_in_proportion_to_the_mailbox() -> None:
    log = MemoryEventLog(MAILBOX)
    place, policy = Place(lambda: log), TopicPolicy(visibility_ms=250, replay_window_ms=500)
    async with place.open(policy=policy) as mailbox:
        await live(mailbox, 100)
        for _ in range(60):
            place.clock.advance(600)
            await batches(mailbox, 1)
            await mailbox.engine.take_snapshot()
        restored = newest(log).restore()
        assert restored is not None
        assert take_snapshot(restored) == take_snapshot(mailbox.engine.mailbox)
    parts = newest(log).parts
    assert sum(each.items for each in parts) < 700
    assert len(ends_of_parts(log)) < 3 * len(parts) + 10


@pytest.mark.usefixtures("small_steps")
async def test_a_large_part_is_stored_in_rows_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "PART_EVENTS", 100_000)  # a part has as many rows as positions before it
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 200)
        await batches(mailbox, 4)
        await mailbox.engine.take_snapshot(whole=True)
        expected = take_snapshot(mailbox.engine.mailbox)
        rows, (part,) = list(log.snapshots()), newest(log).parts
        assert len(rows) > 5
        assert max(len(row.state) for row in rows) < 2 * snapshot.ROW_BYTES
        assert (part.first, part.moment.position) == (rows[-1].position, rows[0].position)
        await mailbox.engine.take_snapshot(whole=True)  # at the same position, so that it must fit there
        restored = newest(log).restore()
        assert restored is not None
        assert take_snapshot(restored) == expected
        await mailbox.send_batch([message()])
        await mailbox.engine.take_snapshot(whole=True)
        assert len(newest(log).parts) == len(list(log.snapshots())) == 1


class RowsLog(MemoryEventLog):
    """A log that notes what is written, and whose process ends when it has saved some rows."""

    def __init__(self) -> None:
        super().__init__(MAILBOX)
        self.writes = ""
        self.rows_left = 1 << 30

    def append(self, commits: Sequence[Commit]) -> None:
        super().append(commits)
        self.writes += "a"

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        if not self.rows_left:
            raise Unavailable("The process has ended.")
        self.rows_left -= 1
        super().save_snapshot(snapshot, keep_from)
        self.writes += "r"


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("saved", [1, 2, 5])
@pytest.mark.parametrize("whole", [False, True])
async def test_a_part_that_was_saved_in_half_is_not_used_and_replaces_none(saved: int, whole: bool) -> None:
    log = RowsLog()
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await live(mailbox, 60)
        await mailbox.engine.take_snapshot()
        before, rows = newest(log), len(list(log.snapshots()))
        await mailbox.send_batch([message(idem_key=str(uuid4())) for _ in range(90)])
        log.rows_left = saved
        with pytest.raises(Unavailable, match="The process has ended"):
            await mailbox.engine.take_snapshot(whole=whole)
        assert newest(log).position == before.position
        assert len(list(log.snapshots())) == rows + saved
        assert take_snapshot(fold(log)) == take_snapshot(mailbox.engine.mailbox)
    log.rows_left = 1 << 30
    async with place.open() as mailbox:  # the next owner removes the rows that are left
        await mailbox.send_batch([message() for _ in range(30)])
        await mailbox.engine.take_snapshot(whole=True)
        assert take_snapshot(fold(log)) == take_snapshot(folded_whole(log))
        first, last = newest(log).parts[0].first, newest(log).position
        assert {row.position for row in log.snapshots()} == set(range(first, last + 1))


@pytest.mark.usefixtures("small_steps")
async def test_appends_do_not_wait_for_all_rows_of_a_part() -> None:
    log = RowsLog()
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 200)
        busy = asyncio.create_task(batches(mailbox, 1_000))
        for _ in range(3):
            await mailbox.engine.take_snapshot(whole=True)
        busy.cancel()
    assert "rar" in log.writes


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("damage", ["corrupt", "foreign version", "of another log", "missing"])
@pytest.mark.parametrize("which", [0, 1, -1], ids=["newest", "second", "oldest"])
async def test_a_damaged_part_is_passed_over_with_what_needs_it(damage: str, which: int) -> None:
    log = WatchedLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open() as mailbox:
        await live(mailbox, 200)
        await batches(mailbox, 12)
    expected = take_snapshot(folded_whole(log))
    stored = list(log.snapshots())
    good = stored[which]
    part = decode_part(good.state)
    assert part is not None
    foreign = encode_part(msgspec.structs.replace(part, version=VERSION + 1))
    stored[which] = {
        "corrupt": StoredSnapshot(good.position, good.chain, good.state[:-1]),
        "foreign version": StoredSnapshot(good.position, good.chain, foreign),
        "of another log": StoredSnapshot(good.position, bytes(32), good.state),
        "missing": stored[which - 1],
    }[damage]
    damaged = with_snapshots(log, stored)
    assert take_snapshot(fold(damaged)) == expected
    async with Place(lambda: damaged).open() as mailbox:
        await batches(mailbox, 5)
    assert take_snapshot(fold(damaged)) == take_snapshot(folded_whole(damaged))


@pytest.mark.usefixtures("small_steps")
@settings(max_examples=10)
@given(kept=st.sets(st.integers(0, 30)))
async def test_whichever_parts_are_left_the_state_is_that_of_the_log(kept: set[int]) -> None:
    log = await log_with_parts()
    damaged = with_snapshots(log, [each for n, each in enumerate(log.snapshots()) if n in kept])
    assert take_snapshot(fold(damaged)) == take_snapshot(folded_whole(log))


async def test_a_snapshot_beyond_the_end_of_the_log_is_passed_over() -> None:
    log = WatchedLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 600)
    (good,) = log.snapshots()
    head = log.head()
    assert head is not None
    log.save_snapshot(StoredSnapshot(head.position + 1, head.chain, good.state))
    assert take_snapshot(fold(log)) == take_snapshot(folded_whole(log))


class RefusingLog(MemoryEventLog):
    """A log that refuses some snapshots."""

    refused = 0

    def save_snapshot(self, snapshot: StoredSnapshot, keep_from: int = 0) -> None:
        if self.refused:
            self.refused -= 1
            raise Unavailable("The disk is full.")
        super().save_snapshot(snapshot, keep_from)


@pytest.mark.usefixtures("small_steps")
async def test_after_a_snapshot_that_could_not_be_saved_the_next_one_is_whole() -> None:
    log = RefusingLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        log.refused = 1_000  # those that are taken without being asked for, too
        await live(mailbox, 200)
        with pytest.raises(Unavailable, match="The disk is full"):
            await mailbox.engine.take_snapshot()
        log.refused = 0
        assert reached(log) == 0
        await batches(mailbox, 4)
        await until(lambda: reached(log) > 600)
    assert take_snapshot(fold(log)) == take_snapshot(folded_whole(log))


@pytest.mark.usefixtures("small_steps")
async def test_a_mailbox_that_changes_all_the_time_gets_its_snapshot() -> None:
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 500)
        busy = asyncio.create_task(batches(mailbox, 1_000))
        taken = [await mailbox.engine.take_snapshot(whole=n % 2 == 0) for n in range(4)]
        assert not busy.done()
        busy.cancel()
        assert [each.unsettled != frozenset() for each in taken] == [True, False, True, False]
        restored = newest(log).restore()
        assert restored is not None
        assert restored.position >= taken[-1].position
        assert take_snapshot(restored) == take_snapshot(fold_at(folded_log(log), restored.position))


@pytest.mark.usefixtures("small_steps")
async def test_unsettled_messages_are_noted_for_those_who_ask_for_a_whole_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "PART_EVENTS", 10_000)
    async with memory_place().open() as mailbox:
        await mailbox.send_batch([message()] * 300)
        first = await mailbox.engine.take_snapshot()  # whole, as there is none before
        assert first.unsettled == frozenset()
    async with memory_place().open() as mailbox:
        await mailbox.send_batch([message()] * 300)
        first, whole = await asyncio.gather(
            mailbox.engine.take_snapshot(), mailbox.engine.take_snapshot(whole=True)
        )
        assert first == whole
        assert len(whole.unsettled) == 300


async def test_no_snapshot_is_taken_of_a_mailbox_that_is_closed() -> None:
    async with memory_place().open() as mailbox:
        await live(mailbox, 10)
    with pytest.raises(MailboxClosed):
        await mailbox.engine.take_snapshot()


def ends_of_parts(log: MemoryEventLog) -> list[int]:
    """Return the positions of the parts in the log, without those of their other rows."""
    rows = [decode_part(row.state) for row in log.snapshots()]
    return [row.position for row in rows if row is not None and not row.rows_after]


async def log_with_parts() -> MemoryEventLog:
    log = MemoryEventLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        await live(mailbox, 120)
        await batches(mailbox, 6)
    return log


def with_snapshots(log: MemoryEventLog, stored: Iterable[StoredSnapshot]) -> MemoryEventLog:
    """Return the same log with other snapshots."""
    copy = folded_log(log)
    for each in stored:
        copy.save_snapshot(each)
    return copy


def folded_log(log: MemoryEventLog) -> MemoryEventLog:
    """Return the same log without snapshots."""
    copy = MemoryEventLog(log.mailbox)
    copy.append(as_appended(log.commits()))
    return copy


class LosingLog(MemoryEventLog):
    """A log whose snapshots another process removes."""

    def snapshots(self) -> Iterator[StoredSnapshot]:
        return iter(())


async def test_the_log_is_not_cut_while_its_snapshots_are_lost() -> None:
    log = LosingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open(limits=MailboxLimits(history_retention_ms=1)) as mailbox:
        await live(mailbox, 20)
        await mailbox.purge_topic(TOPIC, ready=True)
        place.clock.advance(DAY_MS)
        with pytest.raises(Unavailable, match="too busy to truncate its log"):
            await mailbox.retention.enforce_age()
        assert log.first_position() == 1
