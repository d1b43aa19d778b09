"""The data source `postroom_log` in batches: however it is filtered and shared out, the rows are the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, LessThanOrEqual, Not, StringStartsWith

from postroom.adapters.compose.spark import StoreLogSource
from postroom.adapters.compose.store import open_store
from postroom.projections.log_columns import COLUMNS
from postroom.projections.log_conditions import Bucket
from postroom.projections.log_extent import LogExtent
from postroom.projections.spark import source
from postroom.projections.spark.source import (
    BatchReader,
    Part,
    Partitioning,
    follow_log,
    read_log,
    spark_schema,
)
from tests.projections.log_rows import log_row
from tests.projections.stored_logs import ONE, TWO, Kept, keep, rows
from tests.support.fixtures import CreateDatabase

KINDS = ("sqlite", "archive postgres")
READ = (
    "mailbox",
    "mailbox_id",
    "position",
    "place",
    "event",
    "at",
    "topic",
    "principal",
    "attempt",
    "due",
)


@pytest.fixture(scope="module", params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two logs, whose store and driver are as the kind says."""
    kind, folder = str(request.param), tmp_path_factory.mktemp("source")
    store = str(folder / "store.db")
    if "postgres" in kind:
        create: CreateDatabase = request.getfixturevalue("create_shared_database")
        store = create(request.getfixturevalue("postgres_store_template"))
    with ExitStack() as stack:
        yield keep(kind, store, folder / "archive", stack)


def read(spark: SparkSession, kept: Kept, *columns: str, **options: str) -> DataFrame:
    """Return what Spark reads of all that is there."""
    return read_log(spark, kept.log, kept.log.extents(), *columns, **options)


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    """Return rows in the order of the log."""
    return sorted((row.asDict() for row in frame.collect()), key=lambda row: row["place"])


def test_spark_reads_every_column_as_it_was_written(spark: SparkSession, kept: Kept) -> None:
    wanted = [log_row(extent, record) for extent, record in kept.everything()]
    assert collected(read(spark, kept, *COLUMNS)) == [{name: row[name] for name in COLUMNS} for row in wanted]


FILTERS = [
    # by Postroom alone
    ("event = 'MessageSent'", True),
    ("event LIKE 'Message%' AND NOT event LIKE 'MessageS%'", True),
    ("topic = 'orders'", True),
    ("topic = 'it''s'", True),
    ("topic = '%_'", True),
    ("topic IN ('orders', 'Orders', 'nobody')", True),
    ("topic NOT IN ('orders', 'Orders')", True),
    ("topic LIKE 'orders%'", True),
    ("NOT topic LIKE 'orders%'", True),
    ("topic <> 'orders'", True),
    ("topic LIKE 'ü.%'", True),
    ("topic IS NULL AND principal IS NULL", True),
    ("principal IS NOT NULL", True),
    ('principal = "o\'hara"', True),
    ("at >= 1100 AND at < 1150", True),
    ("attempt > 1", True),
    ("NOT attempt > 1", True),
    ("due <= 1100", True),
    ("topic = 'a\u0000b'", True),
    ("topic LIKE 'a\u001a%'", True),
    (f"mailbox = '{ONE}'", True),
    (f"mailbox IN ('{TWO}', 'no@such')", True),
    ("mailbox = 'no@such'", True),
    ("mailbox LIKE 'acme@o%'", True),
    ("mailbox <> 'acme@one'", True),
    ("mailbox_id > 1", True),
    ("position > 20 AND position <= 30", True),
    ("position = 25", True),
    ("position >= 24 AND position < 24", True),
    ("place < 1099511627800", True),
    # together with Spark
    ("position IN (3, 9, 40)", False),
    ("position <> 25", False),
    ("topic <=> NULL", True),
    ("NOT topic <=> 'orders'", False),
    ("topic LIKE '%eu'", False),
    ("topic LIKE '%r%'", False),
    ("length(topic) > 6", False),
    ("topic = 'orders' OR at < 1050", False),
]


def test_filters_give_what_spark_finds_in_all_rows(spark: SparkSession, kept: Kept) -> None:
    everything = collected(read(spark, kept, *READ))
    frame = spark.createDataFrame([tuple(row.values()) for row in everything], spark_schema(READ)).cache()
    left_to_spark = []
    for condition, _ in FILTERS:
        found = read(spark, kept, *READ).where(condition)
        assert collected(found) == collected(frame.where(condition)), condition
        plan = found._jdf.queryExecution().executedPlan().toString()
        if "Filter " in plan:
            left_to_spark.append(condition)
    frame.unpersist()
    assert left_to_spark == [condition for condition, is_pushed in FILTERS if not is_pushed]


