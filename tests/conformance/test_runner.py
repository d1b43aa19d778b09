"""The runner conformance suite on Spark, and on the runner that tests use in its place."""

import pytest

from postroom.projections.ports.runner import Runner
from postroom.projections.spark.session import SparkRunner
from tests.conformance.runner import RunnerConformance
from tests.projections.local_runner import LocalRunner


@pytest.fixture(params=["local", "spark"])
def runner(request: pytest.FixtureRequest) -> Runner:
    if request.param == "local":
        return LocalRunner()
    request.getfixturevalue("spark")
    started = SparkRunner()
    started.start()
    return started


class TestRunners(RunnerConformance):
    pass
