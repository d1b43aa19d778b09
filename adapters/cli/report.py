"""`postroom report`: figures of a store's messages and of policies, as a table, JSON, Parquet or HTML."""

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    NOTHING,
    Archive,
    WrongUsage,
    exact_duration,
    format_duration,
    parse_duration,
    parse_micros,
)
from postroom.adapters.cli.views import EngineOption, check_engine
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize
from postroom.projections.engine import Engine, EngineChoice, EngineSettings

if TYPE_CHECKING:
    import pyarrow as pa

    from postroom.domain.policy import Changes
    from postroom.projections.reports.report import Report
    from postroom.projections.spark.options import LogSelection


Since = Annotated[
    str | None, Option("--since", metavar="TIME", help="First event: RFC 3339, or an age such as 7d.")
]
Until = Annotated[str | None, Option("--until", metavar="TIME", help="End (exclusive), in the same format.")]
Topic = Annotated[
    str | None,
    Option(
        "--topic", metavar="TOPIC", help="Only this topic, or with * at the end, topics with this prefix."
    ),
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
By = Annotated[str, Option("--by", metavar="hour|day", help="Period of a row, in UTC.")]


class ReportOptions(msgspec.Struct, frozen=True):
    """Options of all reports; times in µs."""

    since: int | None
    until: int | None
    topic: str | None
    archive: str | None
    engine: Engine
    parquet: str | None
    html: str | None
    overwrite: bool


def report_options(
    session: Session,
    since: Since = None,
    until: Until = None,
    topic: Topic = None,
    archive: Archive = None,
    engine: EngineOption = "auto",
    parquet: Parquet = None,
    html: Html = None,
    overwrite: Overwrite = False,
) -> ReportOptions:
    """Return the options; raise WrongUsage for an invalid value."""
    checked = check_engine(engine)
    if topic is not None and not topic.strip("*").strip():
        raise WrongUsage("--topic is blank; name a topic, or leave the option out for all.")
    return ReportOptions(
        parse_micros("--since", since),
        parse_micros("--until", until),
        topic,
        session.archive(archive),
        checked,
        parquet,
        html,
        overwrite,
    )


@takes(report_options)
def latency(session: Session, options: ReportOptions, by: By = "hour") -> int | None:
    """Report the time from sending to receiving and acking, by topic and time of sending.

    Shows the median, p95 and p99 of each duration.
    """
    return _report(session, "latency", options, by)


@takes(report_options)
def retries(session: Session, options: ReportOptions, by: By = "hour") -> int | None:
    """Report failed deliveries by topic, reason and kind of error.

    Errors that differ only in numbers and ids are of the same kind, with the same fingerprint.
    """
    return _report(session, "retries", options, by)


@takes(report_options)
def traffic(session: Session, options: ReportOptions, by: By = "hour") -> int | None:
    """Report the number and sizes of sent messages, by topic and principal."""
    return _report(session, "traffic", options, by)


@takes(report_options)
def sla(
    session: Session,
    options: ReportOptions,
    within: Annotated[
        str, Option(metavar="DURATION", help="The bound: maximum time from sending to the ack.")
    ] = "1m",
    by: By = "hour",
) -> int | None:
    """Report the share of messages that were acked within a bound, by topic and time of sending.

    Messages that are younger than the bound and not acked yet are open and do not count.
    """
    return _report(session, "sla", options, by, {"bound": parse_duration(within) * 1_000})


@takes(report_options)
def run(
    session: Session,
    options: ReportOptions,
    module: Annotated[str, Argument(metavar="MODULE", help="Module that defines REPORT.")],
    by: By = "hour",
) -> int | None:
    """Run a custom report, which a Python module defines."""
    with explain_missing_extra("reports"):
        from postroom.projections.reports.report import load_report

    return _write(session, load_report(module), options, by)


def _report(
    session: Session,
    name: str,
    options: ReportOptions,
    by: str,
    parameters: Mapping[str, int] | None = None,
) -> int | None:
    with explain_missing_extra("reports"):
        from postroom.projections.reports.report import REPORTS

    return _write(session, REPORTS[name], options, by, parameters)


def _write(
    session: Session,
    report: "Report",
    options: ReportOptions,
    by: str,
    parameters: Mapping[str, int] | None = None,
) -> int | None:
    from postroom.projections.models.activity import PERIODS

    if by not in PERIODS:
        raise WrongUsage(f"Unknown --by {by!r}; expected {' or '.join(PERIODS)}.")
    rows, choice = compute(session, report, options, {"period": PERIODS[by], **(parameters or {})})
    headings = [name.removesuffix("_ms") for name in rows.column_names]
    cells = [[cell(name, value) for name, value in row.items()] for row in rows.to_pylist()]
    only_wide = [name.removesuffix("_ms") for name in report.only_wide]
    show(
        session,
        report,
        rows,
        choice,
        options,
        lambda: session.out.table(headings, cells, only_wide=only_wide),
    )
    return None if rows.num_rows else NOTHING


def compute(
    session: Session, report: "Report", options: ReportOptions, parameters: Mapping[str, int]
) -> "tuple[pa.Table, EngineChoice]":
    """Return the rows of a report and the engine, and write the rows to the files that the options name."""
    with explain_missing_extra("reports"):
        from postroom.adapters.compose.reports import make_report, report_engine, write_page, write_parquet

    store, selection, archive = session.existing_store(), selection_of(session, options), options.archive
    settings = session.settings.section("engine", EngineSettings)
    choice = report_engine(store, report, options.engine, settings, selection=selection, archive=archive)
    with session.out.progress(choice.summary()):
        rows = make_report(
            store,
            report,
            selection=selection,
            topic=options.topic,
            archive=archive,
            engine=choice,
            parameters=parameters,
        )
    if options.parquet is not None:
        write_parquet(report, rows, options.parquet, overwrite=options.overwrite)
    if options.html is not None:
        write_page(report, rows, options.html)
    return rows, choice


def selection_of(session: Session, options: ReportOptions) -> "LogSelection":
    """Return the part of each log to read."""
    from postroom.projections.spark.options import LogSelection

    return LogSelection(session.settings.mailbox, options.since, options.until)


def show(
    session: Session,
    report: "Report",
    rows: "pa.Table",
    choice: EngineChoice,
    options: ReportOptions,
    table: Callable[[], None],
) -> None:
    """Print the rows of a report, and the names of the files that were written.

    Arguments:
        table: prints the rows as a table.
    """
    if session.out.as_json:
        listed = [_json(row) for row in rows.to_pylist()]
        session.out.json({"report": report.name, "computed_by": choice, "rows": listed})
        return
    table()
    for option, path in (("--parquet", options.parquet), ("--html", options.html)):
        if path is not None:
            session.out.note(f"{option}: {pluralize(rows.num_rows, 'row')} in {path}")


def _json(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _rfc_3339(value) if isinstance(value, datetime) else value for name, value in row.items()}


def cell(name: str, value: Any) -> object:
    """Return a value for a table, with times and durations abbreviated."""
    from postroom.adapters.cli.output import Id

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


_POLICY = ("attempts", "backoff_ms", "backoff_max_ms", "visibility_ms")
_RANGES = ("dead_lettered", "redeliveries", "queued_p50_ms", "queued_p95_ms")
_WIDE_RANGES = ("settled", "dead", "removed", "waiting", "deliveries", "queued_max_ms")
_COUNTS = ("unchanged", "avoided", "pending", "caused", "undecided", "more_deliveries")


@takes(report_options)
def whatif(
    session: Session,
    options: ReportOptions,
    attempts: Annotated[str, Option(metavar="N,...", help="Maximum deliveries of a message.")] = "",
    backoff: Annotated[
        str, Option(metavar="D,...", help="First backoffs, which double with each attempt.")
    ] = "",
    backoff_max: Annotated[str, Option(metavar="D,...", help="Longest backoffs.")] = "",
    visibility: Annotated[str, Option(metavar="D,...", help="Visibility timeouts.")] = "",
    by_topic: Annotated[bool, Option("--by-topic", help="One row per policy and topic.")] = False,
) -> int | None:
    """Report the effects of other retry policies: dead letters, redeliveries and time in queue.

    Each combination of the values is a policy, at most 60; omitted options keep their past values. The
    outcome of a delivery that never took place is unknown, so figures that depend on one are shown as a
    range from the best to the worst case. The first row is the actual history.
    """
    policies = _grid(attempts, backoff, backoff_max, visibility)
    with explain_missing_extra("reports"):
        from postroom.adapters.compose.reports import whatif_report

    report = whatif_report(
        session.existing_store(),
        policies,
        selection=selection_of(session, options),
        archive=options.archive,
    )
    rows, choice = compute(session, report, options, {"by_topic": by_topic})
    listed = rows.to_pylist()
    show(session, report, rows, choice, options, lambda: _table(session, listed))
    return None if listed else NOTHING


def _grid(attempts: str, backoff: str, backoff_max: str, visibility: str) -> "list[Changes]":
    from postroom.domain.policy_grid import policy_grid

    if not any((attempts, backoff, backoff_max, visibility)):
        raise WrongUsage("Pass at least one of --attempts, --backoff, --backoff-max and --visibility.")
    return policy_grid(
        max_attempts=_values("--attempts", attempts, _number),
        backoff_base_ms=_values("--backoff", backoff, parse_duration),
        backoff_max_ms=_values("--backoff-max", backoff_max, parse_duration),
        visibility_ms=_values("--visibility", visibility, parse_duration),
    )


def _values(option: str, text: str, parse: Callable[[str], int]) -> list[int]:
    """Return values separated by commas."""
    parts = [each.strip() for each in text.split(",")] if text else []
    if not all(parts):
        raise WrongUsage(f"{option} {text!r} has an empty value; write values separated by commas.")
    return [parse(each) for each in parts]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise WrongUsage(f"--attempts: {text!r} is not a number of deliveries; write numbers such as 3,5,8.")
    return int(text)


def _table(session: Session, rows: list[dict[str, Any]]) -> None:
    from postroom.adapters.cli.output import Id, Prose

    has_topics = any(row["topic"] is not None for row in rows)
    headings = [
        *(("topic",) if has_topics else ()),
        *("policy", "messages"),
        *map(_heading, (*_RANGES, *_COUNTS, *_WIDE_RANGES)),
    ]
    cells = [
        [
            *((row["topic"],) if has_topics else ()),
            *(Prose(_policy_text(row)), row["messages"]),
            *(Id(_range(name, row)) for name in _RANGES),
            *(row[name] for name in _COUNTS),
            *(_range(name, row) for name in _WIDE_RANGES),
        ]
        for row in rows
    ]
    session.out.table(headings, cells, only_wide=["messages", *map(_heading, (*_COUNTS, *_WIDE_RANGES))])
    messages = sum(row["messages"] for row in rows if all(row[name] is None for name in _POLICY))
    session.out.note(
        f"{pluralize(messages, 'message')}; a range is from the best to the worst case, lower first"
    )


def _policy_text(row: dict[str, Any]) -> str:
    """Return the values that define the policy of a row."""
    texts = [
        f"{_option(name)}={exact_duration(row[name]) if name.endswith('_ms') else row[name]}"
        for name in _POLICY
        if row[name] is not None
    ]
    return " ".join(texts) or "actual"


def _option(name: str) -> str:
    return name.removesuffix("_ms").replace("_", "-")


def _heading(name: str) -> str:
    return {"dead_lettered": "dead letters"}.get(name, name.removesuffix("_ms").replace("_", " "))


def _range(name: str, row: dict[str, Any]) -> str:
    """Return a figure as a range from the best to the worst case, or one value if both are equal."""
    stem, unit = name.removesuffix("_ms"), "_ms" if name.endswith("_ms") else ""
    figures = sorted(row[f"{stem}_{case}{unit}"] for case in ("best", "worst"))
    low, high = (f"{each:,}" if isinstance(each, int) else str(cell(name, each)) for each in figures)
    return low if low == high else f"{low}-{high}"
