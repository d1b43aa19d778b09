"""Partitions of the PostgreSQL event log, and what retention removes of them."""

from contextlib import closing

import psycopg
import pytest

from postroom.adapters.postgres import event_log
from postroom.adapters.postgres.database import Connection
from postroom.domain.commit import IndexEntry, LastEvent
from postroom.domain.errors import Fenced, Unavailable
from postroom.domain.message import MessageAcked
from tests.conformance.log_store import TWO
from tests.conformance.records import after, append, append_each, commits_after, received, stream
from tests.integration.postgres.event_logs import Open, partitions, sents


def test_partitions_are_made_before_they_are_needed(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=8)
    assert partitions(database) == ["log_1_0"]
    append(log, sents(4))
    assert partitions(database) == ["log_1_0"]
    append(log, sents(1, 10))
    assert partitions(database) == ["log_1_0", "log_1_1"]
    append(log, sents(30, 20))
    assert partitions(database) == [f"log_1_{n}" for n in range(5)]
    records = append(open_log(TWO, partition_positions=1_000), sents(3))
    assert "log_2_0" in partitions(database)
    assert len(list(log.read())) == 35
    assert list(open_log(TWO).read()) == records


def test_a_mailbox_keeps_the_partition_size_that_it_was_made_with(
    open_log: Open, database: Connection
) -> None:
    append(open_log(partition_positions=8), sents(5))
    append(open_log(partition_positions=1_000), sents(20, 100))
    assert partitions(database) == [f"log_1_{n}" for n in range(4)]


def test_a_next_partition_that_can_not_be_made_fails_no_append_until_there_is_no_room(
    open_log: Open, database: Connection
) -> None:
    log = open_log(partition_positions=32)
    database.execute(
        "CREATE OR REPLACE FUNCTION postroom.make_partitions(mailbox BIGINT, through BIGINT) RETURNS BIGINT "
        "LANGUAGE plpgsql AS $$ BEGIN RAISE disk_full; END $$"
    )
    for number in range(32):
        append(log, sents(1, number))
    with pytest.raises(Unavailable, match="refused a statement"):
        append(log, sents(1, 100))
    assert len(list(log.read())) == 32


def test_no_partition_reaches_into_the_places_of_the_next_mailbox(
    open_log: Open, database: Connection
) -> None:
    open_log()
    with pytest.raises(psycopg.errors.RaiseException, match="fewer than 2\\^40 positions"):
        database.execute("SELECT postroom.make_partitions(1, 1::bigint << 40)")


def test_retention_drops_whole_partitions_and_deletes_the_rest(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=8)
    records = append_each(log, sents(40))
    assert log.truncate(through=19, limit=2) == 16
    assert partitions(database) == [f"log_1_{n}" for n in (2, 3, 4, 5)]
    assert log.truncate(through=19, limit=2) == 2
    assert log.truncate(through=19, limit=2) == 1
    assert log.truncate(through=19, limit=2) == 0
    assert list(log.read()) == records[19:]
    assert list(log.read(after=2, limit=3)) == records[19:22]
    assert log.first_position() == 20
    assert log.existing_streams([stream(3), stream(30)]) == {stream(30)}
    append(log, sents(5, 100))
    assert [record.position for record in open_log().read()] == list(range(20, 46))


def test_a_partition_that_somebody_looks_at_is_emptied_and_dropped_the_next_time(
    open_log: Open, url: str, database: Connection
) -> None:
    log = open_log(partition_positions=8)
    append_each(log, sents(40))
    with closing(psycopg.connect(url)) as idle:
        idle.execute("SELECT count(*) FROM postroom.log")
        removed = []
        while gone := log.truncate(through=16, limit=5):
            removed.append(gone)
        assert removed == [5, 5, 5, 1]
        assert "log_1_0" in partitions(database)
    assert log.truncate(through=17, limit=5) == 1
    assert partitions(database) == [f"log_1_{n}" for n in (2, 3, 4, 5)]
    assert log.first_position() == 18


def test_a_stale_owner_is_fenced_though_the_partition_it_wants_was_dropped(
    open_log: Open, database: Connection
) -> None:
    old, new = open_log(partition_positions=8), open_log()
    append(old, sents(1), epoch=1)
    stale = after(old, sents(1, 50), epoch=1)
    append_each(new, sents(30, 100), epoch=2)
    assert new.truncate(through=20, limit=100) == 16
    with pytest.raises(Fenced):
        old.append(stale)
    assert partitions(database) == [f"log_1_{n}" for n in (2, 3, 4)]
    assert new.first_position() == 17


