"""Reports on Spark have the rows that they have in this process."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from postroom.adapters.compose.reports import make_report
from postroom.projections.reports.catalog import LATENCY, RETRIES, SLA, TRAFFIC
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
    selection = LogSelection("acme@*", BEGAN + HOUR, BEGAN + 4 * HOUR)
    zone = spark.conf.get("spark.sql.session.timeZone") or "UTC"
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")  # hours are those of UTC in any session
    try:
        for report in (LATENCY, RETRIES, TRAFFIC, SLA):
            local, on_spark = (
                rows_of(make_report(store, report, selection=selection, engine=engine))
                for engine in ("local", "spark")
            )
            assert on_spark == local != []
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)
