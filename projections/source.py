"""The Spark data source `postroom_log`: the event log of a store as rows, at once or as it grows."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from postroom.projections.cut import MailboxCut, Range, decode_cuts, encode_cuts
from postroom.projections.logs import Log, open_log
from postroom.projections.logs.columns import COLUMNS
from postroom.projections.logs.conditions import Bucket
from postroom.projections.logs.pushdown import Pushdown
from postroom.projections.logs.reading import POSITIONS_PER_READ

__all__ = ["COLUMNS", "LogSource", "follow_log", "read_log", "spark_schema"]

PARTITIONS_PER_CORE = 4
BUCKETS = 256
"""Parts that messages can be told apart into by the last byte of their ids."""
_OPTIONS = ("store", "archive", "cuts", "partitions", "partition_by", "driver", "start", "max_rows")

Offset = dict[str, int]
"""How far a stream has come: the last position read, by mailbox name."""


class LogSource(DataSource):
    """Read the event log of a store in Spark.

    Declare the columns wanted as the schema: Spark does not prune the columns of a Python source, so exactly
    those are read. Of a batch, filters on mailbox and position say what is read at all, and those on stored
    columns (`type`, `topic`, `at`, ...) run in the store: `=`, `IN`, `startswith`, comparisons of numbers,
    `IS NULL`, and their negations. A stream takes no filters in: Spark hands it none.

    Options:
        store: path of a SQLite store, or URL of a PostgreSQL one. Spark shows options: `read_log` and
            `follow_log` keep passwords out of them.
        archive: folder in which retention stored what it removed, to be read as the log's beginning.
        cuts: how far to read which mailbox, as `encode_cuts` writes it; all there is when left out.
        partitions: about how many tasks to read with.
        partition_by: `position`, the default, gives each task ranges of positions. `message` gives each all
            records of its share of the messages, wherever they are: every task then has the store go through
            the whole log, so with n tasks the log is scanned n times, though each record is sent once.
        driver: `adbc`, or `python` for the database's ordinary Python driver; `auto`, the default, chooses.
        start: of a stream, JSON of the last position already known, by mailbox; others are read from their
            beginning.
        max_rows: of a stream, how many records one micro-batch has at most.
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
        """Return the reader of the declared columns.

        Raises: InvalidRequest when an option can't be what it is.
        """
        log, columns, plan = self._log(), _declared(schema), self._plan()
        cuts = self.options.get("cuts")
        return LogReader(log, log.cuts() if cuts is None else decode_cuts(cuts), columns, plan)

    def streamReader(self, schema: StructType) -> "LogStreamReader":  # noqa: N802  # Spark's name
        """Return the reader of the declared columns as the log grows.

        Raises: InvalidRequest when an option can't be what it is.
        """
        try:
            start = msgspec.json.decode(self.options.get("start", "{}"), type=Offset)
        except msgspec.DecodeError as error:
            raise InvalidRequest(
                f"The option start of postroom_log is no JSON object of positions: {error}. Write "
                '{"main@local": 120}.'
            ) from None
        limit = self._number("max_rows") if "max_rows" in self.options else None
        return LogStreamReader(self._log(), _declared(schema), self._plan(), start, limit)

    def _log(self) -> Log:
        options = self.options
        unknown = sorted(name for name in options if name not in _OPTIONS)
        if unknown:
            raise InvalidRequest(f"postroom_log has no option {unknown[0]}; it knows {', '.join(_OPTIONS)}.")
        store = self.url or options.get("store")
        if not store:
            raise InvalidRequest("postroom_log reads no store; name one with the option store.")
        return open_log(store, self._choice("driver", "auto", "adbc", "python"), options.get("archive"))  # type: ignore[arg-type]

    def _plan(self) -> "Plan":
        partitions = self._number("partitions") if "partitions" in self.options else PARTITIONS_PER_CORE
        return Plan(partitions, self._choice("partition_by", "position", "message") == "message")

    def _choice(self, name: str, *choices: str) -> str:
        chosen: str = self.options.get(name, choices[0])
        if chosen not in choices:
            raise InvalidRequest(
                f"The option {name} of postroom_log is {chosen!r}; it must be {' or '.join(choices)}."
            )
        return chosen

    def _number(self, name: str) -> int:
        text = self.options[name]
        if not text.isdecimal() or int(text) < 1:
            raise InvalidRequest(f"The option {name} of postroom_log is {text!r}; it must be 1 or more.")
        return int(text)


