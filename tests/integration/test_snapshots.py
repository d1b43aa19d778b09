"""Snapshots: from where a log is folded, and which snapshots are passed over."""

from collections.abc import Iterable, Iterator

import pytest

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import loaded_mailbox
from postroom.application.mailbox.fold import fold
from postroom.application.ports.event_log import StoredSnapshot
from postroom.domain.commit import Commit
from postroom.domain.errors import Unavailable
from postroom.domain.event import Event
from postroom.domain.mailbox.snapshot import take_snapshot
from postroom.domain.policy import DAY_MS, MailboxLimits
from tests.support.stores import MAILBOX, Place, folded_whole, live, message

TOPIC = "orders"


class WatchedLog(MemoryEventLog):
    """A log that remembers from where it was folded."""

    folded_after: int

    def replay(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        self.folded_after = after
        return super().replay(after)


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


async def test_the_next_owner_of_one_that_was_killed_replays_few_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_mailbox, "MIN_SNAPSHOT_EVENTS", 100)
    log = WatchedLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        for _ in range(10):
            await mailbox.send_batch([message()] * 50)
            received = await mailbox.receive_messages("orders", max_messages=50)
            await mailbox.ack_messages([each.receipt for each in received])
        newest, _ = log.snapshots()
        assert mailbox.engine.mailbox.position - newest.position < 500


async def test_a_large_backlog_is_not_saved_more_often_than_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loaded_mailbox, "MIN_SNAPSHOT_EVENTS", 100)
    log = WatchedLog(MAILBOX)
    async with Place(lambda: log).open() as mailbox:
        for _ in range(10):
            await mailbox.send_batch([message()] * 100)
        assert list(log.snapshots()) == []
        await mailbox.purge_topic("orders", ready=True)
        await mailbox.send_message(message())  # written after the snapshot
        assert len(list(log.snapshots())) == 1


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


class LosingLog(MemoryEventLog):
    """A log that keeps snapshots, but whose commit under the newest one is never there."""

    def commits_of(self, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        newest = max((snapshot.position for snapshot in self.snapshots()), default=0)
        found = super().commits_of(positions, envelopes=envelopes)
        return [commit for commit in found if commit.last != newest]


async def test_the_log_is_not_cut_by_a_snapshot_that_does_not_stand_in_it() -> None:
    log = LosingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open(limits=MailboxLimits(history_retention_ms=1)) as mailbox:
        await live(mailbox, 20)
        await mailbox.purge_topic(TOPIC, ready=True)
        place.clock.advance(DAY_MS)
        with pytest.raises(Unavailable, match="too busy to truncate its log"):
            await mailbox.retention.enforce_age()
        assert log.first_position() == 1
