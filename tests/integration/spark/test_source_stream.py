"""The log as a stream in Spark: each record once, whatever was checkpointed before."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.streaming.query import StreamingQuery

from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.domain.errors import BrokenLog, NotFound
from postroom.projections.log_reader import LogReader, Range
from postroom.projections.spark.options import Offset
from postroom.projections.spark.source import StreamOffset, StreamReader
from postroom.spark import register
from tests.conformance.records import append
from tests.integration.spark.streams import start
from tests.projections.stored_logs import LATER, ONE, TOPICS, TWO, Kept, keep, open_event_log, past, rows
from tests.support.replaced_logs import cut

ALL = ReadAllAvailable()


@pytest.fixture(
    params=[
        "sqlite",
        *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("jetstream", "archive postgres")),
    ]
)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    """Two logs, whose store and driver are as the kind says."""
    kind = str(request.param)
    fixture = {"archive postgres": "postgres_store", "jetstream": "jetstream_store"}.get(kind)
    store = str(tmp_path / "store.db") if fixture is None else request.getfixturevalue(fixture)
    with ExitStack() as stack:
        yield keep(kind, store, tmp_path / "archive", stack)


class PositionRows(NamedTuple):
    """Records with columns as the log has them."""

    log: LogReader
    columns: Sequence[str]

    def read(self, ranges: Iterable[Range]) -> Iterator[pa.RecordBatch]:
        return self.log.read(ranges, self.columns)


def reader(kept: Kept, start: Offset | None = None, max_rows: int | None = None) -> StreamReader:
    """Return a reader of the columns that say where a record is."""
    return StreamReader(kept.log, PositionRows(kept.log, ["mailbox", "position"]), start or {}, max_rows)


def heads(kept: Kept) -> Offset:
    """Return where the logs end."""
    return {name: len(records) for name, records in kept.records.items()}


def positions(offset: StreamOffset) -> Offset:
    """Return the positions of an offset."""
    return {name: int(str(value).partition(":")[0]) for name, value in offset.items()}


def batch(stream: StreamReader, start: StreamOffset, end: StreamOffset) -> list[tuple[str, int]]:
    """Return where the records of a batch are."""
    found = [row for part in stream.partitions(start, end) for row in rows(stream.read(part))]
    return [(row["mailbox"], row["position"]) for row in found]


def everything(kept: Kept) -> list[tuple[str, int]]:
    """Return where all records are."""
    return [(name, record.position) for name, records in kept.records.items() for record in records]


# -- offsets ---


def test_a_batch_goes_on_where_the_one_before_ended(kept: Kept) -> None:
    stream = reader(kept)
    first = stream.latestOffset({}, ALL)
    assert positions(first) == heads(kept)
    assert stream.latestOffset(first, ALL) == first
    assert batch(stream, first, first) == []
    kept.write(TWO, past(TWO, 1, 100))
    second = stream.latestOffset(first, ALL)
    assert list(second) == list(first)  # as text, too, it changes only where there is something new
    assert batch(stream, {}, first) + batch(stream, first, second) == sorted(everything(kept))
    assert {name for name, _ in batch(stream, first, second)} == {TWO}


def test_a_mailbox_that_appears_later_is_taken_up(kept: Kept) -> None:
    stream = reader(kept)
    first = stream.latestOffset({}, ALL)
    kept.write(LATER, past(LATER, 2))
    second = stream.latestOffset(first, ALL)
    assert positions(second) == positions(first) | {LATER: len(kept.records[LATER])}
    assert batch(stream, first, second) == [(LATER, record.position) for record in kept.records[LATER]]


@pytest.mark.parametrize("most", [1, 7, 1_000])
def test_a_limit_is_shared_out_until_all_is_read(kept: Kept, most: int) -> None:
    stream = reader(kept, max_rows=most)
    limit = stream.getDefaultReadLimit()
    assert limit == ReadMaxRows(most)
    found: list[tuple[str, int]] = []
    start: StreamOffset = {}
    while (end := stream.latestOffset(start, limit)) != start:
        taken = batch(stream, start, end)
        assert 0 < len(taken) <= max(most, 2)  # at least one of each mailbox
        found += taken
        start = end
    assert sorted(found) == sorted(everything(kept))


def test_a_large_backlog_does_not_keep_a_small_one_waiting(kept: Kept) -> None:
    small = len(kept.records[TWO])
    assert positions(reader(kept).latestOffset({}, ReadMaxRows(2 * small)))[TWO] == small


def test_available_now_is_what_was_there_when_it_was_asked_for(kept: Kept) -> None:
    stream = reader(kept)
    before = heads(kept)
    stream.prepareForTriggerAvailableNow()
    kept.write(ONE, past(ONE, 1, 100))
    kept.write(LATER, past(LATER, 1))
    assert positions(stream.latestOffset({}, ALL)) == before
    assert stream.latestOffset({**before}, ALL) == before
    assert stream.reportLatestOffset() == before


def test_a_stream_begins_after_what_is_known_already(kept: Kept) -> None:
    stream = reader(kept, {ONE: 30})
    start = stream.initialOffset()
    found = batch(stream, start, stream.latestOffset(start, ALL))
    assert found == [(name, position) for name, position in everything(kept) if name == TWO or position > 30]


def test_a_log_that_ends_before_what_was_read_is_noticed(kept: Kept) -> None:
    with pytest.raises(
        BrokenLog, match=f"{ONE} ends at position {len(kept.records[ONE])}, but position 999 was read"
    ):
        reader(kept).latestOffset({ONE: 999}, ALL)


def test_a_log_that_was_replaced_is_noticed_by_the_next_batch_and_by_a_repeated_one(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    with ExitStack() as stack:
        kept = keep("sqlite", store, tmp_path, stack)
        stream = reader(kept)
        middle = stream.latestOffset({}, ReadMaxRows(20))
        end = stream.latestOffset(middle, ALL)
        assert stream.latestOffset({**positions(end)}, ALL) == positions(end)  # of an earlier release
    cut(store, 4)
    with ExitStack() as stack:
        log = stack.enter_context(closing(open_event_log(store, ONE)))
        append(log, past(ONE, 40, 200))
        for offset in (middle, end):
            with pytest.raises(
                BrokenLog, match=rf"of mailbox {ONE} was read before, but its log has another"
            ):
                stream.latestOffset(offset, ALL)
        with pytest.raises(BrokenLog, match="start with a new checkpoint"):
            stream.partitions(middle, end)


@pytest.fixture
def shortened(tmp_path: Path) -> Iterator[Kept]:
    """A store from which retention removed records without archiving them."""
    with ExitStack() as stack:
        kept = keep("sqlite", str(tmp_path / "store.db"), tmp_path, stack)
        log = SqliteEventLog(tmp_path / "store.db", ONE)
        log.truncate(19, 1_000)
        log.close()
        yield kept


def test_a_stream_that_has_not_begun_begins_with_what_retention_left(shortened: Kept) -> None:
    stream = reader(shortened)
    assert positions(stream.latestOffset({}, ReadMaxRows(4))) == {
        TWO: 2
    }  # what is left of the other is later
    assert batch(stream, {}, {ONE: 21}) == [(ONE, 20), (ONE, 21)]


@pytest.mark.parametrize(("start", "missing"), [({ONE: 5}, "6 to 30"), ({ONE: 18}, "19 to 30")])
def test_what_retention_removed_before_a_stream_came_to_it_is_not_left_out_silently(
    shortened: Kept, start: Offset, missing: str
) -> None:
    with pytest.raises(NotFound, match=f"Retention removed some of positions {missing} of mailbox {ONE}"):
        reader(shortened).partitions({**start}, {ONE: 30})
    assert batch(reader(shortened), {ONE: 19}, {ONE: 21}) == [(ONE, 20), (ONE, 21)]


def test_no_mailbox_is_read_beyond_the_time_up_to_which_the_others_are_read(kept: Kept) -> None:
    rows_ = PositionRows(kept.log, ["mailbox", "position", "at"])
    stream = StreamReader(kept.log, rows_, {}, 6)
    start, latest, read = StreamOffset(), 0, 0
    while (end := stream.latestOffset(start, ReadMaxRows(6))) != start:
        times = [row["at"] for part in stream.partitions(start, end) for row in rows(stream.read(part))]
        assert times
        assert latest <= min(times)  # so no row is late for a watermark
        start, latest, read = end, max(times), read + len(times)
    assert positions(start) == heads(kept)
    assert read == len(everything(kept))


# -- under Spark ---


class Sink:
    """Take batches of a stream, and fail when told to."""

    def __init__(self) -> None:
        self.batches: dict[int, list[tuple[str, int, str]]] = {}
        self.fails_at: int | None = None

    def __call__(self, frame: DataFrame, number: int) -> None:
        taken = sorted((row.mailbox, row.position, row.topic or "") for row in frame.collect())
        assert self.batches.setdefault(number, taken) == taken  # a batch that comes again is the same
        if number == self.fails_at:
            raise RuntimeError("this sink is broken")

    @property
    def places(self) -> list[tuple[str, int]]:
        return [(mailbox, position) for taken in self.batches.values() for mailbox, position, _ in taken]


def events(spark: SparkSession, kept: Kept, **options: str) -> DataFrame:
    """Return the stream of events by the store's address."""
    register(spark)
    source = spark.readStream.format("postroom_events").options(columns="mailbox,position,topic", **options)
    return source.options(**kept.options).load()


