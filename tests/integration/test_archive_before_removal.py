"""Retention removes nothing that is not archived, whatever fails and whenever."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.mailbox import segments as building
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import EventLog, Segment
from postroom.domain.commit import GENESIS, Commit, verify_chain
from postroom.domain.errors import BrokenLog, Unavailable
from postroom.domain.policy import DAY_MS, MailboxLimits
from tests.support.examples import examples
from tests.support.stores import MAILBOX, Place, memory_place

TOPIC = "orders"
LIMITS = MailboxLimits(history_retention_ms=DAY_MS)


@pytest.fixture
def archive(tmp_path: Path) -> ParquetLogArchive:
    return ParquetLogArchive(tmp_path / "archive")


async def live(mailbox: OwnedMailbox, count: int) -> None:
    """Send messages and settle all that are there."""
    await mailbox.send_batch([NewMessage(topic=TOPIC, payload=b"%d" % n) for n in range(count)])
    while taken := await mailbox.receive_messages(TOPIC, max_messages=100):
        await mailbox.ack_messages([each.receipt for each in taken])


def whole(log: EventLog, archive: ParquetLogArchive) -> list[Commit]:
    """Return what archive and log hold together."""
    archived = list(archive.commits(MAILBOX))
    return archived + list(log.commits(archived[-1].last if archived else 0))


async def test_what_is_removed_is_archived_and_the_chain_holds_over_both(
    place: Place, archive: ParquetLogArchive
) -> None:
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        written: list[Commit] = []
        log = mailbox.engine.log
        for _ in range(3):
            await live(mailbox, 20)
            written += log.commits(written[-1].last if written else 0)
            place.clock.advance(2 * DAY_MS)
            removed = await mailbox.retention.enforce_age()
            assert removed > 50
            written += log.commits(written[-1].last)
            assert list(archive.commits(MAILBOX))[-1].last == (log.first_position() or 0) - 1
        assert whole(log, archive) == written
        assert verify_chain(whole(log, archive), GENESIS, 1)[0] == written[-1].last
        assert len(archive.segments(MAILBOX)) == 3


async def test_a_long_past_is_archived_in_bounded_segments(
    place: Place, archive: ParquetLogArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SEGMENT_POSITIONS", 25)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        for _ in range(10):
            await live(mailbox, 3)
        place.clock.advance(2 * DAY_MS)
        removed = await mailbox.retention.enforce_age()
        segments = archive.segments(MAILBOX)
        assert all(segment.last - segment.first < 25 for segment in segments)
        assert len(segments) == 4
        assert segments[-1].last == removed


async def test_a_commit_that_is_larger_than_a_segment_may_be_has_its_own(
    place: Place, archive: ParquetLogArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SEGMENT_POSITIONS", 25)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        await live(mailbox, 30)
        place.clock.advance(2 * DAY_MS)
        removed = await mailbox.retention.enforce_age()
        sizes = [each.last - each.first + 1 for each in archive.segments(MAILBOX)]
        assert sizes == [2, 30, 30, 30]
        assert sum(sizes) == removed


async def test_segments_are_bounded_in_bytes_too(
    place: Place, archive: ParquetLogArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "SEGMENT_BYTES", 1_600)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        for _ in range(9):
            await mailbox.send_message(NewMessage(topic=TOPIC, payload=b"x" * 600))
        await live(mailbox, 0)
        place.clock.advance(2 * DAY_MS)
        await mailbox.retention.enforce_age()
        assert len(archive.segments(MAILBOX)) == 5


class FailingArchive(ParquetLogArchive):
    """An archive whose disk is full after some segments."""

    def __init__(self, folder: Path, room: int) -> None:
        super().__init__(folder)
        self.room = room

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        if not self.room:
            raise Unavailable("The disk is full.")
        self.room -= 1
        return super().store(mailbox, commits, before)


@pytest.mark.parametrize("room", [0, 2])
async def test_where_archiving_fails_nothing_is_removed(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(building, "SEGMENT_POSITIONS", 10)
    archive = FailingArchive(tmp_path / "archive", room)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        await live(mailbox, 20)
        place.clock.advance(2 * DAY_MS)
        written = list(mailbox.engine.log.commits())
        with pytest.raises(Unavailable, match="disk is full"):
            await mailbox.retention.enforce_age()
        assert list(mailbox.engine.log.commits()) == written
        archive.room = 100
        assert await mailbox.retention.enforce_age() > 50
        assert whole(mailbox.engine.log, archive)[: len(written)] == written


class DyingLog(MemoryEventLog):
    """A log whose process dies as it is about to remove records."""

    dies = True

    def truncate(self, through: int, limit: int) -> int:
        if self.dies:
            raise Unavailable("This process is dead.")
        return super().truncate(through, limit)


async def test_after_a_crash_between_archiving_and_removal_nothing_is_archived_twice(
    archive: ParquetLogArchive,
) -> None:
    log = DyingLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        await live(mailbox, 20)
        place.clock.advance(2 * DAY_MS)
        with pytest.raises(Unavailable, match="process is dead"):
            await mailbox.retention.enforce_age()
    log.dies = False
    written = list(log.commits())
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        removed = await mailbox.retention.enforce_age()
        (segment,) = archive.segments(MAILBOX)
        assert removed == segment.last == sum(each.event_count for each in archive.commits(MAILBOX))
        assert whole(log, archive)[: len(written)] == written


async def test_what_went_before_there_was_an_archive_leaves_a_gap_at_the_start_only(
    place: Place, archive: ParquetLogArchive
) -> None:
    async with place.open(limits=LIMITS) as mailbox:
        await live(mailbox, 10)
        place.clock.advance(2 * DAY_MS)
        gone = await mailbox.retention.enforce_age()
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        await live(mailbox, 10)
        place.clock.advance(2 * DAY_MS)
        await mailbox.retention.enforce_age()
        kept = whole(mailbox.engine.log, archive)
        assert kept[0].first == gone + 1
        verify_chain(kept[1:], kept[0].chain, kept[0].last + 1)
        assert archive.segments(MAILBOX)[0].before is None


async def test_an_archive_of_another_store_is_not_taken_for_the_past_of_this_one(
    archive: ParquetLogArchive,
) -> None:
    for number, refused in ((30, False), (20, True), (40, True)):
        place = memory_place()
        place.clock.advance(number)  # another store, in which the same mailbox had another life
        async with place.open(limits=LIMITS, archive=archive) as mailbox:
            await live(mailbox, number)
            place.clock.advance(2 * DAY_MS)
            if refused:
                with pytest.raises(Unavailable, match="Name the archive folder of this store"):
                    await mailbox.retention.enforce_age()
                assert mailbox.engine.log.first_position() == 1
            else:
                await mailbox.retention.enforce_age()


async def test_a_log_that_was_altered_is_neither_archived_nor_removed(archive: ParquetLogArchive) -> None:
    class AlteredLog(MemoryEventLog):
        def commits(self, after: int = 0, *, envelopes: bool = True) -> Iterator[Commit]:
            for commit in super().commits(after, envelopes=envelopes):
                yield commit._replace(at=1) if commit.first == 3 else commit

    log = AlteredLog(MAILBOX)
    place = Place(lambda: log)
    async with place.open(limits=LIMITS, archive=archive) as mailbox:
        await live(mailbox, 10)
        place.clock.advance(2 * DAY_MS)
        with pytest.raises(BrokenLog, match="positions 3 to 12"):
            await mailbox.retention.enforce_age()
        assert log.first_position() == 1
    assert archive.segments(MAILBOX) == []


async def test_open_mailbox_archives_into_the_folder_it_is_given(tmp_path: Path) -> None:
    store, folder = str(tmp_path / "store.db"), tmp_path / "archive"
    limits = MailboxLimits(history_retention_ms=1)
    async with open_mailbox(store, limits=limits) as mailbox:
        await live(mailbox, 5)
    async with open_mailbox(store, archive=folder) as mailbox:
        await asyncio.sleep(0.01)
        removed = await mailbox.retention.enforce_age()
        assert removed > 10
    assert sum(each.event_count for each in ParquetLogArchive(folder).commits("main@local")) == removed


# -- any history, any crash ---


@dataclass
class Fate:
    """Say after how many of the writes that retention makes the process dies; None: it lives."""

    writes_left: int | None = None

    def spend(self) -> None:
        if self.writes_left is not None:
            if self.writes_left == 0:
                raise Unavailable("This process is dead.")
            self.writes_left -= 1


class FatefulLog(MemoryEventLog):
    def __init__(self, fate: Fate) -> None:
        super().__init__(MAILBOX)
        self.fate = fate
        self.written: list[Commit] = []

    def append(self, commits: Sequence[Commit]) -> None:
        super().append(commits)
        self.written += (commit._replace(entries=(), last_events=()) for commit in commits)

    def truncate(self, through: int, limit: int) -> int:
        self.fate.spend()
        return super().truncate(through, min(limit, 3))


class FatefulArchive(ParquetLogArchive):
    def __init__(self, folder: Path, fate: Fate) -> None:
        super().__init__(folder)
        self.fate = fate

    def store(self, mailbox: str, commits: Sequence[Commit], before: bytes | None) -> Segment:
        self.fate.spend()
        return super().store(mailbox, commits, before)


rounds = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([0, 1, 3 * DAY_MS]), st.none() | st.integers(0, 9)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=max(examples(30), settings().max_examples // 20))
@given(taken=rounds, segment=st.integers(4, 40))
def test_what_is_archived_and_what_is_left_is_what_was_written(
    taken: list[tuple[int, int, int | None]], segment: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(building, "SEGMENT_POSITIONS", segment)
        asyncio.run(_try(taken, Path(folder)))


async def _try(taken: list[tuple[int, int, int | None]], folder: Path) -> None:
    fate = Fate()
    log = FatefulLog(fate)
    archive = FatefulArchive(folder, fate)
    place = Place(lambda: log)
    for messages, wait_ms, dies_after in taken:
        async with place.open(limits=LIMITS, archive=archive) as mailbox:
            await live(mailbox, messages)
            place.clock.advance(wait_ms)
            fate.writes_left = dies_after
            try:
                await mailbox.retention.enforce_age()
            except Unavailable as error:
                assert "is dead" in str(error)  # noqa: PT017  # it need not fail
            fate.writes_left = None
        first = log.first_position() or 0
        archived = max((commit.last for commit in archive.commits(MAILBOX)), default=0)
        assert archived >= first - 1
        assert whole(log, archive) == log.written
        assert verify_chain(whole(log, archive), GENESIS, 1)[0] == log.written[-1].last
