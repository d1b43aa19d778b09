"""Reports as Spark DataFrames."""

from typing import TYPE_CHECKING

from postroom.projections.reports.report import Parameters, Report

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def report_frame(report: Report, events: "DataFrame", parameters: Parameters) -> "DataFrame":
    """Return a report on events as a DataFrame.

    Arguments:
        events: rows of `postroom_events` with the columns and types of events that the report reads.
        parameters: of the SQL text; times and durations in µs.

    Raises: InvalidRequest for an unknown parameter.
    """
    arguments = report.arguments(parameters)
    if report.addition is not None:
        from pyspark.sql.functions import udf

        # Python functions over Arrow would need pandas.
        add = udf(report.addition.function, "string", useArrow=False)
        events = events.withColumn(report.addition.column, add(*report.addition.arguments))
    return events.sparkSession.sql(report.sql, arguments, events=events)
