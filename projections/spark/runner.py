"""The runner port on Spark, in this process or on a cluster."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from postroom.application.telemetry import summarize
from postroom.projections.plan import Part
from postroom.projections.ports.runner import Pair, Stage
from postroom.projections.spark.session import start_context

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext

POLL_SECONDS = 0.1
# The last line of a Python traceback in the JVM's message.
_TRACEBACK = re.compile(r"Traceback \((?:(?!Traceback \().)*?^[\w.]+: ([^\n]*)", re.DOTALL | re.MULTILINE)


class SparkRunner:
    """A `Runner` on Spark."""

    _context: "SparkContext"

    def start(self) -> None:
        """Start Spark, or use the context of this process; see `Runner.start`."""
        self._context = start_context()

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a job with a task per part, and a shuffle before each stage; see `Runner.run`."""
        from pyspark import StorageLevel

        done = self._context.accumulator(0)

        def run_part(part: Part) -> Iterator[Any]:
            yield from task(part)
            done.add(part.size)

        pairs: RDD[Any] = self._context.parallelize(parts, max(1, len(parts))).flatMap(run_part)
        inputs = []
        for stage in stages:
            pairs.persist(StorageLevel.DISK_ONLY)  # read by this stage and by later ones
            inputs.append(pairs)
            groups = pairs.filter(_belongs_to(stage)).map(_key_and_value)
            if stage.keys:
                groups = groups.union(self._context.parallelize([(key, None) for key in stage.keys], 1))
            results = groups.groupByKey(stage.partitions).flatMap(_stage_task(stage))
            pairs = pairs.filter(_is_other(stage)).union(results)
        try:
            return self._collect(pairs, lambda: progress(done.value))
        finally:
            for each in inputs:
                each.unpersist()

    def reason(self, error: Exception) -> str:
        """Return the error of a task without the JVM's stack traces; see `Runner.reason`."""
        text = str(error)
        if errors := _TRACEBACK.findall(text):
            return str(errors[-1]).strip()
        return next((line.strip() for line in text.splitlines() if line.strip()), summarize(error))

    def _collect(self, results: "RDD[Any]", poll: Callable[[], None]) -> list[Any]:
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(results.collect)
            try:
                while wait([job], POLL_SECONDS).not_done:
                    poll()
            except BaseException:
                self._context.cancelAllJobs()
                raise
            return job.result()


def _belongs_to(stage: Stage) -> Callable[[Any], bool]:
    name = stage.name
    return lambda item: isinstance(item, Pair) and item.stage == name


def _is_other(stage: Stage) -> Callable[[Any], bool]:
    belongs = _belongs_to(stage)
    return lambda item: not belongs(item)


def _key_and_value(pair: Pair) -> tuple[Any, Any]:
    return pair.key, pair.value


def _stage_task(stage: Stage) -> Callable[[tuple[Any, Iterable[Any]]], Iterable[Any]]:
    task = stage.task
    return lambda group: task(group[0], (value for value in group[1] if value is not None))
