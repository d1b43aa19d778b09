"""An event loop on virtual time: it never waits, and what blocks runs in the loop itself."""

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import Executor
from random import Random
from typing import Any

from tests.simulation.jobs import Job

MAX_JOB_SECONDS = 0.005


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock moves to the next timer as soon as nothing else is to be done.

    A job of an executor takes effect some time after it was handed over, and is answered some time later.
    Jobs of one executor keep their order, as those of one thread do.
    """

    def __init__(self, random: Random) -> None:
        self._now = 0.0
        self._random = random
        self._free: dict[Executor | None, float] = {}
        super().__init__(_Selector(self._sleep))

    def time(self) -> float:
        """Return the virtual time in seconds since the loop began."""
        return self._now

    def run_in_executor(  # type: ignore[override]  # the base class types the arguments more narrowly
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = self.create_future()
        start = max(self._now, self._free.get(executor, 0.0)) + self._random.random() * MAX_JOB_SECONDS
        if executor is not None:
            self._free[executor] = start
        self.call_at(start, self._run_job, Job(done, func, args))
        return done

    def _sleep(self, seconds: float | None) -> None:
        if seconds is None:
            raise AssertionError("The simulation waits for something that never happens.")
        self._now += max(seconds, 1e-6)

    def _run_job(self, job: Job) -> None:
        job.run()
        self.call_later(self._random.random() * MAX_JOB_SECONDS, job.finish)


class _Selector(selectors.DefaultSelector):
    def __init__(self, sleep: Callable[[float | None], None]) -> None:
        super().__init__()
        self._sleep = sleep

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._sleep(timeout)
        return super().select(0)
