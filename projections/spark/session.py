"""Starting Spark: `start_context` for jobs with Python tasks, `start_session` for DataFrames.

Options of `spark-submit` take precedence over the settings here. `docs/spark.md` explains how to run on a
cluster.
"""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.application.extras import explain_missing_extra
from postroom.domain.errors import Unavailable

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
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
}
"""Settings of the local JVM for DataFrames."""

DATAFRAMES = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "lz4_raw",
}
"""Settings for DataFrames, on every master."""


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
            "openjdk-17-jre-headless) or set JAVA_HOME."
        )
    os.environ["JAVA_HOME"] = str(own)


def _settings(config: Mapping[str, str], defaults: Mapping[str, str], jvm: Mapping[str, str]) -> "SparkConf":
    find_java()
    with explain_missing_extra():
        from pyspark import SparkConf, SparkContext
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
            f"Spark did not start ({error}). It needs Java 17 or newer; see its output above."
        ) from error
