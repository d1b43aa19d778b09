"""Spark session: the one place that says how Spark is started and configured."""

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.domain.errors import Unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIG = {
    "spark.app.name": "postroom",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    # Without it Spark refuses a Python source that takes filters.
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.parquet.compression.codec": "lz4_raw",
    "spark.log.level": "FATAL",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}

QUIET = "-Dlog4j2.configurationFile=" + (Path(__file__).parent / "log4j2.properties").as_uri()
"""The Java option that keeps Spark's log quiet."""


def start_session(config: dict[str, str] | None = None) -> "SparkSession":
    """Return the Spark session of this process, started on the first call.

    Under `spark-submit` the master and whatever it was told on its command line win over our defaults.

    Arguments:
        config: settings that differ from `CONFIG`.

    Raises: Unavailable when PySpark or Java is missing.
    """
    find_java()
    try:
        from pyspark import SparkConf
        from pyspark.sql import SparkSession
    except ImportError:
        raise Unavailable(
            "Rebuilding read models needs PySpark, which is not installed; "
            "run: pip install 'postroom[spark]'."
        ) from None
    # Tasks run Python too: the same one as this, unless spark-submit says otherwise.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    settings = SparkConf()
    settings.setIfMissing("spark.master", "local[*]")
    for name, value in {**CONFIG, **(config or {})}.items():
        settings.setIfMissing(name, value)
    quiet = (
        "-XX:+UseParallelGC -Dlog4j2.configurationFile="
        + (Path(__file__).parent / "log4j2.properties").as_uri()
    )
    settings.setIfMissing("spark.driver.extraJavaOptions", quiet)
    return SparkSession.builder.config(conf=settings).getOrCreate()


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