def test_retention_waits_for_appends_that_may_not_see_it_yet(
    open_log: Open, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    append_each(log, sents(10))
    append(open_log(TWO), sents(1))
    monkeypatch.setattr(event_log, "RETENTION_WAIT_SECONDS", 0.02)
    with database.transaction(force_rollback=True):
        database.execute("INSERT INTO postroom.log SELECT * FROM postroom.log WHERE false")
        with pytest.raises(Unavailable, match="retention continues when it ends"):
            log.truncate(through=5, limit=100)
        assert log.first_position() == 1
    assert log.truncate(through=5, limit=100) == 5


def test_a_commit_lies_in_the_partition_in_which_it_begins(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=8)
    records = [append(log, sents(count, 100 * count)) for count in (5, 30, 1)]
    assert partitions(database) == [f"log_1_{n}" for n in range(5)]
    found = database.execute("SELECT tableoid::regclass::text FROM postroom.log ORDER BY place")
    assert [name for (name,) in found] == ["postroom.log_1_0", "postroom.log_1_0", "postroom.log_1_4"]
    assert list(open_log().read()) == [*records[0], *records[1], *records[2]]
    assert log.at_positions([8, 9, 35]) == {n + 1: records[1][n - 5] for n in (7, 8, 34)}
    for position, first in ((1, 1), (6, 6), (24, 6), (32, 6), (33, 6), (35, 6), (36, 36)):
        assert [commit.first for commit in log.commits_of([position, 37])] == [first]
        assert next(log.commits(position - 1)).first == first
    assert [commit.first for commit in log.commits_of(range(30, 40))] == [6, 36]
    assert log.position_before(2_000) == 36


def test_a_partition_stays_while_a_commit_that_begins_in_it_reaches_beyond_what_is_removed(
    open_log: Open, database: Connection
) -> None:
    log = open_log(partition_positions=8)
    append(log, sents(5))
    long = append(log, sents(15, 50))
    append_each(log, sents(20, 100))
    assert log.truncate(through=19, limit=100) == 5
    assert partitions(database)[0] == "log_1_0"
    assert log.first_position() == 6
    assert list(log.read())[:15] == long
    assert log.read_stream(stream(51)) == [long[1]]
    assert log.truncate(through=21, limit=100) == 15
    assert partitions(database)[0] == "log_1_2"
    assert log.truncate(through=21, limit=100) == 1
    assert log.first_position() == 22


def test_entries_beyond_a_partition_are_removed_with_the_commit_that_began_in_it(
    open_log: Open, database: Connection
) -> None:
    log = open_log(partition_positions=8)
    append(log, sents(5))
    append(log, sents(15, 50))
    append_each(log, sents(20, 100))
    assert log.truncate(through=20, limit=100) == 20
    assert partitions(database)[0] == "log_1_2"
    assert log.index_of(stream(n) for n in range(100)) == []
    assert database.execute("SELECT count(*) FROM postroom.log_index").fetchone() == (20,)
    assert log.existing_streams(stream(n) for n in range(120)) == {stream(n) for n in range(100, 120)}
    append(log, sents(1, 64))  # its id is free again


def test_a_size_ends_where_partitions_can_be_dropped(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=8)
    append(log, sents(5))
    append(log, sents(15, 50))
    append_each(log, sents(20, 100))
    through = log.position_at_size(1)
    assert through == 20
    assert log.truncate(through, limit=100) == 20
    assert partitions(database)[0] == "log_1_2"


def test_a_last_event_changes_no_row_of_earlier_partitions(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=8)
    append(log, sents(40))
    (commit,) = commits_after(log, [[MessageAcked(stream(n), 2, 1_000, 1) for n in (3, 12, 20)]])
    last = [LastEvent(stream(n), n + 1, last) for n, last in ((12, 42), (20, 43))]
    with database.transaction():
        for number in range(5):  # the log continues in the next one
            database.execute(f"LOCK TABLE postroom.log_index_1_{number} IN EXCLUSIVE MODE".encode())
        log.append([commit._replace(last_events=last)])
    assert log.index_of([stream(3), stream(12), stream(20)]) == [
        IndexEntry(stream(3), 1, 4),
        IndexEntry(stream(12), 1, 13, 42),
        IndexEntry(stream(20), 1, 21, 43),
    ]


def test_the_last_event_of_a_message_that_was_removed_is_not_that_of_one_sent_again(
    open_log: Open,
) -> None:
    log = open_log(partition_positions=8)
    append(log, sents(3))
    (commit,) = commits_after(log, [[received(1), *sents(2, 10)]])
    log.append([commit._replace(last_events=[LastEvent(stream(1), 2, 4)])])
    assert log.truncate(through=3, limit=9) == 3
    assert log.index_of([stream(1)]) == []
    append(log, sents(1, 1))
    assert log.index_of([stream(1)]) == [IndexEntry(stream(1), 1, 7)]
    assert log.truncate(through=6, limit=9) == 3
    assert log.index_of([stream(1)]) == [IndexEntry(stream(1), 1, 7)]
