"""How Spark is started: `start_context` for jobs whose tasks are Python, `start_session` for DataFrames.

What `spark-submit` was told wins over all that is said here. `docs/spark.md` tells how to run on a cluster.
"""

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.domain.errors import Unavailable

if TYPE_CHECKING:
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

QUIET = "-Dlog4j2.configurationFile=" + Path(__file__).with_name("log4j2.properties").absolute().as_uri()
"""The Java option that keeps Spark's log quiet."""

SCHEDULER_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Java options for a JVM that only hands out tasks: compiling less and collecting with one thread leaves the
cores to Python.

Say them to `spark-submit --driver-java-options`: its JVM runs before we do.
"""

LOCAL = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.log.level": "FATAL",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""Settings where Spark runs in one process on this machine: a command of ours, not a service."""

SCHEDULER_JVM = {
    "spark.driver.extraJavaOptions": f"{SCHEDULER_OPTIONS} {QUIET}",
    "spark.driver.memory": "1g",
}
"""The local JVM of a job whose tasks do their work in Python."""

ROWS_JVM = {
    "spark.driver.extraJavaOptions": f"-XX:+UseParallelGC {QUIET}",
    "spark.driver.memory": "2g",
}
"""The local JVM of DataFrames."""

DATAFRAMES = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    # Without it Spark refuses a Python source that takes filters.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "lz4_raw",
}
"""Settings of DataFrames, on every master."""


def start_context(config: Mapping[str, str] | None = None) -> "SparkContext":
    """Return the Spark context of this process, started on the first call.

    It starts about 2 s sooner than a session, as nothing of SQL is loaded.

    Arguments:
        config: settings that go before ours, and after those of `spark-submit`.

    Raises: Unavailable when PySpark or Java is missing, or when Spark does not start.
    """
    settings = _settings(config or {}, {}, SCHEDULER_JVM)
    from pyspark import SparkContext
    from pyspark.errors import PySparkRuntimeError

    try:
        return SparkContext.getOrCreate(settings)
    except PySparkRuntimeError as error:
        raise _did_not_start(error) from error


def start_session(config: Mapping[str, str] | None = None) -> "SparkSession":
    """Return the Spark session of this process, started on the first call.

    Arguments:
        config: settings that go before ours, and after those of `spark-submit`.

    Raises: Unavailable when PySpark or Java is missing, or when Spark does not start.
    """
    settings = _settings(config or {}, DATAFRAMES, ROWS_JVM)
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        return SparkSession.builder.config(conf=settings).getOrCreate()
    except PySparkRuntimeError as error:
        raise _did_not_start(error) from error


def find_java() -> None:
    """See that Spark will find Java: `JAVA_HOME`, else `java` on the path, else one set up beside Python.

    Raises: Unavailable when there is none.
    """
    if "JAVA_HOME" in os.environ or shutil.which("java"):
        return
    own = Path(sys.prefix) / "jdk"
    if not (own / "bin" / "java").exists():
        raise Unavailable(
            "Spark needs Java 17 or newer and found none; install a JDK (for example "
            "openjdk-17-jre-headless) or set JAVA_HOME."
        )
    os.environ["JAVA_HOME"] = str(own)


def _settings(config: Mapping[str, str], ours: Mapping[str, str], jvm: Mapping[str, str]) -> "SparkConf":
    find_java()
    try:
        from pyspark import SparkConf, SparkContext
    except ImportError:
        raise Unavailable(
            "Rebuilding read models needs PySpark, which is not installed; "
            "run: pip install 'postroom[spark]'."
        ) from None
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        # spark-submit started us from a JVM that knows its options; only when asked does SparkConf see them.
        SparkContext.getSystemProperty("spark.master")
    # Tasks run Python too: the same one as this, unless something else was said.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = SparkConf()
    for name, value in {"spark.app.name": "postroom", "spark.master": "local[*]", **config}.items():
        settings.setIfMissing(name, value)
    is_local = str(settings.get("spark.master")).startswith("local")
    for name, value in {**ours, **({**LOCAL, **jvm} if is_local else {})}.items():
        settings.setIfMissing(name, value)
    return settings


def _did_not_start(error: Exception) -> Unavailable:
    return Unavailable(f"Spark did not start ({error}); it needs Java 17 or newer, and says more above.")
