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

from postroom.adapters.compose.queries import open_target
from postroom.adapters.postgres.database import connect
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.read_model_file import views_path
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.domain.record import Record, StoredEvent
from postroom.domain.search import EventFilter
from postroom.projections.log_reader import LogExtent
from postroom.projections.ports.runner import Progress
from postroom.projections.projection import load_projections
from postroom.spark import register
from tests.conformance.read_model_store import rows
from tests.conformance.records import append
from tests.conformance.test_read_model_store import tables
from tests.projections.histories import (
    STORY,
    VARIED,
    Store,
    live,
    model_store,
    open_log,
    rebuild,
    reference,
    send,
    served_rows,
    take_extents,
)
from tests.projections.reference import fold
from tests.support.fixtures import OpenReadModels

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


def test_a_rebuild_serves_what_the_reference_fold_makes_of_the_log(either: Store) -> None:
    seen: list[Progress] = []
    report = rebuild(either, progress=seen.append)
    assert rows(model_store(either)) == reference(either).rows
    assert report.rows == {name: len(each) for name, each in reference(either).rows.items()}
    assert report.events == sum(extent.events for extent in take_extents(either))
    assert list(dict.fromkeys(each.phase for each in seen)) == ["start", "fold", "load", "index", "flip"]
    assert set(report.seconds) == {"start", "fold", "load", "index", "catch_up", "flip", "total"}
    assert set(report.task_seconds) == {"read", "fold", "write"}


def test_read_models_of_a_store_in_jetstream_are_built_elsewhere_as_the_reference_fold_makes_them(
    jetstream_store: str, tmp_path: Path
) -> None:
    fill(jetstream_store)
    target = f"parquet:{tmp_path / 'models'}"
    report = rebuild(jetstream_store, into=target)
    expected = reference(jetstream_store).rows
    assert {name: served_rows(open_target(target), name) for name in expected} == expected
    assert report.rows == {name: len(each) for name, each in expected.items()}


@pytest.mark.extended
def test_spark_submit_rebuilds_a_store_in_jetstream(jetstream_store: str, tmp_path: Path) -> None:
    fill(jetstream_store)
    target = f"parquet:{tmp_path / 'models'}"
    ran = spark_submit(jetstream_store, "--into", target)
    assert ran.returncode == 0, ran.stderr
    rows = {name: served_rows(open_target(target), name) for name in load_projections()}
    assert rows == reference(jetstream_store).rows


def test_a_store_without_records_has_empty_read_models(tmp_path: Path, read_models: OpenReadModels) -> None:
    SqliteEventLog(tmp_path / "store.db", MAILBOX).close()
    report = rebuild(tmp_path / "store.db")
    assert (report.rows["mailbox"], report.events) == (0, 0)
    models = read_models(tmp_path / "store.db")
    assert models.search(EventFilter()).items == ()
    assert models.stats().total_events == 0


def test_what_is_sent_while_a_rebuild_runs_is_served_too(either: Store, read_models: OpenReadModels) -> None:
    report = rebuild(either, progress=once("index", lambda: send(either, MAILBOX, [ONE_MORE])))
    models = read_models(either)
    assert models.get("one-more").topic == "shop"
    assert not any(each.lag for each in models.status().lags)
    assert report.events < sum(extent.events for extent in take_extents(either))
    assert rows(model_store(either)) == reference(either).rows


def test_a_rebuild_up_to_a_position_shows_what_was_there(either: Store) -> None:
    report = rebuild(either, to_position=["30", "archive@test:7"])
    assert {extent.name: extent.last for extent in report.extents} == {MAILBOX: 30, "archive@test": 7}
    expected = fold({extent: records_of(either, extent) for extent in report.extents})
    for row in expected.rows["mailbox"]:
        del row["envelope_blob"]  # the read models have no envelopes
    assert rows(model_store(either)) == expected.rows


@pytest.mark.parametrize("position", ["x", "-1", "nobody@test:3"])
def test_a_position_that_is_none_is_refused(store: Path, position: str) -> None:
    with pytest.raises(InvalidRequest, match=f"Invalid position '{position}'"):
        rebuild(store, to_position=[position])


def test_a_comparison_up_to_a_position_is_refused(store: Path) -> None:
    with pytest.raises(InvalidRequest, match="leave the position out"):
        rebuild(store, to_position=["3"], compare=True)


def test_one_model_is_rebuilt_and_the_others_are_shared(either: Store) -> None:
    first = rebuild(either).version
    report = rebuild(either, only=["search"])
    assert set(report.rows) == {"mailbox"}
    served = model_store(either).active_version()
    assert served is not None
    assert served.models == {**dict.fromkeys(load_projections(), first), "mailbox": report.version}
    assert rows(model_store(either)) == reference(either).rows
    with pytest.raises(InvalidRequest, match="There is no read model nonsense; choose one of activity, "):
        rebuild(either, only=["nonsense"])


