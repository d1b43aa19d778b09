"""Old code and new code in turns: the same benchmarks, each side in processes of its own.

The benchmarks are those of this worktree if the old code has all that they import. If a module was moved
in the meantime, each side runs its own, as it does with benchmarks that read tables of the log themselves.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec

from postroom.domain.errors import InvalidRequest
from tests.benchmarks.figures import Figure, more_is_better

ROOT = Path(__file__).parents[2]
OWN = ("spark", "follow", "postgres.search")
"""They write or read tables of the log, whose format may have changed."""
OLD_NAMES = {"follow.catch_up": "follow.catch_up.local"}
"""Figures that have another name in older benchmarks; newer ones know them by this one, too."""
NOT_SLOWER = 0.95
"""What counts as not slower: less than the difference between two runs of the same code."""
GOALS = {
    "sqlite.lives.100": 2.5,
    "sqlite.send.100": 1.7,
    "sqlite.lives.100.serial": 1.5,
    "sqlite.send.single64": NOT_SLOWER,
    "sqlite.send.1": NOT_SLOWER,
    "sqlite.lives.1": NOT_SLOWER,
    "sqlite.refold": 8 / 3,
    "spark.rebuild.sqlite.1m": 1.4,
    "spark.rebuild.postgres.1m": 1.4,
}
"""How many times better the new code should be (issue 12)."""


def default_names() -> list[str]:
    """Return the names of the measurements with goals, without those that others include."""
    return [name for name in GOALS if not any(name.startswith(f"{other}.") for other in GOALS)]


class Side(msgspec.Struct, frozen=True):
    """Code to measure.

    Attributes:
        name: `old` or `new`.
        folder: its worktree.
        imports: a folder whose only package is its `postroom`.
    """

    name: str
    folder: Path
    imports: Path

    @classmethod
    def of(cls, name: str, folder: Path, links: Path) -> "Side":
        """Return the side of a worktree, and link to its package below a folder."""
        old = folder / "tests" / "typing" / "postroom"  # before there was a folder `postroom`
        imports = links / f"{name}-imports"
        imports.mkdir()
        (imports / "postroom").symlink_to(old if old.exists() else folder / "postroom")
        return cls(name, folder, imports)

    def python(self) -> str:
        """Return its interpreter: that of its environment, or else this one."""
        own = self.folder / ".venv" / "bin" / "python"
        return str(own) if own.exists() else sys.executable

    def environment(self, tests: Path = ROOT) -> dict[str, str]:
        """Return the environment in which `postroom` is its code, and `tests` that of a worktree."""
        path = os.pathsep.join(map(str, (self.imports, tests)))
        return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}

    def check(self) -> None:
        """Check that its code is what is measured.

        Raises: InvalidRequest when it is not.
        """
        script = "import postroom.adapters.compose as code; print(code.__file__)"
        found = subprocess.run(
            [self.python(), "-c", script],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        path = Path(found.stdout.strip()).resolve()
        if found.returncode or not path.is_relative_to(self.folder):
            raise InvalidRequest(f"{self.folder} has no code of Postroom to measure; name a worktree.")

    def has_imports(self) -> bool:
        """Return whether its code has all that the benchmarks of this worktree import."""
        names = [path.stem for path in Path(__file__).parent.glob("[a-z]*.py") if path.stem[:5] != "test_"]
        script = f"import {', '.join(f'tests.benchmarks.{name}' for name in names)}"
        command = [self.python(), "-c", script]
        return not subprocess.run(command, cwd=ROOT, env=self.environment(), capture_output=True).returncode


class Comparison(msgspec.Struct, frozen=True):
    """One figure of both sides.

    Attributes:
        old, new: medians.
        times: how many times better the new code is, the median over the turns.
        lowest, highest: over the turns.
    """

    name: str
    unit: str
    old: float
    new: float
    times: float
    lowest: float
    highest: float
    turns: int
    goal: float | None
    holds: bool | None


@contextmanager
def worktree(commit: str, folder: Path) -> Iterator[Path]:
    """Check out a commit into a folder, and remove it in the end.

    Raises: InvalidRequest when there is no such commit.
    """
    target = folder / "old"
    git = ["git", "-C", str(ROOT), "worktree"]
    added = subprocess.run(
        [*git, "add", "--detach", str(target), commit], capture_output=True, text=True, check=False
    )
    if added.returncode:
        raise InvalidRequest(f"{commit!r} can't be checked out: {added.stderr.strip().splitlines()[-1]}")
    try:
        yield target.resolve()
    finally:
        subprocess.run([*git, "remove", "--force", str(target)], capture_output=True, check=True)


def compare(
    old: Path,
    names: Sequence[str],
    turns: int,
    options: Callable[[Side], Sequence[str]],
    folder: Path,
    tell: Callable[[str], None],
) -> list[Comparison]:
    """Measure each of the names on both sides, in turns.

    Arguments:
        options: of the command that measures a side.

    Raises: InvalidRequest when a side can't be measured; RuntimeError when a measurement fails.
    """
    sides = (Side.of("old", old.resolve(), folder), Side.of("new", ROOT, folder))
    for side in sides:
        side.check()
    has_imports = all(side.has_imports() for side in sides)
    if not has_imports:
        tell("modules were moved: each side runs its own benchmarks")
    results: dict[str, dict[str, list[Figure]]] = {side.name: {} for side in sides}
    for turn in range(turns):
        for name in names:
            # Who begins changes: what a run leaves behind (a warm cache, a hot processor) is no advantage.
            for side in sides if turn % 2 == 0 else sides[::-1]:
                tell(f"turn {turn + 1} of {turns}: {name}, {side.name}")
                tests = ROOT if has_imports and not _reads_tables(name) else side.folder
                for figure in _measure(side, name, options(side), folder, tests):
                    results[side.name].setdefault(figure.name, []).append(figure)
    return compared(results["old"], results["new"])


def compared(old: dict[str, list[Figure]], new: dict[str, list[Figure]]) -> list[Comparison]:
    """Return the comparisons of the figures that both sides have; the figures of a turn are a pair."""
    comparisons = []
    for name, figures in new.items():
        pairs = [(a.value, b.value) for a, b in zip(old.get(name, []), figures, strict=False)]
        if not pairs or not all(a > 0 and b > 0 for a, b in pairs):
            continue
        unit = figures[0].unit
        times = [b / a if more_is_better(unit) else a / b for a, b in pairs]
        goal = GOALS.get(name)
        comparisons.append(
            Comparison(
                name=name,
                unit=unit,
                old=median(a for a, _ in pairs),
                new=median(b for _, b in pairs),
                times=round(median(times), 3),
                lowest=round(min(times), 3),
                highest=round(max(times), 3),
                turns=len(pairs),
                goal=goal,
                holds=None if goal is None else median(times) >= goal,
            )
        )
    return comparisons


def _measure(side: Side, name: str, options: Sequence[str], folder: Path, tests: Path) -> list[Figure]:
    output = folder / "figures.json"
    name = OLD_NAMES.get(name, name) if side.name == "old" else name
    finished = subprocess.run(
        [side.python(), "-m", "tests.benchmarks", name, "--json", "--output", str(output), *options],
        cwd=tests,
        env=side.environment(tests),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if finished.returncode:
        raise RuntimeError(f"{name} of the {side.name} code failed: {finished.stderr.strip()[-2_000:]}")
    figures = msgspec.json.decode(output.read_bytes(), type=list[Figure])
    present = {old: new for new, old in OLD_NAMES.items()}
    return [msgspec.structs.replace(each, name=present.get(each.name, each.name)) for each in figures]


def _reads_tables(name: str) -> bool:
    """Return whether a measurement is one of `OWN`."""
    return any(f"{name}.".startswith(f"{own}.") for own in OWN)
