"""A rebuild names the record that is missing from a log or was altered, and builds nothing from it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from postroom.adapters.compose.projections import rebuild_projections, verify_projections
from postroom.adapters.compose.spark import PostroomEvents, PostroomMessages
from postroom.adapters.compose.store import open_store
from postroom.domain.errors import BrokenLog
from tests.projections.histories import POISON, STORY, Store, live, new_follower
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


def scan(source: type[PostroomEvents | PostroomMessages], store: Store, **options: str) -> int:
    """Read a data source as Spark's tasks do; return the number of rows."""
    opened = source({"path": str(store), **options})
    reader = opened.reader(opened.schema())
    batches = (batch for part in reader.partitions() for batch in reader.read(part))
    return sum(batch.num_rows for batch in batches if isinstance(batch, pa.RecordBatch))


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
    position = missing % (1 << 40)
    says = f"{MAILBOX} lacks what follows position {position - 1}: the next commit begins at {position + 1},"
    with pytest.raises(BrokenLog, match=says):
        rebuild(store)
    for source in (PostroomEvents, PostroomMessages):
        with pytest.raises(BrokenLog, match=says):
            scan(source, store)
        assert scan(source, store, allow_gaps="true")
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
    # Read models have no envelopes that could differ.
    is_intact = verify_projections(str(store), chain=False, runner=LocalRunner()).is_intact
    assert is_intact == (part == "envelopes")


@pytest.mark.parametrize(
    ("commits", "says"),
    [
        (
            "place = (SELECT min(place) FROM log)",
            "begins at position 3, but retention removed only those",
        ),
        ("place = (SELECT max(place) FROM log)", "ends at position .* when it was last closed: its end"),
        ("place > 0", "ends at position 0, but reached"),
    ],
    ids=["first", "last", "all"],
)
def test_a_log_without_its_beginning_or_end_is_refused(store: Store, commits: str, says: str) -> None:
    rebuild(store)
    run(store, f"DELETE FROM log WHERE {commits}")
    with pytest.raises(BrokenLog, match=f"The log of {MAILBOX} {says}"):
        rebuild(store)
    with pytest.raises(BrokenLog, match=says):
        verify_projections(str(store), runner=LocalRunner())
    with pytest.raises(BrokenLog, match=says):
        scan(PostroomEvents, store)
    assert rebuild(store, allow_gaps=True)


def test_a_torn_commit_is_named_by_rebuilds_followers_and_scans(store: Store) -> None:
    rebuild(store)
    live(store, MAILBOX, POISON)
    ((torn,),) = run(store, "SELECT max(place) FROM log")
    half = "substr(events, 1, length(events) / 2)"
    run(store, f"UPDATE log SET events = {half} WHERE place = {torn}")
    says = f"The commit of positions {torn % (1 << 40)} to .* can't be decoded"
    with pytest.raises(BrokenLog, match=says):
        rebuild(store)
    with pytest.raises(BrokenLog, match=says):
        scan(PostroomEvents, store)
    with closing(new_follower(store)) as follower, pytest.raises(BrokenLog, match=says):
        follower.advance()


def test_a_follower_stops_at_a_missing_commit(store: Store) -> None:
    rebuild(store)
    live(store, MAILBOX, POISON)
    ((last,),) = run(store, "SELECT max(last) FROM log")
    run(store, f"DELETE FROM log WHERE last = {last - 1}")
    with (
        closing(new_follower(store)) as follower,
        pytest.raises(BrokenLog, match=f"lacks what follows position {last - 2}"),
    ):
        follower.advance()


def test_what_retention_removed_is_not_missing(store: Store) -> None:
    first = run(store, "SELECT min(last) FROM log")[0][0]
    run(store, f"UPDATE mailbox_names SET removed_through = {first}")
    run(store, f"DELETE FROM log WHERE last <= {first}")
    assert rebuild(store, verify=True)


def test_a_log_under_the_name_of_another_mailbox_is_named(store: Store) -> None:
    rebuild(store)
    run(store, "UPDATE mailbox_names SET name = 'other@test'")
    says = "the log of main@test under the name other@test: the names of mailboxes were altered"
    with pytest.raises(BrokenLog, match=says):
        rebuild(store, allow_gaps=True)
    with pytest.raises(BrokenLog, match=says):
        verify_projections(str(store), runner=LocalRunner())
