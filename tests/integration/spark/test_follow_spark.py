"""Following by a real structured stream: the cursor in the database decides, whatever Spark remembers."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from shutil import rmtree
from threading import Event, Thread

import pytest
from pyspark.sql import SparkSession

from postroom.projections.follow import Follower
from postroom.projections.spark.follow import follow_with_spark
from tests.projections import following
from tests.projections.histories import STORY, VARIED, Store, live, new_follower, reference, take_extents
from tests.support.waiting import wait_until


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    return tmp_path / "store.db"


def test_once_it_ends_where_the_log_ended_and_goes_on_from_there(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    assert follow_once(store, tmp_path / "checkpoint", max_events=10) == ends(store)
    live(store, "box0@test", STORY)
    live(store, "box1@test", VARIED, mode="archive")
    assert follow_once(store, tmp_path / "checkpoint", max_events=1_000) == ends(store)
    assert following.rows(store) == reference(store).rows


def test_what_is_written_while_it_follows_is_there_soon_also_after_a_restart_without_checkpoint(
    spark: SparkSession, store: Store, tmp_path: Path
) -> None:
    live(store, "box0@test", STORY)
    following.build(store)
    checkpoint = tmp_path / "checkpoint"
    for _ in range(2):
        with following_by_spark(store, checkpoint):
            live(store, "box0@test", STORY)
            wait_until(lambda: has_all(store))
        rmtree(checkpoint)
        # Another one was quicker meanwhile.
        live(store, "box1@test", VARIED, mode="archive")
        with closing(new_follower(store)) as other:
            other.advance()
    assert following.rows(store) == reference(store).rows


def follow_once(store: Store, checkpoint: Path, max_events: int) -> dict[str, int]:
    with closing(new_follower(store)) as follower:
        follow_with_spark(follower, Event(), once=True, checkpoint=checkpoint, max_events=max_events)
        return follower.positions()


@contextmanager
def following_by_spark(store: Store, checkpoint: Path) -> Iterator[Follower]:
    stop, follower = Event(), new_follower(store)
    thread = Thread(target=follow_with_spark, args=(follower, stop), kwargs={"checkpoint": checkpoint})
    thread.start()
    try:
        yield follower
    finally:
        stop.set()
        thread.join()
        follower.close()


def ends(store: Store) -> dict[str, int]:
    return {extent.name: extent.last for extent in take_extents(store)}


def has_all(store: Store) -> bool:
    with closing(new_follower(store)) as other:
        return other.positions() == ends(store)
