"""`postroom report`: figures of a store's messages, as a table, JSON, Parquet or an HTML page."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.project import ENGINES, Engine
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.time_arguments import Archive, parse_moment
from postroom.adapters.cli.values import WrongUsage, format_duration, parse_duration
from postroom.application.extras import explain_missing_extra
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    import pyarrow as pa

    from postroom.projections.reports.report import Report
    from postroom.projections.spark.options import LogSelection

PERIODS = ("hour", "day")

Since = Annotated[
    str | None, Option("--since", metavar="TIME", help="First event: RFC 3339, or an age such as 7d.")
]
Until = Annotated[str | None, Option("--until", metavar="TIME", help="End (exclusive), in the same format.")]
Topic = Annotated[
    str | None,
    Option("--topic", metavar="TOPIC", help="Only this topic; with * at the end, those that begin so."),
]
Parquet = Annotated[
    str | None,
    Option("--parquet", metavar="FOLDER", help="Also write the rows to a Parquet file in this folder."),
]
Html = Annotated[
    str | None,
    Option("--html", metavar="FILE", help="Also write a page with charts, which needs no network."),
]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing Parquet folder.")]


class ReportOptions(msgspec.Struct, frozen=True):
    """Options that all reports have; times in µs."""

    since: int | None
    until: int | None
    topic: str | None
    by: str
    archive: str | None
    engine: str
    parquet: str | None
    html: str | None
    overwrite: bool


def report_options(
    session: Session,
    since: Since = None,
    until: Until = None,
    topic: Topic = None,
    by: Annotated[str, Option(metavar="hour|day", help="Period of a row, in UTC.")] = "hour",
    archive: Archive = None,
    engine: Engine = "spark",
    parquet: Parquet = None,
    html: Html = None,
    overwrite: Overwrite = False,
) -> ReportOptions:
    """Return the options; raise WrongUsage for an invalid value."""
    if by not in PERIODS:
        raise WrongUsage(f"Unknown --by {by!r}; expected hour or day.")
    if engine not in ENGINES:
        raise WrongUsage(f"Unknown --engine {engine!r}; expected {' or '.join(ENGINES)}.")
    if topic is not None and not topic.strip("*").strip():
        raise WrongUsage("--topic is blank; name a topic, or leave the option out for all.")
    return ReportOptions(
        _micros("--since", since),
        _micros("--until", until),
        topic,
        by,
        session.archive(archive),
        engine,
        parquet,
        html,
        overwrite,
    )


@takes(report_options)
def latency(session: Session, options: ReportOptions) -> int | None:
    """Report how long messages took from sending to receiving and acking, by topic and the time of sending.

    Of each duration, the median, p95 and p99 are the smallest recorded ones that so many do not exceed.
    """
    return _report(session, "latency", options)


@takes(report_options)
def retries(session: Session, options: ReportOptions) -> int | None:
    """Report failed deliveries by topic, reason and kind of error.

    Errors that differ only in numbers and ids are of one kind, and have the same fingerprint.
    """
    return _report(session, "retries", options)


@takes(report_options)
def traffic(session: Session, options: ReportOptions) -> int | None:
    """Report how many messages of which sizes were sent, by topic and principal."""
    return _report(session, "traffic", options)


@takes(report_options)
def sla(
    session: Session,
    options: ReportOptions,
    within: Annotated[
        str, Option(metavar="DURATION", help="Time from sending to the ack that is within the bound.")
    ] = "1m",
) -> int | None:
    """Report the share of messages that were acked within a bound, by topic and the time of sending.

    Messages that are younger than the bound and not acked yet are open; they do not count in the share.
    """
    return _report(session, "sla", options, {"bound": parse_duration(within) * 1_000})


@takes(report_options)
def run(
    session: Session,
    options: ReportOptions,
    module: Annotated[str, Argument(metavar="MODULE", help="Module that defines REPORT.")],
) -> int | None:
    """Make a report that a module of yours defines."""
    with explain_missing_extra("reports"):
        from postroom.projections.reports.report import load_report

    return _write(session, load_report(module), options, {})


def _report(
    session: Session, name: str, options: ReportOptions, parameters: Mapping[str, int] | None = None
) -> int | None:
    with explain_missing_extra("reports"):
        from postroom.projections.reports.catalog import REPORTS

    return _write(session, REPORTS[name], options, parameters or {})


def _write(
    session: Session, report: "Report", options: ReportOptions, parameters: Mapping[str, int]
) -> int | None:
    rows = compute(session, report, options, parameters)
    headings = [name.removesuffix("_ms") for name in rows.column_names]
    cells = [[cell(name, value) for name, value in row.items()] for row in rows.to_pylist()]
    only_wide = [name.removesuffix("_ms") for name in report.only_wide]
    show(session, report, rows, options, lambda: session.out.table(headings, cells, only_wide=only_wide))
    return None if rows.num_rows else NOTHING


def compute(
    session: Session, report: "Report", options: ReportOptions, parameters: Mapping[str, int]
) -> "pa.Table":
    """Return the rows of a report, and write them to the files that the options name."""
    with explain_missing_extra("reports"):
        from postroom.adapters.compose.reports import make_report, write_page, write_parquet
        from postroom.projections.reports.report import PERIODS as MICROS

    store = session.existing_store()
    label = "Starting Spark" if options.engine == "spark" else "Reading"
    with session.out.progress(label):
        rows = make_report(
            store,
            report,
            selection=selection_of(session, options),
            topic=options.topic,
            archive=options.archive,
            engine="local" if options.engine == "local" else "spark",
            parameters={"period": MICROS[options.by], **parameters},
        )
    if options.parquet is not None:
        write_parquet(report, rows, options.parquet, overwrite=options.overwrite)
    if options.html is not None:
        write_page(report, rows, options.html)
    return rows


def selection_of(session: Session, options: ReportOptions) -> "LogSelection":
    """Return which part of each log is read."""
    from postroom.projections.spark.options import LogSelection

    return LogSelection(session.settings.mailbox, options.since, options.until)


def show(
    session: Session, report: "Report", rows: "pa.Table", options: ReportOptions, table: Callable[[], None]
) -> None:
    """Print the rows of a report, and which files were written.

    Arguments:
        table: prints them as a table.
    """
    if session.out.as_json:
        session.out.json({"report": report.name, "rows": [_json(row) for row in rows.to_pylist()]})
        return
    table()
    for option, path in (("--parquet", options.parquet), ("--html", options.html)):
        if path is not None:
            session.out.note(f"{option}: {pluralize(rows.num_rows, 'row')} in {path}")


def _json(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rfc_3339(value) if isinstance(value, datetime) else value for name, value in row.items()}


def cell(name: str, value: Any) -> object:
    """Return a value for a table: times and durations in few characters."""
    from postroom.adapters.cli.tables import Id

    match value:
        case datetime():
            return Id(f"{value:%m-%d %H:%M}")
        case float() if name.endswith("_ms"):
            return Id(f"{value:.3g}ms" if value < 999.5 else format_duration(value))
        case float():
            return Id(f"{value:.3g}" if value < 100 else f"{value:,.0f}")
    return value


def _rfc_3339(time: datetime) -> str:
    return time.replace(tzinfo=None).isoformat() + "Z"


def _micros(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    moment = parse_moment(text, datetime.now(UTC))
    if isinstance(moment, int):
        raise WrongUsage(
            f"{option} {text!r} is not a time; write 2026-01-31T08:00:00Z, or an age such as 7d."
        )
    return round(moment.timestamp() * 1_000_000)
