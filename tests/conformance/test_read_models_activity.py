"""Activity, dead letters and contexts of the read models on SQLite and PostgreSQL."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from postroom.adapters.compose.queries import open_read_models
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.ingest.redrive import ORIGINAL_SUBJECT
from postroom.application.messages import NewMessage
from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.ports.read_models import ActivityFilter, ReadModels
from postroom.domain.errors import Unavailable
from postroom.projections.projection import Row
from tests.conformance.read_models_activity import ActivityConformance
from tests.projections.histories import (
    POISON,
    STORY,
    Receive,
    Send,
    Settle,
    Step,
    Store,
    build_without_spark,
    live,
    reference,
)
from tests.support.fixtures import CreateDatabase
from tests.support.steps import Operate, Wait

INGESTED = NewMessage(
    topic="shop", payload=b"", message_id="order-1", attrs={ORIGINAL_SUBJECT: "orders.placed"}
)
TWICE: list[Step] = [
    Send(INGESTED),
    *POISON[1:],
    Operate("redrive", "shop"),
    Receive("shop"),
    Settle("nack", 2),
    Wait(300),
    Receive("shop"),
    Settle("nack", 3),
]
"""A message that came from elsewhere dies, is put back and dies again."""


def fill(store: Store) -> None:
    live(store, "box0@test", [*STORY, Wait(2 * 3_600_000), *STORY, Wait(30 * 3_600_000), *STORY])
    live(store, "box1@test", TWICE)
    build_without_spark(store)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("activity") / "store.db"
    fill(path)
    return path


@pytest.fixture(scope="module")
def database(create_shared_database: CreateDatabase, postgres_store_template: str) -> str:
    url = create_shared_database(postgres_store_template)
    fill(url)
    return url


@pytest.fixture(params=["file", "database"])
def store(request: pytest.FixtureRequest) -> Store:
    store: Store = request.getfixturevalue(request.param)
    return store


@pytest.fixture
def models(store: Store) -> Iterator[ReadModels]:
    with closing(open_read_models(str(store))) as opened:
        yield opened


@pytest.fixture
def rows(store: Store) -> list[Row]:
    return reference(store).rows["activity"]


class TestActivity(ActivityConformance):
    """SQLite and PostgreSQL."""


def test_a_dead_letter_tells_its_lineage_and_its_original_subject(models: ReadModels) -> None:
    (letter,) = models.dead_letters(DeadLetterFilter(mailbox="box1@test")).items
    (earlier,) = letter.lineage
    assert (letter.topic, letter.original_subject) == ("shop", "orders.placed")
    assert (earlier.reason, earlier.attempt, earlier.last_error) == ("max_attempts", 2, "timeout after 1 ms")
    assert earlier.redriven_at is not None
    assert letter.redriven_at is not None
    assert letter.first_seen < earlier.at < earlier.redriven_at == letter.redriven_at < letter.last_seen


def test_a_dead_letter_that_was_never_put_back_has_no_lineage(models: ReadModels) -> None:
    letters = models.dead_letters(DeadLetterFilter(mailbox="box0@test")).items
    assert {letter.lineage for letter in letters if letter.redriven == 0} == {()}


def test_read_models_of_an_earlier_release_say_that_they_must_be_rebuilt(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    live(store, "box0@test", POISON)
    build_without_spark(store)
    with closing(sqlite3.connect(views_path(store))) as views, views:
        views.execute("UPDATE projection SET models = NULL")
    with closing(open_read_models(str(store))) as models:
        with pytest.raises(Unavailable, match="postroom views rebuild"):
            models.activity(ActivityFilter())
        with pytest.raises(Unavailable, match="postroom views rebuild"):
            models.dead_letters(DeadLetterFilter())


def test_before_anything_was_counted_there_are_no_contexts(models: ReadModels) -> None:
    assert models.contexts() == ()


def test_a_store_without_read_models_has_no_contexts(tmp_path: Path, postgres_store: str) -> None:
    for store in (tmp_path / "store.db", postgres_store):
        with closing(open_read_models(str(store))) as models:
            assert models.contexts() == ()


def test_a_file_that_an_earlier_release_wrote_has_no_contexts(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    live(store, "box0@test", POISON)
    build_without_spark(store)
    with closing(sqlite3.connect(views_path(store))) as views, views:
        views.execute("DROP TABLE context_backlog")
    with closing(open_read_models(str(store))) as models:
        assert models.contexts() == ()
