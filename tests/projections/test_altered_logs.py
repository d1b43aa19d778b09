"""A rebuild names the record that is missing from a log or was altered, and builds nothing from it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from postroom.adapters.compose.projections import rebuild_projections, verify_projections
from postroom.adapters.compose.store import open_store
from postroom.domain.errors import BrokenLog
from tests.projections.histories import STORY, Store, live
from tests.projections.local_runner import LocalRunner
from tests.support.altered_commits import alter

MAILBOX = "main@test"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    path: Store = tmp_path / "store.db"
    if request.param == "postgres":
        path = request.getfixturevalue("postgres_store")
    live(path, MAILBOX, STORY)
    return path


def run(store: Store, statement: str) -> list[tuple[int, ...]]:
    if str(store).startswith("postgresql:"):
        with psycopg.connect(str(store), autocommit=True, options="-csearch_path=postroom") as database:
            cursor = database.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []
    with closing(sqlite3.connect(store)) as file, file:
        return file.execute(statement).fetchall()


def rebuild(store: Store, *, verify: bool = False, allow_gaps: bool = False) -> int:
    report = rebuild_projections(str(store), verify=verify, allow_gaps=allow_gaps, runner=LocalRunner())
    return report.version


def test_an_intact_log_is_rebuilt_and_verified(store: Store) -> None:
    assert rebuild(store, verify=True)
    assert verify_projections(str(store), runner=LocalRunner()).is_intact


def test_a_missing_commit_is_named_and_left_out_only_on_request(store: Store) -> None:
    active = rebuild(store)
    places = [place for (place,) in run(store, "SELECT place FROM log ORDER BY place")]
    missing = places[len(places) // 2]
    run(store, f"DELETE FROM log WHERE place = {missing}")
    with pytest.raises(BrokenLog, match=f"{MAILBOX} lacks .* the first is {missing % (1 << 40)}\\."):
        rebuild(store)
    with pytest.raises(BrokenLog, match=r"lacks|jumps"):
        verify_projections(str(store), runner=LocalRunner())
    before = open_store(str(store)).read_model_store().active_version()
    assert before is not None
    assert before.version == active
    assert rebuild(store, allow_gaps=True) > active


@pytest.mark.parametrize("part", ["events", "envelopes"])
def test_an_altered_commit_is_named_when_hashes_are_checked(store: Store, part: str) -> None:
    rebuild(store)
    old, new = (b"shop", b"shot") if part == "events" else (b"alice", b"mallo")
    alter(store, part, lambda text: text.replace(old, new))  # type: ignore[arg-type]  # one of both
    reason = "does not match its hash"
    with pytest.raises(BrokenLog, match=reason):
        rebuild(store, verify=True)
    with pytest.raises(BrokenLog, match=reason):
        verify_projections(str(store), runner=LocalRunner())
    assert not verify_projections(str(store), chain=False, runner=LocalRunner()).is_intact


def test_what_retention_removed_is_not_missing(store: Store) -> None:
    first = run(store, "SELECT min(last) FROM log")[0][0]
    run(store, f"DELETE FROM log WHERE last <= {first}")
    assert rebuild(store, verify=True)
