"""The runner conformance suite on Spark, and on the runner that tests use in its place."""

import pytest

from postroom.projections.ports.runner import TaskRunner
from postroom.projections.spark.session import SparkTaskRunner
from tests.conformance.runner import RunnerConformance
from tests.projections.local_runner import LocalRunner


@pytest.fixture(params=["local", "spark"])
def runner(request: pytest.FixtureRequest) -> TaskRunner:
    if request.param == "local":
        return LocalRunner()
    request.getfixturevalue("spark")
    started = SparkTaskRunner()
    started.start()
    return started


class TestRunners(RunnerConformance):
    pass
