"""Adding a projection is adding one file: it is built, followed and verified like those that are there."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from postroom.application.messages import NewMessage
from postroom.projections.projection import MODULES, Row, load_projections
from tests.e2e.conftest import Postroom
from tests.projections.histories import STORY, Send, Store, live, model_store, reference, served_rows

RETRIES = '''
"""Retries: how often deliveries to a topic failed, and when the last one did."""

import polars as pl

from postroom.projections.projection import Column, EventProjection


def fold(records):
    requeued = records.filter(pl.col("event") == "MessageRequeued")
    return requeued.select("mailbox", "topic", pl.lit(1).alias("retries"), pl.col("at").alias("last_at"))


PROJECTION = EventProjection(
    "retries",
    (
        Column("mailbox", "text", "key"),
        Column("topic", "text", "key"),
        Column("retries", "int", "sum"),
        Column("last_at", "int", "max", required=True),
    ),
    indexes=(("retries",),),
    reads=("mailbox", "topic", "event", "at"),
    fold=fold,
)
'''

WAITING = '''
"""Waiting: unsettled messages by who sent them."""

import polars as pl

from postroom.projections.projection import Column, MessageProjection

UNSETTLED = ("ready", "delayed", "in_flight", "dead")


def derive(messages):
    who = pl.col("principal").fill_null("nobody").alias("who")
    unsettled = messages.filter(pl.col("status").is_in(UNSETTLED))
    return unsettled.select(who, pl.lit(1).alias("messages"), pl.col("created_at").alias("oldest_at"))


PROJECTION = MessageProjection(
    "waiting",
    (Column("who", "text", "key"), Column("messages", "int", "sum"), Column("oldest_at", "int", "min")),
    derive=derive,
)
'''


def retries_of(record: Row) -> Iterator[Row]:
    """Yield what a row of the log counts for."""
    if record["event"] == "MessageRequeued":
        yield {name: record[name] for name in ("mailbox", "topic")} | {"retries": 1, "last_at": record["at"]}


def waiting_of(message: Row) -> Iterator[Row]:
    """Yield what a message counts for."""
    if message["status"] in ("ready", "delayed", "in_flight", "dead"):
        who = message["principal"] or "nobody"
        yield {"who": who, "messages": 1, "oldest_at": message["created_at"]}


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, postroom: Postroom) -> Store:
    """A store with a past."""
    store = (
        postroom.store if request.param == "sqlite" else cast(str, request.getfixturevalue("postgres_store"))
    )
    live(store, "main@local", STORY)
    return store


@pytest.fixture
def added(postroom: Postroom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The environment in which two projections have been added, each as one file."""
    folder = tmp_path / "ours"
    folder.mkdir()
    (folder / "retries.py").write_text(RETRIES)
    (folder / "waiting.py").write_text(WAITING)
    environment = {MODULES: "retries, waiting", "PYTHONPATH": str(folder)}
    monkeypatch.setenv(MODULES, environment[MODULES])
    monkeypatch.syspath_prepend(str(folder))
    yield environment
    for name in ("retries", "waiting"):
        sys.modules.pop(name, None)


@pytest.mark.extended
def test_an_added_projection_is_built_followed_and_verified(
    postroom: Postroom, store: Store, added: dict[str, Any]
) -> None:
    here = {**added, "POSTROOM_STORE": str(store)}
    # Elsewhere both engines are shown to do the same: each is tried with one of the stores.
    engine = ("--engine", "local" if store == postroom.store else "spark")
    assert list(load_projections())[-2:] == ["retries", "waiting"]
    report = postroom.ok("views", "rebuild", *engine, "--json", **here).json
    assert report["rows"]["retries"] > 0
    assert report["rows"]["waiting"] > 0
    agree(store)

    more = [Send(NewMessage(topic="shop", payload=b"", principal="carol")), *STORY]
    live(store, "main@local", more)
    postroom.ok("views", "follow", "--once", **here)
    agree(store)
    assert postroom.ok("views", "verify", *engine, "--json", **here).code == 0


def agree(store: Store) -> None:
    """Check that all that is served is what the reference folds make of the log."""
    expected = reference(store, of_records={"retries": retries_of}, of_messages={"waiting": waiting_of}).rows
    assert expected["retries"]
    assert {row["who"] for row in expected["waiting"]} > {"nobody"}
    for name in load_projections():
        assert served_rows(model_store(store), name) == expected[name]


def test_a_fold_that_declares_other_columns_is_refused_by_name_before_anything_is_built(
    postroom: Postroom, added: dict[str, Any]
) -> None:
    live(postroom.store, "main@local", STORY)
    file = Path(added["PYTHONPATH"]) / "retries.py"
    file.write_text(RETRIES.replace('alias("retries")', 'alias("tries")'))
    failed = postroom("views", "rebuild", "--json", **added)
    assert failed.code != 0
    assert "projection retries returned the columns mailbox, topic, tries, last_at" in failed.error["message"]
    assert "retries (int, never null)" in failed.error["message"]


def test_a_record_that_an_added_fold_raises_at_is_parked_by_name_and_the_rest_goes_on(
    postroom: Postroom, added: dict[str, Any]
) -> None:
    live(postroom.store, "main@local", STORY)
    file = Path(added["PYTHONPATH"]) / "retries.py"
    poison = """    if "redriven" in requeued["topic"]:
        raise ValueError("no redriven")
"""
    file.write_text(RETRIES.replace("    return requeued", f"{poison}    return requeued"))
    report = postroom.ok("views", "rebuild", "--engine", "local", "--json", **added).json
    assert report["parked"] == 1
    assert report["rows"]["mailbox"] == len(reference(postroom.store).rows["mailbox"])
    parked = postroom.ok("views", "status", "--json", **added).out
    assert "projection retries failed with ValueError: no redriven" in parked


@pytest.mark.parametrize(
    ("modules", "problem"),
    [
        ("nowhere", "projection nowhere can't be loaded: No module named 'nowhere'"),
        ("json", "projection json can't be loaded: module 'json' has no attribute 'PROJECTION'"),
        ("retries,waiting,again", "Two projections are named retries"),
    ],
)
def test_a_module_that_adds_no_projection_is_told_in_one_sentence(
    postroom: Postroom, added: dict[str, Any], modules: str, problem: str
) -> None:
    live(postroom.store, "main@local", STORY[:1])
    (Path(added["PYTHONPATH"]) / "again.py").write_text(RETRIES)
    failed = postroom("views", "rebuild", "--json", **(added | {MODULES: modules}))
    assert failed.code != 0
    assert problem in failed.error["message"]
