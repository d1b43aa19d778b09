"""The data source `postroom_events` in Spark: by frames, views and SQL, typed as the live engine says."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from postroom.adapters.compose.spark import PostroomEvents, events
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.projections.log_reader import LogExtent, Range
from postroom.projections.spark.columns import EVENTS
from postroom.projections.spark.message_rows import message_parts
from postroom.projections.spark.source import BatchReader, Part, parts_of
from postroom.spark import register
from tests.integration.spark.streams import start
from tests.projections.histories import send
from tests.projections.stored_logs import ONE, TWO, Kept, keep

EVENT = StructType().add("event", "string")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two logs in a SQLite file."""
    folder = tmp_path_factory.mktemp("source")
    with ExitStack() as stack:
        yield keep("sqlite", str(folder / "store.db"), folder, stack)


def test_frames_and_views_that_are_read_several_times_each_have_their_own_rows(
    spark: SparkSession, kept: Kept
) -> None:
    register(spark)
    source = spark.read.format("postroom_events").option("columns", "event,position")
    frame = source.load(kept.options["path"])
    records = [record for _, record in kept.everything()]
    sent = sum(record.type == "MessageSent" for record in records)
    # Filters that Spark gives to a Python source would be those of all its scans (ADR 0080).
    assert frame.where("event = 'MessageSent'").count() == sent
    assert frame.count() == len(records)
    frame.createOrReplaceTempView("events")
    counts = """SELECT (SELECT count(*) FROM events WHERE event = 'MessageSent'),
        (SELECT count(*) FROM events WHERE event = 'MailboxCreated'), count(*) FROM events"""
    assert spark.sql(counts).collect() == [(sent, 2, len(records))]


def test_sql_names_the_store_and_sees_types_and_comments(spark: SparkSession, kept: Kept) -> None:
    register(spark)
    store = kept.options["path"]
    options = f"path '{store}', mailbox 'acme@two'"
    spark.sql(f"CREATE OR REPLACE TEMP VIEW log USING postroom_events OPTIONS ({options})")
    columns = {row.col_name: (row.data_type, row.comment) for row in spark.sql("DESCRIBE log").collect()}
    assert columns["at"] == ("timestamp", "Log time of the event.")
    assert columns["custom_headers"][0] == "map<string,string>"
    assert list(columns) == [column.name for column in EVENTS if column.default]
    query = "SELECT unix_micros(min(at)), count(message_id), any_value(mailbox) FROM log"
    records = kept.records["acme@two"]
    messages = sum(record.type.startswith("Message") for record in records)
    assert spark.sql(query).collect() == [(records[0].at, messages, "acme@two")]


def test_a_store_in_jetstream_is_read_as_any_other(
    spark: SparkSession, jetstream_store: str, tmp_path: Path
) -> None:
    register(spark)
    with ExitStack() as stack:
        kept = keep("archive jetstream", jetstream_store, tmp_path / "archive", stack)
        archive = kept.options["archive"]
        frame = spark.read.format("postroom_events").option("archive", archive).load(jetstream_store)
        rows = frame.select("mailbox", "position", "event").orderBy("mailbox", "position").collect()
        assert list(map(tuple, rows)) == [
            (extent.name, record.position, record.type) for extent, record in kept.everything()
        ]
        scanned = events(spark, jetstream_store, archive=archive, mailbox=ONE)
        assert scanned.count() == len(kept.records[ONE])


@pytest.mark.extended
def test_spark_finds_the_sources_by_their_installed_modules(spark: SparkSession, kept: Kept) -> None:
    # As in spark-sql, where no Python code of the user runs.
    frame = spark.newSession().read.format("postroom_messages").load(kept.options["path"])
    sent = sum(record.type == "MessageSent" for _, record in kept.everything())
    assert frame.where("topic IS NOT NULL").count() == frame.count() == sent


