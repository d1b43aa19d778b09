"""What every log archive promises: what was stored comes back, in order, each once, and verified."""

from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox import records as reading
from postroom.application.mailbox.archived_log import ArchivedEventLog
from postroom.application.ports.event_log import LogArchive, Segment
from postroom.domain.commit import GENESIS, Commit, verify_chain
from postroom.domain.errors import BrokenLog
from postroom.domain.message import MessageAcked, MessageRedriven
from tests.conformance.records import append, append_each, life, mixed, received, sent, stream
from tests.support.examples import examples

BOX, OTHER = "acme@one", "acme@two"
COUNT = 40


def history(mailbox: str = BOX) -> list[Commit]:
    """Return commits of one event and of several, with present and absent values in every column."""
    log = MemoryEventLog(mailbox)
    events = mixed(2 * COUNT, mailbox)
    append_each(log, events[:5])
    start = 5
    while log.head().position < COUNT:  # type: ignore[union-attr]  # it is not empty
        append(log, events[start : start + 1 + start % 4])
        start += 1 + start % 4
    return list(log.commits())


HEALTH_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
"""Examples use folders of their own, and several adapters pass one suite."""
COMMITS = history()
LAST = COMMITS[-1].last


def keep(archive: LogArchive, first: int, last: int, *, knows_before: bool = True) -> Segment:
    """Store the commits that hold the positions from `first` to `last`."""
    commits = [each for each in COMMITS if each.last >= first and each.first <= last]
    return archive.store(BOX, commits, before(commits[0]) if knows_before else None)


def before(commit: Commit) -> bytes:
    """Return the chain hash of the commit before one of `COMMITS`."""
    return next((each.chain for each in COMMITS if each.last == commit.first - 1), GENESIS)


def stored(archive: LogArchive) -> list[Commit]:
    """Return those of `COMMITS` that are in a segment."""
    segments = archive.segments(BOX)
    return [each for each in COMMITS if any(s.first <= each.first <= s.last for s in segments)]


def firsts(commits: Iterable[Commit]) -> list[int]:
    """Return the first positions of commits."""
    return [commit.first for commit in commits]


def read(commit: Commit, *, envelopes: bool = True) -> Commit:
    """Return a commit as it is read: without additions to the index."""
    return commit._replace(entries=(), last_events=(), envelopes=commit.envelopes if envelopes else b"")