@dataclass
class Part(InputPartition):
    """What one task reads: of all messages, or of those in one bucket."""

    ranges: list[Range]
    bucket: Bucket | None = None


@dataclass(frozen=True)
class Plan:
    """Say how ranges are shared out among tasks."""

    partitions: int
    is_by_message: bool

    def parts(self, ranges: Sequence[Range]) -> list[Part]:
        """Return about equal parts of ranges, none of them small for its own sake."""
        positions = sum(last - first + 1 for _, first, last in ranges)
        size = max(POSITIONS_PER_READ, -(-positions // self.partitions))
        if not self.is_by_message:
            return _by_position(ranges, size)
        count = min(-(-positions // size), BUCKETS) or 1
        bounds = [BUCKETS * number // count for number in range(count + 1)]
        return [Part(list(ranges), Bucket("stream", low, high)) for low, high in pairwise(bounds)]


def _by_position(ranges: Iterable[Range], size: int) -> list[Part]:
    """Cut ranges into parts of so many positions; small mailboxes share one."""
    parts: list[Part] = []
    room = 0
    for cut, first, end in ranges:
        while first <= end:
            if room == 0:
                parts.append(Part([]))
                room = size
            last = min(first + room - 1, end)
            parts[-1].ranges.append(Range(cut, first, last))
            room -= last - first + 1
            first = last + 1
    return parts


class LogReader(DataSourceReader):
    """Read position ranges of a log as Arrow batches, a short read transaction at a time."""

    def __init__(self, log: Log, cuts: Sequence[MailboxCut], columns: Sequence[str], plan: Plan) -> None:
        self._log = log
        self._cuts = cuts
        self._columns = columns
        self._plan = plan
        self._pushdown = Pushdown()

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802  # Spark's name
        """Take over the filters that ranges and stores can apply exactly; leave the others to Spark."""
        return self._pushdown.take(filters)

    def partitions(self) -> Sequence[Part]:
        """Return what each task reads; there always is one, as Spark demands."""
        return self._plan.parts(self._pushdown.ranges(self._cuts)) or [Part([])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        buckets = [] if partition.bucket is None else [partition.bucket]
        return self._log.read(partition.ranges, self._columns, [*self._pushdown.where, *buckets])


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Read a log as it grows; offsets are the last position read of each mailbox, and nothing else.

    A batch is told by its two offsets alone, so that it is the same when it is read again. In its rows,
    `cut_at` is the log time of the mailbox's last record in the batch.
    """

    def __init__(
        self, log: Log, columns: Sequence[str], plan: Plan, start: Offset, max_rows: int | None
    ) -> None:
        self._log = log
        self._columns = columns
        self._plan = plan
        self._start = start
        self._max_rows = max_rows
        self._target: Offset | None = None
        self._seen: Offset | None = None

    def initialOffset(self) -> Offset:  # noqa: N802  # Spark's name
        """Return where a stream without a checkpoint begins."""
        return self._start

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802  # Spark's name
        """Return how many records a batch may have."""
        return ReadAllAvailable() if self._max_rows is None else ReadMaxRows(self._max_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802  # Spark's name
        """Take what is there now as all that will be read."""
        self._target = self._log.heads()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802  # Spark's name
        """Return how far the logs had come when they were last looked at."""
        return self._seen

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802  # Spark's name
        """Return how far the next batch goes; a mailbox that has nothing new stays where it was.

        Raises: BrokenLog when a log ends before what was read of it already.
        """
        self._seen = self._log.heads() if self._target is None else self._target
        behind = {name: head for name, head in self._seen.items() if head != start.get(name)}
        for name, head in behind.items():
            if head < start.get(name, 0) and self._target is None:
                raise BrokenLog(
                    f"The log of mailbox {name} ends at position {head}, but {start[name]} was read of it "
                    "before: its end was cut off. Restore the store, or start with a new checkpoint.",
                    head + 1,
                )
        begins = start | self._begins({name: head for name, head in behind.items() if name not in start})
        pending = {name: head - begins[name] for name, head in behind.items() if head > begins[name]}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else sum(pending.values())
        shares = _shares(pending, most)
        return start | {name: begins[name] + shares[name] for name in pending if shares[name]}

    def partitions(self, start: Offset, end: Offset) -> Sequence[Part]:
        """Return what each task reads of the batch between two offsets.

        Raises: NotFound when retention removed some of it.
        """
        grown = {name: last for name, last in end.items() if last > start.get(name, 0)}
        cuts = {cut.name: cut for cut in self._log.cuts(grown)}
        ranges = []
        for name, last in grown.items():
            cut = cuts.get(name)
            first = start[name] + 1 if name in start else cut.first if cut is not None else 1
            if cut is None or cut.first > first or cut.last < last:
                raise NotFound(
                    f"Positions {first} to {last} of mailbox {name} are to be read, but retention removed "
                    "some of them. Read with the archive, or rebuild and follow with a new checkpoint."
                )
            ranges.append(Range(cut, first, last))
        return self._plan.parts(ranges)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, Part)
        return self._log.read(partition.ranges, self._columns, [partition.bucket] if partition.bucket else [])

    def _begins(self, heads: Offset) -> Offset:
        """Return the position before the first of each of these logs."""
        begins = {cut.name: cut.first - 1 for cut in self._log.cuts(heads)} if heads else {}
        return heads | begins  # one that is gone by now has nothing to be read


def _shares(pending: Mapping[str, int], most: int) -> Offset:
    """Share out what a batch may have: to each mailbox the same, or what it has where that is less."""
    shares: Offset = {}
    for number, name in enumerate(sorted(pending, key=pending.__getitem__)):
        shares[name] = min(pending[name], most // (len(pending) - number))
        most -= shares[name]
    return shares


def read_log(
    session: SparkSession,
    store: str,
    cuts: Sequence[MailboxCut],
    *columns: str,
    archive: str | None = None,
    **options: Any,
) -> DataFrame:
    """Return the records of a store up to the cuts.

    Arguments:
        columns: which of `COLUMNS` to read.
        archive: folder in which retention stored what it removed, when the cuts were taken with it.
        options: more options of `LogSource`.
    """
    given = {"cuts": encode_cuts(cuts)} | _options(session, store, archive) | options
    return session.read.format("postroom_log").schema(spark_schema(columns)).options(**given).load()


def follow_log(
    session: SparkSession,
    store: str,
    start: Offset,
    *columns: str,
    archive: str | None = None,
    **options: Any,
) -> DataFrame:
    """Return the records of a store as they are written, as a stream.

    Arguments:
        start: the last position already known, by mailbox; a checkpoint knows better.
        columns: which of `COLUMNS` to read.
        archive: folder in which retention stores what it removes, for a stream that may come late.
        options: more options of `LogSource`, such as `max_rows`.
    """
    given = {"start": msgspec.json.encode(start).decode()} | _options(session, store, archive) | options
    return session.readStream.format("postroom_log").schema(spark_schema(columns)).options(**given).load()


def _options(session: SparkSession, store: str, archive: str | None) -> dict[str, str]:
    class StoreSource(LogSource):
        # Made here, it is sent to the workers by value: so the URL travels with it, where nothing shows it.
        url = store

    session.dataSource.register(StoreSource)
    partitions = {"partitions": str(PARTITIONS_PER_CORE * session.sparkContext.defaultParallelism)}
    return partitions if archive is None else partitions | {"archive": archive}


def spark_schema(columns: Iterable[str]) -> str:
    """Return the schema of these columns, as Spark spells it."""
    return ", ".join(f"{name} {COLUMNS[name].spark}" for name in columns)


def _declared(schema: StructType) -> list[str]:
    for field in schema:
        if field.name not in COLUMNS or field.dataType.simpleString() != COLUMNS[field.name].spark:
            raise InvalidRequest(
                f"postroom_log has no column {field.name} of type {field.dataType.simpleString()}; it has "
                f"{spark_schema(COLUMNS)}."
            )
    return list(schema.fieldNames())
