"""What the PostgreSQL event log promises beyond the conformance suite."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from random import Random
from typing import Any
from urllib.parse import quote, urlsplit

import psycopg
import pytest
from psycopg import sql

from postroom.adapters.compose import list_mailboxes
from postroom.adapters.postgres import event_log, log_connections
from postroom.adapters.postgres.database import Connection, connect
from postroom.adapters.postgres.errors import unavailable
from postroom.adapters.postgres.event_log import PostgresEventLog, mailbox_names
from postroom.application.mailbox.codec import to_records
from postroom.domain.commit import GENESIS, Commit, LastEvent, verify_chain
from postroom.domain.errors import BrokenLog, DuplicateRecord, NotFound, Unavailable, WrongPosition
from tests.conformance.log_store import ONE, TWO
from tests.conformance.records import after, append, append_each, commits_after, mixed, received, sent, stream
from tests.integration.postgres.event_logs import Open, partitions, sents
from tests.support.servers.postgres_proxy import Proxy


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
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )


def test_connections_that_were_ended_are_made_again(open_log: Open, database: Connection) -> None:
    log = open_log()
    records = append(log, sents(3))
    end_all(database)
    assert list(log.read()) == records
    more = after(log, sents(3, 10))
    log.append(more)
    assert list(log.read()) == records + [record for commit in more for record in to_records(commit)]


def append_in_thread(
    pool: ThreadPoolExecutor, log: PostgresEventLog, commits: Sequence[Commit]
) -> "Future[None]":
    return pool.submit(log.append, commits)


def test_an_append_whose_caller_was_lost_is_ended_before_it_is_repeated(
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
        (lost,) = database.execute("SELECT pid FROM pg_locks WHERE NOT granted").fetchone() or (0,)
        proxy.cut()  # the server still means to carry it out
        wait_until(database, f"{waiting} AND pid <> {lost}")
        assert database.execute("SELECT pid FROM pg_stat_activity WHERE pid = %s", (lost,)).fetchone() is None
        blocking.rollback()
        appending.result()
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
        appending.result()
        with pytest.raises(WrongPosition, match="expected position 3, but its log ends at 5"):
            log.append(late)
        log.append(after(log, sents(1, 20)))
        assert verify_chain(log.commits(), GENESIS, 1)[0] == 6
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


def test_of_large_commits_few_are_fetched_at_a_time(open_log: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    log, sizes, random = open_log(ONE), list[int](), Random(1)
    records = append_each(log, [sent(number, envelope=random.randbytes(60_000)) for number in range(1, 31)])
    fetch = log_connections.LogConnections.fetch

    def spy(connections: Any, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        rows = fetch(connections, statement, **values)
        sizes.append(len(rows))
        return rows

    monkeypatch.setattr(log_connections.LogConnections, "fetch", spy)
    for most, expected in ((1, 1), (150_000, 3), (event_log.CHUNK_BYTES, 30)):
        monkeypatch.setattr(event_log, "CHUNK_BYTES", most)
        sizes.clear()
        assert list(log.read()) == records
        assert max(sizes) == expected


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
