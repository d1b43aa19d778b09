"""Reports on the store at an address."""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.postgres.url import is_url
from postroom.application.extras import explain_missing_extra
from postroom.projections.ports.log_reader import LogReader
from postroom.projections.reports.report import BEGINNING, END_OF_TIME, Report
from postroom.projections.spark.columns import EVENTS, arrow_schema
from postroom.projections.spark.event_rows import EventFilter, EventRows
from postroom.projections.spark.options import LogSelection

if TYPE_CHECKING:
    import pyarrow as pa

Engine = Literal["spark", "local"]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def make_report(
    address: str,
    report: Report,
    *,
    selection: LogSelection,
    topic: str | None = None,
    archive: str | None = None,
    engine: Engine = "spark",
    parameters: Mapping[str, int] | None = None,
) -> "pa.Table":
    """Return the rows of a report.

    Arguments:
        selection: mailboxes and times; a report that follows messages reads to the end of the log.
        topic: a topic, or with `*` at its end those that begin so.
        archive: folder of the records that retention removed.
        engine: `local` runs in this process, without a JVM.
        parameters: of the report's SQL text.

    Raises: InvalidRequest for an invalid parameter; Unavailable when the store can't be read, or Spark does
        not start; MissingExtra when a package is not installed.
    """
    log = open_log_reader(open_store(address), archive)
    arguments = {
        "since": BEGINNING if selection.since is None else selection.since,
        "until": END_OF_TIME if selection.until is None else selection.until,
        **(parameters or {}),
    }
    if "now" in report.defaults:
        arguments["now"] = max(
            (each.at for each in log.extents() if selection.includes(each.name)), default=0
        )
    if report.follows:
        selection = LogSelection(selection.mailbox, selection.since)
    if engine == "local":
        return _run_locally(log, report, selection, topic, arguments)
    return _run_on_spark(address, report, selection, topic, archive, arguments)


def _run_locally(
    log: LogReader, report: Report, selection: LogSelection, topic: str | None, parameters: Mapping[str, int]
) -> "pa.Table":
    with explain_missing_extra("reports"):
        from postroom.projections.reports.local import run_report

    schema = arrow_schema(column for column in EVENTS if column.name in report.reads)
    rows = EventRows(log, schema, EventFilter(report.events, topic))
    return run_report(report, schema, rows.read(selection.ranges(log, log.extents())), parameters)


def _run_on_spark(
    address: str,
    report: Report,
    selection: LogSelection,
    topic: str | None,
    archive: str | None,
    parameters: Mapping[str, int],
) -> "pa.Table":
    with explain_missing_extra("spark"):
        from postroom.adapters.compose.spark import register
        from postroom.projections.reports.spark import report_frame
        from postroom.projections.spark.session import start_session

    spark = start_session()
    register(spark)
    # Spark's processes may have another working directory than this one.
    options = {
        "url" if is_url(address) else "path": address if is_url(address) else str(Path(address).absolute()),
        "columns": ",".join(report.reads),
        "event": ",".join(report.events) or None,
        "topic": topic,
        "mailbox": selection.mailbox,
        "archive": None if archive is None else str(Path(archive).absolute()),
        "since": _time(selection.since),
        "until": _time(selection.until),
    }
    events = spark.read.format("postroom_events").options(**options).load()
    return report_frame(report, events, parameters).toArrow()


def _time(micros: int | None) -> str | None:
    return None if micros is None else (_EPOCH + timedelta(microseconds=micros)).isoformat()


def write_parquet(report: Report, rows: "pa.Table", folder: str, *, overwrite: bool = False) -> None:
    """Write the rows of a report to a Parquet file in a folder, which has all of them or is unchanged.

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
