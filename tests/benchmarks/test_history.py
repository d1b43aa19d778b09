"""The benchmarks of histories run to their end on small stores."""

from pathlib import Path

import pytest

from tests.benchmarks import history
from tests.benchmarks.figures import Figures


def test_retention_of_a_small_store_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "RETENTION_LIVES", 2_000)
    figures = Figures([], lambda _: None, tmp_path / "bench.json", 1)
    history.MEASUREMENTS["sqlite.retention"](figures, tmp_path, 0)
    assert {each.name for each in figures.results} == {
        "sqlite.retention.delete100k",
        "sqlite.retention.of_lives",
    }
    assert all(each.value > 0 for each in figures.results)
