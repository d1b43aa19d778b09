"""What every event log promises: an adapter's test class inherits the suite and brings a `Store`."""

from abc import ABC, abstractmethod
from random import Random
from threading import Barrier, Thread

import pytest

from postroom.application.ports.event_log import EventLog, Head, Seal, StoredSnapshot
from postroom.domain.errors import DuplicateRecord, Fenced, PostroomError, WrongPosition
from postroom.domain.message import MessageAcked
from postroom.domain.record import CHAIN, GENESIS, Record, verify_chain
from tests.conformance.records import after, append, created, life, mixed, received, sent, stream

ONE, TWO = "acme@one", "acme@two"


class Store(ABC):
    """One place that keeps logs, for as long as a test runs."""

    is_durable: bool
    """Whether a log that was closed and opened again is the same."""
    durability: str
    """What the logs say an append survives."""

    @abstractmethod
    def open(self, mailbox: str = ONE) -> EventLog:
        """Return the log of a mailbox, for its owner."""

    @abstractmethod
    def open_reader(self, mailbox: str = ONE) -> EventLog:
        """Return the log of a mailbox that exists, for somebody who only reads."""


class EventLogConformance:
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

    def test_absent_values_and_any_bytes_and_any_text_survive(self, log: EventLog) -> None:
        bare = Record(1, stream(1), 1, 1, "Bare.1", 0, None, None, None, None, None, b"", bytes(32))
        facts = ("ü/\U0001f4ee", -1, 0, 2**62, "", b"\x00'\xff", b"\xff" * 32)
        headers = (-1, "", "\x00", " ", "\n", "'", '"', ";", "--", "%", "ß", "{}", bytes(range(256)) * 300)
        full = Record._make((2, bytes(16), 2**31, 2**40, "Full.1", 2**62, *facts, *headers))
        log.append([bare, full])
        assert list(log.read()) == [bare, full]
        assert log.read_stream(stream(1)) == [bare]

    def test_a_big_batch_of_mixed_events_is_one_append(self, log: EventLog) -> None:
        records = append(log, mixed(1_500, ONE))
        assert list(log.read()) == records
        head = log.head()
        assert head is not None
        assert verify_chain(log.read(), GENESIS, 1) == (1_500, head.chain)

    def test_appending_nothing_changes_nothing(self, log: EventLog) -> None:
        log.append([])
        assert log.head() is None

    def test_the_head_is_the_last_record(self, log: EventLog) -> None:
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

    def test_replay_yields_the_columns_up_to_state(self, log: EventLog) -> None:
        records = append(log, mixed(40, ONE))
        assert [tuple(row) for row in log.replay(10)] == [record[:CHAIN] for record in records[10:]]

    def test_reading_goes_on_past_any_inner_page(self, log: EventLog) -> None:
        for start in range(0, 12_000, 4_000):
            append(log, [sent(n) for n in range(start, start + 4_000)])
        assert [record.position for record in log.read()] == list(range(1, 12_001))
        assert [row[0] for row in log.replay(1)] == list(range(2, 12_001))
        assert len(list(log.read(after=500, limit=11_000))) == 11_000

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
        first, second = after(log, [sent(1), sent(2)])
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

    def test_a_stale_owner_is_fenced_though_retention_removed_the_place_it_wants(self, store: Store) -> None:
        old, new = store.open(), store.open()
        append(old, [sent(1)], epoch=1)
        stale = after(old, [sent(2)], epoch=1)
        append(new, [sent(n) for n in range(3, 10)], epoch=2)
        new.truncate(through=5, limit=100)
        with pytest.raises(Fenced):
            old.append(stale)
        assert new.first_position() == 6

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

    def test_of_concurrent_appends_at_one_position_exactly_one_wins(self, store: Store) -> None:
        logs = [store.open() for _ in range(4)]
        append(logs[0], [created(ONE)])
        ready = Barrier(len(logs))
        outcomes: dict[int, PostroomError | None] = {}

        def compete(number: int) -> None:
            records = after(logs[number], [sent(100 * number + n) for n in range(20)])
            ready.wait()
            try:
                logs[number].append(records)
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

    # -- finding records ---

    def test_history_is_one_streams_records_oldest_first(self, log: EventLog) -> None:
        records = append(
            log, [sent(1), sent(2), received(1), received(2), MessageAcked(stream(1), 3, 1_000, 1)]
        )
        assert log.read_stream(stream(1)) == [records[0], records[2], records[4]]
        assert log.read_stream(stream(2)) == [records[1], records[3]]
        assert log.read_stream(stream(3)) == []

    def test_known_tells_which_streams_have_records(self, log: EventLog) -> None:
        append(log, [sent(n) for n in range(1, 20)])
        assert log.existing_streams(stream(n) for n in (0, 1, 19, 20)) == {stream(1), stream(19)}
        assert log.existing_streams([]) == set()

    def test_the_streams_of_a_range_are_found_in_order_as_far_as_retention_left_them(
        self, log: EventLog
    ) -> None:
        append(log, [sent(5), sent(2), received(2), sent(9), sent(4)])
        assert log.streams_between(stream(2), stream(5), 9) == [stream(2), stream(4), stream(5)]
        assert log.streams_between(stream(2), stream(5), 2) == [stream(2), stream(4)]
        assert log.streams_between(stream(6), stream(8), 9) == []
        log.truncate(through=2, limit=9)
        assert log.streams_between(bytes(16), b"\xff" * 16, 9) == [stream(4), stream(9)]

    def test_the_first_record_of_streams_is_found_as_far_as_retention_left_it(self, log: EventLog) -> None:
        records = append(log, [sent(1), sent(2), received(1), sent(3), received(2)])
        first = sorted(log.replay_first(stream(n) for n in (3, 1, 9, 2)))
        assert first == [records[n][:CHAIN] for n in (0, 1, 3)]
        assert list(log.replay_first([])) == []
        assert log.truncate(through=2, limit=9) == 2
        assert log.existing_streams([stream(1), stream(3)]) == {stream(1), stream(3)}
        assert list(log.replay_first([stream(1), stream(3)])) == [records[3][:CHAIN]]

    def test_records_are_found_by_position_and_missing_ones_are_left_out(self, log: EventLog) -> None:
        records = append(log, mixed(12, ONE))
        assert log.at_positions([12, 3, 99, 0, 3]) == {3: records[2], 12: records[11]}
        assert log.at_positions([]) == {}

    @pytest.mark.parametrize(
        ("at", "position"), [(0, 0), (10, 0), (11, 1), (20, 1), (21, 3), (30, 3), (31, 4), (10**15, 4)]
    )
    def test_the_position_before_a_time_is_that_of_the_last_record_before_it(
        self, log: EventLog, at: int, position: int
    ) -> None:
        append(log, [sent(1, at=10), sent(2, at=20), sent(3, at=20), sent(4, at=30)])
        assert log.position_before(at) == position

    # -- truncation and snapshots ---

    def test_truncation_removes_the_oldest_records_up_to_a_limit(self, log: EventLog) -> None:
        records = append(log, [sent(n, at=10 * n) for n in range(1, 11)])
        assert log.truncate(through=6, limit=4) == 4
        assert log.first_position() == 5
        assert log.truncate(through=6, limit=4) == 2
        assert log.truncate(through=6, limit=4) == 0
        assert list(log.read()) == records[6:]
        assert list(log.read(after=3, limit=2)) == records[6:8]
        assert [row[0] for row in log.replay(8)] == [9, 10]
        assert log.at_positions([6, 7]) == {7: records[6]}
        assert log.read_stream(stream(6)) == []
        assert log.existing_streams([stream(6), stream(7)]) == {stream(7)}
        assert log.position_before(75) == 7
        assert log.position_before(5) == 6

    def test_a_log_goes_on_after_truncation(self, log: EventLog) -> None:
        append(log, [sent(n) for n in range(1, 6)])
        log.truncate(through=4, limit=100)
        records = append(log, [sent(6), received(5)])
        assert [record.position for record in log.read()] == [5, 6, 7]
        assert log.read_stream(stream(5))[-1] == records[-1]

    def test_truncation_leaves_the_later_records_of_a_stream(self, log: EventLog) -> None:
        records = append(log, [sent(1), sent(2), received(1)])
        log.truncate(through=1, limit=100)
        assert log.read_stream(stream(1)) == [records[2]]
        assert log.existing_streams([stream(1)]) == {stream(1)}

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
        assert 0 <= log.size().records < 200_000
        assert log.reclaim_space(1 << 20) == 0

    def test_the_size_grows_with_what_is_appended_and_shrinks_with_what_is_removed(
        self, log: EventLog
    ) -> None:
        noise = Random(1)  # which no store can compress
        append(log, [sent(n, envelope=noise.randbytes(10_000)) for n in range(1, 401)])
        full = log.size()
        assert 4_000_000 < full.records < 8_000_000
        assert full.disk >= full.records
        log.truncate(through=300, limit=1_000)
        assert full.records / 5 < log.size().records < full.records / 3

    def test_the_oldest_records_of_a_size_are_found(self, log: EventLog) -> None:
        assert log.position_at_size(1_000) == 0
        append(log, [sent(n, envelope=Random(n).randbytes(10_000)) for n in range(1, 101)])
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
        assert 2 < one.size().records / two.size().records < 4

    # -- the seal ---

    def test_a_log_is_unsealed_until_its_owner_leaves_and_the_last_seal_counts(self, log: EventLog) -> None:
        assert log.sealed() is None
        records = append(log, [sent(1), sent(2)])
        log.seal(Seal(1, records[0].chain))
        log.seal(Seal(2, records[1].chain))
        assert log.sealed() == Seal(2, records[1].chain)

    def test_a_seal_only_advances(self, store: Store) -> None:
        stale_owner, owner = store.open(), store.open()
        records = append(owner, [sent(1), sent(2), sent(3)])
        owner.seal(Seal(3, records[2].chain))
        stale_owner.seal(Seal(2, records[1].chain))
        assert owner.sealed() == Seal(3, records[2].chain)
        assert stale_owner.sealed() == Seal(3, records[2].chain)

    def test_a_seal_outlives_the_records_that_came_before_it(self, log: EventLog) -> None:
        records = append(log, [sent(n) for n in range(1, 6)])
        log.seal(Seal(3, records[2].chain))
        log.truncate(through=4, limit=100)
        assert log.sealed() == Seal(3, records[2].chain)

    # -- two mailboxes, closing, reopening ---

    def test_two_mailboxes_of_one_store_do_not_see_each_other(self, store: Store) -> None:
        one, two = store.open(ONE), store.open(TWO)
        mine = append(one, [created(ONE), sent(1, at=5), sent(2, at=6)])
        theirs = append(two, [created(TWO), sent(3, at=7)], epoch=9)
        one.save_snapshot(StoredSnapshot(2, mine[1].chain, b"mine"))
        assert list(one.read()) == mine
        assert list(two.read()) == theirs
        assert list(two.replay(1)) == [theirs[1][:CHAIN]]
        assert two.read_stream(stream(1)) == []
        assert two.existing_streams([stream(1), stream(3)]) == {stream(3)}
        assert two.at_positions([2, 3]) == {2: theirs[1]}
        assert list(two.snapshots()) == []
        assert two.position_before(100) == 2
        two.save_snapshot(StoredSnapshot(2, theirs[1].chain, b"theirs"))
        two.seal(Seal(2, theirs[1].chain))
        assert one.sealed() is None
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
        records = append(log, mixed(300, ONE))
        snapshot = StoredSnapshot(300, records[-1].chain, b"state")
        log.save_snapshot(snapshot)
        log.truncate(through=100, limit=1_000)
        log.seal(Seal(300, records[-1].chain))
        log.close()

        log = store.open()
        assert log.sealed() == Seal(300, records[-1].chain)
        assert list(log.read()) == records[100:]
        assert list(log.snapshots()) == [snapshot]
        assert log.head() == Head(300, records[-1].at, records[-1].chain, 1)
        assert log.first_position() == 101
        append(log, [sent(10**9)])
