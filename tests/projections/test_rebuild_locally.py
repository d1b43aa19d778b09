"""Rebuilds in this process: what they read, and what becomes the active version."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.messages import NewMessage
from postroom.projections.projection import MODULES
from tests.projections.histories import (
    STORY,
    Store,
    begin,
    build_without_spark,
    fold_all,
    live,
    model_store,
    rebuild,
    reference,
    send,
    take_extents,
)
from tests.projections.local_runner import LocalRunner

MAILBOX = "main@test"
OTHERS = ("backlog", "dead_letters", "activity")
SENDS = """
import polars as pl
from postroom import Column, EventProjection

def fold(records):
    return records.filter(pl.col("event") == "MessageSent").select("mailbox", pl.lit(1).alias("messages"))

PROJECTION = EventProjection(
    "sends",
    (Column("mailbox", "text", "key"), Column("messages", "int", "sum")),
    reads=("mailbox", "event"),
    fold=fold,
)
"""


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "postgres":
        url: str = request.getfixturevalue("postgres_store")
        return url
    return tmp_path / "store.db"


@pytest.fixture
def add_projection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what adds the projection `sends`."""

    def add() -> None:
        name = f"added_{uuid4().hex}"  # modules are loaded once in a process
        (tmp_path / f"{name}.py").write_text(SENDS)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv(MODULES, name)

    return add


def test_a_model_added_to_a_store_that_moved_on_is_built_and_the_others_catch_up(
    store: Store, add_projection: Callable[[], None]
) -> None:
    live(store, MAILBOX, STORY)
    rebuild(store, runner=LocalRunner())
    send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
    add_projection()
    rebuild(store, only=["sends"], runner=LocalRunner())
    expected = reference(store).rows
    assert rows(store, "sends") == [{"mailbox": MAILBOX, "messages": len(expected["mailbox"])}]
    assert {name: rows(store, name) for name in expected} == expected


def test_a_store_is_rebuilt_whose_path_has_wildcards_and_the_parts_of_a_store_they_match_stay(
    tmp_path: Path,
) -> None:
    for name in ("a-b.db", "a?b.db", "a[b]*.db"):
        live(tmp_path / name, MAILBOX, STORY)
    with begin(tmp_path / "a-b.db") as build:
        fold_all(tmp_path / "a-b.db", build)
    staged = build.parts_done()
    for name in ("a?b.db", "a[b]*.db"):
        store = tmp_path / name
        build_without_spark(store)
        expected = reference(store).rows
        assert {model: rows(store, model) for model in expected} == expected
    assert build.parts_done() == staged


def test_a_model_that_is_no_longer_known_is_left_out_by_a_rebuild_of_all(
    store: Store, add_projection: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    live(store, MAILBOX, STORY)
    add_projection()
    rebuild(store, runner=LocalRunner())
    monkeypatch.delenv(MODULES)
    send(store, MAILBOX, [NewMessage(topic="shop", payload=b"")])
    rebuild(store, runner=LocalRunner())
    active = model_store(store).active_version()
    assert active is not None
    assert "sends" not in active.models
    expected = reference(store).rows
    assert {name: rows(store, name) for name in expected} == expected


@pytest.mark.parametrize("model", ["activity", "backlog", "search"])
def test_one_model_of_a_store_that_moved_on_is_rebuilt_and_the_others_catch_up(
    store: Store, model: str
) -> None:
    live(store, MAILBOX, STORY)
    rebuild(store, runner=LocalRunner())
    live(store, "later@test", STORY)
    rebuild(store, only=[model], runner=LocalRunner())
    active = model_store(store).active_version()
    assert active is not None
    assert active.positions == {extent.name: extent.last for extent in take_extents(store)}
    expected = reference(store).rows
    assert {name: rows(store, name) for name in expected} == expected


def test_views_show_the_active_version_whichever_it_is(store: Store) -> None:
    models = {**dict.fromkeys(("mailbox", "messages"), "mailbox"), **dict.fromkeys(OTHERS)}

    def assert_shown() -> None:
        shown = {view: view_size(store, view) for view in models}
        assert shown == {view: len(rows(store, model or view)) for view, model in models.items()}

    live(store, MAILBOX, STORY)
    rebuild(store, runner=LocalRunner())
    assert_shown()
    live(store, "later@test", STORY)
    rebuild(store, only=["backlog"], runner=LocalRunner())
    rebuild(store, runner=LocalRunner())
    assert_shown()
    model_store(store).roll_back()
    assert_shown()
    rebuild(store, only=["backlog"], to_position=["20"], runner=LocalRunner())
    assert view_size(store, "backlog") == len(rows(store, "backlog"))
    with pytest.raises((sqlite3.Error, psycopg.Error)):
        view_size(store, "activity")


def view_size(store: Store, view: str) -> int:
    """Return the number of rows of a view, by SQL."""
    statement = f"SELECT count(*) FROM {view}"
    if isinstance(store, Path):
        with closing(sqlite3.connect(views_path(store))) as file:
            return int(file.execute(statement).fetchone()[0])
    with psycopg.connect(store, options="-csearch_path=postroom") as database:
        return int(database.execute(statement.encode()).fetchone()[0])  # type: ignore[index]  # it has one row


def rows(store: Store, model: str) -> list[dict[str, object]]:
    """Return the rows of a model of the active version."""
    return [row for frame in model_store(store).rows(model) for row in frame.to_dicts()]
