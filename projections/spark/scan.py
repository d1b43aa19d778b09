"""A scan of segments by Spark's Parquet reader, with the rows of `postroom_events`."""

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from postroom.projections.models.messages import UUID_SQL
from postroom.projections.spark.columns import EVENTS, Kind
from postroom.projections.spark.event_rows import SEGMENT_SOURCES, EventFilter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

_MESSAGE_ID = f"if(sent_position IS NULL, NULL, coalesce(sent_message_id, {UUID_SQL.format('')}))"
_SOURCES = SEGMENT_SOURCES | {"message_id": _MESSAGE_ID}
_CONVERSIONS: dict[Kind, str] = {
    "time": "timestamp_micros({})",
    "milliseconds": "timestamp_micros({} * 1000)",
    "map": "from_json({}, 'map<string,string>')",
}
_KINDS = {column.name: column.kind for column in EVENTS}


def scan_segments(
    spark: "SparkSession",
    files: Sequence[str],
    stored: pa.Schema,
    schema: "StructType",
    filter_: EventFilter,
) -> "DataFrame":
    """Return the events of segments that match a filter, in any order.

    Spark reads only the columns that a query needs, and skips row groups by the statistics of the others.

    Arguments:
        files: paths of the Parquet files.
        stored: the columns of the files.
        schema: the columns to return, from `EVENTS`.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    # Spark takes paths for patterns.
    paths = [re.sub(r"([\\*?{}\[\]])", r"\\\1", file) for file in files]
    frame = spark.read.schema(from_arrow_schema(stored)).parquet(*paths)
    for condition in _conditions(filter_):
        frame = frame.where(condition)
    return frame.select(*(_column(field.name).alias(field.name, metadata=field.metadata) for field in schema))


def _column(name: str) -> "Column":
    from pyspark.sql.functions import expr

    return expr(_CONVERSIONS.get(_KINDS[name], "{}").format(_SOURCES.get(name, name)))


def _conditions(filter_: EventFilter) -> Iterator["Column"]:
    from pyspark.sql.functions import col

    if filter_.events:
        yield col("event").isin(*filter_.events)
    if filter_.topic is not None:
        topic = col(_SOURCES["topic"])
        prefix = filter_.topic.removesuffix("*")
        yield topic.startswith(prefix) if prefix != filter_.topic else topic == prefix
