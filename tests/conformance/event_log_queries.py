"""What every event log promises about finding and removing its commits: a part of its conformance suite."""

from collections.abc import Iterable
from random import Random

import pytest

from postroom.application.mailbox import records as reading
from postroom.application.mailbox.codec import to_records
from postroom.application.ports.event_log import EventLog, Head, Seal, StoredSnapshot
from postroom.domain.commit import Commit, IndexEntry, LastEvent
from postroom.domain.message import MessageAcked
from postroom.domain.names import mailbox_stream
from postroom.domain.record import Event
from tests.conformance.log_store import ONE, TWO, Store, replayed
from tests.conformance.records import (
    append,
    append_each,
    commits_after,
    created,
    life,
    mixed,
    received,
    sent,
    stored,
    stream,
)


class EventLogQueries:
    """Tests of finding commits, of retention, snapshots and sizes; they have the fixtures of the suite."""

    # -- finding records ---

    def test_history_is_one_streams_records_oldest_first(self, log: EventLog) -> None:
        records = append(
            log, [sent(1), sent(2), received(1), received(2), MessageAcked(stream(1), 3, 1_000, 1)]
        )
        assert log.read_stream(stream(1)) == [records[0], records[2], records[4]]
        assert log.read_stream(stream(2)) == [records[1], records[3]]
        assert log.read_stream(stream(3)) == []

    def test_history_goes_on_over_commits_up_to_the_settlement(self, log: EventLog) -> None:
        first = append(log, [created(ONE), *life(1), sent(2)])
        later = append(log, [received(2), MessageAcked(stream(2), 3, 1_000, 1)])
        append(log, [sent(3)])
        assert log.read_stream(stream(2)) == [first[-1], *(each for each in later)]
        assert log.read_stream(stream(1)) == first[1:6]

    def test_history_is_found_backwards_from_the_last_event_that_the_index_has(self, log: EventLog) -> None:
        (first,) = append(log, [sent(1)])
        append(log, [sent(n) for n in range(10, 20)])
        (taken,) = append(log, [received(1)])
        append(log, [sent(n) for n in range(20, 30)])
        (acked,) = commits_after(log, [[MessageAcked(stream(1), 3, 1_000, 1)]])
        log.append([acked._replace(last_events=[LastEvent(stream(1), 1, acked.first)])])
        assert log.index_of([stream(1)]) == [IndexEntry(stream(1), 1, 1, acked.first)]
        assert log.index_of([stream(10)]) == [IndexEntry(stream(10), 1, 2)]
        assert log.read_stream(stream(1)) == [first, taken, *to_records(acked)]

    @pytest.mark.parametrize("scanned", [2, 20_000])
    def test_streams_are_read_together_as_each_alone(
        self, log: EventLog, monkeypatch: pytest.MonkeyPatch, scanned: int
    ) -> None:
        monkeypatch.setattr(reading, "SCAN_POSITIONS", scanned)
        chance = Random(scanned)
        lives = [
            [sent(number), received(number), MessageAcked(stream(number), 3, 1_000, 1)][: 1 + number % 4]
            for number in range(1, 25)
        ]
        groups: list[list[Event]] = [[created(ONE)]]
        while coming := [life for life in lives if life]:
            if chance.random() < 0.5:
                groups.append([])
            groups[-1].append(chance.choice(coming[:5]).pop(0))
        first: dict[bytes, int] = {}
        for commit, events in [*zip(commits_after(log, groups), groups, strict=True)]:
            far = []
            for position, event in enumerate(events, commit.first):
                begun = first.setdefault(event.stream, position)
                if isinstance(event, MessageAcked) and position - begun > scanned:
                    far.append(LastEvent(event.stream, begun, position))
            log.append([commit._replace(last_events=far)])
        streams = [*first, stream(99)]
        together = log.read_streams(streams)
        alone = {each: log.read_stream(each) for each in streams}
        whole = list(log.read())
        for each in streams:
            assert alone[each] == [record for record in whole if record.stream == each]
            assert replayed(together.get(each, ())) == replayed(alone[each])

    def test_later_events_of_streams_are_searched_in_as_many_positions_as_the_caller_allows(
        self, log: EventLog
    ) -> None:
        append(log, [sent(1)])
        append(log, [received(1)])
        for number in range(2, 8):
            append(log, [sent(number)])
        append(log, [MessageAcked(stream(1), 3, 1_000, 1)])
        lengths = [len(log.read_streams([stream(1)], limit)[stream(1)]) for limit in (1, 4, 100, None)]
        assert lengths == [2, 2, 3, 3]

    def test_the_last_event_of_a_message_may_be_in_the_append_that_sends_it(self, log: EventLog) -> None:
        one, two = commits_after(log, [[sent(1), sent(2)], [received(1)]])
        log.append([one, two._replace(last_events=[LastEvent(stream(1), 1, 3)])])
        assert log.index_of([stream(1)]) == [IndexEntry(stream(1), 1, 1, 3)]
        assert [record.position for record in log.read_stream(stream(1))] == [1, 3]

    def test_the_last_event_moves_on_with_each_append(self, log: EventLog) -> None:
        append(log, [sent(1), sent(2)])
        for version in (2, 3):
            (commit,) = commits_after(log, [[received(1, version=version), received(2, version=version)]])
            last = [LastEvent(stream(n), n, commit.first + n - 1) for n in (1, 2)]
            log.append([commit._replace(last_events=last)])
        assert [entry.last for entry in log.index_of([stream(2), stream(1)])] == [5, 6]

    def test_the_index_has_all_events_of_the_mailbox_and_of_other_aggregates_in_order(
        self, log: EventLog
    ) -> None:
        append(log, [*mixed(3, ONE), sent(7)])
        append(log, [stored(8), stored(8, version=2), received(7)])
        own = mailbox_stream(ONE)
        assert log.index_of([own]) == [IndexEntry(own, n, n) for n in (1, 2, 3)]
        assert log.index_of([stream(9), stream(8), stream(7), stream(8)]) == [
            IndexEntry(stream(7), 1, 4),
            IndexEntry(stream(8), 1, 5),
            IndexEntry(stream(8), 2, 6),
        ]
        assert [record.version for record in log.read_stream(stream(8))] == [1, 2]
        assert [record.position for record in log.read_stream(own)] == [1, 2, 3]

    def test_known_tells_which_streams_have_records(self, log: EventLog) -> None:
        append(log, [sent(n) for n in range(1, 20)])
        assert log.existing_streams(stream(n) for n in (0, 1, 19, 20)) == {stream(1), stream(19)}
        assert log.existing_streams([]) == set()

    def test_the_streams_of_a_range_are_found_in_order_as_far_as_retention_left_them(
        self, log: EventLog
    ) -> None:
        append_each(log, [sent(5), sent(2), received(2), sent(9), sent(4)])
        assert log.streams_between(stream(2), stream(5), 9) == [stream(2), stream(4), stream(5)]
        assert log.streams_between(stream(2), stream(5), 2) == [stream(2), stream(4)]
        assert log.streams_between(stream(6), stream(8), 9) == []
        log.truncate(through=2, limit=9)
        assert log.streams_between(bytes(16), b"\xff" * 16, 9) == [stream(4), stream(9)]

    def test_a_range_of_streams_has_each_once(self, log: EventLog) -> None:
        append(log, [stored(3), stored(3, version=2), sent(4)])
        append(log, [stored(5, version=2)])  # its first event is not there
        assert log.streams_between(stream(1), stream(9), 9) == [stream(3), stream(4)]

    def test_the_first_event_of_streams_is_found_as_far_as_retention_left_it(self, log: EventLog) -> None:
        records = append_each(log, [sent(1), sent(2), received(1), sent(3), received(2)])
        first = sorted(log.replay_first(stream(n) for n in (3, 1, 9, 2)), key=lambda event: event.stream)
        assert first == [event for _, event in replayed(records[n] for n in (0, 1, 3))]
        assert list(log.replay_first([])) == []
        assert log.truncate(through=2, limit=9) == 2
        assert log.existing_streams([stream(1), stream(3)]) == {stream(3)}
        assert list(log.replay_first([stream(1), stream(3)])) == first[2:]

    def test_records_are_found_by_position_and_missing_ones_are_left_out(self, log: EventLog) -> None:
        records = append(log, mixed(12, ONE))
        assert log.at_positions([12, 3, 99, 0, 3]) == {3: records[2], 12: records[11]}
        assert log.at_positions([]) == {}

    def test_of_large_commits_few_are_read_at_a_time(
        self, log: EventLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reading, "BYTES_AT_ONCE", 2_500)
        random = Random(1)
        records = append_each(log, [sent(n, envelope=random.randbytes(500)) for n in range(1, 31)])
        parts: list[int] = []
        find = log.commits_of

        def commits_of(positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
            commits = find(positions, envelopes=envelopes)
            parts.append(len(commits))
            return commits

        monkeypatch.setattr(log, "commits_of", commits_of)
        assert log.at_positions(range(1, 31)) == {each.position: each for each in records}
        assert parts[0] <= reading.FIRST_POSITIONS
        assert max(parts[1:]) * 500 <= reading.BYTES_AT_ONCE
        parts.clear()
        log.at_positions(range(1, 31), envelopes=False)
        assert parts == [30]

    @pytest.mark.parametrize(
        ("at", "position"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 3), (30, 3), (31, 4), (10**15, 4)]
    )
    def test_the_position_before_a_time_is_the_end_of_the_last_commit_before_it(
        self, log: EventLog, at: int, position: int
    ) -> None:
        append(log, [sent(1, at=10), sent(2, at=20), sent(3, at=20), sent(4, at=30)])
        assert log.position_before(at) == position

    def test_the_position_before_a_time_is_found_among_commits_of_all_sizes(self, log: EventLog) -> None:
        sizes = Random(1)
        ends, end = [0], 0
        for at in range(1, 60):
            size = sizes.choice((1, 2, 50))
            append(log, [sent(end + n, at=at) for n in range(1, size + 1)])
            end += size
            ends.append(end)
        assert [log.position_before(at + 1) for at in range(60)] == ends

    def test_the_position_before_a_time_is_found_while_the_log_is_truncated(
        self, log: EventLog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        append_each(log, [sent(n, at=1_000 + n) for n in range(1, 6)])
        first_position, truncations = log.first_position, [3]

        def first_position_before_truncation() -> int | None:
            first = first_position()
            if truncations:
                log.truncate(truncations.pop(), limit=3)
            return first

        monkeypatch.setattr(log, "first_position", first_position_before_truncation)
        assert log.position_before(1_005) == 4

    # -- truncation and snapshots ---

    def test_truncation_removes_the_oldest_commits_up_to_a_limit(self, log: EventLog) -> None:
        records = append(log, [sent(n, at=10 * n) for n in range(1, 11)])
        assert log.truncate(through=6, limit=4) == 4
        assert log.first_position() == 5
        assert log.truncate(through=6, limit=4) == 2
        assert log.truncate(through=6, limit=4) == 0
        assert list(log.read()) == records[6:]
        assert list(log.commits_of(range(1, 9))) == list(log.commits())[:2]
        assert list(log.read(after=3, limit=2)) == records[6:8]
        assert [position for position, _ in log.replay(8)] == [9, 10]
        assert log.at_positions([6, 7]) == {7: records[6]}
        assert log.read_stream(stream(6)) == []
        assert log.existing_streams([stream(6), stream(7)]) == {stream(7)}
        assert log.position_before(75) == 7
        assert log.position_before(5) == 6

    def test_truncation_removes_whole_commits_that_end_at_or_before_the_position(self, log: EventLog) -> None:
        for start in range(1, 40, 10):
            append(log, [sent(n) for n in range(start, start + 10)])
        assert log.truncate(through=9, limit=9) == 0
        assert log.first_position() == 1
        assert log.truncate(through=25, limit=1) == 10
        assert log.truncate(through=25, limit=9) == 10
        assert log.truncate(through=29, limit=9) == 0
        assert log.first_position() == 21
        assert log.existing_streams(stream(n) for n in range(1, 41)) == {stream(n) for n in range(21, 41)}
        assert log.position_before(0) == 20
        assert log.head() == Head(40, 1_000, [*log.commits()][-1].chain, 1)

    def test_a_message_may_be_sent_again_when_truncation_removed_it(self, log: EventLog) -> None:
        append(log, [sent(1), sent(2), received(1)])
        append(log, [sent(3)])
        assert log.truncate(through=3, limit=1) == 3
        records = append(log, [sent(1)])
        assert log.read_stream(stream(1)) == records
        assert log.index_of([stream(1), stream(2)]) == [IndexEntry(stream(1), 1, 5)]

    def test_a_log_goes_on_after_truncation(self, log: EventLog) -> None:
        append_each(log, [sent(n) for n in range(1, 6)])
        log.truncate(through=4, limit=100)
        records = append(log, [sent(6), received(5)])
        assert [record.position for record in log.read()] == [5, 6, 7]
        assert log.read_stream(stream(5))[-1] == records[-1]

    def test_truncation_leaves_the_later_records_of_a_stream(self, log: EventLog) -> None:
        records = append_each(log, [sent(1), sent(2), received(1), stored(4)])
        more = append_each(log, [stored(4, version=2), sent(5)])
        assert log.truncate(through=1, limit=100) == 1
        assert log.read_stream(stream(1)) == []  # found by its first event, which is gone
        assert log.existing_streams([stream(1)]) == set()
        assert list(log.read()) == [*records[1:], *more]
        assert log.truncate(through=4, limit=100) == 3
        assert log.read_stream(stream(4)) == more[:1]
        assert log.streams_between(stream(0), stream(9), 9) == [stream(5)]

    def test_snapshots_come_newest_first_without_those_that_are_not_kept(self, log: EventLog) -> None:
        append(log, [sent(n) for n in range(1, 31)])
        taken = [
            StoredSnapshot(position, bytes([position]) * 32, b"\x00" * position) for position in (10, 20, 30)
        ]
        log.save_snapshot(taken[0])
        log.save_snapshot(taken[1], keep_from=10)
        assert list(log.snapshots()) == [taken[1], taken[0]]
        log.save_snapshot(taken[2], keep_from=11)
        assert list(log.snapshots()) == [taken[2], taken[1]]

    def test_a_snapshot_taken_again_at_its_position_replaces_the_first(self, log: EventLog) -> None:
        append(log, [sent(n) for n in range(1, 11)])
        older = StoredSnapshot(5, bytes(32), b"older")
        for snapshot in (
            older,
            StoredSnapshot(10, bytes(32), b"before"),
            StoredSnapshot(10, bytes(32), b"after"),
        ):
            log.save_snapshot(snapshot)
        assert list(log.snapshots())[:2] == [StoredSnapshot(10, bytes(32), b"after"), older]

    # -- size ---

    def test_an_empty_log_takes_next_to_nothing(self, log: EventLog) -> None:
        assert 0 <= log.size().commits < 200_000
        assert log.reclaim_space(1 << 20) == 0

    def test_the_size_grows_with_what_is_appended_and_shrinks_with_what_is_removed(
        self, log: EventLog
    ) -> None:
        noise = Random(1)  # which no store can compress
        append_each(log, [sent(n, envelope=noise.randbytes(10_000)) for n in range(1, 401)])
        full = log.size()
        assert 4_000_000 < full.commits < 8_000_000
        assert full.disk >= full.commits
        log.truncate(through=300, limit=1_000)
        assert full.commits / 5 < log.size().commits < full.commits / 3

    def test_the_oldest_commits_of_a_size_are_found(self, log: EventLog) -> None:
        assert log.position_at_size(1_000) == 0
        append_each(log, [sent(n, envelope=Random(n).randbytes(10_000)) for n in range(1, 101)])
        append(log, [received(n) for n in range(1, 101)])
        assert log.position_at_size(0) == 1
        assert 40 <= log.position_at_size(500_000) <= 50
        assert log.position_at_size(10**9) == 200
        log.truncate(through=20, limit=100)
        assert 60 <= log.position_at_size(500_000) <= 70

    def test_each_mailbox_has_a_size_of_its_own(self, store: Store) -> None:
        one, two = store.open(ONE), store.open(TWO)
        append(one, [sent(n, envelope=Random(n).randbytes(10_000)) for n in range(1, 301)])
        append(two, [sent(n, envelope=Random(n).randbytes(10_000)) for n in range(1, 101)])
        assert 2 < one.size().commits / two.size().commits < 4

    # -- the seal ---

    def test_a_log_is_unsealed_until_its_owner_leaves_and_the_last_seal_counts(self, log: EventLog) -> None:
        assert log.read_seal() is None
        records = append_each(log, [sent(1), sent(2)])
        log.seal(Seal(1, records[0].chain))
        log.seal(Seal(2, records[1].chain))
        assert log.read_seal() == Seal(2, records[1].chain)

    def test_a_seal_only_advances(self, store: Store) -> None:
        stale_owner, owner = store.open(), store.open()
        records = append_each(owner, [sent(1), sent(2), sent(3)])
        owner.seal(Seal(3, records[2].chain))
        stale_owner.seal(Seal(2, records[1].chain))
        assert owner.read_seal() == Seal(3, records[2].chain)
        assert stale_owner.read_seal() == Seal(3, records[2].chain)

    def test_a_seal_outlives_the_commits_that_came_before_it(self, log: EventLog) -> None:
        records = append_each(log, [sent(n) for n in range(1, 6)])
        log.seal(Seal(3, records[2].chain))
        log.truncate(through=4, limit=100)
        assert log.read_seal() == Seal(3, records[2].chain)
