"""Read models know the log that they were built from: one that was replaced or cut is not followed."""

import os
import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from postroom.adapters.cli.values import INTEGRITY, exit_code
from postroom.adapters.compose.projections import rebuild_projections, verify_projections
from postroom.domain.errors import BrokenLog
from postroom.projections.follow import Follower
from tests.projections import following
from tests.projections.histories import (
    POISON,
    STORY,
    VARIED,
    Store,
    begin,
    fold_all,
    live,
    log_reader,
    new_follower,
    reference,
    take_extents,
)
from tests.projections.local_runner import LocalRunner
from tests.support.altered_commits import alter
from tests.support.fixtures import OpenReadModels
from tests.support.replaced_logs import commit_ends, cut, run_sql

BOX = "box0@test"
REPLACED = (
    rf"include position \d+ of mailbox {BOX}, but its log "
    r"(has another commit there|ends at position \d+) now: it was replaced or cut"
)
REBUILD = "rebuild them with `postroom views rebuild`"


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    return tmp_path / "store.db"


@pytest.fixture
def built(store: Store) -> Store:
    """A store whose read models were followed to the end of its log."""
    live(store, BOX, STORY)
    following.build(store, take_extents(store))
    live(store, BOX, POISON)
    with closing(new_follower(store)) as follower:
        follower.advance()
    return store


def catalog(store: Store) -> Store:
    """Return the database with the catalog of the read models."""
    return store if isinstance(store, str) else Path(f"{store}-views")


def replace(store: Store) -> None:
    """Replace the log by an older copy, in which other messages were sent afterwards, and more of them."""
    cut(store, commit_ends(store)[3])
    live(store, BOX, VARIED)


def shorten(store: Store) -> None:
    """Replace the log by an older copy."""
    cut(store, commit_ends(store)[-3])


def restore_last(store: Store) -> None:
    """Replace the last commit by another one of the same positions."""
    ends = commit_ends(store)
    cut(store, ends[-2])
    live(store, BOX, [])
    run_sql(store, f"DELETE FROM log WHERE last > {ends[-1]}")
    assert commit_ends(store)[-1] == ends[-1]


def stops(follower: Follower) -> str:
    """Return why a follower stops."""
    with closing(follower), pytest.raises(BrokenLog, match=REPLACED) as raised:
        follower.advance()
    assert exit_code(raised.value) == INTEGRITY
    return str(raised.value)


@pytest.mark.parametrize("change", [replace, shorten, restore_last])
def test_a_log_that_was_replaced_or_cut_is_not_followed_until_a_rebuild(
    built: Store, change: Callable[[Store], None]
) -> None:
    before = following.rows(built)
    change(built)
    assert REBUILD in stops(new_follower(built))
    assert following.rows(built) == before
    rebuild_projections(str(built), runner=LocalRunner())
    live(built, BOX, POISON)
    with closing(new_follower(built)) as follower:
        follower.advance()
    assert following.rows(built) == reference(built).rows


def test_a_follower_stops_when_the_log_is_replaced_while_it_waits(built: Store) -> None:
    with closing(new_follower(built)) as follower:
        assert not follower.step()
        replace(built)
        with pytest.raises(BrokenLog, match=REPLACED):
            follower.step()


