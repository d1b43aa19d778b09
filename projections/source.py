"""The Spark data source `postroom_log`: the event log of a store as rows, by mailbox and position range."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    InputPartition,
    Not,
    StringStartsWith,
)
from pyspark.sql.types import StructType

from postroom.projections.cut import PLACES, MailboxCut, decode_cuts, encode_cuts
from postroom.projections.logs import Log, open_log
from postroom.projections.logs.reading import quoted

POSITIONS_PER_READ = 50_000
"""Positions that one SQL statement covers: it bounds how long a read transaction lasts."""
PARTITIONS_PER_CORE = 4


class Column(NamedTuple):
    """How one column of the source is read: as SQL over the log, a Spark type, an Arrow type."""

    sql: str
    spark: str
    arrow: pa.DataType


_LONG, _TEXT, _BYTES = ("bigint", pa.int64()), ("string", pa.string()), ("binary", pa.binary())
_STORED = {
    _LONG: ("place", "version", "epoch", "at", "shard", "attempt", "due", "timestamp"),
    _BYTES: ("stream", "state", "chain", "envelope"),
    _TEXT: (
        *(
            "type",
            "topic",
            "reason",
            "message_id",
            "content_type",
            "schema_url",
            "schema_version",
            "encryption",
        ),
        *("correlation_id", "principal", "namespace", "trace_id", "span_id", "custom_headers"),
    ),
}
COLUMNS = {name: Column(name, *types) for types, names in _STORED.items() for name in names} | {
    "mailbox_id": Column(f"place / {PLACES}", *_LONG),
    "position": Column(f"place % {PLACES}", *_LONG),
    "event": Column(":event", *_TEXT),
    "mailbox": Column("CAST(:mailbox AS TEXT)", *_TEXT),
    "cut_at": Column("CAST(:cut_at AS BIGINT)", *_LONG),
}
"""What may be declared as a column.

`event` is `type` without its schema version, `mailbox` the name, `cut_at` the log time (µs) at the mailbox's
cut.
"""


class LogSource(DataSource):
    """Read the event log of a store in Spark.

    Declare the columns wanted as the schema: Spark does not prune the columns of a Python source, so exactly
    those are read. Filters on `type` run in the store.

    Options:
        store: path of a SQLite store, or URL of a PostgreSQL one. Spark shows options: `read_log` keeps
            passwords out of them.
        cuts: how far to read which mailbox, as `encode_cuts` writes it.
        partitions: about how many tasks to read with.
        driver: `adbc`, or `python` for the database's ordinary Python driver.
    """

    url: ClassVar[str | None] = None
    """The store in place of the option, where its URL is not for everybody's eyes."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `spark.read.format`."""
        return "postroom_log"

    def schema(self) -> str:
        """Return every column there is, for when none were declared."""
        return spark_schema(COLUMNS)

    def reader(self, schema: StructType) -> "LogReader":
        """Return the reader of the declared columns."""
        options = self.options
        return LogReader(
            open_log(self.url or options["store"], "python" if options.get("driver") == "python" else "adbc"),
            decode_cuts(options["cuts"]),
            schema.fieldNames(),
            partitions=int(options.get("partitions", PARTITIONS_PER_CORE)),
        )


class Range(NamedTuple):
    """Positions `first` to `last` of one mailbox."""

    cut: MailboxCut
    first: int
    last: int


@dataclass
class Ranges(InputPartition):
    """What one task reads."""

    ranges: list[Range]


class LogReader(DataSourceReader):
    """Read position ranges of a log as Arrow batches, a short read transaction at a time."""

    def __init__(
        self, log: Log, cuts: Sequence[MailboxCut], columns: Sequence[str], *, partitions: int
    ) -> None:
        self._log = log
        self._cuts = cuts
        self._columns = columns
        self._partitions = partitions
        self._where = ["place BETWEEN :first AND :last"]

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Take over the filters on `type`; leave the others to Spark."""
        for filter_ in filters:
            match filter_:
                case StringStartsWith(("type",), prefix):
                    self._where.append(self._log.starts_with(prefix))
                case Not(StringStartsWith(("type",), prefix)):
                    self._where.append(f"NOT ({self._log.starts_with(prefix)})")
                case EqualTo(("type",), value):
                    self._where.append(f"type = {quoted(value)}")
                case _:
                    yield filter_

    def partitions(self) -> Sequence[Ranges]:
        """Cut the mailbox logs into about equal parts; small mailboxes share one."""
        size = max(POSITIONS_PER_READ, -(-sum(cut.events for cut in self._cuts) // self._partitions))
        parts: list[Ranges] = []
        room = 0
        for cut in self._cuts:
            first = cut.first
            while first <= cut.last:
                if room == 0:
                    parts.append(Ranges([]))
                    room = size
                last = min(first + room - 1, cut.last)
                parts[-1].ranges.append(Range(cut, first, last))
                room -= last - first + 1
                first = last + 1
        return parts or [Ranges([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Ranges)
        schema = pa.schema([(name, COLUMNS[name].arrow) for name in self._columns])
        return self._log.batches(self._statements(partition), schema)

    def _statements(self, partition: Ranges) -> Iterator[str]:
        for cut, start, end in partition.ranges:
            for first in range(start, end + 1, POSITIONS_PER_READ):
                yield self._sql(cut, first, min(first + POSITIONS_PER_READ - 1, end))

    def _sql(self, cut: MailboxCut, first: int, last: int) -> str:
        columns = ", ".join(f"{COLUMNS[name].sql} AS {name}" for name in self._columns)
        values = {  # the name last: it may itself look like one of the others
            ":event": self._log.event,
            ":cut_at": str(cut.at),
            ":first": str(cut.place(first)),
            ":last": str(cut.place(last)),
            ":mailbox": quoted(cut.name),
        }
        sql = f"SELECT {columns} FROM {self._log.table} WHERE {' AND '.join(self._where)}"
        for name, value in values.items():
            sql = sql.replace(name, value)
        return sql


def read_log(session: SparkSession, store: str, cuts: Sequence[MailboxCut], *columns: str) -> DataFrame:
    """Return the records of a store up to the cuts.

    Arguments:
        columns: which of `COLUMNS` to read.
    """

    class StoreSource(LogSource):
        # Made here, it is sent to the workers by value: so the URL travels with it, where nothing shows it.
        url = store

    session.dataSource.register(StoreSource)
    options = {
        "cuts": encode_cuts(cuts),
        "partitions": str(PARTITIONS_PER_CORE * session.sparkContext.defaultParallelism),
    }
    return session.read.format("postroom_log").schema(spark_schema(columns)).options(**options).load()


def spark_schema(columns: Iterable[str]) -> str:
    """Return the schema of these columns, as Spark spells it."""
    return ", ".join(f"{name} {COLUMNS[name].spark}" for name in columns)