def test_a_comparison_tells_which_rows_differ_from_those_that_were_served(either: Store) -> None:
    assert rebuild(either, compare=True).differences == ["There is no active version to compare with"]
    assert rebuild(either, compare=True).differences == []
    alter(either, "UPDATE {mailbox} SET principal = 'mallory' WHERE message_id = 'order-1'")
    alter(either, "DELETE FROM {backlog} WHERE topic = 'later'")
    send(either, MAILBOX, [ONE_MORE])  # which only one of them has read
    mailbox, backlog = rebuild(either, compare=True).differences or []
    assert mailbox.startswith("mailbox: 0 added, 0 removed and ")
    assert "1 added, 0 removed" in backlog
    assert "topic later" in backlog
    assert rows(model_store(either)) == reference(either).rows


def test_a_rebuild_neither_takes_nor_waits_for_the_write_lock_of_the_log(store: Path) -> None:
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("BEGIN IMMEDIATE")
        report = rebuild(store)
        writer.execute("ROLLBACK")
    assert report.rows["mailbox"] == len(reference(store).rows["mailbox"])


def test_messages_that_retention_removes_meanwhile_are_not_served_half(either: Store) -> None:
    through = 10

    def truncate() -> None:
        with closing(open_log(either, MAILBOX)) as log:
            log.truncate(through, 1_000)

    rebuild(either, progress=once("fold", truncate))
    served = rows(model_store(either))
    assert min(row["position"] for row in served["mailbox"] if row["mailbox"] == MAILBOX) > through
    assert {row["id"] for row in served["dead_letters"]} <= {row["id"] for row in served["mailbox"]}


def test_what_cannot_be_folded_is_left_out_and_counted(store: Path) -> None:
    with closing(SqliteEventLog(store, MAILBOX)) as log:
        head = log.head()
        assert head is not None
        append(log, [StoredEvent(bytes(16), 1, head.at, "MessageTeleported", b"")], epoch=head.epoch)
    report = rebuild(store)
    assert report.parked == len(reference(store).parked) > 0
    assert rows(model_store(store)) == reference(store).rows


def test_a_rebuild_that_fails_leaves_what_is_served_and_says_why(
    store: Path, read_models: OpenReadModels
) -> None:
    before = rebuild(store).version
    with closing(sqlite3.connect(store)) as writer:
        writer.execute("ALTER TABLE log RENAME COLUMN epoch TO nobody")
        writer.commit()
    with pytest.raises(Unavailable, match=r"can't be read: .*no such column: epoch"):
        rebuild(store)
    status = read_models(store).status()
    assert status.active is not None
    assert status.active.version == before
    assert status.versions[0].status == "failed"
    assert "no such column" in (status.versions[0].error or "")
    assert tables(store, status.versions[0].version) == set()


def test_spark_submit_rebuilds_a_database_from_the_repository_and_shows_no_password(
    postgres_store: str, read_models: OpenReadModels
) -> None:
    fill(postgres_store)
    url = urlsplit(postgres_store)
    secret = url._replace(netloc=f"{url.username}:open-sesame@{url.hostname}:{url.port}").geturl()
    ran = spark_submit(secret)
    assert ran.returncode == 0, ran.stderr
    assert "INFO" in ran.stderr
    assert "open-sesame" not in ran.stdout + ran.stderr
    report = json.loads(ran.stdout)
    assert report["rows"]["mailbox"] == len(reference(postgres_store).rows["mailbox"])
    assert read_models(postgres_store).stats().total_events == report["rows"]["mailbox"]


def spark_submit(store: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Run a rebuild of a store by spark-submit."""
    submit = Path(sys.executable).with_name("spark-submit")
    settings = ("spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1", "spark.log.level=INFO")
    configured = [word for each in settings for word in ("--conf", each)]
    return subprocess.run(
        [submit, *configured, "projections/rebuild.py", "--json", *options],
        cwd=REPOSITORY,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "POSTROOM_STORE": store,
        },
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_plan_of_spark_shows_the_password_of_a_database(postgres_store: str, spark: SparkSession) -> None:
    fill(postgres_store)
    url = urlsplit(postgres_store)
    secret = url._replace(netloc=f"{url.username}:open-sesame@{url.hostname}:{url.port}").geturl()
    register(spark)
    frame = spark.read.format("postroom_events").option("url", secret).load()
    plans = frame._jdf.queryExecution()  # all of them, as the UI shows them
    assert "postroom_events" in plans.toString()
    assert "open-sesame" not in plans.toString() + plans.logical().toJSON() + repr(frame)
    assert frame.count() > 0


def once(phase: str, act: Callable[[], None]) -> Callable[[Progress], None]:
    """Return a progress callback that acts when a phase begins."""
    pending = [act]

    def on_progress(progress: Progress) -> None:
        if progress.phase == phase and pending:
            pending.pop()()

    return on_progress


def alter(store: Store, statement: str) -> None:
    """Change rows that are served behind everybody's back."""
    served = model_store(store).active_version()
    assert served is not None
    names = {name: f"{name}_v{version}" for name, version in served.models.items()}
    if is_url(str(store)):
        with closing(connect(str(store), "test")) as database:
            database.execute("SET search_path = postroom")
            database.execute(statement.format(**names).encode())
        return
    with closing(sqlite3.connect(views_path(store))) as file:
        file.execute(statement.format(**names))
        file.commit()


def records_of(store: Store, extent: LogExtent) -> list[Record]:
    with closing(open_log(store, extent.name, create_missing=False)) as log:
        return list(log.read())
