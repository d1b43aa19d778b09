"""The data sources of a store's logs: `postroom_events`, `postroom_messages` and `postroom_payloads`.

A scan reads segments by Spark's Parquet reader, with the rows of `postroom_events`.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from postroom.domain.errors import InvalidRequest
from postroom.projections.log_checks import check_bounds
from postroom.projections.log_reader import LogReader, PayloadDecoder, Range
from postroom.projections.models.messages import UUID_SQL, MessageStatus
from postroom.projections.spark.columns import (
    EVENTS,
    MESSAGES,
    PAYLOADS,
    Kind,
    SourceColumn,
    check_schema,
    select_columns,
    spark_schema,
)
from postroom.projections.spark.event_rows import SEGMENT_SOURCES, EventFilter, EventRows
from postroom.projections.spark.message_rows import MessageRows, extents_as_of, message_parts
from postroom.projections.spark.options import (
    RANGE,
    STORE,
    LogSelection,
    Options,
    store_options,
    stored_options,
    table_options,
)
from postroom.projections.spark.payload_rows import PayloadRows
from postroom.projections.spark.source import BatchReader, Part, StreamReader, parts_of

STREAM = ("start", "max_rows")
"""Options of streams only."""
READ = ("columns", "partitions")


class StoreSource(DataSource):
    """A data source of the logs of a store; subclasses open the store and read its rows.

    A query reads the columns of its declared schema, of the option `columns`, or else the default columns:
    Spark does not pass the columns that a query needs to a Python source.
    """

    columns: ClassVar[Sequence[SourceColumn]]
    allowed: ClassVar[Sequence[str]]
    """Names of the options."""
    cores: ClassVar[int | None] = None
    """Number of cores of the cluster, if known to `register`."""

    @abstractmethod
    def open_log(self, options: Options) -> LogReader:
        """Return the reader of the log that the options name."""

    @abstractmethod
    def rows(self, log: LogReader, schema: pa.Schema, options: Options) -> Any:
        """Return the reader of the rows: a `RowReader`, unless a subclass overrides `reader`."""

    def schema(self) -> StructType:
        """Return the schema of queries that declare no columns.

        While a table is created, its options are stored in the schema.

        Raises: InvalidRequest if the option `columns` has an unknown name, or a table's store a password.
        """
        of_table = table_options(self.options)
        options = self._options(self.options if of_table is None else of_table)
        schema = spark_schema(select_columns(self.name(), self.columns, options.text("columns")))
        if of_table is not None:
            store_options(self.name(), schema, options.values)
        return schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the declared columns.

        Raises: InvalidRequest for an unknown option or an invalid value, BrokenLog when a log lacks its
            beginning or end.
        """
        options = self._batch_options(stored_options(schema, self.options))
        selection, partitions = LogSelection.of(options), options.number("partitions")
        log, rows = self._open(options, schema)
        return BatchReader(rows, parts_of(list(selection.ranges(log, log.extents())), self.cores, partitions))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        """Return the reader of the declared columns as the log grows.

        Raises: InvalidRequest for an unknown option or an invalid value.
        """
        options = self._options(stored_options(schema, self.options))
        for name in ("until", "to_position", "ranges", "partitions"):
            if name in options.values:
                raise InvalidRequest(f"The option {name} of {self.name()} is for batches; use read.")
        start, max_rows, selection = (
            options.offset("start"),
            options.number("max_rows"),
            LogSelection.of(options),
        )
        log, rows = self._open(options, schema)
        return StreamReader(log, rows, start, max_rows, selection=selection, cores=self.cores)

    def _batch_options(self, values: Mapping[str, str]) -> Options:
        options = self._options(values)
        for name in STREAM:
            if name in options.values:
                raise InvalidRequest(f"The option {name} of {self.name()} is for streams; use readStream.")
        return options

    def _options(self, values: Mapping[str, str]) -> Options:
        options = Options(self.name(), dict(values))
        options.check_names(self.allowed)
        return options

    def _open(self, options: Options, schema: StructType) -> tuple[LogReader, Any]:
        check_schema(self.name(), self.columns, schema)
        log = self.open_log(options)
        rows = self.rows(log, to_arrow_schema(schema, timezone="UTC"), options)
        if not options.allow_gaps:
            check_bounds(log)
        return log, rows