class LogArchiveConformance:
    """Subclasses give the fixture `archive`, empty."""

    def test_what_is_stored_comes_back_as_it_was(self, archive: LogArchive) -> None:
        keep(archive, 1, LAST)
        assert list(archive.commits(BOX)) == list(map(read, COMMITS))
        assert list(archive.commits(BOX, envelopes=False)) == [
            read(each, envelopes=False) for each in COMMITS
        ]

    def test_an_archive_of_nothing_is_empty(self, archive: LogArchive) -> None:
        assert archive.mailboxes() == []
        assert archive.segments(BOX) == []
        assert archive.last_segment(BOX) is None
        assert list(archive.commits(BOX)) == archive.commits_of(BOX, [1]) == []
        assert archive.index_of(BOX, [stream(1)]) == []

    def test_it_tells_what_is_stored_and_how_the_segments_are_chained(self, archive: LogArchive) -> None:
        first = keep(archive, 1, 3)
        second = keep(archive, 4, 20)
        end = next(each for each in COMMITS if each.last >= 20)
        assert first == Segment(BOX, 1, 3, GENESIS, COMMITS[2].chain)
        assert second == Segment(BOX, 4, end.last, COMMITS[2].chain, end.chain)
        assert archive.segments(BOX) == [first, second]
        assert archive.last_segment(BOX) == second

    def test_mailboxes_are_apart(self, archive: LogArchive) -> None:
        other = history(OTHER)
        archive.store(OTHER, other, GENESIS)
        keep(archive, 1, 5)
        assert archive.mailboxes() == [BOX, OTHER]
        assert list(archive.commits(OTHER)) == list(map(read, other))
        assert firsts(archive.commits(BOX)) == [1, 2, 3, 4, 5]

    def test_storing_again_changes_nothing(self, archive: LogArchive) -> None:
        segment = keep(archive, 1, 10)
        assert keep(archive, 1, 10) == segment
        assert archive.segments(BOX) == [segment]
        assert list(archive.commits(BOX)) == list(map(read, stored(archive)))

    @settings(max_examples=examples(50), suppress_health_check=HEALTH_CHECKS)
    @given(
        ranges=st.lists(st.tuples(st.integers(1, COUNT), st.integers(1, COUNT)).map(sorted), max_size=6),
        after=st.integers(0, COUNT),
    )
    def test_overlapping_segments_give_each_commit_once(
        self, archive: LogArchive, ranges: list[list[int]], after: int
    ) -> None:
        for first, last in ranges:
            # Only what continues another segment says what it continues, as in the archive of a real log.
            ends = {segment.last for segment in archive.segments(BOX)}
            start = next(each.first for each in COMMITS if each.last >= first)
            keep(archive, first, last, knows_before=start == 1 or start - 1 in ends)
        kept = stored(archive)  # examples share an archive
        assert list(archive.commits(BOX, after)) == [read(each) for each in kept if each.last > after]

    @settings(max_examples=examples(25), suppress_health_check=HEALTH_CHECKS)
    @given(
        ranges=st.lists(st.tuples(st.integers(1, COUNT), st.integers(1, COUNT)).map(sorted), max_size=4),
        asked=st.lists(st.integers(0, COUNT + 6), max_size=5),
        envelopes=st.booleans(),
    )
    def test_single_commits_and_streams_are_found_wherever_they_are(
        self, archive: LogArchive, ranges: list[list[int]], asked: list[int], envelopes: bool
    ) -> None:
        for first, last in ranges:
            keep(archive, first, last, knows_before=False)
        kept = stored(archive)
        assert archive.commits_of(BOX, asked, envelopes=envelopes) == [
            read(each, envelopes=envelopes)
            for each in kept
            if any(each.first <= position <= each.last for position in asked)
        ]
        entries = sorted(entry for commit in kept for entry in commit.entries)
        assert archive.index_of(BOX, {entry.stream for entry in entries} | {bytes(16)}) == entries

    @pytest.mark.parametrize(
        ("at", "position"), [(0, 0), (20, 0), (21, 2), (40, 3), (55, 5), (160, 15), (161, 16), (10**9, 16)]
    )
    def test_the_position_before_a_time_is_that_of_the_last_commit_before_it(
        self, archive: LogArchive, at: int, position: int
    ) -> None:
        log = MemoryEventLog(BOX)
        append_each(log, [sent(n, at=10 * max(n, 2)) for n in range(1, 17)])
        commits = list(log.commits())
        for first, last in ((1, 6), (4, 8), (9, 16)):
            archive.store(BOX, commits[first - 1 : last], None)
        assert archive.position_before(BOX, at) == position

    def test_segments_take_room(self, archive: LogArchive) -> None:
        small, large = keep(archive, 1, 5), keep(archive, 1, LAST)
        assert 0 < archive.size(small) < archive.size(large)

    def test_commits_that_went_without_being_archived_are_skipped(self, archive: LogArchive) -> None:
        keep(archive, 1, 3)
        later = keep(archive, 9, 12, knows_before=False)
        found = list(archive.commits(BOX))
        assert firsts(found)[:4] == [1, 2, 3, later.first]
        assert found[-1].last == later.last

    def test_a_segment_that_is_missing_is_noticed(self, archive: LogArchive) -> None:
        keep(archive, 1, 2)
        keep(archive, 4, 12)
        with pytest.raises(BrokenLog, match="lacks positions 3 to 3"):
            list(archive.commits(BOX))

    def test_a_commit_that_was_altered_before_it_was_stored_is_noticed(self, archive: LogArchive) -> None:
        altered = [COMMITS[0], COMMITS[1]._replace(at=7), *COMMITS[2:5]]
        archive.store(BOX, altered, GENESIS)
        with pytest.raises(BrokenLog, match="positions 2 to 2"):
            list(archive.commits(BOX))

    def test_a_commit_that_can_not_be_decoded_is_not_stored(self, archive: LogArchive) -> None:
        with pytest.raises(BrokenLog, match="positions 2 to 2 can't be decoded"):
            archive.store(BOX, [COMMITS[0], COMMITS[1]._replace(events=b"\xc1")], GENESIS)
        assert archive.segments(BOX) == []

    def test_a_segment_of_another_history_is_noticed(self, archive: LogArchive) -> None:
        keep(archive, 1, 3)
        other = history(OTHER)
        archive.store(BOX, other[3:8], other[2].chain)
        with pytest.raises(BrokenLog, match="another store"):
            list(archive.commits(BOX))

    def test_the_chain_holds_over_segments(self, archive: LogArchive) -> None:
        for number in range(0, len(COMMITS), 3):
            commits = COMMITS[number : number + 3]
            archive.verify(archive.store(BOX, commits, before(commits[0])))
        assert verify_chain(archive.commits(BOX), GENESIS, 1) == (LAST, COMMITS[-1].chain)

    @pytest.mark.parametrize("scanned", [0, 10**6])
    def test_the_history_of_a_message_is_found_in_archive_and_log(
        self, archive: LogArchive, monkeypatch: pytest.MonkeyPatch, scanned: int
    ) -> None:
        monkeypatch.setattr(reading, "SCAN_POSITIONS", scanned)
        log = MemoryEventLog(BOX)
        append(log, life(1, at=1_000)[:2])
        append(log, life(2, at=1_001))
        append(log, [sent(3, at=1_002)])
        append(log, life(1, at=1_003)[2:])
        append(log, [received(3, at=1_004)])
        records = list(log.read())
        archive.store(BOX, [each for each in log.commits() if each.last <= 8], GENESIS)
        log.truncate(8, 100)
        whole = ArchivedEventLog(log, archive)
        assert list(whole.read()) == records
        for number in (1, 2, 3, 4):
            expected = [each for each in records if each.stream == stream(number)]
            assert whole.read_stream(stream(number)) == expected

    @pytest.mark.parametrize("archived", [1, 5, 6])
    def test_what_follows_a_dead_letter_is_found_behind_the_archive(
        self, archive: LogArchive, monkeypatch: pytest.MonkeyPatch, archived: int
    ) -> None:
        monkeypatch.setattr(reading, "SCAN_POSITIONS", 5)
        log = MemoryEventLog(BOX)
        redriven = MessageRedriven(stream(1), 6, 1_000, 1_001, 2_000)
        append_each(log, life(1))
        append_each(log, [sent(number) for number in range(2, 9)])
        append_each(log, [redriven, received(1, version=7), MessageAcked(stream(1), 8, 1_000, 1)])
        records = log.read_stream(stream(1))
        assert [each.version for each in records] == [
            1,
            2,
            3,
            4,
            5,
        ]  # the test's log was not told of the last
        records = [each for each in log.read() if each.stream == stream(1)]
        archive.store(BOX, list(log.commits())[:archived], GENESIS)
        log.truncate(archived, 100)
        assert ArchivedEventLog(log, archive).read_stream(stream(1)) == records
