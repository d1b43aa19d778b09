import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.fixtures import OpenReadModels

# The machine's speed says nothing about the code: no example is failed for being slow.
settings.register_profile(
    "default",
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# The gate tries the same examples every time: what it says of a change is about that change.
settings.register_profile("gate", parent=settings.get_profile("default"), derandomize=True, database=None)
# HYPOTHESIS_PROFILE=thorough looks much longer, for a night or before a release.
settings.register_profile(
    "thorough",
    parent=settings.get_profile("default"),
    max_examples=5_000,
    stateful_step_count=100,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def read_models() -> "Iterator[OpenReadModels]":
    """Open read models of stores; all are closed when the test is over."""
    from postroom.adapters.sqlite.read_models import SqliteReadModels

    with ExitStack() as opened:
        yield lambda store: opened.enter_context(closing(SqliteReadModels(store)))


@pytest.fixture(scope="session")
def spark() -> "Iterator[SparkSession]":
    """One small Spark session for the whole run; its start costs more than all its tests."""
    from postroom.projections.session import QUIET, start_session

    session = start_session(
        {
            "spark.master": "local[2]",
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-XX:TieredStopAtLevel=1 {QUIET}",
        }
    )
    yield session
    session.stop()