def filtered(kept: Kept, *filters: Filter) -> tuple[BatchReader, list[Filter]]:
    """Return a reader that was handed filters, and which of them it left to Spark."""
    reader = BatchReader(
        kept.log, kept.log.extents(), ["mailbox", "position", "topic"], Partitioning(4, False)
    )
    return reader, list(reader.pushFilters(list(filters)))


def ranges(reader: BatchReader) -> list[tuple[str, int, int]]:
    """Return which positions are read at all."""
    return [(extent.name, first, last) for part in reader.partitions() for extent, first, last in part.ranges]


@pytest.mark.parametrize(
    ("filters", "wanted"),
    [
        ([EqualTo(("mailbox",), TWO)], [(TWO, 1, 12)]),
        ([In(("mailbox",), (TWO, "no@such"))], [(TWO, 1, 12)]),
        ([Not(EqualTo(("mailbox",), ONE))], [(TWO, 1, 12)]),
        ([EqualTo(("mailbox",), "no@such")], []),
        ([GreaterThan(("position",), 30), LessThanOrEqual(("position",), 33)], [(ONE, 31, 33)]),
        ([In(("position",), (9, 11))], [(ONE, 9, 11), (TWO, 9, 11)]),
        ([EqualTo(("position",), -1)], []),
        ([EqualTo(("place",), 2 * 2**40 + 7)], [(TWO, 7, 7)]),
        ([LessThanOrEqual(("place",), 2**40 + 3)], [(ONE, 1, 3)]),
    ],
)
def test_filters_on_mailbox_and_position_say_what_is_read_at_all(
    kept: Kept, filters: list[Filter], wanted: list[tuple[str, int, int]]
) -> None:
    reader, left = filtered(kept, *filters)
    assert ranges(reader) == [
        (name, first, min(last, len(kept.records[name]))) for name, first, last in wanted
    ]
    assert all(isinstance(each, In) for each in left)


def test_filters_on_stored_columns_leave_only_what_is_wanted_to_be_sent(kept: Kept) -> None:
    reader, left = filtered(kept, StringStartsWith(("topic",), "orders"), GreaterThan(("at",), 1_050))
    assert left == []
    sent = [row for part in reader.partitions() for row in rows(reader.read(part))]
    assert [(row["mailbox"], row["position"]) for row in sent] == [
        (extent.name, record.position)
        for extent, record in kept.everything()
        if getattr(record.event, "topic", "").startswith("orders") and record.at > 1_050
    ]


def test_a_reader_stops_at_its_extents(spark: SparkSession, kept: Kept) -> None:
    extents = kept.log.extents({ONE: 30})
    frame = read_log(spark, kept.log, extents, "position", "place", "as_of")
    found = collected(frame)
    assert [row["position"] for row in found] == list(range(1, 31))
    assert {row["as_of"] for row in found} == {kept.records[ONE][29].at}


# -- how work is shared out ---


def test_parts_by_position_hold_every_position_once(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "POSITIONS_PER_READ", 10)
    extents = kept.log.extents()
    parts = BatchReader(kept.log, extents, ["place"], Partitioning(3, False)).partitions()
    held = [
        (extent.name, p)
        for part in parts
        for extent, first, last in part.ranges
        for p in range(first, last + 1)
    ]
    assert held == [(extent.name, p) for extent in extents for p in range(1, extent.last + 1)]
    sizes = [sum(last - first + 1 for _, first, last in part.ranges) for part in parts]
    assert len(parts) == 3
    assert max(sizes) - min(sizes) <= 3


def test_small_logs_share_a_task_and_no_log_still_has_one(kept: Kept) -> None:
    assert len(BatchReader(kept.log, kept.log.extents(), ["place"], Partitioning(8, False)).partitions()) == 1
    assert BatchReader(kept.log, [], ["place"], Partitioning(8, False)).partitions() == [Part([])]
    assert BatchReader(kept.log, [], ["place"], Partitioning(8, True)).partitions() == [
        Part([], Bucket("stream", 0, 256))
    ]


