"""Scans of `postroom_events` in Spark: rows per second, memory, and how they scale with executors."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.benchmarks.figures import Figures
from tests.benchmarks.options import Database, Options
from tests.benchmarks.processes import run_program
from tests.benchmarks.spark import label, open_store

EXECUTORS = (1, 2, 4)
CORES = 64
"""A cluster whose time is computed from the times of the tasks."""


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return what is measured of scans under these options."""

    def of(database: Database, figures: Figures, folder: Path, messages: int) -> None:
        with open_store(database, messages, options, figures, folder) as (store, _):
            _scan(f"scan.{database}.{label(messages)}", "local[*]", store, figures)

    def by_executors(figures: Figures, folder: Path, messages: int) -> None:
        with open_store("sqlite", messages, options, figures, folder) as (store, _):
            for count in EXECUTORS:
                name = f"scan.executors.{label(messages)}.{count}"
                _scan(name, f"local-cluster[{count},1,512]", store, figures)

    return {
        "scan.sqlite": partial(of, "sqlite"),
        "scan.postgres": partial(of, "postgres"),
        "scan.executors": by_executors,
    }


def _scan(name: str, master: str, store: str, figures: Figures) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.pipeline.scan", master]
    finished = run_program(command, {"POSTROOM_STORE": store, "PYSPARK_PYTHON": sys.executable})
    results: dict[str, Any] = msgspec.json.decode(finished.output.splitlines()[-1])
    # A filter's speed is that at which it passes over the log, so all scans count the rows of the whole.
    rows = results["full"]["rows"]
    for scan, result in results.items():
        seconds, tasks = result["seconds"], result["tasks"]
        figures.add(f"{name}.{scan}", rows / seconds, "rows/s")
        figures.add(f"{name}.{scan}.tasks", sum(tasks), "s")
        figures.add(f"{name}.{scan}.on_{CORES}_cores", _seconds_on(CORES, tasks), "s")
    for role, mib in finished.peak_mib.items():
        figures.add(f"{name}.memory.{role}", mib, "MiB")


def _seconds_on(cores: int, tasks: Sequence[float]) -> float:
    """Return the least time of the tasks' work on some cores, among which it is divided more finely.

    A log of more parts than cores is divided evenly; the time of planning is not included.
    """
    return max(sum(tasks) / cores, min(tasks, default=0.0))
