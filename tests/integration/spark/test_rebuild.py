"""A rebuild from start to end, with real Spark, on a store that others use meanwhile."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import pytest
from pyspark.sql import SparkSession

from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.messages import NewMessage
from postroom.application.ports.read_models import DeadLetterFilter, views_path
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.search import EventFilter
from postroom.projections.cut import encode_cuts
from postroom.projections.logs import take_cuts
from postroom.projections.rebuild import Progress, rebuild
from postroom.projections.source import LogSource, read_log
from postroom.projections.views import open_views
from tests.fixtures import OpenReadModels
from tests.projections.histories import STORY, VARIED, Store, live, open_log, reference, send

REPOSITORY = Path(__file__).parents[3]
MAILBOX = "main@test"
ONE_MORE = NewMessage(topic="shop", payload=b"", message_id="one-more")

pytestmark = pytest.mark.usefixtures("spark")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    fill(path)
    return path


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store of either kind."""
    if request.param == "postgres":
        url = str(request.getfixturevalue("postgres_store"))
        fill(url)
        return url
    return cast(Path, request.getfixturevalue("store"))


def fill(store: Store) -> None:
    live(store, MAILBOX, [*STORY, *VARIED])
    live(store, "archive@test", VARIED, mode="archive")


def test_a_rebuild_serves_what_the_reference_fold_makes_of_the_log(
    either: Store, read_models: OpenReadModels
) -> None:
    seen: list[Progress] = []
    report = rebuild(str(either), progress=seen.append)
    expected = reference(either)
    models = read_models(either)
    found = {item.message_id: item for item in models.search(EventFilter(limit=1_000)).items}
    assert len(found) == report.messages == len(expected.mailbox)
    for row in expected.mailbox:
        item = found[row["message_id"]]
        assert (item.position, item.attempts, item.envelope_blob) == (
            row["position"],
            row["attempts"],
            row["envelope_blob"],
        )
    letters = models.dead_letters(DeadLetterFilter(limit=1_000)).items
    assert {each.id for each in letters} == {row["id"] for row in expected.dead_letters}
    assert report.dead_letters == len(expected.dead_letters)
    assert report.backlog == len(expected.backlog)
    assert report.events == sum(cut.events for cut in take_cuts(str(either)))
    assert list(dict.fromkeys(each.phase for each in seen)) == ["start", "fold", "load", "index", "flip"]
    assert set(report.seconds) == {"start", "fold", "load", "index", "flip", "total"}
    with open_views(str(either)) as views:
        assert list(views.staging.parent.glob(f"{views.staging.name}*")) == []


def test_a_store_without_records_has_empty_read_models(tmp_path: Path, read_models: OpenReadModels) -> None:
    SqliteEventLog(tmp_path / "store.db", MAILBOX).close()
    report = rebuild(str(tmp_path / "store.db"))
    assert (report.messages, report.events) == (0, 0)
    models = read_models(tmp_path / "store.db")
    assert models.search(EventFilter()).items == ()
    assert models.stats().total_events == 0


def test_what_is_sent_while_a_rebuild_runs_comes_with_the_next_one(
    store: Path, read_models: OpenReadModels
) -> None:
    rebuild(str(store), progress=once("fold", lambda: send(store, MAILBOX, [ONE_MORE])))
    models = read_models(store)
    with pytest.raises(NotFound):
        models.get("one-more")
    assert any(each.lag for each in models.status().lags)


def test_a_rebuild_neither_takes_nor_waits_for_the_write_lock_of_the_log(store: Path) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        report = rebuild(str(store))
        writer.execute("ROLLBACK")
    assert report.messages == len(reference(store).mailbox)


def test_messages_that_retention_removes_meanwhile_are_not_served_half(
    either: Store, read_models: OpenReadModels
) -> None:
    through = 10

    def truncate() -> None:
        with closing(open_log(either, MAILBOX)) as log:
            log.truncate(through, 1_000)

    rebuild(str(either), progress=once("load", truncate))
    models = read_models(either)
    positions = [item.position for item in models.search(EventFilter(mailbox=MAILBOX, limit=1_000)).items]
    assert min(positions) > through
    assert {each.id % (1 << 40) for each in models.dead_letters(DeadLetterFilter()).items} <= set(positions)


