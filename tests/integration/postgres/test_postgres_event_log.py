"""What the PostgreSQL event log promises beyond the conformance suite."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import islice
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

from postroom.adapters.compose import list_mailboxes
from postroom.adapters.postgres import event_log, log_connections
from postroom.adapters.postgres.database import Connection, connect, unavailable
from postroom.adapters.postgres.event_log import PostgresEventLog, mailbox_names
from postroom.application.mailbox.codec import to_records
from postroom.domain.commit import GENESIS, Commit, IndexEntry, LastEvent, verify_chain
from postroom.domain.errors import BrokenLog, DuplicateRecord, Fenced, NotFound, Unavailable, WrongPosition
from postroom.domain.message import MessageAcked
from tests.conformance.log_store import ONE, TWO
from tests.conformance.records import after, append, append_each, commits_after, mixed, received, sent, stream
from tests.support.servers.postgres_proxy import Proxy

Open = Callable[..., PostgresEventLog]
PARTITIONS = "SELECT relid::text FROM pg_partition_tree(%s) WHERE isleaf AND level = 1 ORDER BY 1"


@pytest.fixture
def url(postgres_store: str) -> str:
    return postgres_store


@pytest.fixture
def open_log(url: str) -> Iterator[Open]:
    """Open logs; all are closed when the test is over."""
    with ExitStack() as opened:
        yield lambda mailbox=ONE, url=url, **options: opened.enter_context(
            closing(PostgresEventLog(url, mailbox, **options))
        )


@pytest.fixture
def database(url: str) -> Iterator[Connection]:
    """Somebody else's connection."""
    with closing(psycopg.connect(url, autocommit=True)) as connection:
        yield connection


def sents(count: int, start: int = 0) -> list[Any]:
    return [sent(number) for number in range(start, start + count)]


def partitions(database: Connection) -> list[str]:
    """Return the names of the log's partitions, after checking that the index has the same."""
    found = [
        [name for (name,) in database.execute(PARTITIONS, (table,))]
        for table in ("postroom.log", "postroom.log_index")
    ]
    assert found[1] == [name.replace("log_", "log_index_") for name in found[0]]
    return [name.removeprefix("postroom.") for name in found[0]]


def wait_until(database: Connection, question: str) -> None:
    for _ in range(6_000):
        if (database.execute(question.encode()).fetchone() or (False,))[0]:
            return
        time.sleep(0.005)
    pytest.fail(f"It never came true: {question}")


# -- nobody waits ---


