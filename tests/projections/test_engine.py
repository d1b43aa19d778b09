"""The engine `auto` is this process for a log that is small, and wherever Spark can't run."""

import sys
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose.projections import projection_engine, rebuild_projections, verify_projections
from postroom.adapters.compose.reports import report_engine
from postroom.application.messages import NewMessage
from postroom.projections.engine import Engine, EngineChoice, EngineSettings, choose_engine, find_engine
from postroom.projections.reports.report import LATENCY, TRAFFIC
from postroom.projections.spark.options import LogSelection
from tests.projections.histories import send

FEW, MANY = 1_000, 1_001
SMALL = EngineSettings(local_records=FEW)


@pytest.mark.parametrize(
    ("engine", "records", "others", "expected", "reason"),
    [
        ("auto", FEW, {}, "local", "1,000 log records, at most 1,000"),
        ("auto", MANY, {}, "spark", "1,001 log records, more than 1,000"),
        ("auto", MANY, {"spark_lacks": "Java"}, "local", "Java is not installed"),
        ("auto", MANY, {"spark_lacks": "pyspark", "local_lacks": "duckdb"}, "local", "pyspark is not"),
        ("auto", FEW, {"local_lacks": "duckdb"}, "spark", "duckdb is not installed"),
        ("auto", FEW, {"is_submitted": True}, "spark", "started by spark-submit"),
        ("local", MANY, {}, "local", "requested"),
        ("local", MANY, {"is_submitted": True}, "local", "requested"),
        ("spark", FEW, {}, "spark", "requested"),
        ("spark", FEW, {"spark_lacks": "Java"}, "spark", "requested"),
    ],
)
def test_the_engine_depends_on_the_request_the_size_and_what_is_installed(
    engine: Engine, records: int, others: dict[str, Any], expected: str, reason: str
) -> None:
    here = {"is_submitted": False, "local_lacks": None, "spark_lacks": None, **others}
    choice = choose_engine(engine, records, SMALL, **here)
    assert choice.engine == expected
    assert choice.reason.startswith(reason)


@pytest.fixture
def store(tmp_path: Path) -> str:
    send(tmp_path / "store.db", "main@local", [NewMessage(topic="shop", payload=b"")] * 3)
    return str(tmp_path / "store.db")


@pytest.fixture
def java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Java, as far as can be seen without starting it."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("java")
def test_the_size_is_the_number_of_records_that_the_job_reads(store: str) -> None:
    whole = LogSelection()
    counted = projection_engine(store, "auto", SMALL).reason
    assert report_engine(store, LATENCY, "auto", SMALL, selection=whole).reason == counted
    records = int(counted.split()[0])
    assert records >= 3
    assert projection_engine(store, "auto", EngineSettings(records)).engine == "local"
    assert projection_engine(store, "auto", EngineSettings(records - 1)).engine == "spark"
    other = LogSelection(mailbox="other@*")
    assert report_engine(store, TRAFFIC, "auto", EngineSettings(0), selection=other).engine == "local"


@pytest.mark.usefixtures("java")
def test_a_small_log_is_computed_here_and_the_report_of_the_run_says_so(store: str) -> None:
    rebuilt = rebuild_projections(store)
    assert rebuilt.computed_by == verify_projections(store).computed_by
    assert rebuilt.computed_by is not None
    assert rebuilt.computed_by.engine == "local"
    assert "log records, at most 10,000,000" in rebuilt.computed_by.summary()


def test_without_pyspark_or_java_the_engine_is_this_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, java: Path
) -> None:
    def find() -> EngineChoice:
        return find_engine("auto", lambda: MANY, SMALL)

    assert find().engine == "spark"
    monkeypatch.setitem(sys.modules, "pyspark", None)
    assert find() == EngineChoice("local", "pyspark is not installed")
    monkeypatch.undo()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert find() == EngineChoice("local", "Java is not installed")
    assert java.is_dir()


def test_a_process_that_spark_submit_started_uses_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    assert find_engine("auto", lambda: 0).engine == "spark"
    assert find_engine("local", lambda: 0).engine == "local"
