"""Reports on Spark have the rows that they have in this process."""

from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from postroom.adapters.compose.reports import make_report, report_frame, whatif_report
from postroom.adapters.compose.spark import register
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.segments import build_segments
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy_grid import policy_grid
from postroom.projections.reports.report import LATENCY, RETRIES, SLA, TRAFFIC
from postroom.projections.spark.options import LogSelection
from tests.projections.report_logs import BEGAN, BOXES, HOUR, past, write


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """Return rows with their first column in µs."""
    micros = table["start"].cast(pa.timestamp("us")).cast(pa.int64())
    listed: list[dict[str, Any]] = table.set_column(0, "start", micros).to_pylist()
    return listed


def test_spark_and_duckdb_compute_the_same_rows_from_one_text(spark: SparkSession, tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    write(store, {mailbox: past(mailbox, 60) for mailbox in BOXES})
    archive = str(tmp_path / "archive")
    with closing(SqliteEventLog(store, BOXES[0])) as log:
        # Of this mailbox, Spark scans the segment itself.
        deque(build_segments(log, ParquetLogArchive(archive), list(log.commits())[50].last), 0)
    selection = LogSelection("acme@*", BEGAN + HOUR, BEGAN + 4 * HOUR)
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")  # hours are those of UTC in any session
    try:
        for report in (LATENCY, RETRIES, TRAFFIC, SLA):
            local, on_spark = (
                rows_of(make_report(store, report, selection=selection, archive=archive, engine=engine))
                for engine in ("local", "spark")
            )
            assert on_spark == local != []
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_grid_of_policies_has_the_same_rows_in_spark_and_in_duckdb(
    spark: SparkSession, tmp_path: Path
) -> None:
    store = str(tmp_path / "store.db")
    write(store, {mailbox: past(mailbox, 60) for mailbox in BOXES})
    register(spark)
    grid = policy_grid(max_attempts=(1, 4), visibility_ms=(60_000, 7_200_000))
    local = make_report(
        store,
        whatif_report(store, grid),
        selection=LogSelection(),
        engine="local",
        parameters={"by_topic": 1},
    )
    frame = report_frame(spark, store, "whatif", policies=grid, parameters={"by_topic": 1})
    assert frame.toArrow().to_pylist() == local.to_pylist() != []
    with pytest.raises(InvalidRequest, match="There is no report 'delay'; name latency, retries"):
        report_frame(spark, store, "delay")
    with pytest.raises(InvalidRequest, match="The report sla takes no policies; whatif does"):
        report_frame(spark, store, "sla", policies=grid)
    for name in ("topic", "mailbox", "archive"):
        options: dict[str, Any] = {name: "\udcff"}
        with pytest.raises(InvalidRequest, match=f"{name} contains the surrogate"):
            report_frame(spark, store, "traffic", **options)
