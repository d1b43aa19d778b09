"""The sink conformance suite on what read models are built into for others to read."""

from pathlib import Path

import pytest

from postroom.projections import sinks
from tests.conformance.sink import OpenSink, SinkConformance, fill
from tests.projections.histories import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    path = tmp_path / "store.db"
    fill(path)
    return path


@pytest.fixture(params=["parquet", "delta", "chdb"])
def into(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"{request.param}:{tmp_path / 'models'}"


@pytest.fixture
def open_sink(store: Store, into: str) -> OpenSink:
    return lambda: sinks.open_sink(str(store), into)


class TestTargets(SinkConformance):
    pass
