import json
from pathlib import Path

import pytest

from tests.benchmarks.figures import Figures


@pytest.mark.parametrize(
    ("asked", "name", "is_wanted"),
    [
        ([], "sqlite.send.100", True),
        (["sqlite.send"], "sqlite.send.100", True),
        (["sqlite.send.100"], "sqlite.", True),
        (["sqlite.open.1m"], "sqlite.open", True),
        (["sqlite.send.100"], "sqlite.send.1", False),
        (["sqlite.send.1"], "sqlite.send.100", False),
        (["sqlite.lives.100"], "sqlite.lives.100.serial", True),
        (["memory."], "sqlite.send.1", False),
    ],
)
def test_a_measurement_runs_when_it_or_something_in_it_is_asked_for(
    asked: list[str], name: str, is_wanted: bool
) -> None:
    assert Figures(asked, lambda _: None).wants(name) is is_wanted


@pytest.mark.parametrize(
    ("value", "unit", "holds"),
    [
        (10, "messages/s", True),
        (9, "messages/s", False),
        (10, "times", True),
        (9, "times", False),
        (10, "ms", True),
        (11, "ms", False),
    ],
)
def test_a_rate_holds_from_its_goal_up_and_anything_else_from_it_down(
    value: float, unit: str, holds: bool
) -> None:
    figures = Figures([], lambda _: None)
    figures.add("name", value, unit, goal=10)
    assert figures.results[0].holds is holds


@pytest.mark.parametrize(
    ("asked", "is_named"),
    [
        ([], False),
        (["spark."], False),
        (["spark.rebuild.postgres.5m"], True),
        (["spark.rebuild.postgres.1m"], False),
    ],
)
def test_what_takes_very_long_runs_only_when_it_is_asked_for_by_its_name(
    asked: list[str], is_named: bool
) -> None:
    assert Figures(asked, lambda _: None).is_named("spark.rebuild.postgres.5m") is is_named


def test_figures_are_in_the_file_as_soon_as_they_are_measured(tmp_path: Path) -> None:
    figures = Figures([], lambda _: None, tmp_path / "bench.json")
    for name in ("first", "second"):
        figures.add(name, 1, "ms")
        assert [each["name"] for each in json.loads((tmp_path / "bench.json").read_text())][-1] == name
    figures.add("first", 2, "ms")
    written = json.loads((tmp_path / "bench.json").read_text())
    assert {each["name"]: each["value"] for each in written} == {"first": 2, "second": 1}
    assert len(written) == 2