@pytest.mark.parametrize(
    "held",
    [
        "SELECT count(*) FROM postroom.log, postroom.mailbox_names",
        "SELECT * FROM postroom.log FOR UPDATE",
        "SELECT * FROM postroom.mailbox_names FOR UPDATE",
    ],
)
def test_appends_wait_for_no_transaction_that_idles_with_a_snapshot_or_rows_of_ours(
    open_log: Open, url: str, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    monkeypatch.setattr(log_connections, "TIMEOUT", "5s")  # what waits fails
    log = open_log(partition_positions=8)
    append(log, sents(3))
    with closing(psycopg.connect(url)) as idle:
        idle.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        idle.execute(held.encode())
        for start in range(10, 100, 10):
            append(log, sents(10, start))
        with closing(PostgresEventLog(url, TWO)) as other:
            append(other, sents(1))
        assert idle.execute("SELECT count(*) FROM postroom.log").fetchone() == (1,)
    head = log.head()
    assert head is not None
    assert head.position == 93


def test_an_append_takes_the_weakest_lock_that_writing_needs_and_no_other(
    open_log: Open, database: Connection
) -> None:
    log = open_log()
    append(log, sents(1))
    with database.transaction():
        # It conflicts with every lock stronger than that of an insert.
        database.execute("LOCK TABLE postroom.log, postroom.log_index IN SHARE UPDATE EXCLUSIVE MODE")
        database.execute(
            "LOCK TABLE postroom.mailbox_names, postroom.snapshot, postroom.seal IN EXCLUSIVE MODE"
        )
        append(log, sents(10, 10))
    assert len(list(log.read())) == 11


def test_appends_update_and_delete_no_row(open_log: Open, database: Connection) -> None:
    log = open_log(partition_positions=64)
    for start in range(0, 500, 10):
        append(log, sents(10, start))
    log.close()
    # A connection's figures are there once it has ended.
    inserted = "SELECT sum(n_tup_ins) = {} FROM pg_stat_all_tables WHERE relname LIKE '{}'"
    wait_until(database, inserted.format(50, "log\\_1\\_%"))
    wait_until(database, inserted.format(500, "log\\_index\\_1\\_%"))
    changed = database.execute(
        "SELECT sum(n_tup_upd), sum(n_tup_del), sum(n_dead_tup) FROM pg_stat_all_tables "
        "WHERE schemaname = 'postroom'"
    )
    assert changed.fetchone() == (0, 0, 0)


# -- partitions ---


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


# -- finding ---


def test_a_stream_is_found_by_its_index_though_a_new_partition_has_no_statistics(
    open_log: Open, database: Connection
) -> None:
    log = open_log(partition_positions=2_000)
    append(log, sents(5_000))
    log.close()
    log = open_log()
    assert len(log.read_stream(stream(77))) == 1
    assert log.existing_streams([stream(77), stream(4_999), stream(9_999)]) == {stream(77), stream(4_999)}
    log.close()
    wait_until(
        database,
        "SELECT sum(idx_tup_read) >= 3 FROM pg_stat_all_indexes WHERE relname LIKE 'log\\_index\\_1\\_%'",
    )
    scanned = database.execute(
        "SELECT sum(seq_tup_read) FROM pg_stat_all_tables WHERE relname LIKE 'log\\_index\\_1\\_%'"
    )
    assert scanned.fetchone() == (0,)


# -- connections that are lost ---


def end_all(database: Connection) -> None:
    database.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def test_a_connection_that_was_lost_is_made_again_and_only_an_append_says_so(
    open_log: Open, database: Connection
) -> None:
    log = open_log()
    records = append(log, sents(3))
    end_all(database)
    assert list(log.read()) == records
    more = after(log, sents(3, 10))
    with pytest.raises(Unavailable, match="can't be reached"):
        log.append(more)
    log.append(more)
    assert list(log.read()) == records + [record for commit in more for record in to_records(commit)]


def append_in_thread(
    pool: ThreadPoolExecutor, log: PostgresEventLog, commits: Sequence[Commit]
) -> "Future[None]":
    return pool.submit(log.append, commits)


def test_an_append_whose_caller_was_lost_is_ended_before_the_log_is_read_again(
    open_log: Open, url: str, database: Connection
) -> None:
    with Proxy(url) as proxy, ThreadPoolExecutor(1) as pool, closing(psycopg.connect(url)) as blocking:
        log = open_log(url=proxy.url)
        records = append(log, sents(3))
        blocking.execute("LOCK TABLE postroom.log IN SHARE MODE")
        late = after(log, sents(2, 10))
        appending = append_in_thread(pool, log, late)
        waiting = "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted"
        wait_until(database, waiting)
        proxy.cut()
        with pytest.raises(Unavailable, match="can't be reached"):
            appending.result()
        assert database.execute(waiting).fetchone() == (True,)  # the server still means to carry it out
        head = log.head()
        assert head is not None
        assert head.position == 3
        blocking.rollback()
        log.append(late)
        assert list(log.read()) == records + [record for commit in late for record in to_records(commit)]
        log.close()


def test_an_append_whose_answer_was_lost_is_not_repeated(
    open_log: Open, url: str, database: Connection
) -> None:
    with Proxy(url) as proxy, ThreadPoolExecutor(1) as pool:
        log = open_log(url=proxy.url)
        append(log, sents(3))
        late = after(log, sents(2, 10))
        proxy.hold_answers()
        appending = append_in_thread(pool, log, late)
        wait_until(database, "SELECT count(*) = 2 FROM postroom.log")
        proxy.cut()
        with pytest.raises(Unavailable, match="can't be reached"):
            appending.result()
        with pytest.raises(WrongPosition, match="expected position 3, but its log ends at 5"):
            log.append(late)
        assert verify_chain(log.commits(), GENESIS, 1)[0] == 5
        log.close()


# -- what is promised of an append ---


def test_durability_is_what_was_asked_for_whatever_the_database_has_as_its_default(
    open_log: Open, url: str, database: Connection
) -> None:
    name = sql.Identifier(urlsplit(url).path[1:])
    database.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
    log = open_log()
    assert log.durability == "power-cut"
    for number in range(20):
        before = database.execute("SELECT pg_current_wal_insert_lsn()").fetchone() or ("",)
        append(log, sents(1, number))
        flushed = database.execute("SELECT pg_current_wal_flush_lsn() > %s::pg_lsn", before)
        assert flushed.fetchone() == (True,)
    assert open_log(TWO, durability="relaxed").durability == "process-crash"


def test_an_append_is_one_statement_whatever_it_changes(
    open_log: Open, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = open_log()
    append(log, sents(3))
    commits = commits_after(log, [[*sents(2, 10), received(1)], sents(2, 20)])
    last = [LastEvent(stream(n), n + 1, 6) for n in (0, 1)]
    log.append([commits[0]._replace(last_events=last), commits[1]])
    assert database.execute("SELECT count(*) FROM postroom.log_index").fetchone() == (9,)
    transactions = database.execute(
        "SELECT count(DISTINCT xmin::text) FROM ("
        "SELECT xmin FROM postroom.log WHERE place & 1099511627775 > 3 "
        "UNION ALL SELECT xmin FROM postroom.log_index WHERE place & 1099511627775 > 3) AS rows"
    )
    assert transactions.fetchone() == (1,)


def test_a_duplicate_leaves_no_trace_of_its_append(open_log: Open, database: Connection) -> None:
    log = open_log()
    append(log, sents(3))
    (doubtful,) = commits_after(log, [[*sents(20, 10), sent(1)]])
    with pytest.raises(DuplicateRecord):
        log.append([doubtful._replace(last_events=[LastEvent(stream(0), 1, 5)])])
    assert database.execute("SELECT count(*) FROM postroom.log_index").fetchone() == (3,)
    assert len(list(log.commits())) == 1


@pytest.mark.parametrize("damage", [b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd" + b"\xff" * 40])
def test_a_commit_that_can_not_be_decompressed_is_named(
    open_log: Open, database: Connection, damage: bytes
) -> None:
    log = open_log()
    append_each(log, sents(3))
    database.execute("UPDATE postroom.log SET events = %s WHERE place & 1099511627775 = 2", (damage,))
    with pytest.raises(BrokenLog, match="commit at position 2 can't be decompressed"):
        list(log.read())
    with pytest.raises(BrokenLog, match="commit at position 2"):
        log.at_positions([2])
    assert len(list(log.read(limit=1))) == 1


def test_streams_that_are_no_ids_are_not_found(open_log: Open) -> None:
    log = open_log()
    append(log, sents(3))
    assert log.existing_streams([b"", b"x" * 15, b"x" * 17, stream(1)]) == {stream(1)}


# -- who may do what ---


@pytest.fixture
def restricted_url(url: str, database: Connection) -> Iterator[str]:
    """Return the address as a user with the rights that the manual names, and none to create anything."""
    role = sql.Identifier(f"{urlsplit(url).path[1:]}_app")
    for statement in (
        "CREATE ROLE {}",
        "REVOKE ALL ON SCHEMA public FROM PUBLIC",
        "GRANT USAGE ON SCHEMA postroom TO {}",
        "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA postroom TO {}",
        "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA postroom TO {}",
    ):
        database.execute(sql.SQL(statement).format(role))
    yield f"{url}?options={quote(f'-c role={role.as_string()[1:-1]}')}"
    database.execute(sql.SQL("DROP OWNED BY {0}").format(role))
    database.execute(sql.SQL("DROP ROLE {0}").format(role))


def test_who_appends_and_removes_needs_no_right_to_create_or_drop_tables(
    open_log: Open, restricted_url: str, database: Connection
) -> None:
    log = open_log(url=restricted_url, partition_positions=8)
    records = append_each(log, mixed(40, ONE))
    assert log.truncate(through=20, limit=100) == 16
    assert list(log.read()) == records[16:]
    assert partitions(database)[0] == "log_1_2"
    with closing(psycopg.connect(restricted_url, autocommit=True)) as connection:
        for forbidden in (
            "CREATE TABLE postroom.mine ()",
            "DROP TABLE postroom.log_1_2",
            "TRUNCATE postroom.log_index",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                connection.execute(forbidden)


def test_a_user_without_rights_is_told_so(open_log: Open, restricted_url: str, database: Connection) -> None:
    role = sql.Identifier(f"{urlsplit(restricted_url).path[1:]}_app")
    database.execute(sql.SQL("REVOKE USAGE ON SCHEMA postroom FROM {}").format(role))
    with pytest.raises(
        Unavailable, match="denies a privilege that Postroom needs: permission denied for schema postroom"
    ):
        open_log(url=restricted_url)


# -- opening ---


def test_opening_for_reading_creates_nothing_and_writes_nothing(open_log: Open, url: str) -> None:
    with pytest.raises(NotFound, match=f"has no mailbox {ONE}; send a message to create it"):
        open_log(create_missing=False)
    assert mailbox_names(url) == []
    append(open_log(), sents(1))
    reader = open_log(create_missing=False)
    for write in (lambda: append(reader, sents(1, 10)), lambda: reader.truncate(1, 1)):
        with pytest.raises(Unavailable, match="opened read-only"):
            write()


def test_opening_a_mailbox_again_and_again_uses_no_ids_up(open_log: Open, database: Connection) -> None:
    for _ in range(5):
        open_log(ONE).close()
    open_log(TWO)
    found = database.execute("SELECT name, id FROM postroom.mailbox_names ORDER BY id").fetchall()
    assert found == [(ONE, 1), (TWO, 2)]


def test_a_closed_log_says_so(open_log: Open) -> None:
    log = open_log()
    log.close()
    with pytest.raises(Unavailable, match="was closed; open the store again"):
        log.head()


def test_a_value_that_cannot_be_sent_is_not_taken_for_a_lost_connection(url: str) -> None:
    with pytest.raises(Unavailable) as caught, closing(connect(url, "test")) as database, unavailable(url):
        database.execute("SELECT %s::text", ["\0"])
    assert "NUL" in str(caught.value)
    assert "can't be reached" not in str(caught.value)


def test_a_lost_connection_is_reported_as_such(url: str) -> None:
    database = connect(url, "test")
    database.close()
    with pytest.raises(Unavailable, match="can't be reached"), unavailable(url):
        database.execute("SELECT 1")


def test_mailboxes_are_sorted_by_name(open_log: Open, url: str) -> None:
    open_log(TWO)
    open_log(ONE)
    assert mailbox_names(url) == list_mailboxes(url) == [ONE, TWO]


def test_a_gap_that_is_longer_than_what_is_read_at_once_is_not_taken_for_the_end(
    open_log: Open, database: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_CHUNK_POSITIONS", 3)
    log = open_log()
    append_each(log, sents(20))
    database.execute("DELETE FROM postroom.log WHERE last BETWEEN 5 AND 15")
    assert [commit.last for commit in log.commits()] == [*range(1, 5), *range(16, 21)]
    with pytest.raises(BrokenLog, match="jumps from position 4 to 16"):
        verify_chain(log.commits(), GENESIS, 1)


def test_a_commit_whose_last_position_was_altered_is_read_once(open_log: Open, database: Connection) -> None:
    log = open_log()
    append_each(log, sents(3))
    database.execute("UPDATE postroom.log SET last = 1 WHERE last = 3")
    assert [commit.first for commit in islice(log.commits(), 9)] == [1, 2, 3]
