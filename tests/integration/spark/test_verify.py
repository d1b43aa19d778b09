"""Verifying finds any served row that is not what the log amounts to."""

from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from postroom.adapters.compose.projections import verify_projections
from postroom.application.messages import NewMessage
from postroom.domain.errors import NotFound
from postroom.projections.projection import load_projections
from postroom.projections.verify import VerifyReport
from tests.conformance.read_model_store import MAILBOX, fill
from tests.integration.spark.test_rebuild import alter
from tests.projections import histories
from tests.projections.histories import (
    STORY,
    Receive,
    Send,
    Store,
    build_without_spark,
    live,
    new_follower,
    open_log,
    rebuild,
    send,
)

pytestmark = pytest.mark.usefixtures("spark", "small_parts")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so small that messages reach into several."""
    monkeypatch.setattr("postroom.projections.plan.POSITIONS", (40, 40))
    monkeypatch.setattr("postroom.projections.plan.POSITIONS_PER_BUCKET", 60)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.extended)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of either kind, with a past and read models of it."""
    made = request.getfixturevalue("postgres_store") if request.param == "postgres" else tmp_path / "store.db"
    fill(made)
    build_without_spark(made)
    return cast(Store, made)


def test_what_was_built_is_intact_and_stays_so_when_it_is_brought_on(store: Store) -> None:
    report = verify(str(store))
    assert report.is_intact
    assert {name: found.rows for name, found in report.models.items()} == {
        name: len(rows) for name, rows in histories.reference(store).rows.items()
    }
    assert report.engine.rows == report.models["backlog"].rows
    live(store, MAILBOX, [*STORY, Send(NewMessage(topic="shop", payload=b"")), Receive("shop")])
    with closing(new_follower(store, version=report.version)) as follower:
        follower.advance()
    again = verify(str(store))
    assert again.is_intact, again.summary()
    assert again.models["mailbox"].rows > report.models["mailbox"].rows
    assert again.skipped == []


def test_one_altered_row_of_each_model_is_found_with_its_key_column_and_values(store: Store) -> None:
    alter(store, "UPDATE {mailbox} SET principal = 'mallory' WHERE message_id = 'order-1'")
    alter(store, "UPDATE {dead_letters} SET reason = 'none of your business' WHERE message_id = 'order-1'")
    alter(store, "UPDATE {backlog} SET ready = ready + 1 WHERE topic = 'later'")
    alter(store, "UPDATE {activity} SET events = 0 WHERE period = 'day' AND event = 'MessageExpired'")
    report = verify(str(store))
    assert not report.is_intact
    assert {name: found.different for name, found in report.models.items()} == dict.fromkeys(
        load_projections(), 1
    )
    assert differences(report) == {
        "mailbox": ("principal", "'mallory'", "None"),
        "dead_letters": ("reason", "'none of your business'", "'max_attempts'"),
        "backlog": ("ready", "1", "0"),
        "activity": ("events", "0", "1"),
        "engine": ("ready", "1", "0"),
    }
    assert "principal: stored 'mallory', recomputed None" in report.summary()


def test_rows_that_are_missing_and_rows_that_are_too_many_are_found(store: Store) -> None:
    alter(store, "DELETE FROM {dead_letters}")
    alter(store, "DELETE FROM {mailbox} WHERE message_id = 'order-1'")
    alter(store, "UPDATE {mailbox} SET id = id + 1 WHERE id = (SELECT max(id) FROM {mailbox})")
    report = verify(str(store))
    found = report.models["mailbox"]
    assert (found.missing, found.extra, found.different) == (2, 0, 0) or (found.missing, found.extra) == (
        2,
        1,
    )
    assert report.models["dead_letters"].missing == report.models["dead_letters"].rows > 0


def test_what_retention_removed_since_is_not_missed_and_what_counts_it_is_told(store: Store) -> None:
    with closing(open_log(store, "archive@test")) as log:
        log.truncate(10, 1_000)
    report = verify(str(store))
    assert report.is_intact, report.summary()
    assert "activity" not in report.models
    assert any(each.startswith("activity: retention removed") for each in report.skipped)
    assert any("archive@test" in each for each in report.skipped)


def test_without_read_models_there_is_nothing_to_verify(tmp_path: Path) -> None:
    send(tmp_path / "store.db", MAILBOX, [NewMessage(topic="shop", payload=b"")])
    with pytest.raises(NotFound, match="postroom views rebuild"):
        verify(str(tmp_path / "store.db"))


def test_a_rebuild_that_only_built_some_models_is_verified_as_far_as_it_goes(store: Store) -> None:
    rebuild(store, only=["search"], restart=True)
    assert verify(str(store)).is_intact


def verify(store: str) -> VerifyReport:
    return verify_projections(store, engine="spark")


def differences(report: VerifyReport) -> dict[str, tuple[str | None, str, str]]:
    findings = {**report.models, "engine": report.engine}
    return {
        name: (found.first.column, found.first.stored, found.first.recomputed)
        for name, found in findings.items()
        if found.first is not None
    }
