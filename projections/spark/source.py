"""The Spark data source `postroom_log`: the event log of a store as rows, in batches or as a stream."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, ClassVar

import msgspec
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    Filter,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from postroom.domain.errors import BrokenLog, InvalidRequest, NotFound
from postroom.projections.log_columns import COLUMNS
from postroom.projections.log_conditions import Bucket
from postroom.projections.log_extent import LogExtent, Range, decode_extents, encode_extents, pack
from postroom.projections.ports.log_reader import POSITIONS_PER_READ, LogReader
from postroom.projections.spark.pushdown import Pushdown

__all__ = ["COLUMNS", "LogSource", "follow_log", "read_log", "spark_schema"]

PARTITIONS_PER_CORE = 4
BUCKETS = 256
"""The number of values of the last byte of a stream id, which divides messages among tasks."""
OPTIONS = ("extents", "partitions", "partition_by", "start", "max_rows")
_numbers = count(1)

Offset = dict[str, int]
"""The last position that a stream has read, by mailbox name."""


class LogSource(DataSource):
    """The event log of a store as a Spark data source; subclasses open it.

    Declare the columns to read as the schema: Spark does not prune the columns of a Python source, so exactly
    those are read. In batch queries, filters on mailbox and position select the ranges to read, and filters
    on stored columns (`type`, `topic`, `at`, ...) run in the store: `=`, `IN`, `startswith`, comparisons of
    numbers, `IS NULL`, and their negations. Spark passes no filters to streams.

    Options:
        extents: the extents to read, as JSON by `encode_extents`; all of every log by default.
        partitions: approximate number of tasks.
        partition_by: `position`, the default, assigns ranges of positions to tasks. `message` assigns
            messages with all their records; then every task scans the whole log, though each record is
            transferred once.
        start: JSON of the last position already read by mailbox, for a stream; other mailboxes are read from
            the beginning.
        max_rows: maximum number of records in a micro-batch of a stream.
    """

    allowed: ClassVar[Sequence[str]] = OPTIONS
    """Names of the options."""

    @abstractmethod
    def open_log(self) -> LogReader:
        """Return the reader of the log."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "postroom_log"

    def schema(self) -> str:
        """Return all columns, for queries that declare none."""
        return spark_schema(COLUMNS)

    def reader(self, schema: StructType) -> "BatchReader":
        """Return the reader of the declared columns.

        Raises: InvalidRequest for an unknown option or an invalid value.
        """
        plan, log, columns = self._plan(), self.open_log(), _column_names(schema)
        extents = self.options.get("extents")
        return BatchReader(log, log.extents() if extents is None else decode_extents(extents), columns, plan)

    def streamReader(self, schema: StructType) -> "StreamReader":  # noqa: N802  # Spark's name
        """Return the reader of the declared columns as the log grows.

        Raises: InvalidRequest for an unknown option or an invalid value.
        """
        try:
            start = msgspec.json.decode(self.options.get("start", "{}"), type=Offset)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"The option start of postroom_log is not a JSON object of positions: {error}. Write "
                '{"main@local": 120}.'
            ) from None
        limit = self._number("max_rows") if "max_rows" in self.options else None
        return StreamReader(self.open_log(), _column_names(schema), self._plan(), start, limit)

    def _plan(self) -> "Partitioning":
        unknown = sorted(name for name in self.options if name not in self.allowed)
        if unknown:
            raise InvalidRequest(
                f"postroom_log has no option {unknown[0]}; expected {', '.join(self.allowed)}."
            )
        partitions = self._number("partitions") if "partitions" in self.options else PARTITIONS_PER_CORE
        return Partitioning(partitions, self.choice("partition_by", "position", "message") == "message")

    def choice(self, name: str, *choices: str) -> str:
        """Return an option's value, the first choice by default; raise InvalidRequest for any other."""
        choice: str = self.options.get(name, choices[0])
        if choice not in choices:
            raise InvalidRequest(
                f"The option {name} of postroom_log is {choice!r}; expected {' or '.join(choices)}."
            )
        return choice

    def _number(self, name: str) -> int:
        text = self.options[name]
        if not text.isdecimal() or int(text) < 1:
            raise InvalidRequest(f"The option {name} of postroom_log is {text!r}; expected 1 or more.")
        return int(text)


