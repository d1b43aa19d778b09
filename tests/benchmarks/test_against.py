import json
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from postroom.domain.errors import InvalidRequest
from tests.benchmarks.__main__ import MODULES
from tests.benchmarks.against import OLD_NAMES, ROOT, Side, compare, compared, default_names, worktree
from tests.benchmarks.figures import Figure, Figures
from tests.benchmarks.options import Options


def figures(name: str, unit: str, *values: float) -> dict[str, list[Figure]]:
    return {name: [Figure(name, value, unit, None, None) for value in values]}


@pytest.mark.parametrize("unit", ["messages/s", "ms"])
def test_the_ratio_is_the_median_over_the_turns_and_above_one_when_the_new_code_is_better(unit: str) -> None:
    slow, quick = (10, 10, 40), (20, 30, 60)
    old, new = (slow, quick) if unit == "messages/s" else (quick, slow)
    (found,) = compared(figures("sqlite.send.100", unit, *old), figures("sqlite.send.100", unit, *new))
    assert (found.times, found.lowest, found.highest, found.turns) == (2, 1.5, 3, 3)
    assert (found.goal, found.holds) == (1.7, True)


def test_what_one_side_alone_measures_is_not_compared() -> None:
    assert compared(figures("a", "ms", 1), figures("b", "ms", 1)) == []


def test_by_default_all_goals_are_measured() -> None:
    assert {"sqlite.lives.100", "sqlite.refold", "spark.rebuild.sqlite.1m"} <= set(default_names())
    assert "sqlite.lives.100.serial" not in default_names()  # "sqlite.lives.100" includes it


@pytest.mark.parametrize("name", MODULES)
def test_every_measurement_is_found_by_its_name(name: str) -> None:
    module = import_module(f"tests.benchmarks.{name}")
    made = module.measurements(Options()) if hasattr(module, "measurements") else module.MEASUREMENTS
    for measurement in made:
        assert any(Figures([measurement], lambda _: None).wants(prefix) for prefix in MODULES[name]), (
            measurement
        )


def test_a_figure_is_measured_under_its_present_and_its_older_name() -> None:
    for name, older in OLD_NAMES.items():
        assert Figures([name], lambda _: None).wants(name)
        assert Figures([older], lambda _: None).wants(name)


def test_code_whose_modules_were_moved_runs_benchmarks_of_its_own(tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "postroom").mkdir(parents=True)
    (other / "postroom" / "__init__.py").touch()
    assert Side.of("new", ROOT, tmp_path).has_imports()
    assert not Side.of("old", other, tmp_path).has_imports()


def test_a_folder_without_code_and_an_unknown_commit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="name a worktree"):
        compare(tmp_path, ["sqlite.send.1"], 1, lambda _: [], tmp_path, lambda _: None)
    if shutil.which("git") and (ROOT / ".git").exists():
        with pytest.raises(InvalidRequest, match="can't be checked out"), worktree("no-commit", tmp_path):
            pass


@pytest.mark.extended
def test_both_sides_are_measured_in_turns(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    command = [sys.executable, "-m", "tests.benchmarks", "--against", str(ROOT), "--turns", "1"]
    finished = subprocess.run(
        [*command, "access.verify", "--json", "--output", str(output)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    found = json.loads(output.read_text())
    assert found == json.loads(finished.stdout)
    assert {"old", "new", "times", "lowest", "highest"} <= found[0].keys()
