"""The engine of a job on a log: this process, or Spark."""

from collections.abc import Callable
from importlib.util import find_spec
from os import environ
from typing import Annotated, Literal, get_args

import msgspec

from postroom.domain.errors import Unavailable

Engine = Literal["auto", "local", "spark"]
ENGINES: tuple[str, ...] = get_args(Engine)


class EngineSettings(msgspec.Struct, frozen=True):
    """Settings of `[engine]`.

    Arguments:
        local_records: maximum number of log records that the engine `auto` reads without Spark.
    """

    local_records: Annotated[int, msgspec.Meta(ge=0)] = 10_000_000


class EngineChoice(msgspec.Struct, frozen=True):
    """The engine of a job, and why it was chosen."""

    engine: Literal["local", "spark"]
    reason: str

    def summary(self) -> str:
        """Return one line of text."""
        return f"{self.engine.capitalize()} engine: {self.reason}"


def choose_engine(
    engine: Engine,
    records: int,
    settings: EngineSettings,
    *,
    is_submitted: bool,
    local_lacks: str | None,
    spark_lacks: str | None,
) -> EngineChoice:
    """Return the engine of a job.

    Arguments:
        engine: the user's choice.
        records: number of log records that the job reads.
        is_submitted: whether `spark-submit` started this process.
        local_lacks, spark_lacks: what the engine needs and is not installed; None if nothing.
    """
    if engine != "auto":
        return EngineChoice(engine, "requested")
    if is_submitted:
        return EngineChoice("spark", "started by spark-submit")
    if spark_lacks is not None:
        return EngineChoice("local", f"{spark_lacks} is not installed")
    if local_lacks is not None:
        return EngineChoice("spark", f"{local_lacks} is not installed")
    if records > settings.local_records:
        return EngineChoice("spark", f"{records:,} log records, more than {settings.local_records:,}")
    return EngineChoice("local", f"{records:,} log records, at most {settings.local_records:,}")


def find_engine(
    engine: Engine | EngineChoice,
    count: Callable[[], int],
    settings: EngineSettings | None = None,
    *,
    local_module: str = "polars",
) -> EngineChoice:
    """Return the engine of a job by the size of the log and the installed packages.

    Arguments:
        engine: the user's choice, or one that this function returned.
        count: returns the number of log records that the job reads.
        settings: the defaults if None.
        local_module: the package that computes the job's rows in this process.
    """
    if isinstance(engine, EngineChoice):
        return engine
    return choose_engine(
        engine,
        count() if engine == "auto" else 0,
        settings or EngineSettings(),
        is_submitted="PYSPARK_GATEWAY_PORT" in environ,
        local_lacks=local_module if find_spec(local_module) is None else None,
        spark_lacks=_missing_of_spark(),
    )


def _missing_of_spark() -> str | None:
    if find_spec("pyspark") is None:
        return "pyspark"
    from postroom.projections.spark.session import find_java  # of the extra `views`

    try:
        find_java()
    except Unavailable:
        return "Java"
    return None
