"""Reports: the events that they read, and the SQL query that both engines run.

A query uses the SQL that Spark and DuckDB have in common, with Spark's function names. `{events}` is the
table of the report's rows, `:name` a parameter. In DuckDB, `at` is a keyword: write `e.at`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from itertools import islice
from typing import Any, Literal, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from postroom.domain.errors import InvalidRequest
from postroom.domain.integrity import fingerprint
from postroom.projections.models.activity import PERIODS
from postroom.projections.spark.columns import EVENTS

BEGINNING, END_OF_TIME = 0, 1 << 62
"""Default bounds of a report, in µs."""

Parameters = Mapping[str, int]
Merge = Literal["sum", "max"]


class Chart(NamedTuple):
    """A chart of a report's rows.

    Arguments:
        title: shown above it.
        value: column of the figures.
        by: column with a series for each value.
        merge: how rows with the same `x` and `by` are merged.
        unit: unit of the figures, such as `ms`.
        x: column of the x axis.
    """

    title: str
    value: str
    by: str = "topic"
    merge: Merge = "max"
    unit: str = ""
    x: str = "start"


class HeatMap(NamedTuple):
    """Heat maps of a report's rows, with a cell for each combination of values of some columns.

    Arguments:
        value: column of the figures.
        columns: columns of the axes, the first along x; the row with nulls in all of them is the actual
            history.
        by: column with a heat map for each value.
        unit: unit of the figures, such as `ms`.
    """

    title: str
    value: str
    columns: tuple[str, ...]
    by: str = "topic"
    unit: str = ""


class Addition(NamedTuple):
    """A text column that a Python function computes from others, for the query to read.

    Arguments:
        function: a module-level function, as Spark's tasks import it.
        arguments: names of the columns that it takes.
    """

    column: str
    function: Callable[..., str]
    arguments: tuple[str, ...]


EventRow = tuple[Any, ...]
"""An event: the columns that a report reads, without `mailbox` and `stream`; times in µs."""


class MessageRows(NamedTuple):
    """Rows that a Python function computes from the events of each message, for the query to read.

    The report must read the columns `mailbox` and `stream`, and `position` as the first of the others.

    Arguments:
        function: takes mailbox, stream id, and the events in order of position; yields rows. It is pickled.
        schema: schema of the rows: texts and integers.
    """

    function: Callable[[str, bytes, Iterable[EventRow]], Iterable[tuple[Any, ...]]]
    schema: pa.Schema

    def lists(self, mailboxes: pa.Array, streams: pa.Array, events: pa.Array) -> pa.Array:
        """Return the rows of each message as a list of structs.

        Arguments:
            events: a list of structs for each message, in order of position.
        """
        structs = events.flatten()
        columns = [_values(structs.field(number)) for number in range(structs.type.num_fields)]
        rows = zip(*columns, strict=True)
        results: list[tuple[Any, ...]] = []
        offsets = [0]
        messages = (mailboxes.to_pylist(), streams.to_pylist(), pc.list_value_length(events).to_pylist())
        for mailbox, stream, length in zip(*messages, strict=True):
            results += self.function(mailbox, stream, islice(rows, length))
            offsets.append(len(results))
        values = zip(*results, strict=True) if results else ([] for _ in self.schema)
        arrays = [pa.array(each, field.type) for each, field in zip(values, self.schema, strict=True)]
        fields = pa.StructArray.from_arrays(arrays, fields=list(self.schema))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), fields)


def _values(array: pa.Array) -> list[Any]:
    """Return the values of an array, with times in µs."""
    is_time = pa.types.is_timestamp(array.type)
    return pl.Series(array.cast(pa.timestamp("us")).cast(pa.int64()) if is_time else array).to_list()


@dataclass(frozen=True)
class Report:
    """A report on the events of a store.

    Arguments:
        name, title: of the command and of the page.
        sql: the query.
        reads: columns of `postroom_events` that it reads.
        events: types of the events that it reads; empty for all.
        charts: charts of the HTML page.
        only_wide: columns that a table shows only with `--wide`.
        follows: whether events after `:until` are read, for the outcomes of messages sent before.
        addition: a computed column.
        messages: rows of messages, which the query reads instead of events.
        defaults: defaults of parameters besides `period`, `since` and `until`.
    """

    name: str
    title: str
    sql: str
    reads: tuple[str, ...]
    events: tuple[str, ...] = ()
    charts: tuple[Chart | HeatMap, ...] = ()
    only_wide: tuple[str, ...] = ()
    follows: bool = False
    addition: Addition | None = None
    messages: MessageRows | None = None
    defaults: Parameters = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = [column.name for column in EVENTS]
        for name in self.reads:
            if name not in columns:
                raise InvalidRequest(
                    f"The report {self.name} reads a column {name!r}; postroom_events has "
                    f"{', '.join(columns)}."
                )

    @property
    def event_columns(self) -> list[str]:
        """Return the columns of an `EventRow`."""
        return [name for name in self.reads if name not in ("mailbox", "stream")]

    def arguments(self, parameters: Parameters) -> dict[str, int]:
        """Return the parameters that the query uses, with defaults for missing ones.

        Raises: InvalidRequest for an unknown name.
        """
        defaults = {"period": PERIODS["hour"], "since": BEGINNING, "until": END_OF_TIME, **self.defaults}
        for name in parameters:
            if name not in defaults:
                raise InvalidRequest(
                    f"The report {self.name} has no parameter {name!r}; it has {', '.join(defaults)}."
                )
        values = {**defaults, **parameters}
        # Spark can't compare a boolean with a number.
        return {name: int(value) for name, value in values.items() if f":{name}" in self.sql}


def sql_of(name: str) -> str:
    """Return the query in a file of this package."""
    return (files("postroom.projections.reports") / f"{name}.sql").read_text()


def load_report(module: str) -> Report:
    """Return the report that a module defines as `REPORT`.

    Raises: InvalidRequest if the module can't be imported, or defines no report.
    """
    try:
        report: Any = import_module(module).REPORT
    except Exception as error:
        raise InvalidRequest(f"The report {module} can't be loaded: {error}. Check PYTHONPATH.") from error
    if not isinstance(report, Report):
        raise InvalidRequest(f"REPORT of {module} is a {type(report).__name__}; make it a Report.")
    return report


_MESSAGES = sql_of("messages")
_LIFE = ("mailbox", "position", "event", "at", "message_id", "topic", "due")


LATENCY = Report(
    "latency",
    "Time from sending to receiving and acking",
    sql_of("latency").replace("{messages}", _MESSAGES),
    reads=_LIFE,
    events=("MessageSent", "MessageReceived", "MessageAcked"),
    charts=(
        Chart("Sent to acked, p95", "total_p95_ms", unit="ms"),
        Chart("Sent to first received, p95", "queue_p95_ms", unit="ms"),
        Chart("Messages sent", "messages", merge="sum"),
    ),
    only_wide=(
        "received",
        "queue_p50_ms",
        "queue_p99_ms",
        "work_p50_ms",
        "work_p95_ms",
        "work_p99_ms",
        "total_p99_ms",
    ),
    follows=True,
)
SLA = Report(
    "sla",
    "Messages acked within a bound",
    sql_of("sla").replace("{messages}", _MESSAGES),
    reads=_LIFE,
    events=("MessageSent", "MessageAcked", "MessageExpired"),
    charts=(
        Chart("Share acked within the bound", "share"),
        Chart("Messages that missed the bound", "missed", merge="sum"),
    ),
    follows=True,
    defaults={"bound": 60_000_000, "now": 0},
)
TRAFFIC = Report(
    "traffic",
    "Messages sent",
    sql_of("traffic"),
    reads=("at", "topic", "principal", "size"),
    events=("MessageSent",),
    charts=(
        Chart("Messages a second", "per_second", merge="sum"),
        Chart("Bytes of payloads", "bytes", merge="sum"),
        Chart("Messages by principal", "messages", by="principal", merge="sum"),
    ),
    only_wide=("size_p95",),
)
RETRIES = Report(
    "retries",
    "Deliveries that failed",
    sql_of("retries"),
    reads=("mailbox", "event", "at", "message_id", "topic", "reason", "last_error", "attempt"),
    events=("MessageRequeued", "MessageDeadLettered"),
    charts=(
        Chart("Failures by topic", "failures", merge="sum"),
        Chart("Failures by reason", "failures", by="reason", merge="sum"),
        Chart("Failures by kind of error", "failures", by="fingerprint", merge="sum"),
    ),
    only_wide=("fingerprint", "attempt_mean"),
    addition=Addition("fingerprint", fingerprint, ("reason", "last_error")),
)
REPORTS = {report.name: report for report in (LATENCY, RETRIES, TRAFFIC, SLA)}
"""Reports on events, by name."""
