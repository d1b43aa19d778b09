"""Results of the benchmarks."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

RUNS = 3
"""How often a measurement is repeated; its median counts, as machines are noisy."""


class Figure(msgspec.Struct, frozen=True):
    """One figure: rates, and ratios of rates, should reach their goal; all else should stay below it."""

    name: str
    value: float
    unit: str
    goal: float | None
    holds: bool | None


def more_is_better(unit: str) -> bool:
    """Return whether figures of a unit should be large: rates, and `times` a rate of the same run."""
    return unit.endswith("/s") or unit == "times"


class Figures:
    """The figures of one run."""

    def __init__(
        self, names: Sequence[str], show: Callable[[str], None], output: Path | None = None, runs: int = RUNS
    ) -> None:
        """Take the prefixes of the measurements to make.

        Arguments:
            show: called with the text of each figure as it is added.
            output: JSON file that has all figures so far, also if the run is interrupted.
            runs: how often the measurements of queues, stores and histories are repeated.
        """
        self.results: list[Figure] = []
        self.runs = runs
        self._names = names
        self._show = show
        self._output = output

    def wants(self, name: str) -> bool:
        """Return whether to make a measurement, or one whose name begins with `name`."""
        return not self._names or any(
            _includes(asked, name) or _includes(name, asked) for asked in self._names
        )

    def is_named(self, name: str) -> bool:
        """Return whether a measurement, or one whose name begins with `name`, was requested by that name."""
        return any(_includes(name, asked) for asked in self._names)

    def progress(self, text: str) -> None:
        """Show the progress of a long measurement."""
        self._show(text)

    def add(self, name: str, value: float, unit: str, goal: float | None = None) -> None:
        """Add a figure, instead of an earlier one of the same name, and show it."""
        holds = None
        if goal is not None:
            holds = value >= goal if more_is_better(unit) else value <= goal
        self.results = [each for each in self.results if each.name != name]
        self.results.append(Figure(name, round(value, 4), unit, goal, holds))
        self.save()
        self._show(f"{name}: {value:,.4g} {unit}" if value < 100 else f"{name}: {value:,.0f} {unit}")

    def save(self) -> None:
        """Write the figures to the file."""
        if self._output is not None:
            write(self._output, self.results)


def _includes(group: str, name: str) -> bool:
    """Return whether a name, of parts between dots, is that of a group or of something in it."""
    return f"{name}.".startswith(f"{group.removesuffix('.')}.")


def write(path: Path, results: object) -> None:
    """Write results to a JSON file, which is complete at all times."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    temporary.replace(path)


class Stopwatch:
    """Measure the seconds that a block takes."""

    def __enter__(self) -> "Stopwatch":
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self.elapsed()

    def elapsed(self) -> float:
        """Return the seconds since the block was entered."""
        return time.perf_counter() - self._start