@dataclass
class Part(InputPartition):
    """The records that one task reads: ranges of positions, and optionally one bucket of messages."""

    ranges: list[Range]
    bucket: Bucket | None = None


@dataclass(frozen=True)
class Partitioning:
    """Division of ranges among tasks."""

    partitions: int
    is_by_message: bool

    def parts(self, ranges: Sequence[Range]) -> list[Part]:
        """Return parts of about equal size, none smaller than one read."""
        positions = sum(each.size for each in ranges)
        size = max(POSITIONS_PER_READ, -(-positions // self.partitions))
        if not self.is_by_message:
            return [Part(group) for group in pack(ranges, size)]
        count = min(-(-positions // size), BUCKETS) or 1
        bounds = [BUCKETS * number // count for number in range(count + 1)]
        return [Part(list(ranges), Bucket("stream", low, high)) for low, high in pairwise(bounds)]


class BatchReader(DataSourceReader):
    """A reader of ranges of a log as Arrow batches, in short read transactions."""

    def __init__(
        self, log: LogReader, extents: Sequence[LogExtent], columns: Sequence[str], plan: Partitioning
    ) -> None:
        self._log = log
        self._extents = extents
        self._columns = columns
        self._plan = plan
        self._pushdown = Pushdown()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Accept the filters that ranges and stores can apply exactly; return the others to Spark."""
        return self._pushdown.accept(filters)

    def partitions(self) -> Sequence[Part]:
        """Return the part of each task; Spark requires at least one partition."""
        return self._plan.parts(self._pushdown.ranges(self._extents)) or [Part([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        buckets = [] if partition.bucket is None else [partition.bucket]
        return self._log.read(partition.ranges, self._columns, [*self._pushdown.where, *buckets])


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A reader of a log as it grows; an offset is the last position read of each mailbox.

    Two offsets define a batch, so a repeated read returns the same rows. `as_of` is the log time of the
    mailbox's last record in the batch.
    """

    def __init__(
        self, log: LogReader, columns: Sequence[str], plan: Partitioning, start: Offset, max_rows: int | None
    ) -> None:
        self._log = log
        self._columns = columns
        self._plan = plan
        self._start = start
        self._max_rows = max_rows
        self._target: Offset | None = None
        self._heads: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's name
        """Return the offset at which a stream without a checkpoint begins."""
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return the limit on the records of a batch."""
        return ReadAllAvailable() if self._max_rows is None else ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Fix the present end of the logs as the end of the stream."""
        self._target = self._log.heads()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802  # Spark's name
        """Return the end of the logs at the last poll."""
        return self._heads

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802  # Spark's name
        """Return the end of the next batch; a mailbox without new records keeps its position.

        Raises: BrokenLog when a log ends before a position that was already read.
        """
        self._heads = self._log.heads() if self._target is None else self._target
        behind = {name: head for name, head in self._heads.items() if head != start.get(name)}
        for name, head in behind.items():
            if head < start.get(name, 0) and self._target is None:
                raise BrokenLog(
                    f"The log of mailbox {name} ends at position {head}, but position {start[name]} was read "
                    "before: its end is missing. Restore the store, or start with a new checkpoint.",
                    head + 1,
                )
        starts = start | self._starts({name: head for name, head in behind.items() if name not in start})
        pending = {name: head - starts[name] for name, head in behind.items() if head > starts[name]}
        max_rows = limit.max_rows if isinstance(limit, ReadMaxRows) else sum(pending.values())
        shares = _shares(pending, max_rows)
        return start | {name: starts[name] + shares[name] for name in pending if shares[name]}

    def partitions(self, start: Offset, end: Offset) -> Sequence[Part]:
        """Return the part of each task in the batch between two offsets.

        Raises: NotFound when retention removed some of its records.
        """
        new_ends = {name: last for name, last in end.items() if last > start.get(name, 0)}
        extents = {extent.name: extent for extent in self._log.extents(new_ends)}
        ranges = []
        for name, last in new_ends.items():
            extent = extents.get(name)
            first = start[name] + 1 if name in start else extent.first if extent is not None else 1
            if extent is None or extent.first > first or extent.last < last:
                raise NotFound(
                    f"Retention removed some of positions {first} to {last} of mailbox {name} before they "
                    "were read. Read with the archive, or rebuild and follow with a new checkpoint."
                )
            ranges.append(Range(extent, first, last))
        return self._plan.parts(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        return self._log.read(partition.ranges, self._columns, [partition.bucket] if partition.bucket else [])

    def _starts(self, heads: Offset) -> Offset:
        """Return the position before the first of each of these logs."""
        starts = {extent.name: extent.first - 1 for extent in self._log.extents(heads)} if heads else {}
        return heads | starts  # a mailbox without an extent is read no further


def _shares(pending: Mapping[str, int], limit: int) -> Offset:
    """Divide a limit evenly among mailboxes; the unused rest of a share goes to the others."""
    shares: Offset = {}
    for number, name in enumerate(sorted(pending, key=pending.__getitem__)):
        shares[name] = min(pending[name], limit // (len(pending) - number))
        limit -= shares[name]
    return shares


def read_log(
    session: SparkSession, log: LogReader, extents: Sequence[LogExtent], *columns: str, **options: Any
) -> DataFrame:
    """Return the records of a log within extents.

    Arguments:
        columns: names of columns of `COLUMNS`.
        options: more options of `LogSource`.
    """
    name = _register(session, log)
    options = {"extents": encode_extents(extents), "partitions": _default_partitions(session)} | options
    return session.read.format(name).schema(spark_schema(columns)).options(**options).load()


def follow_log(
    session: SparkSession, log: LogReader, start: Offset, *columns: str, **options: Any
) -> DataFrame:
    """Return the records of a log as a stream that continues as they are written.

    Arguments:
        log: includes the archive if the stream may be later than retention.
        start: the last position already read, by mailbox; a checkpoint takes precedence.
        columns: names of columns of `COLUMNS`.
        options: more options of `LogSource`, such as `max_rows`.
    """
    name, begin = _register(session, log), msgspec.json.encode(start).decode()
    options = {"start": begin, "partitions": _default_partitions(session)} | options
    return session.readStream.format(name).schema(spark_schema(columns)).options(**options).load()


def _register(session: SparkSession, log: LogReader) -> str:
    """Register a source for a log, and return its name, which is unique: frames look their source up late."""
    unique_name = f"{LogSource.name()}_{next(_numbers)}"

    class StoreLogSource(LogSource):
        # A local class is pickled by value, with the reader, so its URL is not in an option that Spark shows.
        @classmethod
        def name(cls) -> str:
            return unique_name

        def open_log(self) -> LogReader:
            return log

    session.dataSource.register(StoreLogSource)
    return unique_name


def _default_partitions(session: SparkSession) -> str:
    return str(PARTITIONS_PER_CORE * session.sparkContext.defaultParallelism)


def spark_schema(columns: Iterable[str]) -> str:
    """Return the schema of these columns in Spark's notation."""
    return ", ".join(f"{name} {COLUMNS[name].spark}" for name in columns)


def _column_names(schema: StructType) -> list[str]:
    for field in schema:
        if field.name not in COLUMNS or field.dataType.simpleString() != COLUMNS[field.name].spark:
            raise InvalidRequest(
                f"postroom_log has no column {field.name} of type {field.dataType.simpleString()}; it has "
                f"{spark_schema(COLUMNS)}."
            )
    return list(schema.fieldNames())
