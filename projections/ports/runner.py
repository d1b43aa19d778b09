"""Port: a runner of tasks, in this process or on a cluster, and the progress of long jobs in timed phases."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from postroom.projections.plan import Part

Key = int | str


class Pair(NamedTuple):
    """A value that a task sends to a later stage, and the key that it is grouped by there."""

    stage: str
    key: Key
    value: Any


class Stage(NamedTuple):
    """A later step of a job, whose task receives all values of a key.

    Arguments:
        name: name of the stage in pairs.
        task: takes a key and all its values; yields results, or pairs for later stages.
        partitions: number of tasks.
        keys: keys for which the task runs even without pairs.
    """

    name: str
    task: Callable[[Any, Iterable[Any]], Iterable[Any]]
    partitions: int
    keys: tuple[Key, ...] = ()


class TaskRunner(Protocol):
    """A runner of tasks, which retries lost ones; every adapter passes `tests/conformance/runner.py`.

    Tasks, parts and pairs are pickled: a task may run in any process, and more than once.
    """

    def start(self) -> None:
        """Start the runner, which may take seconds.

        Raises: Unavailable when it can't be started.
        """

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a task for each part, then the stages in their order, and return all results in any order.

        Arguments:
            task: takes a part; yields results, or pairs for a stage.
            progress: called repeatedly, from this thread, with the size of the parts done so far.

        Raises: an exception that `reason` explains, when a task failed.
        """

    def reason(self, error: Exception) -> str:
        """Return the cause of an error that `run` raised, in one line."""


class Progress(msgspec.Struct, frozen=True):
    """Progress of a job.

    Arguments:
        phase: the current phase.
        done, total: work of the phase, in `unit`; total is 0 while unknown.
        seconds: time since the job began.
        rate: work per second; 0 while unknown.
        remaining_seconds: estimated time until the phase ends; None while unknown.
    """

    phase: str
    done: int
    total: int
    unit: str
    seconds: float
    rate: float = 0.0
    remaining_seconds: float | None = None

    def summary(self) -> str:
        """Return one line of text."""
        if not self.total:
            return self.phase
        remaining = "" if self.remaining_seconds is None else f", {self.remaining_seconds:,.0f} s left"
        return f"{self.phase} {self.done:,}/{self.total:,} {self.unit}, {self.rate:,.0f}/s{remaining}"


class Stopwatch:
    """A stopwatch for consecutive phases, which also reports progress.

    Arguments:
        report: called with each progress report.
    """

    def __init__(self, report: Callable[[Progress], None]) -> None:
        self._start = self._phase_start = time.monotonic()
        self._report = report
        self.seconds: dict[str, float] = {}

    def elapsed(self) -> float:
        """Return the seconds since the stopwatch was created."""
        return round(time.monotonic() - self._start, 3)

    def end(self, phase: str) -> None:
        """Record the duration of a phase; the next one begins now."""
        now = time.monotonic()
        self.seconds[phase] = round(now - self._phase_start, 3)
        self._phase_start = now

    def counter(self, phase: str, unit: str, before: int = 0) -> Callable[[int, int], None]:
        """Return a function that reports the work done in a phase, and the total.

        Arguments:
            before: work that was already done and does not count towards the rate.
        """
        start = time.monotonic()

        def report(done: int, total: int) -> None:
            rate = (done - before) / max(time.monotonic() - start, 0.001)
            self.report(phase, done, total, unit, rate, (total - done) / rate if rate else None)

        report(before, 0)
        return report

    def report(
        self,
        phase: str,
        done: int = 0,
        total: int = 0,
        unit: str = "",
        rate: float = 0.0,
        remaining_seconds: float | None = None,
    ) -> None:
        """Report the progress of a phase."""
        self._report(Progress(phase, done, total, unit, self.elapsed(), rate, remaining_seconds))
