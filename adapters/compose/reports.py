"""Reports on the store at an address."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.application.extras import explain_missing_extra
from postroom.application.queries.mailbox_past import read_mailbox_past, to_us
from postroom.domain.arguments import check_any_text
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import Changes
from postroom.projections.engine import Engine, EngineChoice, EngineSettings, find_engine
from postroom.projections.log_reader import LogReader
from postroom.projections.reports import whatif
from postroom.projections.reports.report import BEGINNING, END_OF_TIME, Report
from postroom.projections.spark.columns import EVENTS, arrow_schema
from postroom.projections.spark.event_rows import EventFilter, EventRows
from postroom.projections.spark.options import WHOLE_LOG, LogSelection

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def report_engine(
    address: str,
    report: Report,
    engine: Engine | EngineChoice,
    settings: EngineSettings | None = None,
    *,
    selection: LogSelection,
    archive: str | None = None,
) -> EngineChoice:
    """Return the engine that makes a report; see `find_engine` and `make_report`."""
    log, selection = open_log_reader(open_store(address), archive), _selection(report, selection)
    return find_engine(
        engine,
        lambda: sum(each.size for each in selection.ranges(log, log.extents())),
        settings,
        local_module="duckdb",
    )


def make_report(
    address: str,
    report: Report,
    *,
    selection: LogSelection,
    topic: str | None = None,
    archive: str | None = None,
    engine: Engine | EngineChoice = "auto",
    parameters: Mapping[str, int] | None = None,
) -> "pa.Table":
    """Return the rows of a report.

    Arguments:
        selection: mailboxes and times; a report that follows messages reads to the end of the log.
        topic: a topic, or with `*` at its end those that begin so.
        archive: folder of the records that retention removed.
        engine: see `rebuild_projections`; `local` needs DuckDB.
        parameters: of the report's SQL text.

    Raises: InvalidRequest for an invalid parameter; Unavailable when the store can't be read, or Spark does
        not start; MissingExtra when a package is not installed.
    """
    log = open_log_reader(open_store(address), archive)
    _check_names(selection, topic)
    arguments = _arguments(log, report, selection, parameters or {})
    choice = report_engine(address, report, engine, selection=selection, archive=archive)
    if choice.engine == "local":
        return _run_locally(log, report, _selection(report, selection), topic, arguments)
    with explain_missing_extra("spark"):
        from postroom.adapters.compose.spark import register
        from postroom.projections.spark.session import start_session

    spark = start_session()
    register(spark)
    return _frame(spark, address, report, _selection(report, selection), topic, archive, arguments).toArrow()


def report_frame(
    spark: "SparkSession",
    store: str,
    report: str | Report,
    *,
    mailbox: str | None = None,
    topic: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
    archive: str | None = None,
    policies: Sequence[Changes] = (),
    parameters: Mapping[str, int] | None = None,
) -> "DataFrame":
    """Return a report as a DataFrame, with the columns that `docs/reports.md` describes.

    Arguments:
        spark: a session with which Postroom's data sources are registered.
        store: path or URL of the store.
        report: `latency`, `retries`, `traffic`, `sla` or `whatif`, or a report of your own.
        mailbox: a name, or a prefix followed by `*`; None for all.
        topic: a topic, or with `*` at its end those that begin so.
        since, until: range of the time of sending, or of the failure in `retries`; `until` is exclusive.
        archive: folder of the records that retention removed.
        policies: of `whatif`, at most 60.
        parameters: parameters of the report: `period`, and for `sla` `bound`, in µs; for `whatif` `by_topic`,
            0 or 1.

    Raises: InvalidRequest for an unknown report or parameter; Unavailable when the store can't be read.
    """
    times = (None if each is None else to_us(each) for each in (since, until))
    selection = LogSelection(mailbox, next(times), next(times))
    if isinstance(report, str):
        report = _report(report, store, selection, archive, policies)
    log = open_log_reader(open_store(store), archive)
    _check_names(selection, topic)
    arguments = _arguments(log, report, selection, parameters or {})
    return _frame(spark, store, report, _selection(report, selection), topic, archive, arguments)


def _report(
    name: str, address: str, selection: LogSelection, archive: str | None, policies: Sequence[Changes]
) -> Report:
    with explain_missing_extra("reports"):
        from postroom.projections.reports.report import REPORTS

    if name != whatif.NAME:
        if name not in REPORTS:
            raise InvalidRequest(
                f"There is no report {name!r}; name {', '.join(REPORTS)} or {whatif.NAME}, or pass a Report."
            )
        if policies:
            raise InvalidRequest(f"The report {name} takes no policies; {whatif.NAME} does.")
        return REPORTS[name]
    return whatif_report(address, policies, selection=selection, archive=archive)


def _check_names(selection: LogSelection, topic: str | None) -> None:
    """Raise InvalidRequest unless UTF-8 can encode the names of the mailbox and the topic."""
    for name, text in (("mailbox", selection.mailbox), ("topic", topic)):
        if text is not None:
            check_any_text(name, text)


def _arguments(
    log: LogReader, report: Report, selection: LogSelection, parameters: Mapping[str, int]
) -> dict[str, int]:
    """Add the times of the selection, and the end of the log, to the parameters of a report."""
    arguments = {
        "since": BEGINNING if selection.since is None else selection.since,
        "until": END_OF_TIME if selection.until is None else selection.until,
        **parameters,
    }
    if "now" in report.defaults:
        arguments["now"] = max(
            (each.at for each in log.extents() if selection.includes(each.name)), default=0
        )
    return arguments


def _selection(report: Report, selection: LogSelection) -> LogSelection:
    """Return the selection to read: a report that follows messages reads to the end of the log."""
    return LogSelection(selection.mailbox, selection.since) if report.follows else selection


def _run_locally(
    log: LogReader, report: Report, selection: LogSelection, topic: str | None, parameters: Mapping[str, int]
) -> "pa.Table":
    with explain_missing_extra("reports"):
        from postroom.projections.reports.local import run_report

    schema = arrow_schema(column for column in EVENTS if column.name in report.reads)
    rows = EventRows(log, schema, EventFilter(report.events, topic))
    return run_report(report, schema, rows.read(selection.ranges(log, log.extents())), parameters)


def _frame(
    spark: "SparkSession",
    address: str,
    report: Report,
    selection: LogSelection,
    topic: str | None,
    archive: str | None,
    parameters: Mapping[str, int],
) -> "DataFrame":
    from postroom.adapters.compose.spark import events
    from postroom.projections.reports import spark as on_spark

    frame = events(
        spark,
        address,
        columns=",".join(report.reads),
        event=",".join(report.events) or None,
        topic=topic,
        mailbox=selection.mailbox,
        archive=archive,
        since=_time(selection.since),
        until=_time(selection.until),
    )
    return on_spark.report_frame(report, frame, parameters)


def whatif_report(
    address: str,
    policies: Sequence[Changes],
    *,
    selection: LogSelection = WHOLE_LOG,
    archive: str | None = None,
) -> Report:
    """Return the report of the outcome under each of several policies for the messages of a store.

    Arguments:
        policies: at most 60; see `policy_grid`.
        selection: mailboxes that are read.
        archive: folder of the records that retention removed.

    Raises: NotFound when the store does not exist; Unavailable when it can't be read; BrokenLog when a log
        contains a commit that this version can't read.
    """
    pasts = {}
    for extent in open_log_reader(open_store(address), archive).extents():
        if selection.includes(extent.name):
            with read_mailbox(address, extent.name, archive=archive) as reader:
                pasts[extent.name] = read_mailbox_past(reader.log, extent.last, extent.at)
    return whatif.whatif_report(policies, pasts)


def _time(micros: int | None) -> str | None:
    return None if micros is None else (_EPOCH + timedelta(microseconds=micros)).isoformat()


def write_parquet(report: Report, rows: "pa.Table", folder: str, *, overwrite: bool = False) -> None:
    """Write the rows of a report to a Parquet file in a folder, all or none.

    Arguments:
        overwrite: replace a folder that this function wrote.

    Raises: InvalidRequest when the folder has anything else; Unavailable when it can't be written.
    """
    from postroom.adapters.reports.files import write_parquet_folder

    write_parquet_folder(rows, report.name, Path(folder).absolute(), overwrite=overwrite)


def write_page(report: Report, rows: "pa.Table", file: str) -> None:
    """Write the page of a report, with its charts and rows, to a file, which it replaces.

    Raises: Unavailable when it can't be written; MissingExtra when pygal is not installed.
    """
    from postroom.adapters.reports.files import replace_file

    with explain_missing_extra("reports"):
        from postroom.adapters.reports.page import page_of

    replace_file(Path(file).absolute(), page_of(report, rows).encode())
