"""Reports: what they read, and the SQL text that both engines run.

The text is in the SQL that Spark and DuckDB have in common, with Spark's names of functions. `{events}` is
the table of the report's rows, `:name` a parameter. In DuckDB, `at` is a keyword: write `e.at`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from typing import Any, Literal, NamedTuple

from postroom.domain.errors import InvalidRequest
from postroom.projections.spark.columns import EVENTS

PERIODS = {"hour": 3_600_000_000, "day": 86_400_000_000}
"""Periods that reports divide time into, in µs; they begin at midnight UTC."""
BEGINNING, END_OF_TIME = 0, 1 << 62
"""Bounds (µs) of a report that has none."""

Parameters = Mapping[str, int]
Merge = Literal["sum", "max"]


class Chart(NamedTuple):
    """A chart of a report's rows by the column `start`, or by `x`.

    Arguments:
        value: column of the figures.
        by: column whose values have a line or bar each.
        merge: how rows of the same `start` and `by` are merged.
        unit: of the figures, such as `ms`.
    """

    title: str
    value: str
    by: str = "topic"
    merge: Merge = "max"
    unit: str = ""
    x: str = "start"


class Addition(NamedTuple):
    """A text column that is computed from others before the SQL text reads it.

    Arguments:
        function: of a module, which Spark's tasks import.
        arguments: columns.
    """

    column: str
    function: Callable[..., str]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """A report on the events of a store.

    Arguments:
        sql: the text of the query.
        reads: columns of `postroom_events` that it reads.
        events: types of the events that it reads; all when empty.
        charts: of the HTML page.
        only_wide: columns that a table shows with `--wide` only.
        follows: whether messages sent before `:until` are followed to the end of the log.
        addition: a column that no log has.
        defaults: of parameters besides `period`, `since` and `until`.
    """

    name: str
    title: str
    sql: str
    reads: tuple[str, ...]
    events: tuple[str, ...] = ()
    charts: tuple[Chart, ...] = ()
    only_wide: tuple[str, ...] = ()
    follows: bool = False
    addition: Addition | None = None
    defaults: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = [column.name for column in EVENTS]
        for name in self.reads:
            if name not in columns:
                raise InvalidRequest(
                    f"The report {self.name} reads a column {name!r}; postroom_events has "
                    f"{', '.join(columns)}."
                )

    def arguments(self, parameters: Parameters) -> dict[str, int]:
        """Return the parameters that the SQL text has, with defaults for those that are missing.

        Raises: InvalidRequest for a name that it does not have.
        """
        defaults = {"period": PERIODS["hour"], "since": BEGINNING, "until": END_OF_TIME, **self.defaults}
        for name in parameters:
            if name not in defaults:
                raise InvalidRequest(
                    f"The report {self.name} has no parameter {name!r}; it has {', '.join(defaults)}."
                )
        return {name: value for name, value in {**defaults, **parameters}.items() if f":{name}" in self.sql}


def sql_of(name: str) -> str:
    """Return the text of a file of this package."""
    return (files("postroom.projections.reports") / f"{name}.sql").read_text()


def load_report(module: str) -> Report:
    """Return the report that a module defines as `REPORT`.

    Raises: InvalidRequest when it can't be imported, or defines none.
    """
    try:
        report: Any = import_module(module).REPORT
    except Exception as error:
        raise InvalidRequest(f"The report {module} can't be loaded: {error}. Check PYTHONPATH.") from error
    if not isinstance(report, Report):
        raise InvalidRequest(f"REPORT of {module} is a {type(report).__name__}; make it a Report.")
    return report
