"""Spark's own scan of segments returns the rows of the data source."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.commit import GENESIS
from postroom.domain.errors import InvalidRequest
from postroom.spark import events, register
from tests.conformance.records import append_each
from tests.projections.stored_logs import ONE, Kept, keep, past
from tests.support.servers.object_store import BUCKET, ObjectStoreServer


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two logs in a SQLite file, one with a beginning in an archive whose name looks like a pattern."""
    folder = tmp_path_factory.mktemp("scan")
    with ExitStack() as stack:
        yield keep("archive sqlite", str(folder / "store.db"), folder / "archive[1]{a,b}*", stack)


def frame_of(spark: SparkSession, kept: Kept, **options: Any) -> DataFrame:
    register(spark)
    store = kept.options["path"]
    return events(spark, store, archive=kept.options["archive"], driver=kept.options["driver"], **options)


def plan_of(frame: DataFrame) -> str:
    with redirect_stdout(StringIO()) as printed:
        frame.explain("formatted")
    return printed.getvalue()


def rows_of(frame: DataFrame) -> list[dict[str, Any]]:
    rows = (row.asDict(recursive=True) for row in frame.collect())
    return sorted(rows, key=lambda row: (row["mailbox"], row["position"]))


@pytest.mark.parametrize(
    "options",
    [
        {"columns": "*"},
        {"from_position": 5, "allow_gaps": False, "mailbox": ONE},
        {"topic": "orders*", "event": "MessageSent,MessageReceived"},
        {"topic": "orders"},
        {"mailbox": ONE, "from_position": "5", "to_position": "30"},
        {"since": "1970-01-01T00:00:00.001100Z", "until": "1970-01-01T00:00:00.001160Z"},
    ],
)
def test_the_rows_are_those_of_the_data_source(
    spark: SparkSession, kept: Kept, options: dict[str, Any]
) -> None:
    frame = frame_of(spark, kept, **options)
    source = spark.read.format("postroom_events").options(**kept.options | options).load()
    # Spark takes every column of a file for nullable.
    columns = [
        [(field.name, field.dataType.simpleString(), field.metadata) for field in each.schema]
        for each in (frame, source)
    ]
    assert columns[0] == columns[1]
    assert rows_of(frame) == rows_of(source) != []


def test_filters_and_columns_reach_the_files(spark: SparkSession, kept: Kept) -> None:
    frame = frame_of(spark, kept).where("event = 'MessageSent' AND topic = 'orders' AND position > 3")
    plan = plan_of(frame.select("mailbox", "at"))
    scan = plan[plan.rindex("Scan parquet") :]
    scan = scan[: scan.index("\n\n")]
    for condition in (
        "EqualTo(event,MessageSent)",
        "EqualTo(event_topic,orders)",
        "GreaterThan(position,3)",
    ):
        assert condition in scan, scan
    assert (
        "ReadSchema: struct<position:bigint,mailbox:string,event:string,at:bigint,event_topic:string>" in scan
    )


def test_only_what_no_whole_segment_holds_is_read_by_the_data_source(spark: SparkSession, kept: Kept) -> None:
    (file,) = Path(kept.options["archive"], ONE).glob("*.parquet")
    last = int(file.name.partition("-")[2].partition(".")[0])
    segment = frame_of(spark, kept, mailbox=ONE, to_position=str(last))
    assert "BatchScan" not in plan_of(segment)
    assert segment.count() == last
    assert "Scan parquet" not in plan_of(frame_of(spark, kept, mailbox=ONE, to_position=str(last - 1)))


def test_no_task_is_needed_to_find_many_segments(spark: SparkSession, tmp_path: Path) -> None:
    store, archive, before = str(tmp_path / "store.db"), ParquetLogArchive(tmp_path / "archive"), GENESIS
    with closing(SqliteEventLog(store, ONE, durability="relaxed")) as log:
        append_each(log, past(ONE, 20))
        for commit in log.commits():
            archive.store(ONE, [commit], before)
            before = commit.chain
    register(spark)
    spark.sparkContext.setJobGroup("segments", "")
    try:
        frame = events(spark, store, archive=tmp_path / "archive")
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)  # type: ignore[arg-type]
    assert not spark.sparkContext.statusTracker().getJobIdsForGroup("segments")
    assert len(frame.inputFiles()) == frame.count() > 32


def test_a_frame_ends_where_the_log_ended_when_it_was_made(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept = keep("archive sqlite", str(tmp_path / "store.db"), tmp_path / "archive", stack)
        frame = frame_of(spark, kept)
        count = len(kept.everything())
        kept.write(ONE, past(ONE, 1, 90))
        assert (frame.count(), frame_of(spark, kept).count()) == (count, len(kept.everything()))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"start": "{}"}, "is for streams"),
        ({"topics": "orders"}, "did you mean topic"),
        ({"ranges": "[1, 2]"}, "expected a JSON object of ranges"),
        ({"archive": " "}, "archive"),
        ({"topic": ["orders"]}, "option topic of postroom_events must be text.* it was list"),
        ({"from_position": 1.5}, "it was float"),
    ],
)
def test_wrong_options_are_refused(
    spark: SparkSession, kept: Kept, options: dict[str, Any], error: str
) -> None:
    register(spark)
    with pytest.raises(InvalidRequest, match=error):
        events(spark, kept.options["path"], **{"archive": kept.options["archive"]} | options)


def test_without_a_connector_for_the_object_store_the_data_source_reads_the_segments(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ObjectStoreServer(tmp_path) as server, ExitStack() as stack:
        endpoint = server.environment["AWS_ENDPOINT_URL"].partition("://")[2]
        # Spark's processes have started without the variables.
        archive = f"s3://test:test@{BUCKET}/archive?scheme=http&endpoint_override={endpoint}&region=us-east-1"
        kept = keep("archive sqlite", str(tmp_path / "store.db"), archive, stack)
        rows = rows_of(frame_of(spark, kept, columns="mailbox,position,event"))
        expected = [(extent.name, record.position, record.type) for extent, record in kept.everything()]
        assert [tuple(row.values()) for row in rows] == expected
