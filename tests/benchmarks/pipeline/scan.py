"""Scans of `postroom_events` in a Spark session of this process; prints JSON.

`python -m tests.benchmarks.pipeline.scan MASTER`, with the store in `POSTROOM_STORE`.
"""

import os
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from pyspark.sql import SparkSession

from postroom.projections.spark.session import start_session
from postroom.spark import register
from tests.benchmarks.figures import RUNS, Stopwatch

FEW = "mailbox,message_id,topic,event,at"
SCANS: dict[str, tuple[dict[str, str], str | None]] = {
    "full": ({}, None),
    "few_columns": ({"columns": FEW}, None),
    "acked": ({"columns": FEW, "event": "MessageAcked"}, None),
    "acked_by_spark": ({"columns": FEW}, "event = 'MessageAcked'"),
}
"""Options and filter of each scan."""


def main(master: str) -> None:
    """Run each scan several times, and print rows, median seconds and the seconds of the tasks of one run."""
    with TemporaryDirectory() as folder:
        settings = {
            "spark.master": master,
            "spark.driver.memory": "1g",
            "spark.executor.memory": "512m",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": Path(folder).as_uri(),
        }
        spark = start_session(settings)
        register(spark)
        _read(spark, {"to_position": "1000"}, None)  # loads Spark's classes
        results: dict[str, Any] = {}
        for name, (options, where) in SCANS.items():
            runs = []
            for _ in range(RUNS):
                spark.sparkContext.setJobGroup(name, name)
                with Stopwatch() as running:
                    _read(spark, options, where)
                runs.append(running.seconds)
            results[name] = {"seconds": median(runs)}
        spark.sparkContext.setJobGroup("rows", "rows")
        for name, (options, where) in SCANS.items():
            results[name]["rows"] = _frame(spark, options, where).count()
        spark.stop()
        for name, tasks in _task_seconds(Path(folder)).items():
            results[name]["tasks"] = tasks[-len(tasks) // RUNS :]
    print(msgspec.json.encode(results).decode())


def _frame(spark: SparkSession, options: dict[str, str], where: str | None) -> Any:
    frame = spark.read.format("postroom_events").options(**options).load(os.environ["POSTROOM_STORE"])
    return frame if where is None else frame.where(where)


def _read(spark: SparkSession, options: dict[str, str], where: str | None) -> None:
    _frame(spark, options, where).write.format("noop").mode("overwrite").save()


def _task_seconds(folder: Path) -> dict[str, list[float]]:
    """Return the seconds of all tasks by job group, in the order in which they ended."""
    groups: dict[int, str] = {}
    seconds: dict[str, list[float]] = {}
    for file in sorted(each for each in folder.rglob("*") if each.is_file()):
        for line in file.read_bytes().splitlines():
            event = msgspec.json.decode(line) if line.startswith(b"{") else {}
            if event.get("Event") == "SparkListenerJobStart":
                group = event["Properties"].get("spark.jobGroup.id")
                groups |= dict.fromkeys(event["Stage IDs"], group)
            elif event.get("Event") == "SparkListenerTaskEnd" and groups.get(event["Stage ID"]) in SCANS:
                run = event["Task Metrics"]["Executor Run Time"] / 1_000
                seconds.setdefault(groups[event["Stage ID"]], []).append(run)
    return seconds


if __name__ == "__main__":
    main(sys.argv[1])
