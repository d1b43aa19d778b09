"""Reports as Spark DataFrames."""

from typing import TYPE_CHECKING

from postroom.projections.reports.report import MessageRows, Parameters, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def report_frame(report: Report, events: "DataFrame", parameters: Parameters) -> "DataFrame":
    """Return a report on events as a DataFrame.

    Arguments:
        events: rows of `postroom_events` with the columns and event types that the report reads.
        parameters: parameters of the query; times and durations in µs.

    Raises: InvalidRequest for an unknown parameter.
    """
    arguments = report.arguments(parameters)
    if report.addition is not None:
        from pyspark.sql.functions import udf

        # A udf over Arrow would need pandas.
        add = udf(report.addition.function, "string", useArrow=False)
        events = events.withColumn(report.addition.column, add(*report.addition.arguments))
    if report.messages is not None:
        events = _rows_of_messages(report, report.messages, events)
    return events.sparkSession.sql(report.sql, arguments, events=events)


def _rows_of_messages(report: Report, rows: MessageRows, events: "DataFrame") -> "DataFrame":
    """Group events by message, and return the rows of each message."""
    from pyspark.sql.functions import (  # type: ignore[attr-defined]  # its types lack arrow_udf
        arrow_udf,
        collect_list,
        inline,
        sort_array,
        struct,
    )
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import ArrayType

    events_of_message = sort_array(collect_list(struct(*report.event_columns)))  # by position
    messages = events.groupBy("mailbox", "stream").agg(events_of_message.alias("events"))
    lists = arrow_udf(rows.lists, ArrayType(from_arrow_schema(rows.schema)))
    return messages.select(inline(lists("mailbox", "stream", "events")))