def test_a_local_session_reads_with_the_python_that_registered_the_sources(
    spark: SparkSession, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a notebook whose kernel is not the first python3 of the path.
    monkeypatch.delenv("PYSPARK_PYTHON")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/python-without-postroom")
    register(spark)
    assert spark.read.format("postroom_events").load(kept.options["path"]).count()


def test_a_table_keeps_its_options_and_a_query_may_override_them(spark: SparkSession, kept: Kept) -> None:
    register(spark)
    store = kept.options["path"]
    options = f"path '{store}', event 'MailboxCreated', columns 'event,mailbox'"
    spark.sql(f"CREATE TABLE created USING postroom_events OPTIONS ({options})")
    try:
        assert [row.mailbox for row in spark.sql("FROM created ORDER BY mailbox").collect()] == [ONE, TWO]
        one = "SELECT event, count(*) FROM created WITH (mailbox = 'acme@one') GROUP BY event"
        assert spark.sql(one).collect() == [("MailboxCreated", 1)]
    finally:
        spark.sql("DROP TABLE created")


def test_payloads_are_read_as_declared_in_batches_views_and_streams(
    spark: SparkSession, tmp_path: Path
) -> None:
    register(spark)
    store = str(tmp_path / "store.db")
    orders = [NewMessage(topic="orders", payload=b'{"id": %d}' % number) for number in range(20)]
    send(
        store, "acme@one", [*orders, NewMessage(topic="notes", payload=b"{", content_type="application/json")]
    )
    declared = "message_id STRING, payload STRUCT<id: BIGINT>, reason STRING"
    spark.sql(
        f"CREATE OR REPLACE TEMP VIEW payloads ({declared}) USING postroom_payloads OPTIONS (path '{store}')"
    )
    query = "SELECT sum(payload.id), count(*), any_value(reason, true) FROM payloads"
    assert spark.sql(query).collect() == [(190, 21, "The payload is not JSON: Input data was truncated.")]
    stream = (
        spark.readStream.format("postroom_payloads").schema(declared).option("topic", "orders").load(store)
    )
    writer = stream.selectExpr("payload.id AS id").writeStream.format("memory").queryName("ids")
    start(writer.trigger(availableNow=True), StreamingQuery.awaitTermination)
    assert spark.sql("SELECT count(*), sum(id) FROM ids").collect() == [(20, 190)]
    failing = spark.read.format("postroom_payloads").option("mode", "failfast").load(store)
    with pytest.raises(PySparkException, match=r"of mailbox acme@one: The payload is not JSON"):
        failing.collect()


# -- without Spark ---


def test_columns_are_never_null_where_the_schema_says_so() -> None:
    schema = PostroomEvents({"path": "x"}).schema()
    required = [field.name for field in schema if not field.nullable]
    assert required == ["mailbox", "position", "event", "at", "version", "epoch", "stream", "chain"]
    assert "envelope" not in schema.names
    assert PostroomEvents({"path": "x", "columns": "at, envelope"}).schema().names == ["at", "envelope"]


@pytest.mark.parametrize(
    ("options", "schema", "says"),
    [
        ({}, "event string", r"needs a store; name one by load\(...\), by the option path or url, or in"),
        ({"path": "a", "url": "b"}, "event string", "both the options path and url"),
        ({"path": "x", "topc": "y"}, "event string", r"no option topc \(did you mean topic\?\); it has path"),
        ({"path": "x", "driver": "odbc"}, "event string", "expected auto or adbc or python"),
        ({"path": "x", "start": "{}"}, "event string", "is for streams; use readStream"),
        ({"path": "x"}, "typ string", "no column typ; it has mailbox, position"),
        ({"path": "x"}, "at string", "at of postroom_events is declared as string; declare it as timestamp"),
    ],
    ids=str,
)
def test_options_and_columns_that_can_not_be_are_refused(
    options: dict[str, str], schema: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POSTROOM_STORE", raising=False)
    name, type_ = schema.split()
    with pytest.raises(InvalidRequest, match=says):
        PostroomEvents(options).reader(StructType().add(name, type_))


def of_table(**options: str) -> dict[str, str]:
    """Return what Spark passes when a table is created with options."""
    return {"provider": "postroom_events", "owner": "me", "team": "a property"} | {
        name if name == "path" else f"option.{name}": value for name, value in options.items()
    }


@pytest.mark.parametrize(
    "url", ["postgresql://me:sesame@db/orders", "postgresql://db/orders?user=me&password=sesame"]
)
def test_a_table_stores_no_password(url: str) -> None:
    with pytest.raises(InvalidRequest, match="option url of postroom_events has a password, which") as error:
        PostroomEvents(of_table(url=url)).schema()
    assert "sesame" not in str(error.value)
    assert "postroom.options" in PostroomEvents(of_table(url="postgresql://me@db/orders")).schema().json()


def test_options_of_a_table_are_checked_and_are_not_those_of_another_store(kept: Kept) -> None:
    with pytest.raises(InvalidRequest, match=r"no option topc \(did you mean topic\?\)"):
        PostroomEvents(of_table(topc="x")).schema()
    schema = PostroomEvents(of_table(path="/no/such.db", mailbox=TWO)).schema()
    with pytest.raises(NotFound, match=r"There is no store at /no/such\.db"):
        PostroomEvents({}).reader(schema)
    parts = PostroomEvents({"path": kept.options["path"]}).reader(schema).partitions()
    assert sizes_of(list(parts)) == [len(kept.everything())]  # type: ignore[arg-type]  # all are Parts


@pytest.mark.parametrize("option", ["until", "to_position", "partitions"])
def test_a_stream_has_no_end(option: str) -> None:
    with pytest.raises(InvalidRequest, match=f"option {option} of postroom_events is for batches; use read"):
        PostroomEvents({"path": "x", option: "1"}).streamReader(EVENT)


@pytest.mark.parametrize("text", ["[1]", '{"main@local": "x"}', "{"])
def test_a_start_that_is_no_offset_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"option start of postroom_events is .* a JSON object"):
        PostroomEvents({"path": "x", "start": text}).streamReader(EVENT)


def test_the_store_is_named_by_a_file_uri_or_the_environment(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kept.options["path"]
    monkeypatch.setenv("POSTROOM_STORE", store)
    uri = Path(store).as_uri()
    readers = [PostroomEvents(options).reader(EVENT) for options in ({}, {"path": uri}, {"url": store})]
    parts = [sizes_of(list(reader.partitions())) for reader in readers]  # type: ignore[arg-type]  # all are Parts
    assert parts == [[len(kept.everything())]] * 3
    with pytest.raises(NotFound, match=r"There is no store at /no/such\.db"):
        PostroomEvents({"path": "file:/no/such.db"}).reader(EVENT)


# -- how work is divided ---


def ranges(*sizes: int) -> list[Range]:
    """Return the whole logs of mailboxes of these sizes."""
    extents = [LogExtent(number, f"acme@{number}", 1, size, 0) for number, size in enumerate(sizes, 1)]
    return [Range(extent, 1, extent.last) for extent in extents]


def sizes_of(parts: list[Part]) -> list[int]:
    """Return the number of positions of each part."""
    return [sum(each.size for each in part.ranges) for part in parts]


def test_work_is_divided_by_the_size_of_the_log_and_the_cores() -> None:
    assert sizes_of(parts_of(ranges(3_000_000), cores=2)) == [500_000] * 6
    assert sizes_of(parts_of(ranges(30_000_000), cores=2)) == [500_000] * 60
    assert len(parts_of(ranges(30_000_000), cores=64)) == 192
    assert len(parts_of(ranges(30_000_000), cores=None)) == 200
    assert sizes_of(parts_of(ranges(400_000), cores=None, partitions=4)) == [100_000] * 4
    assert sizes_of(parts_of(ranges(100_000), cores=64)) == [50_000] * 2


def test_a_large_mailbox_is_split_and_small_ones_share_a_task() -> None:
    parts = parts_of(ranges(200_000, *[100] * 500), cores=1, partitions=5)
    assert sizes_of(parts) == [50_000] * 5
    assert len(parts[-1].ranges) == 500
    mailboxes = ranges(*[10_000] * 200, 2_000_000)
    assert sizes_of(message_parts(mailboxes, cores=None)) == [3_000_000, 1_000_000]
    assert sizes_of(message_parts(mailboxes, cores=4)) == [2_000_000, *[330_000] * 6, 20_000]
    assert BatchReader(None, parts_of([], cores=8)).partitions() == [Part([])]  # type: ignore[arg-type]