def test_a_log_that_is_replaced_while_a_batch_is_read_is_not_applied(
    built: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    live(built, BOX, POISON)
    fold = Follower._fold

    def fold_after_replacement(*arguments: object) -> object:
        monkeypatch.undo()
        replace(built)
        return fold(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Follower, "_fold", fold_after_replacement)
    before = following.rows(built)
    stops(new_follower(built))
    assert following.rows(built) == before


def test_a_store_file_that_is_replaced_by_an_older_copy_stops_the_follower_that_runs(tmp_path: Path) -> None:
    store, copy = tmp_path / "store.db", tmp_path / "copy.db"
    live(store, BOX, STORY)
    following.build(store, take_extents(store))
    shutil.copy(store, copy)
    live(copy, BOX, VARIED)
    live(store, BOX, POISON)
    with closing(new_follower(store)) as follower:
        follower.advance()
        os.replace(copy, store)
        with pytest.raises(BrokenLog, match=REPLACED):
            follower.advance()


def test_a_cursor_in_the_middle_of_a_commit_is_compared(store: Store) -> None:
    live(store, BOX, STORY)
    before, end = next((before, end) for before, end in pairwise(commit_ends(store)) if end > before + 1)
    extents = log_reader(store).extents({BOX: end - 1})
    following.build(store, extents)
    with closing(new_follower(store)) as follower:
        follower.advance()
    assert following.rows(store) == reference(store).rows
    following.build(store, extents)
    cut(store, before)
    live(store, BOX, VARIED)
    stops(new_follower(store))


def test_a_log_of_another_mailbox_is_not_followed(built: Store) -> None:
    run_sql(built, "UPDATE mailbox_names SET name = 'other@test'")
    says = "that log is one of other@test now"
    with closing(new_follower(built)) as follower, pytest.raises(BrokenLog, match=says):
        follower.advance()


def test_a_log_that_is_gone_is_named(built: Store) -> None:
    run_sql(built, "DELETE FROM log", "DELETE FROM mailbox_names")
    with closing(new_follower(built)) as follower, pytest.raises(BrokenLog, match="has no such log now"):
        follower.advance()


def test_an_unknown_hash_is_filled_in_at_the_next_start_without_new_records(built: Store) -> None:
    run_sql(catalog(built), "UPDATE projection_cursor SET chain = NULL")
    before = following.rows(built)
    with closing(new_follower(built)) as follower:
        follower.advance()
        assert follower.counts.events == 0
    assert following.rows(built) == before
    restore_last(built)
    stops(new_follower(built))


def test_a_cursor_that_an_earlier_release_moved_is_filled_in_again(built: Store) -> None:
    stale = run_sql(catalog(built), "SELECT position FROM projection_cursor")[0][0] - 1
    run_sql(catalog(built), f"UPDATE projection_cursor SET chain = '{stale}:{'ab' * 32}'")
    with closing(new_follower(built)) as follower:
        follower.advance()
    restore_last(built)
    stops(new_follower(built))


@pytest.mark.parametrize("change", [replace, shorten])
def test_an_unknown_hash_is_not_filled_in_from_a_log_that_contradicts_it(
    built: Store, change: Callable[[Store], None]
) -> None:
    run_sql(catalog(built), "UPDATE projection_cursor SET chain = NULL, at = at + 1")
    change(built)
    stops(new_follower(built))


def test_what_retention_removed_is_not_compared(built: Store) -> None:
    live(built, BOX, POISON)
    end = run_sql(catalog(built), "SELECT max(position) FROM projection_cursor")[0][0]
    through = min(last for last in commit_ends(built) if last > end)
    run_sql(
        built,
        f"UPDATE mailbox_names SET removed_through = {through}",
        f"DELETE FROM log WHERE last <= {through}",
    )
    with closing(new_follower(built)) as follower:
        follower.advance()


def test_a_verification_names_a_log_that_was_replaced_or_cut(built: Store) -> None:
    assert verify_projections(str(built), runner=LocalRunner()).is_intact
    restore_last(built)
    for chain in (True, False):
        with pytest.raises(BrokenLog, match=REPLACED):
            verify_projections(str(built), chain=chain, runner=LocalRunner())


def test_a_verification_goes_to_the_end_of_the_log(built: Store) -> None:
    live(built, BOX, [*POISON, *VARIED])
    assert verify_projections(str(built), runner=LocalRunner()).is_intact
    alter(built, "envelopes", lambda text: text.replace(b"STRASSE", b"STRESSA"))
    with pytest.raises(BrokenLog, match="does not match its hash"):
        verify_projections(str(built), runner=LocalRunner())


def test_an_interrupted_rebuild_is_not_continued_from_another_log(store: Store) -> None:
    live(store, BOX, STORY)
    with begin(store) as version:
        fold_all(store, version)
    replace(store)
    with pytest.raises(BrokenLog, match=REPLACED):
        rebuild_projections(str(store), runner=LocalRunner())
    assert rebuild_projections(str(store), runner=LocalRunner()).version > version.version
    assert following.rows(store) == reference(store).rows


def test_the_status_tells_of_a_log_that_was_replaced(built: Store, read_models: OpenReadModels) -> None:
    assert [each.is_same_log for each in read_models(built).status().lags] == [True]
    restore_last(built)
    (lag,) = read_models(built).status().lags
    assert (lag.lag, lag.is_same_log) == (0, False)
