"""The Spark benchmark compares like with like: a log as engines write it, and peers with our result."""

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom.adapters.compose import is_database
from postroom.adapters.compose.projections import rebuild_projections
from postroom.domain.record import Record
from tests.benchmarks.follow import (
    SAMPLED_TURNS,
    TURN_SECONDS,
    following,
    latencies,
    wait_until_caught_up,
)
from tests.benchmarks.long_log import build_long_log
from tests.benchmarks.options import Interleave
from tests.benchmarks.pipeline.postgres import clean_up
from tests.benchmarks.spark import run_peer
from tests.projections.histories import open_log

ROOT = Path(__file__).parents[2]
MESSAGES, ORIGINALS = 2_000, 1_000
PEERS = ("polars", "duckdb")
TABLES = ("mailbox", "header", "topic", "text")
Rows = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    return str(tmp_path / "store.db")


@pytest.fixture(params=["life", "none"])
def interleave(request: pytest.FixtureRequest) -> Interleave:
    way: Interleave = request.param
    return way


def build(
    store: str,
    folder: Path,
    interleave: Interleave = "life",
    messages: int = MESSAGES,
    originals: int = ORIGINALS,
) -> list[Record]:
    """Build a log, of copied lives where there are more messages than originals, and return its records."""
    build_long_log(store, messages, interleave, folder, lambda _: None, originals=originals)
    with closing(open_log(store if is_database(store) else Path(store), "main@local")) as log:
        return list(log.read())


def test_copied_lives_follow_the_originals_without_a_gap_in_position_or_a_step_back_in_time(
    store: str, tmp_path: Path, interleave: Interleave
) -> None:
    records = build(store, tmp_path, interleave)
    assert [record.position for record in records] == list(range(1, len(records) + 1))
    times = [record.at for record in records]
    assert times == sorted(times)


def test_every_copy_is_a_message_of_its_own_whose_events_are_in_order(
    store: str, tmp_path: Path, interleave: Interleave
) -> None:
    lives: dict[bytes, list[Record]] = {}
    for record in build(store, tmp_path, interleave):
        if record.type.startswith("Message"):
            lives.setdefault(record.stream, []).append(record)
    assert len(lives) == MESSAGES
    for life in lives.values():
        assert life[0].type == "MessageSent"
        assert [record.version for record in life] == list(
            range(life[0].version, life[0].version + len(life))
        )
    last = Counter(life[-1].type for life in lives.values())
    assert last["MessageSent"] == MESSAGES * 23 // 1_000  # waiting, or delayed
    assert last["MessageReceived"] == MESSAGES * 2 // 1_000
    assert last["MessageDeadLettered"] == MESSAGES * 4 // 1_000  # and one of five was put back
    assert last["MessageAcked"] == MESSAGES * 971 // 1_000


def test_without_interleaving_everything_is_sent_before_anything_is_received_or_acked(
    store: str, tmp_path: Path
) -> None:
    kinds = [record.type for record in build(store, tmp_path, "none")]
    messages = [kind for kind in kinds if kind.startswith("Message")]
    assert messages[:MESSAGES] == ["MessageSent"] * MESSAGES
    assert "MessageAcked" not in messages[: 2 * MESSAGES - MESSAGES * 23 // 1_000]


def test_in_life_hardly_any_message_is_settled_far_from_where_it_was_sent(store: str, tmp_path: Path) -> None:
    first: dict[bytes, int] = {}
    far = 0
    for record in build(store, tmp_path, messages=8_000, originals=8_000):
        first.setdefault(record.stream, record.position)
        far += record.type == "MessageAcked" and record.position - first[record.stream] > 5_000
    assert far < 8_000 // 100


@pytest.mark.extended
def test_every_peer_makes_the_rows_and_the_indexes_of_the_rebuild(store: str, tmp_path: Path) -> None:
    build(store, tmp_path)
    rebuild_projections(store, only=("search",))
    if is_database(store):
        expected = in_postgres(store, "postroom", f"_v{version_in_postgres(store)}")
    else:
        expected = in_sqlite(Path(f"{store}-views"))
    assert len(expected["mailbox"]) == MESSAGES
    for peer in PEERS:
        target = tmp_path / f"{peer}.db"
        run_peer(peer, store, target)
        if is_database(store):
            assert in_postgres(store, "bench", "") == expected, peer
            clean_up(store)
        else:
            assert in_sqlite(target) == expected, peer


def in_postgres(store: str, schema: str, suffix: str) -> Rows:
    """Return the rows of the search model's tables, and their indexes."""
    with psycopg.connect(store) as connection:
        rows: Rows = {
            table: sorted(
                connection.execute(f'SELECT * FROM {schema}."{table}{suffix}"').fetchall(), key=repr
            )
            for table in TABLES
        }
        statements = connection.execute(
            "SELECT tablename, indexdef FROM pg_indexes WHERE schemaname = %s", [schema]
        ).fetchall()
    rows["indexes"] = sorted(
        (table.removesuffix(suffix), definition.partition(" USING ")[2])
        for table, definition in statements
        if table.removesuffix(suffix) in TABLES
    )
    return rows


def in_sqlite(file: Path) -> Rows:
    """Return the rows of the search model's tables, and their indexes."""
    with closing(sqlite3.connect(file)) as connection:
        schema = connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND type <> 'view'"
        ).fetchall()
        suffix = next(f"_v{name.rpartition('_v')[2]}" for name, _ in schema if name.startswith("mailbox_v"))
        rows: Rows = {
            table: sorted(connection.execute(f"SELECT * FROM {table}{suffix}").fetchall(), key=repr)
            for table in TABLES
        }
        rows["indexes"] = sorted(
            (name, sql) for name, sql in schema if name.startswith((*TABLES, "text_index", "word_index"))
        )
        for index in ("text_index", "word_index"):
            connection.execute(f"INSERT INTO {index}{suffix} ({index}{suffix}) VALUES ('integrity-check')")
    return rows


def version_in_postgres(store: str) -> int:
    with psycopg.connect(store) as connection:
        row = connection.execute("SELECT version FROM postroom.projection WHERE status = 'active'").fetchone()
    assert row is not None
    return int(row[0])


@pytest.mark.extended
def test_every_message_that_is_sampled_while_a_follower_runs_is_found(
    postgres_store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the spawned process imports tests.benchmarks
    build(postgres_store, tmp_path)
    rebuild_projections(postgres_store)
    with following(postgres_store) as check:
        wait_until_caught_up(postgres_store, check)
        seen, rate = latencies(postgres_store, 30 * TURN_SECONDS)
    assert len(seen) == 30 // SAMPLED_TURNS
    assert min(seen) > 0
    assert rate > 0
