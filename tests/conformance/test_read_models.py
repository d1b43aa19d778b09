"""The read models conformance suite on SQLite, and what only its file can promise."""

import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.adapters.sqlite.read_models import SqliteReadModels
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import BacklogFilter, DeadLetterFilter, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import EventFilter
from tests.conformance.read_models import Build, ReadModelsConformance, Send
from tests.fixtures import OpenReadModels
from tests.projections import histories
from tests.projections.histories import STORY, VARIED, Receive, build_without_spark, live


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    live(path, "box0@test", [*STORY, *VARIED, Receive("shop")])
    live(path, "box1@test", [*STORY, *VARIED])
    build_without_spark(path)
    return path


@pytest.fixture(params=["few messages", "many messages"])
def models(
    request: pytest.FixtureRequest, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SqliteReadModels]:
    if request.param == "many messages":  # so many that every bound of the query planner is passed
        monkeypatch.setattr("postroom.adapters.sqlite.read_models.FEW", 4)
        monkeypatch.setattr("postroom.adapters.sqlite.read_models.FEW_ENOUGH", 1)
        monkeypatch.setattr("postroom.adapters.sql.search.MAX_BRANCHES", 2)
    opened = SqliteReadModels(store)
    yield opened
    opened.close()


@pytest.fixture
def build(store: Path) -> Build:
    return lambda: build_without_spark(store)


@pytest.fixture
def send(store: Path) -> Send:
    def send_one(message: NewMessage) -> None:
        histories.send(store, "box0@test", [message])

    return send_one


class TestSqliteReadModels(ReadModelsConformance):
    pass


def test_before_the_first_rebuild_every_question_says_what_to_run(
    tmp_path: Path, read_models: OpenReadModels
) -> None:
    histories.send(tmp_path / "store.db", "main@test", [NewMessage(topic="shop", payload=b"")])
    models = read_models(tmp_path / "store.db")
    for ask in (
        lambda: models.search(EventFilter()),
        lambda: models.backlog(BacklogFilter()),
        lambda: models.dead_letters(DeadLetterFilter()),
        models.stats,
    ):
        with pytest.raises(NotFound, match="postroom project rebuild"):
            ask()
    status = models.status()
    assert status.active is None
    assert [each.lag for each in status.lags] == [each.head for each in status.lags]


def test_the_file_is_readable_by_its_owner_only(store: Path) -> None:
    assert stat.S_IMODE(views_path(store).stat().st_mode) == 0o600


def test_a_file_that_is_no_database_is_reported(store: Path, read_models: OpenReadModels) -> None:
    views_path(store).write_bytes(b"not a database, but long enough to be taken for one" * 100)
    for suffix in ("-wal", "-shm"):
        views_path(store).with_name(views_path(store).name + suffix).unlink(missing_ok=True)
    with pytest.raises(Unavailable, match=r"can't be read.*rebuild"):
        read_models(store).search(EventFilter())


def test_every_index_of_the_rfc_is_there(store: Path) -> None:
    connection = sqlite3.connect(views_path(store))
    indexed = {
        connection.execute(f"SELECT name FROM pragma_index_info('{name}') WHERE seqno = 0").fetchone()[0]
        for (name,) in connection.execute("SELECT name FROM pragma_index_list('mailbox_v1')")
    }
    connection.close()
    assert {"timestamp", "topic", "principal", "correlation_id", "trace_id", "message_id"} <= indexed
