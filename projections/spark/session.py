"""Starting Spark: `start_context` for jobs with Python tasks, `start_session` for DataFrames.

Options of `spark-submit` take precedence over the settings here. `docs/spark.md` explains how to run on a
cluster.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from postroom.application.extras import explain_missing_extra
from postroom.application.telemetry import summarize
from postroom.domain.errors import Unavailable
from postroom.projections.plan import Part
from postroom.projections.ports.runner import Pair, Stage

if TYPE_CHECKING:
    from pyspark import RDD, SparkConf, SparkContext
    from pyspark.sql import SparkSession


QUIET = "-Dlog4j2.configurationFile=" + Path(__file__).with_name("log4j2.properties").absolute().as_uri()
"""Java option that disables Spark's log."""

SCHEDULER_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java options for a JVM that only schedules tasks: less compilation and single-threaded garbage collection
leave the cores to Python.

With `spark-submit`, pass them as `--driver-java-options`: its JVM starts before this code.
"""

LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "FATAL",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings for Spark inside a command on this machine."""

SCHEDULER_JVM = {
    "spark.driver.extraJavaOptions": f"{SCHEDULER_OPTIONS} {QUIET}",
    "spark.driver.memory": "1g",
}
"""Settings of the local JVM for jobs whose tasks run in Python."""

ROWS_JVM = {
    "spark.driver.extraJavaOptions": f"-XX:+UseParallelGC {QUIET}",
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings of the local JVM for DataFrames; on a cluster, Spark merges small ones of its 200 partitions."""

DATAFRAMES = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "lz4_raw",
    "spark.sql.files.maxPartitionBytes": "32m",
    "spark.sql.files.openCostInBytes": "256k",
    "spark.sql.sources.parallelPartitionDiscovery.threshold": "256",
}
"""Settings for DataFrames, on every master.

Segments have few bytes for their rows. By default, Spark counts 4 MB more for each file, so that a task gets
either many rows or many small files, and it runs a task to look up each of more than 32 files.
"""


def start_context(config: Mapping[str, str] | None = None) -> "SparkContext":
    """Return the Spark context of this process, started on the first call.

    It starts about 2 s faster than a session, because Spark SQL is not loaded.

    Arguments:
        config: settings that override the defaults, but not the options of `spark-submit`.

    Raises: Unavailable when PySpark or Java is missing, or when Spark does not start.
    """
    settings = _settings(config or {}, {}, SCHEDULER_JVM)
    from pyspark import SparkContext

    with _start_errors():
        return SparkContext.getOrCreate(settings)


def start_session(config: Mapping[str, str] | None = None) -> "SparkSession":
    """Return the Spark session of this process, started on the first call.

    Arguments:
        config: settings that override the defaults, but not the options of `spark-submit`.

    Raises: Unavailable when PySpark or Java is missing, or when Spark does not start.
    """
    settings = _settings(config or {}, DATAFRAMES, ROWS_JVM)
    from pyspark.sql import SparkSession

    with _start_errors():
        return SparkSession.builder.config(conf=settings).getOrCreate()


def find_java() -> None:
    """Find Java by `JAVA_HOME` or the path, or else set `JAVA_HOME` to a JDK in Python's environment.

    Raises: Unavailable if Java is missing.
    """
    if "JAVA_HOME" in os.environ or shutil.which("java"):
        return
    own = Path(sys.prefix) / "jdk"
    if not (own / "bin" / "java").exists():
        raise Unavailable(
            "Spark needs Java 17 or newer, which is not installed; install a JDK (for example "
            "openjdk-17-jre-headless), set JAVA_HOME, or do without Spark: --engine local."
        )
    os.environ["JAVA_HOME"] = str(own)


def _settings(config: Mapping[str, str], defaults: Mapping[str, str], jvm: Mapping[str, str]) -> "SparkConf":
    with explain_missing_extra(otherwise="do without Spark: --engine local"):
        from pyspark import SparkConf, SparkContext
    find_java()
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # spark-submit started this process; SparkConf sees its options only after a call to the JVM.
        SparkContext.getSystemProperty("spark.master")
    # Tasks run the same Python as this process by default.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = SparkConf()
    for name, value in {"spark.app.name": "postroom", "spark.master": "local[*]", **config}.items():
        settings.setIfMissing(name, value)
    is_local = str(settings.get("spark.master")).startswith("local")
    for name, value in {**defaults, **({**LOCAL, **jvm} if is_local else {})}.items():
        settings.setIfMissing(name, value)
    return settings


@contextmanager
def _start_errors() -> Iterator[None]:
    """Raise Unavailable for Spark's own error."""
    from pyspark.errors import PySparkRuntimeError

    try:
        yield
    except PySparkRuntimeError as error:
        raise Unavailable(
            f"Spark did not start ({error}). It needs Java 17 or newer; see its output above, or do without "
            "Spark: --engine local."
        ) from error


POLL_SECONDS = 0.1
# The last line of a Python traceback in the JVM's message.
_TRACEBACK = re.compile(r"Traceback \((?:(?!Traceback \().)*?^[\w.]+: ([^\n]*)", re.DOTALL | re.MULTILINE)


class SparkTaskRunner:
    """A `TaskRunner` on Spark."""

    _context: "SparkContext"

    def start(self) -> None:
        """Start Spark, or use the context of this process; see `TaskRunner.start`."""
        self._context = start_context()

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a job with a task per part, and a shuffle before each stage; see `TaskRunner.run`."""
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
        """Return the error of a task without the JVM's stack traces; see `TaskRunner.reason`."""
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
