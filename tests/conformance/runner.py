"""What every runner does: a task for each part, then stages that get all values of a key together."""

import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from postroom.projections.log_reader import LogExtent, Range
from postroom.projections.plan import Part
from postroom.projections.ports.runner import Pair, Stage, TaskRunner

SECONDS = 60.0

EXTENT = LogExtent(1, "main@test", 1, 30, 0)
PARTS = [Part(f"part-{n}", (Range(EXTENT, 10 * n + 1, 10 * n + 10),)) for n in range(3)]


class Total(NamedTuple):
    """A result: what the values of a key add up to."""

    key: int | str
    total: int


def positions(part: Part) -> Iterator[int]:
    """Yield the positions of a part as results."""
    for each in part.ranges:
        yield from range(each.first, each.last + 1)


def by_parity(part: Part) -> Iterator[Pair | Total]:
    """Yield each position for the stage `parity`, and the size of the part as a result."""
    for position in positions(part):
        yield Pair("parity", position % 2, position)
    yield Total(part.name, part.size)


def add(key: int, values: Iterable[int]) -> Iterator[Pair]:
    """Hand the sum of a parity to the stage `all`."""
    yield Pair("all", "sum", sum(values))


def total(key: str, values: Iterable[int]) -> Iterator[Total]:
    """Yield the sum of everything."""
    yield Total(key, sum(values))


def refuse(part: Part) -> Iterator[int]:
    """Fail at one of the parts."""
    if part.name == "part-1":
        raise ValueError("no such luck")
    yield part.size


def wait_for(file: Path, part: Part) -> Iterator[int]:
    """Yield the size of a part once a file exists."""
    deadline = time.monotonic() + SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            raise TimeoutError("no progress was reported")
        time.sleep(0.01)
    yield part.size


class RunnerConformance:
    """Subclass it with a fixture `runner`, which was started."""

    def test_every_part_has_its_task_and_all_results_come_back(self, runner: TaskRunner) -> None:
        assert sorted(runner.run(positions, PARTS)) == list(range(1, 31))

    def test_no_parts_give_no_results(self, runner: TaskRunner) -> None:
        assert runner.run(positions, []) == []

    def test_a_stage_gets_all_values_of_a_key_whichever_part_they_are_from(self, runner: TaskRunner) -> None:
        stages = [Stage("parity", add, 2), Stage("all", total, 1, ("sum", "nothing"))]
        results = runner.run(by_parity, PARTS, stages)
        assert sorted(results) == [
            Total("nothing", 0),
            *(Total(part.name, 10) for part in PARTS),
            Total("sum", sum(range(1, 31))),
        ]

    def test_progress_is_reported_in_this_process_and_never_exceeds_the_work(
        self, runner: TaskRunner
    ) -> None:
        here, seen = os.getpid(), []

        def report(done: int) -> None:
            assert os.getpid() == here
            seen.append(done)

        runner.run(positions, PARTS, progress=report)
        assert seen == sorted(seen)
        assert all(0 <= done <= 30 for done in seen)

    def test_progress_is_reported_while_a_task_runs(self, runner: TaskRunner, tmp_path: Path) -> None:
        file = tmp_path / "reported"
        assert runner.run(partial(wait_for, file), PARTS, progress=lambda _: file.touch()) == [10, 10, 10]

    def test_an_error_of_progress_ends_the_run(self, runner: TaskRunner, tmp_path: Path) -> None:
        file = tmp_path / "reported"

        def report(done: int) -> None:
            file.touch()
            raise ValueError("the disk is full")

        with pytest.raises(ValueError, match="the disk is full"):
            runner.run(partial(wait_for, file), PARTS, progress=report)

    def test_what_a_task_raised_is_the_reason_of_the_failure(self, runner: TaskRunner) -> None:
        with pytest.raises(Exception, match="no such luck") as failed:
            runner.run(refuse, PARTS)
        assert runner.reason(failed.value) == "no such luck"