def test_a_rebuild_that_fails_leaves_what_is_served_and_says_why(
    store: Path, read_models: OpenReadModels
) -> None:
    before = rebuild(str(store)).version
    with closing(sqlite3.connect(store)) as writer:
        writer.execute("UPDATE log SET type = 'MessageTeleported.1' WHERE type = 'MessageAcked.1'")
        writer.commit()
    with pytest.raises(Unavailable, match="unknown type MessageTeleported"):
        rebuild(str(store))
    status = read_models(store).status()
    assert status.active is not None
    assert status.active.version == before
    assert status.versions[0].status == "failed"
    assert "MessageTeleported" in (status.versions[0].error or "")
    assert tables(store, status.versions[0].version) == set()


def test_the_log_reads_alike_by_adbc_and_by_the_python_driver(either: Store, spark: SparkSession) -> None:
    odd = NewMessage(topic="shop", payload=b"", principal="a\0b\x1ac", attrs={"it's": "ünïcode"})
    send(either, MAILBOX, [odd])
    cuts = take_cuts(str(either))
    columns = ("place", "mailbox_id", "mailbox", "position", "type", "event", "topic", "principal", "due")
    columns += ("custom_headers", "state", "envelope", "cut_at")
    frame = read_log(spark, str(either), cuts, *columns)
    by_driver = (
        spark.read.format(LogSource.name())
        .schema(frame.schema)
        .options(store=str(either), cuts=encode_cuts(cuts), driver="python")
        .load()
    )
    rows = sorted(frame.collect())
    assert rows == sorted(by_driver.collect())
    assert len(rows) == sum(cut.events for cut in cuts)
    assert [row.principal for row in rows if row.principal not in (None, "alice", "Bob", "STRASSE ß")] == [
        "a\0b\x1ac"
    ]


def test_spark_submit_rebuilds_a_database_from_the_repository_and_shows_no_password(
    postgres_store: str, read_models: OpenReadModels
) -> None:
    fill(postgres_store)
    url = urlsplit(postgres_store)
    secret = url._replace(netloc=f"{url.username}:open-sesame@{url.hostname}:{url.port}").geturl()
    submit = Path(sys.executable).with_name("spark-submit")
    quick = "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"
    ran = subprocess.run(
        [submit, "--conf", quick, "--conf", "spark.log.level=INFO", "projections/rebuild.py", "--json"],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "POSTROOM_STORE": secret,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "INFO" in ran.stderr
    assert "open-sesame" not in ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["messages"] == len(reference(postgres_store).mailbox)
    assert read_models(postgres_store).stats().total_events == report["messages"]


def test_no_plan_of_spark_shows_the_password_of_a_database(postgres_store: str, spark: SparkSession) -> None:
    fill(postgres_store)
    url = urlsplit(postgres_store)
    secret = url._replace(netloc=f"{url.username}:open-sesame@{url.hostname}:{url.port}").geturl()
    frame = read_log(spark, secret, take_cuts(secret), "type")
    plans = frame._jdf.queryExecution()  # all of them, as the UI shows them
    assert "postroom_log" in plans.toString()
    assert "open-sesame" not in plans.toString() + plans.logical().toJSON() + repr(frame)
    assert frame.count() > 0


def once(phase: str, act: Callable[[], None]) -> Callable[[Progress], None]:
    """Return a progress callback that acts when a phase begins."""
    pending = [act]

    def on_progress(progress: Progress) -> None:
        if progress.phase == phase and pending:
            pending.pop()()

    return on_progress


def tables(store: Path, version: int) -> set[str]:
    with closing(sqlite3.connect(views_path(store))) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB ?", (f"*_v{version}*",))
        return {name for (name,) in names}
