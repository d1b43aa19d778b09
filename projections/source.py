"""The Spark data source `postroom_log`: the event log of a store as rows, by mailbox and position range."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

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

from postroom.projections.cut import MailboxCut, Range, decode_cuts, encode_cuts
from postroom.projections.logs import Log, open_log
from postroom.projections.logs.columns import COLUMNS
from postroom.projections.logs.conditions import Condition, IsIn, StartsWith
from postroom.projections.logs.conditions import Not as NotThat
from postroom.projections.logs.reading import POSITIONS_PER_READ

PARTITIONS_PER_CORE = 4


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
        self._where: list[Condition] = []

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Take over the filters on `type`; leave the others to Spark."""
        for filter_ in filters:
            match filter_:
                case StringStartsWith(("type",), prefix):
                    self._where.append(StartsWith("type", prefix))
                case Not(StringStartsWith(("type",), prefix)):
                    self._where.append(NotThat(StartsWith("type", prefix)))
                case EqualTo(("type",), value):
                    self._where.append(IsIn("type", (value,)))
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
        return self._log.read(partition.ranges, self._columns, self._where)


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
