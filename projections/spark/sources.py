"""The data sources of the log's store: `postroom_events`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from postroom.domain.errors import InvalidRequest
from postroom.projections.ports.log_reader import LogReader
from postroom.projections.spark.columns import (
    EVENTS,
    SourceColumn,
    check_schema,
    select_columns,
    spark_schema,
)
from postroom.projections.spark.event_rows import EventRows
from postroom.projections.spark.options import RANGE, STORE, LogSelection, Options
from postroom.projections.spark.source import BatchReader, RowReader, StreamReader, parts_of

STREAM = ("start", "max_rows")
"""Options of streams only."""
READ = ("columns", "partitions")


class StoreSource(DataSource):
    """A data source of the logs of a store; subclasses open the store and read its rows.

    The columns to read are those of the declared schema, of the option `columns`, or else all but those that
    have to be asked for: Spark does not tell a Python source which columns a query needs.
    """

    columns: ClassVar[Sequence[SourceColumn]]
    allowed: ClassVar[Sequence[str]]
    """Names of the options."""
    cores: ClassVar[int | None] = None
    """Number of cores of the cluster, if `register` could see it."""

    @abstractmethod
    def open_log(self, options: Options) -> LogReader:
        """Return the reader of the log that the options name."""

    @abstractmethod
    def rows(self, log: LogReader, schema: pa.Schema, options: Options) -> RowReader:
        """Return the reader of the rows of ranges."""

    def schema(self) -> StructType:
        """Return the columns for queries that declare none.

        Raises: InvalidRequest when the option `columns` has an unknown name.
        """
        return spark_schema(select_columns(self.name(), self.columns, self._options().text("columns")))

    def reader(self, schema: StructType) -> BatchReader:
        """Return the reader of the declared columns.

        Raises: InvalidRequest for an unknown option or an invalid value.
        """
        options = self._options()
        for name in STREAM:
            if name in options.values:
                raise InvalidRequest(f"The option {name} of {self.name()} is for streams; use readStream.")
        log, rows = self._open(options, schema)
        ranges = list(LogSelection.of(options).ranges(log, log.extents()))
        return BatchReader(rows, parts_of(ranges, self.cores, options.number("partitions")))

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802  # Spark's name
        """Return the reader of the declared columns as the log grows.

        Raises: InvalidRequest for an unknown option or an invalid value.
        """
        options = self._options()
        for name in ("until", "to_position", "partitions"):
            if name in options.values:
                raise InvalidRequest(f"The option {name} of {self.name()} is for batches; use read.")
        log, rows = self._open(options, schema)
        return StreamReader(
            log,
            rows,
            options.offset("start"),
            options.number("max_rows"),
            selection=LogSelection.of(options),
            cores=self.cores,
            is_by_time=True,
        )

    def _options(self) -> Options:
        options = Options(self.name(), dict(self.options))
        options.check_names(self.allowed)
        return options

    def _open(self, options: Options, schema: StructType) -> tuple[LogReader, RowReader]:
        check_schema(self.name(), self.columns, schema)
        log = self.open_log(options)
        return log, self.rows(log, to_arrow_schema(schema, timezone="UTC"), options)


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
