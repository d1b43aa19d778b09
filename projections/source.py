"""The Spark data source `postroom_log`: the event log of a store as rows, by mailbox and position range."""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, NamedTuple

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

from postroom.projections.cut import PLACES, MailboxCut, decode_cuts, encode_cuts, read_uri

Driver = Literal["adbc", "sqlite3"]

ROWS_PER_BATCH = 20_000
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
    "event": Column("substr(type, 1, instr(type, '.') - 1)", *_TEXT),
    "mailbox": Column(":mailbox", *_TEXT),
    "cut_at": Column(":cut_at", *_LONG),
}
"""What may be declared as a column.

`event` is `type` without its schema version, `mailbox` the name, `cut_at` the log time (µs) at the mailbox's
cut.
"""

# A first row of values, because the ADBC driver takes a column's type from what it sees first, and NULL says
# nothing.
_TYPED = {pa.int64(): "0", pa.string(): "''", pa.binary(): "x''"}


class LogSource(DataSource):
    """Read the event log of a SQLite store in Spark.

    Declare the columns wanted as the schema: Spark does not prune the columns of a Python source, so exactly
        those
    are read. Filters on `type` run in the store.

    Options:
        store: path of the SQLite file.
        cuts: how far to read which mailbox, as `encode_cuts` writes it.
        partitions: about how many tasks to read with.
        driver: `adbc`, or `sqlite3` where ADBC is not available.
    """

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
            options["store"],
            decode_cuts(options["cuts"]),
            schema.fieldNames(),
            partitions=int(options.get("partitions", PARTITIONS_PER_CORE)),
            driver="sqlite3" if options.get("driver") == "sqlite3" or not _has_adbc() else "adbc",
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
    """Read position ranges of a SQLite log as Arrow batches, a short read transaction at a time."""

    def __init__(
        self,
        store: str,
        cuts: Sequence[MailboxCut],
        columns: Sequence[str],
        *,
        partitions: int,
        driver: Driver,
    ) -> None:
        self._uri = read_uri(store)
        self._cuts = cuts
        self._columns = columns
        self._partitions = partitions
        self._driver = driver
        self._where = ["place BETWEEN :first AND :last"]

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Take over the filters on `type`; leave the others to Spark."""
        for filter_ in filters:
            match filter_:
                case StringStartsWith(("type",), prefix):
                    self._where.append(_starts_with(prefix))
                case Not(StringStartsWith(("type",), prefix)):
                    self._where.append(f"NOT ({_starts_with(prefix)})")
                case EqualTo(("type",), value):
                    self._where.append(f"type = {_quoted(value)}")
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
        batches = _adbc_batches if self._driver == "adbc" else _sqlite3_batches
        for cut, start, end in partition.ranges:
            for first in range(start, end + 1, POSITIONS_PER_READ):
                last = min(first + POSITIONS_PER_READ - 1, end)
                yield from batches(self._uri, self._sql(cut, first, last), schema)

    def _sql(self, cut: MailboxCut, first: int, last: int) -> str:
        columns = ", ".join(COLUMNS[name].sql for name in self._columns)
        values = {  # the name last: it may itself look like one of the others
            ":cut_at": str(cut.at),
            ":first": str(cut.place(first)),
            ":last": str(cut.place(last)),
            ":mailbox": _quoted(cut.name),
        }
        typed = ", ".join(_TYPED[COLUMNS[name].arrow] + f" AS {name}" for name in self._columns)
        sql = f"SELECT {columns} FROM log WHERE {' AND '.join(self._where)}"
        for name, value in values.items():
            sql = sql.replace(name, value)
        return f"SELECT {typed} UNION ALL {sql}"


def read_log(session: SparkSession, store: str, cuts: Sequence[MailboxCut], *columns: str) -> DataFrame:
    """Return the records of a store up to the cuts.

    Arguments:
        columns: which of `COLUMNS` to read.
    """
    session.dataSource.register(LogSource)
    options = {
        "store": store,
        "cuts": encode_cuts(cuts),
        "partitions": str(PARTITIONS_PER_CORE * session.sparkContext.defaultParallelism),
    }
    return session.read.format("postroom_log").schema(spark_schema(columns)).options(**options).load()


def spark_schema(columns: Iterable[str]) -> str:
    """Return the schema of these columns, as Spark spells it."""
    return ", ".join(f"{name} {COLUMNS[name].spark}" for name in columns)


def _has_adbc() -> bool:
    try:
        import adbc_driver_sqlite.dbapi  # noqa: F401
    except ImportError:
        return False
    return True


def _adbc_batches(uri: str, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    from adbc_driver_sqlite import dbapi

    options = {"adbc.sqlite.query.batch_rows": str(ROWS_PER_BATCH)}
    with (
        dbapi.connect(uri, autocommit=True) as connection,
        connection.cursor(adbc_stmt_kwargs=options) as cursor,
    ):
        cursor.execute(sql)
        skip = 1  # the typed row
        for batch in cursor.fetch_record_batch():
            yield batch.slice(skip).cast(schema)
            skip = 0


def _sqlite3_batches(uri: str, sql: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with closing(sqlite3.connect(uri, uri=True)) as connection:
        cursor = connection.execute(sql)
        cursor.fetchone()  # the typed row
        while rows := cursor.fetchmany(ROWS_PER_BATCH):
            columns = zip(*rows, strict=True)
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _starts_with(prefix: str) -> str:
    # A range, because LIKE ignores case and would not see an index.
    return f"type >= {_quoted(prefix)} AND type < {_quoted(prefix[:-1] + chr(ord(prefix[-1]) + 1))}"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