@pytest.fixture
def follow(spark: SparkSession, kept: Kept, tmp_path: Path) -> Callable[..., None]:
    """Follow the log with what is available now, from the last checkpoint on."""

    def run(sink: Sink, **options: str) -> None:
        frame = events(spark, kept, **options)
        writer = frame.writeStream.foreachBatch(sink).option(
            "checkpointLocation", str(tmp_path / "checkpoint")
        )
        start(writer.trigger(availableNow=True), StreamingQuery.awaitTermination)

    return run


def test_a_stream_that_starts_again_reads_each_record_once(kept: Kept, follow: Callable[..., None]) -> None:
    sink = Sink()
    follow(sink, max_rows="25")
    assert len(sink.batches) > 2
    assert sorted(sink.places) == sorted(everything(kept))
    known = len(sink.batches)
    follow(sink, max_rows="25")
    assert len(sink.batches) == known
    kept.write(ONE, past(ONE, 2, 100))
    kept.write(LATER, past(LATER, 2))
    follow(sink)
    assert sorted(sink.places) == sorted(everything(kept))


def test_a_batch_that_failed_comes_again_as_it_was(kept: Kept, follow: Callable[..., None]) -> None:
    sink = Sink()
    sink.fails_at = 1
    with pytest.raises(StreamingQueryException, match="this sink is broken"):
        follow(sink, max_rows="20")
    kept.write(ONE, past(ONE, 3, 100))
    kept.write(LATER, past(LATER, 1))
    sink.fails_at = None
    follow(sink, max_rows="20")
    assert sorted(sink.places) == sorted(everything(kept))
    topics = {topic for taken in sink.batches.values() for _, position, topic in taken if position > 2}
    assert topics <= {*TOPICS, "shop"} - {""}


def test_a_stream_reads_on_as_the_log_grows(spark: SparkSession, kept: Kept, tmp_path: Path) -> None:
    sink = Sink()
    frame = events(spark, kept, start=f'{{"{ONE}": 10}}')
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "c"))
    query = start(writer, StreamingQuery.processAllAvailable)
    try:
        kept.write(TWO, past(TWO, 2, 100))
        kept.write(LATER, past(LATER, 1))
        query.processAllAvailable()
    finally:
        query.stop()
    wanted = [(name, position) for name, position in everything(kept) if name != ONE or position > 10]
    assert sorted(sink.places) == sorted(wanted)