def test_parts_by_message_hold_all_records_of_their_messages(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "POSITIONS_PER_READ", 10)
    reader = BatchReader(kept.log, kept.log.extents(), ["place", "stream"], Partitioning(4, True))
    parts = [rows(reader.read(part)) for part in reader.partitions()]
    assert len(parts) == 4
    streams = [{row["stream"] for row in part} for part in parts]
    assert sum(map(len, streams)) == len(set().union(*streams))
    places = sorted(row["place"] for part in parts for row in part)
    assert places == [extent.place(record.position) for extent, record in kept.everything()]


def test_partition_by_message_gives_the_same_rows(spark: SparkSession, kept: Kept) -> None:
    by_message = read(spark, kept, "place", "topic", partition_by="message", partitions="3")
    assert collected(by_message) == collected(read(spark, kept, "place", "topic"))


# -- what is refused ---


def load(spark: SparkSession, schema: str = "event string", **options: str) -> DataFrame:
    spark.dataSource.register(StoreLogSource)
    return spark.read.format("postroom_log").schema(schema).options(**options).load()


@pytest.mark.parametrize(
    ("options", "schema", "says"),
    [
        ({}, "event string", "needs a store; name one with the option store"),
        ({"store": "none.db"}, "event string", "There is no store at none.db"),
        ({"store": "x", "stoer": "y"}, "event string", "no option stoer; expected store, archive"),
        (
            {"store": "x", "extents": "[]", "driver": "odbc"},
            "event string",
            "driver .* expected auto or adbc or python",
        ),
        ({"store": "x", "extents": "[]", "partitions": "0"}, "event string", "expected 1 or more"),
        (
            {"store": "x", "extents": "[]", "partition_by": "luck"},
            "event string",
            "expected position or message",
        ),
        ({"store": "x", "extents": "[]"}, "typ string", "no column typ of type string"),
        ({"store": "x", "extents": "[]"}, "at string", "no column at of type string"),
    ],
)
def test_options_and_columns_that_can_not_be_are_refused(
    spark: SparkSession, options: dict[str, str], schema: str, says: str
) -> None:
    with pytest.raises(PySparkException, match=says):
        load(spark, schema, **options).collect()


def test_without_extents_every_log_is_read_to_its_end(spark: SparkSession, tmp_path: Path) -> None:
    with ExitStack() as stack:
        kept = keep("sqlite", str(tmp_path / "store.db"), tmp_path, stack)
        assert load(spark, **kept.options).count() == len(kept.everything())


def test_the_source_by_the_stores_address_remains_registered_beside_opened_logs(
    spark: SparkSession, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        kept = keep("sqlite", str(tmp_path / "store.db"), tmp_path, stack)
        by_address = load(spark, **kept.options)
        opened = read(spark, kept, "event")
        assert follow_log(spark, kept.log, {}, "event").isStreaming
        again = spark.read.format("postroom_log").schema("event string").options(**kept.options).load()
        assert opened.count() == by_address.count() == again.count() == len(kept.everything())


def test_logs_opened_by_several_threads_are_not_confused(spark: SparkSession) -> None:
    class NumberedLog:
        """A log of one record, whose position is the log's number."""

        def __init__(self, number: int) -> None:
            self.number = number

        def read(self, *_: object) -> Iterator[pa.RecordBatch]:
            yield pa.record_batch({"position": pa.array([self.number], pa.int64())})

    def open_log(number: int) -> DataFrame:
        return read_log(spark, NumberedLog(number), [LogExtent(1, ONE, 1, 1, 0)], "position")  # type: ignore[arg-type]

    numbers = range(1, 17)
    with ThreadPoolExecutor(8) as pool:
        frames = list(pool.map(open_log, numbers))
    rows = reduce(DataFrame.union, frames).collect()
    assert [row.position for row in rows] == list(numbers)


def test_a_password_in_the_url_shows_nowhere(spark: SparkSession) -> None:
    url = "postgresql://me:secret@127.0.0.1:1/gone"
    frame = read_log(spark, open_store(url).log_reader(), [], "event")
    assert "secret" not in frame._jdf.queryExecution().toString()


def test_the_schema_is_every_column_when_none_is_declared(spark: SparkSession) -> None:
    spark.dataSource.register(StoreLogSource)
    frame = spark.read.format("postroom_log").options(store="x", extents="[]").load()
    assert frame.columns == list(COLUMNS)
