"""What every event log promises: an adapter's test class inherits the suite and brings a `Store`."""

from random import Random
from threading import Barrier, Thread

import pytest

from postroom.application.mailbox.codec import make_commit, to_records
from postroom.application.ports.event_log import EventLog, Head, Seal, StoredSnapshot
from postroom.domain.commit import GENESIS, Commit, IndexEntry, verify_chain
from postroom.domain.errors import DuplicateRecord, Fenced, PostroomError, WrongPosition
from postroom.domain.message import Headers
from postroom.domain.record import Record
from tests.conformance.event_log_queries import EventLogQueries
from tests.conformance.log_store import ONE, TWO, Store, replayed
from tests.conformance.records import (
    after,
    append,
    append_each,
    commits_after,
    created,
    life,
    mixed,
    received,
    sent,
    stream,
)


class EventLogConformance(EventLogQueries):
    @pytest.fixture
    def log(self, store: Store) -> EventLog:
        return store.open()

    # -- appending and reading ---

    def test_a_new_log_is_empty(self, log: EventLog) -> None:
        assert log.mailbox == ONE
        assert log.head() is None
        assert log.first_position() is None
        assert list(log.read()) == []
        assert list(log.replay()) == []
        assert list(log.commits()) == log.commits_of([0, 1]) == []
        assert log.index_of([stream(1)]) == []
        assert log.read_stream(stream(1)) == []
        assert log.existing_streams([stream(1)]) == set()
        assert log.at_positions([1]) == {}
        assert log.position_before(10**15) == 0
        assert list(log.snapshots()) == []

    def test_records_come_back_as_they_were_written(self, log: EventLog) -> None:
        records = append(log, [created(ONE), *life(1), sent(2)])
        assert list(log.read()) == records
        assert [record.position for record in log.read()] == [1, 2, 3, 4, 5, 6, 7]
        assert all(type(record) is Record for record in log.read())

    def test_commits_come_back_as_they_were_written_without_their_additions_to_the_index(
        self, log: EventLog
    ) -> None:
        commits = after(log, [created(ONE), *life(1), sent(2, at=1_001)])
        log.append(commits)
        read = [commit._replace(entries=(), last_events=()) for commit in commits]
        assert list(log.commits()) == log.commits_of([1, 7]) == read
        assert [type(commit.events) for commit in log.commits()] == [bytes, bytes]

    def test_envelopes_are_left_out_on_request(self, log: EventLog) -> None:
        append(log, life(1))
        (commit,) = log.commits()
        assert commit.envelopes
        bare = commit._replace(envelopes=b"")
        assert list(log.commits(envelopes=False)) == log.commits_of([3], envelopes=False) == [bare]

    def test_extreme_numbers_and_any_bytes_and_any_text_survive(self, log: EventLog) -> None:
        text = "ü/\U0001f4ee\x00\x1a0 \n'\";--%ß{}"
        headers = Headers(0, text, text, text, text, text, text, text, text, text, text, {text: text, "": ""})
        events = [
            sent(1, at=2**62, headers=headers, envelope=bytes(range(256)) * 300),
            sent(2, at=2**62, envelope=b""),
        ]
        own = [IndexEntry(stream(1), 1, 1, 2), IndexEntry(stream(2), 2**31 - 1, 2)]
        commit = make_commit(events, [0, 0], first=1, epoch=2**62, previous=b"\xff" * 32)
        commit = commit._replace(entries=own)
        log.append([commit])
        assert list(log.commits()) == [commit._replace(entries=())]
        assert list(log.read()) == list(to_records(commit))
        assert log.head() == Head(2, 2**62, commit.chain, 2**62)
        assert log.index_of([stream(1), stream(2)]) == own

    def test_parts_of_any_size_come_back_as_they_were(self, log: EventLog) -> None:
        for part in (b"", b"\x00", bytes(range(256)) * 4, b"\x90" * 10_000):
            head = log.head()
            end = head.position if head else 0
            log.append([Commit(end + 1, end + 1, 1, 5, bytes(32), part, part)])
            assert list(log.commits(end)) == [Commit(end + 1, end + 1, 1, 5, bytes(32), part, part)]

    @pytest.mark.parametrize("size", [1, 5_000])
    def test_a_commit_holds_any_number_of_events(self, log: EventLog, size: int) -> None:
        append(log, [created(ONE)])
        records = append(log, [sent(n) for n in range(size)])
        assert list(log.read(after=1)) == records
        assert len(list(log.commits(1))) == 1
        assert log.existing_streams([stream(0), stream(size - 1), stream(size)]) == {
            stream(0),
            stream(size - 1),
        }

    def test_a_commit_holds_large_envelopes(self, log: EventLog) -> None:
        noise = Random(1).randbytes(5_000_000)
        records = append(log, [sent(n, envelope=noise) for n in range(4)])
        assert list(log.read()) == records
        (bare,) = log.commits(envelopes=False)
        assert len(bare.events) < 2_000

    def test_a_big_batch_of_mixed_events_is_one_append(self, log: EventLog) -> None:
        records = append(log, mixed(1_500, ONE))
        assert list(log.read()) == records
        head = log.head()
        assert head is not None
        assert verify_chain(log.commits(), GENESIS, 1) == (1_500, head.chain)
        assert len(list(log.commits())) == 1

    def test_several_commits_are_one_append(self, log: EventLog) -> None:
        records = append_each(log, mixed(500, ONE))
        assert list(log.read()) == records
        assert verify_chain(log.commits(), GENESIS, 1) == (500, records[-1].chain)
        assert len(list(log.commits())) == 500
        assert [commit.first for commit in log.commits(490)] == list(range(491, 501))

    def test_appending_nothing_changes_nothing(self, log: EventLog) -> None:
        log.append([])
        assert log.head() is None

    def test_the_head_is_the_end_of_the_last_commit(self, log: EventLog) -> None:
        append(log, [sent(1)], epoch=4)
        records = append(log, [received(1, at=1_234), sent(2, at=5_678)], epoch=5)
        assert log.head() == Head(3, 5_678, records[-1].chain, 5)
        assert log.first_position() == 1

    def test_reading_starts_after_a_position_and_stops_at_the_limit(self, log: EventLog) -> None:
        records = append(log, mixed(40, ONE))
        assert list(log.read(after=37)) == records[37:]
        assert list(log.read(after=5, limit=3)) == records[5:8]
        assert list(log.read(after=39, limit=10)) == records[39:]
        assert list(log.read(limit=0)) == []
        assert list(log.read(after=40)) == []

    def test_commits_are_read_from_the_one_that_ends_after_a_position(self, log: EventLog) -> None:
        for start in (0, 10, 20):
            append(log, [sent(n) for n in range(start, start + 10)])
        for position, first in ((0, 1), (9, 1), (10, 11), (15, 11), (20, 21), (29, 21)):
            assert next(log.commits(position)).first == first
        assert list(log.commits(30)) == list(log.commits(99)) == []

    def test_commits_are_found_by_the_positions_they_hold(self, log: EventLog) -> None:
        for start in (0, 10, 20):
            append(log, [sent(n) for n in range(start, start + 10)])
        assert [commit.first for commit in log.commits_of([30, 1, 5, 10, 21, 0, 31, -1])] == [1, 21]
        assert log.commits_of([]) == []
        log.truncate(through=10, limit=1)
        assert [commit.first for commit in log.commits_of([9, 10, 11])] == [11]

    def test_replay_yields_positions_and_events_without_envelopes(self, log: EventLog) -> None:
        append_each(log, mixed(20, ONE))
        records = [*log.read(), *append(log, [sent(n) for n in range(10**9, 10**9 + 20)])]
        assert list(log.replay(10)) == replayed(records[10:])

    def test_reading_goes_on_past_any_inner_page(self, log: EventLog) -> None:
        append_each(log, [sent(n) for n in range(5_000)])
        append(log, [sent(n) for n in range(5_000, 9_000)])
        append_each(log, [sent(n) for n in range(9_000, 9_300)])
        assert [record.position for record in log.read()] == list(range(1, 9_301))
        assert [position for position, _ in log.replay(1)] == list(range(2, 9_301))
        assert len(list(log.read(after=500, limit=8_700))) == 8_700

    # -- the expected position and the epoch ---

    def test_an_append_at_the_wrong_position_says_what_was_expected_and_what_is_there(
        self, log: EventLog
    ) -> None:
        stale = after(log, [sent(1)])
        append(log, [sent(2), sent(3)])
        with pytest.raises(
            WrongPosition, match=r"acme@one expected position 0, but its log ends at 2"
        ) as refused:
            log.append(stale)
        assert (refused.value.expected, refused.value.actual) == (0, 2)
        assert [record.stream for record in log.read()] == [stream(2), stream(3)]

    def test_an_append_beyond_the_end_is_refused(self, log: EventLog) -> None:
        first, second = commits_after(log, [[sent(1)], [sent(2)]])
        with pytest.raises(WrongPosition) as refused:
            log.append([second])
        assert (refused.value.expected, refused.value.actual) == (1, 0)
        log.append([first])
        log.append([second])

    def test_a_stale_owner_is_fenced_by_a_newer_epoch(self, store: Store) -> None:
        old, new = store.open(), store.open()
        append(old, [sent(1)], epoch=1)
        stale = after(old, [sent(2)], epoch=1)
        append(new, [sent(3)], epoch=2)
        with pytest.raises(Fenced, match="taken over by epoch 2 while this process held epoch 1") as refused:
            old.append(stale)
        assert (refused.value.epoch, refused.value.newer) == (1, 2)
        assert new.read_stream(stream(2)) == []

    @pytest.mark.parametrize(("mine", "theirs"), [(1, 3), (3, 1), (2, 2)])
    def test_a_stale_owner_is_fenced_however_many_events_it_and_the_newer_one_append(
        self, store: Store, mine: int, theirs: int
    ) -> None:
        old, new = store.open(), store.open()
        append(old, [sent(1), sent(2)], epoch=1)
        stale = after(old, [sent(100 + n) for n in range(mine)], epoch=1)
        append(new, [sent(200 + n) for n in range(theirs)], epoch=2)
        for commits in (stale, [*stale, *stale]):
            with pytest.raises(Fenced):
                old.append(commits)
        assert new.existing_streams(stream(100 + n) for n in range(mine)) == set()
        assert verify_chain(new.commits(), GENESIS, 1)[0] == 2 + theirs

    def test_a_stale_owner_is_fenced_though_retention_removed_the_place_it_wants(self, store: Store) -> None:
        old, new = store.open(), store.open()
        append(old, [sent(1)], epoch=1)
        stale = after(old, [sent(2)], epoch=1)
        append_each(new, [sent(n) for n in range(3, 10)], epoch=2)
        new.truncate(through=5, limit=100)
        with pytest.raises(Fenced):
            old.append(stale)
        assert new.first_position() == 6
        assert new.existing_streams([stream(2)]) == set()

    def test_a_new_owner_that_lost_the_race_may_try_again(self, store: Store) -> None:
        old, new = store.open(), store.open()
        taking_over = after(new, [sent(1)], epoch=2)
        append(old, [sent(2)], epoch=1)
        with pytest.raises(WrongPosition):
            new.append(taking_over)
        append(new, [sent(1)], epoch=2)

    def test_a_repeated_version_of_a_stream_refuses_the_whole_append(self, log: EventLog) -> None:
        append(log, [sent(1)])
        for doubtful in ([sent(2), sent(1)], [sent(2), sent(2)]):
            with pytest.raises(DuplicateRecord):
                append(log, doubtful)
        head = log.head()
        assert head is not None
        assert head.position == 1
        assert log.existing_streams([stream(1), stream(2)]) == {stream(1)}
        append(log, [sent(2), received(1)])

    def test_a_repeated_version_in_another_commit_of_the_append_refuses_it(self, log: EventLog) -> None:
        doubtful = commits_after(log, [[sent(1)], [sent(2), sent(1)]])
        with pytest.raises(DuplicateRecord):
            log.append(doubtful)
        assert log.head() is None
        assert log.index_of([stream(1), stream(2)]) == []

    def test_of_concurrent_appends_at_one_position_exactly_one_wins(self, store: Store) -> None:
        logs = [store.open() for _ in range(4)]
        append(logs[0], [created(ONE)])
        ready = Barrier(len(logs))
        outcomes: dict[int, PostroomError | None] = {}

        def compete(number: int) -> None:
            commits = after(logs[number], [sent(100 * number + n) for n in range(20)])
            ready.wait()
            try:
                logs[number].append(commits)
                outcomes[number] = None
            except WrongPosition as error:
                outcomes[number] = error

        threads = [Thread(target=compete, args=(number,)) for number in range(len(logs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [number for number, error in outcomes.items() if error is None]
        assert len(outcomes) == len(logs)
        expected = [stream(100 * winner + n) for n in range(20)]
        assert [record.stream for record in logs[0].read(after=1)] == expected

    def test_a_reader_sees_whole_appends_in_order_while_they_go_on(self, store: Store) -> None:
        log = store.open()
        append(log, [sent(n) for n in range(10)])
        reader = store.open_reader()
        errors: list[Exception] = []

        def write() -> None:
            try:
                for batch in range(1, 60):
                    append(log, [sent(10 * batch + n) for n in range(10)])
            except Exception as error:
                errors.append(error)

        writer = Thread(target=write)
        writer.start()
        seen = 0
        while seen < 600 and not errors:
            positions = [record.position for record in reader.read()]
            assert positions == list(range(1, len(positions) + 1))
            assert len(positions) % 10 == 0
            assert len(positions) >= seen
            seen = len(positions)
        writer.join()
        assert errors == []

    # -- two mailboxes, closing, reopening ---

    def test_two_mailboxes_of_one_store_do_not_see_each_other(self, store: Store) -> None:
        one, two = store.open(ONE), store.open(TWO)
        mine = append(one, [created(ONE, at=4), sent(1, at=5), sent(2, at=6)])
        theirs = append(two, [created(TWO, at=6), sent(3, at=7)], epoch=9)
        one.save_snapshot(StoredSnapshot(2, mine[1].chain, b"mine"))
        assert list(one.read()) == mine
        assert list(two.read()) == theirs
        assert list(two.replay(1)) == replayed(theirs[1:])
        assert two.read_stream(stream(1)) == []
        assert two.index_of([stream(1)]) == []
        assert two.streams_between(bytes(16), stream(9), 9) == [stream(3)]
        assert two.existing_streams([stream(1), stream(3)]) == {stream(3)}
        assert two.at_positions([2, 3]) == {2: theirs[1]}
        assert list(two.snapshots()) == []
        assert two.position_before(100) == 2
        two.save_snapshot(StoredSnapshot(2, theirs[1].chain, b"theirs"))
        two.seal(Seal(2, theirs[1].chain))
        assert one.read_seal() is None
        assert one.truncate(through=2, limit=100) == 2
        assert list(two.read()) == theirs
        assert [snapshot.state for snapshot in one.snapshots()] == [b"mine"]

    def test_two_mailboxes_of_one_store_may_hold_the_same_stream(self, store: Store) -> None:
        one, two = store.open(ONE), store.open(TWO)
        append(one, [created(ONE), sent(1)])
        (_, record) = append(two, [created(TWO), sent(1)])
        assert two.read_stream(stream(1)) == [record]

    def test_a_closed_log_may_be_closed_again(self, log: EventLog) -> None:
        append(log, [sent(1)])
        log.close()
        log.close()

    def test_the_log_says_what_an_append_survives(self, store: Store, log: EventLog) -> None:
        assert log.durability == store.durability

    def test_what_was_appended_is_there_after_reopening(self, store: Store) -> None:
        if not store.is_durable:
            pytest.skip("this store forgets, as it says")
        log = store.open()
        records = append_each(log, mixed(300, ONE))
        snapshot = StoredSnapshot(300, records[-1].chain, b"state")
        log.save_snapshot(snapshot)
        log.truncate(through=100, limit=1_000)
        log.seal(Seal(300, records[-1].chain))
        log.close()

        log = store.open()
        assert log.read_seal() == Seal(300, records[-1].chain)
        assert list(log.read()) == records[100:]
        assert list(log.snapshots()) == [snapshot]
        assert log.head() == Head(300, records[-1].at, records[-1].chain, 1)
        assert log.first_position() == 101
        append(log, [sent(10**9)])
