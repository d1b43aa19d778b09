"""What every log archive promises: what was stored comes back, in order, each once, and verified."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.ports.log_archive import LogArchive, Segment
from postroom.domain.errors import BrokenLog
from postroom.domain.record import CHAIN, GENESIS, Record, verify_chain
from tests.conformance.records import append, mixed, sent

BOX, OTHER = "acme@one", "acme@two"
COUNT = 40


def history(mailbox: str = BOX) -> list[Record]:
    """Return records that have present and absent values in every column."""
    return append(MemoryEventLog(mailbox), mixed(COUNT, mailbox))


RECORDS = history()


def keep(archive: LogArchive, first: int, last: int, *, knows_before: bool = True) -> Segment:
    """Store the records from `first` to `last`."""
    before = RECORDS[first - 2].chain if first > 1 else GENESIS
    return archive.store(BOX, RECORDS[first - 1 : last], before if knows_before else None)


def positions(records: Sequence[Record]) -> list[int]:
    """Return the positions of records."""
    return [record.position for record in records]


class LogArchiveConformance:
    """Subclasses give the fixture `archive`, empty."""

    def test_what_is_stored_comes_back_as_it_was(self, archive: LogArchive) -> None:
        keep(archive, 1, COUNT)
        assert list(archive.read(BOX)) == RECORDS
        assert all(type(record) is Record for record in archive.read(BOX))

    def test_an_archive_of_nothing_is_empty(self, archive: LogArchive) -> None:
        assert archive.mailboxes() == []
        assert archive.segments(BOX) == []
        assert archive.last_segment(BOX) is None
        assert list(archive.read(BOX)) == []

    def test_it_tells_what_is_stored_and_how_the_segments_are_chained(self, archive: LogArchive) -> None:
        first = keep(archive, 1, 10)
        second = keep(archive, 11, 15)
        assert first == Segment(BOX, 1, 10, GENESIS, RECORDS[9].chain)
        assert second == Segment(BOX, 11, 15, RECORDS[9].chain, RECORDS[14].chain)
        assert archive.segments(BOX) == [first, second]
        assert archive.last_segment(BOX) == second

    def test_mailboxes_are_apart(self, archive: LogArchive) -> None:
        other = history(OTHER)
        archive.store(OTHER, other, GENESIS)
        keep(archive, 1, 5)
        assert archive.mailboxes() == [BOX, OTHER]
        assert list(archive.read(OTHER)) == other
        assert positions(list(archive.read(BOX))) == [1, 2, 3, 4, 5]

    def test_storing_again_changes_nothing(self, archive: LogArchive) -> None:
        keep(archive, 1, 10)
        keep(archive, 1, 10)
        assert len(archive.segments(BOX)) == 1
        assert list(archive.read(BOX)) == RECORDS[:10]

    @settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        ranges=st.lists(st.tuples(st.integers(1, COUNT), st.integers(1, COUNT)).map(sorted), max_size=6),
        after=st.integers(0, COUNT),
    )
    def test_overlapping_segments_give_each_record_once(
        self, archive: LogArchive, ranges: list[list[int]], after: int
    ) -> None:
        reached = {p for each in ranges for p in range(each[0], each[1] + 1)}
        for first, last in ranges:
            # Only what continues another segment says what it continues, as in the archive of a real log.
            keep(archive, first, last, knows_before=first == 1 or first - 1 in reached)
        stored = {p for each in archive.segments(BOX) for p in range(each.first, each.last + 1)}
        assert stored >= reached  # examples share an archive
        found = list(archive.read(BOX, after))
        assert positions(found) == sorted(p for p in stored if p > after)
        assert all(record == RECORDS[record.position - 1] for record in found)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        ranges=st.lists(st.tuples(st.integers(1, COUNT), st.integers(1, COUNT)).map(sorted), max_size=4),
        asked=st.lists(st.integers(0, COUNT + 2), max_size=5),
    )
    def test_single_records_are_found_wherever_they_are(
        self, archive: LogArchive, ranges: list[list[int]], asked: list[int]
    ) -> None:
        for first, last in ranges:
            keep(archive, first, last, knows_before=False)
        stored = {p for each in archive.segments(BOX) for p in range(each.first, each.last + 1)}
        kept = [record for record in RECORDS if record.position in stored]
        assert archive.at_positions(BOX, asked) == {p: RECORDS[p - 1] for p in asked if p in stored}
        for stream in {record.stream for record in RECORDS} | {bytes(16)}:
            assert archive.read_stream(BOX, stream) == [record for record in kept if record.stream == stream]
        after = asked[0] if asked else 0
        assert list(archive.replay(BOX, after)) == [r[:CHAIN] for r in kept if r.position > after]

    @pytest.mark.parametrize(
        ("at", "position"), [(0, 0), (20, 0), (21, 2), (40, 3), (55, 5), (160, 15), (161, 16), (10**9, 16)]
    )
    def test_the_position_before_a_time_is_that_of_the_last_record_before_it(
        self, archive: LogArchive, at: int, position: int
    ) -> None:
        records = append(MemoryEventLog(BOX), [sent(n, at=10 * max(n, 2)) for n in range(1, 17)])
        for first, last in ((1, 6), (4, 8), (9, 16)):
            archive.store(BOX, records[first - 1 : last], None)
        assert archive.position_before(BOX, at) == position

    def test_segments_take_room(self, archive: LogArchive) -> None:
        small, large = keep(archive, 1, 5), keep(archive, 1, COUNT)
        assert 0 < archive.size(small) < archive.size(large)

    def test_records_that_went_without_being_archived_are_skipped(self, archive: LogArchive) -> None:
        keep(archive, 1, 5)
        keep(archive, 9, 12, knows_before=False)
        assert positions(list(archive.read(BOX))) == [1, 2, 3, 4, 5, 9, 10, 11, 12]

    def test_a_segment_that_is_missing_is_noticed(self, archive: LogArchive) -> None:
        keep(archive, 1, 5)
        keep(archive, 9, 12)
        with pytest.raises(BrokenLog, match="lacks positions 6 to 8"):
            list(archive.read(BOX))

    def test_a_record_that_was_altered_before_it_was_stored_is_noticed(self, archive: LogArchive) -> None:
        altered = [RECORDS[0], RECORDS[1]._replace(at=7), *RECORDS[2:5]]
        archive.store(BOX, altered, GENESIS)
        with pytest.raises(BrokenLog, match="position 2"):
            list(archive.read(BOX))

    def test_a_segment_of_another_history_is_noticed(self, archive: LogArchive) -> None:
        keep(archive, 1, 5)
        other = history(OTHER)
        archive.store(BOX, other[5:8], other[4].chain)
        with pytest.raises(BrokenLog, match="another store"):
            list(archive.read(BOX))

    def test_the_chain_holds_over_segments(self, archive: LogArchive) -> None:
        for first in range(1, COUNT, 7):
            keep(archive, first, min(first + 6, COUNT))
        assert verify_chain(archive.read(BOX), GENESIS, 1) == (COUNT, RECORDS[-1].chain)
