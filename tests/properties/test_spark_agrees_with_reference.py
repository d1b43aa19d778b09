"""Spark and the reference fold make the same rows of every history."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from postroom.projections.backlog import backlog
from postroom.projections.dead_letters import dead_letters
from postroom.projections.logs import take_cuts
from postroom.projections.messages import messages
from postroom.projections.reference import ReadModels
from postroom.projections.rows import MAILBOX_COLUMNS
from tests.projections.histories import STORY, VARIED, Step, Store, live, reference, steps

histories = st.lists(st.lists(steps, max_size=80), min_size=2, max_size=4)


@settings(
    max_examples=3 if settings.default.max_examples <= 100 else 200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(histories)
@example([STORY, STORY])
def test_spark_agrees_with_the_reference_on_every_history(
    spark: SparkSession, taken: list[list[Step]]
) -> None:
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store.db"
        for number, history in enumerate(taken):
            live(store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
        assert folded_by_spark(spark, store) == reference(store)


def test_spark_agrees_with_the_reference_on_a_log_in_postgresql(
    spark: SparkSession, postgres_store: str
) -> None:
    for number, history in enumerate([STORY, VARIED, STORY]):
        live(postgres_store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")
    assert folded_by_spark(spark, postgres_store) == reference(postgres_store)


def folded_by_spark(spark: SparkSession, store: Store) -> ReadModels:
    cuts = take_cuts(str(store))
    staged = messages(spark, str(store), cuts).cache()
    try:
        return ReadModels(
            _rows(staged.select(*MAILBOX_COLUMNS), "id"),
            _rows(backlog(staged), "mailbox", "topic", "shard"),
            _rows(dead_letters(spark, str(store), cuts, staged), "id"),
        )
    finally:
        staged.unpersist()


def _rows(frame: DataFrame, *key: str) -> list[dict[str, Any]]:
    rows = [
        {
            name: bytes(value) if isinstance(value, bytearray) else value
            for name, value in row.asDict().items()
        }
        for row in frame.collect()
    ]
    return sorted(rows, key=lambda row: tuple(row[name] for name in key))