class EventsSource(StoreSource):
    """The events of a store's mailboxes, one row each: `postroom_events`."""

    columns = EVENTS
    allowed = (*STORE, *RANGE, "event", "topic", *READ, *STREAM)

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "postroom_events"

    def rows(self, log: LogReader, schema: pa.Schema, options: Options) -> EventRows:
        """Return the reader of events that match the options `event` and `topic`."""
        return EventRows(log, schema, options.event_filter())

    def selection(self) -> tuple[list[Range], EventFilter]:
        """Return the ranges of the logs that the options select, and the filter of their events.

        Raises: as `reader`.
        """
        options = self._batch_options(self.options)
        log, _ = self._open(options, self.schema())
        return list(LogSelection.of(options).ranges(log, log.extents())), options.event_filter()


class PayloadsSource(StoreSource):
    """The messages of a store's mailboxes with their payloads decoded, one row each: `postroom_payloads`."""

    columns = PAYLOADS
    allowed = (*STORE, *RANGE, "topic", "namespaces", "mode", *READ, *STREAM)

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "postroom_payloads"

    @abstractmethod
    def open_decoder(self, options: Options) -> PayloadDecoder:
        """Return the decoder of payloads that the options name."""

    def rows(self, log: LogReader, schema: pa.Schema, options: Options) -> PayloadRows:
        """Return the reader of messages that match the option `topic`."""
        return PayloadRows(
            log,
            schema,
            self.open_decoder(options),
            options.text("topic"),
            fails_fast=options.choice("mode", "permissive", "failfast") == "failfast",
        )


class MessageReader(BatchReader):
    """A reader of the messages of whole logs; see `BatchReader`."""

    rows: MessageRows

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        return self.rows.read(partition.ranges, partition.bucket)


class MessagesSource(StoreSource):
    """The messages of a store's mailboxes with their status, one row each: `postroom_messages`."""

    columns = MESSAGES
    allowed = (*STORE, "mailbox", "topic", "status", "as_of", "columns")

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "postroom_messages"

    def reader(self, schema: StructType) -> MessageReader:
        """Return the reader of the declared columns, as of the option `as_of`.

        Raises: InvalidRequest for an unknown option or an invalid value, NotFound if retention removed the
            log as of that moment.
        """
        options = self._options(stored_options(schema, self.options))
        selection, moment = LogSelection(options.text("mailbox")), options.moment("as_of")
        log, rows = self._open(options, schema)
        extents = [each for each in log.extents() if selection.includes(each.name)]
        extents = list(extents_as_of(log, extents, *moment))
        ranges = [Range(each, each.first, each.last) for each in extents]
        return MessageReader(rows, message_parts(ranges, self.cores))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        """Raise InvalidRequest, as rows of messages change."""
        raise InvalidRequest(f"{self.name()} can't be streamed, as its rows change; stream postroom_events.")

    def rows(self, log: LogReader, schema: pa.Schema, options: Options) -> MessageRows:
        """Return the reader of messages that match the options `topic` and `status`."""
        return MessageRows(log, schema, options.names("status", tuple(MessageStatus)), options.text("topic"))


_MESSAGE_ID = f"if(sent_position IS NULL, NULL, coalesce(sent_message_id, {UUID_SQL.format('')}))"
_SOURCES = SEGMENT_SOURCES | {"message_id": _MESSAGE_ID}
_CONVERSIONS: dict[Kind, str] = {
    "time": "timestamp_micros({})",
    "milliseconds": "timestamp_micros({} * 1000)",
    "map": "from_json({}, 'map<string,string>')",
}
_KINDS = {column.name: column.kind for column in EVENTS}


def scan_segments(
    spark: SparkSession,
    files: Sequence[str],
    stored: pa.Schema,
    schema: StructType,
    filter_: EventFilter,
) -> DataFrame:
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


def _column(name: str) -> Column:
    from pyspark.sql.functions import expr

    return expr(_CONVERSIONS.get(_KINDS[name], "{}").format(_SOURCES.get(name, name)))


def _conditions(filter_: EventFilter) -> Iterator[Column]:
    from pyspark.sql.functions import col

    if filter_.events:
        yield col("event").isin(*filter_.events)
    if filter_.topic is not None:
        topic = col(_SOURCES["topic"])
        prefix = filter_.topic.removesuffix("*")
        yield topic.startswith(prefix) if prefix != filter_.topic else topic == prefix
