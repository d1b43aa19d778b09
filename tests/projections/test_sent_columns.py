"""Columns of the archive with the values of the `MessageSent` of each event's message."""

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from pyspark.sql.pandas.types import to_arrow_schema

from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.mailbox.codec import to_records
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog
from postroom.domain.mailbox.events import TopicPaused
from postroom.domain.message import Headers
from postroom.domain.names import message_id
from postroom.domain.record import Event
from postroom.projections.log_reader import Range
from postroom.projections.projection import SENT_COLUMNS
from postroom.projections.spark.columns import EVENTS, select_columns, spark_schema
from postroom.projections.spark.event_rows import EventRows
from tests.conformance.log_archive import BOX, COMMITS, before, keep
from tests.conformance.records import append, created, received, sent
from tests.support.examples import examples
from tests.support.segments import as_format_2

IDS = (None, "from-the-sender")


def message(number: int, at: int) -> Event:
    """Return a `MessageSent`, whose topic, shard and id depend on its time, too."""
    event = replace(sent(number, at=at, headers=Headers(1, message_id=IDS[at % 2])), topic=f"t{at % 3}")
    return replace(event, shard=at % 5)


def write(log: SqliteEventLog, steps: list[tuple[int, int, bool]]) -> list[Commit]:
    """Append a history in which ids are sent again after retention; return its commits."""
    commits: list[Commit] = []
    sent_at: dict[int, int] = {}
    append(log, [created(BOX, at=1), TopicPaused(bytes(16), 2, 1, "t1")])
    for at, (number, count, removes) in enumerate(steps, 2):
        events: list[Event] = [received(number, at=at, version=at * 10 + each) for each in range(count)]
        if number not in sent_at:
            events = [message(number, at), *events]
            sent_at[number] = log.head().position + 1  # type: ignore[union-attr]  # it is not empty
        append(log, events or [received(number, at=at, version=at * 10)])
        if removes:
            last = log.head().position  # type: ignore[union-attr]  # it is not empty
            commits += list(log.commits(commits[-1].last if commits else 0))
            log.truncate(last - 3, 1_000)
            first = log.first_position() or last + 1
            sent_at = {each: position for each, position in sent_at.items() if position >= first}
    return commits + list(log.commits(commits[-1].last if commits else 0))


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 4), st.integers(0, 3), st.sampled_from([False, False, True])),
        min_size=3,
        max_size=14,
    ),
    sizes=st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=14, max_size=14),
    start=st.sampled_from([0, 0, 3]),
)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_they_are_what_the_events_of_the_log_are_resolved_to(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, int, bool]],
    sizes: list[tuple[int, bool]],
    start: int,
) -> None:
    folder = tmp_path_factory.mktemp("sent")
    archive = ParquetLogArchive(folder / "archive")
    with ExitStack() as stack:
        log = stack.enter_context(
            closing(SqliteEventLog(str(folder / "store.db"), BOX, durability="relaxed"))
        )
        commits = write(log, steps)
        stored = []
        rest, chain = commits[start:], None if start else GENESIS
        if start:
            log.truncate(commits[start - 1].last, 1_000)
        for size, is_old in sizes:
            if rest:
                segment = archive.store(BOX, rest[:size], chain)
                file = next(each.path for each in archive.files(BOX) if each.first == segment.first)
                if is_old:
                    as_format_2(Path(file))
                else:
                    stored += pq.read_table(file, columns=["position", *SENT_COLUMNS]).to_pylist()
                rest, chain = rest[size:], segment.chain
        for segment in archive.segments(BOX):
            archive.verify(segment)
        columns = to_arrow_schema(
            spark_schema(select_columns("postroom_events", EVENTS, "*")), timezone="UTC"
        )
        reader = open_log_reader(open_store(str(folder / "store.db")), str(folder / "archive"))
        (extent,) = reader.extents()
        batches = EventRows(reader, columns).read([Range(extent, extent.first, extent.last)])
        rows = {row["position"]: row for batch in batches for row in batch.to_pylist()}
    sent_events: dict[bytes, dict[str, Any]] = {}
    expected = {}
    for record in (record for commit in commits[start:] for record in to_records(commit)):
        event = record.event
        if record.type == "MessageSent":
            sent_events[event.stream] = {
                "sent_position": record.position,
                "sent_at": event.at,
                "sent_message_id": event.headers.message_id,  # type: ignore[attr-defined]  # of a MessageSent
                "event_topic": event.topic,  # type: ignore[attr-defined]
                "event_shard": event.shard,  # type: ignore[attr-defined]
            }
        is_message = record.type.startswith("Message")
        own = {"event_topic": getattr(event, "topic", None), "event_shard": getattr(event, "shard", None)}
        values = dict.fromkeys(SENT_COLUMNS) | ({} if is_message else own)
        if is_message:
            values |= sent_events.get(event.stream, {})
        expected[record.position] = values
        row = rows[record.position]
        assert (row["topic"], row["shard"]) == (values["event_topic"], values["event_shard"])
        is_known = is_message and values["sent_position"] is not None
        id_ = message_id(event.stream, values["sent_message_id"]) if is_known else None
        assert row["message_id"] == id_
    assert stored == [{"position": row["position"], **expected[row["position"]]} for row in stored]


@pytest.mark.parametrize(("column", "value"), [("event_topic", "other"), ("sent_position", None)])
def test_a_forged_value_is_found_by_verifying_the_segment(tmp_path: Path, column: str, value: object) -> None:
    archive = ParquetLogArchive(tmp_path)
    segment = keep(archive, 1, 20)
    (file,) = archive.files(BOX)
    table = pq.read_table(file.path)
    values = table[column].to_pylist()
    values[8] = value
    index = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(index, table.schema.field(index), pa.array(values, table[column].type)), file.path
    )
    (tmp_path / BOX / "manifest.json").unlink()
    with pytest.raises(BrokenLog, match="differs at position 9 from the commit"):
        archive.verify(segment)


def test_a_segment_is_intact_without_the_earlier_ones_that_it_was_filled_from(tmp_path: Path) -> None:
    archive = ParquetLogArchive(tmp_path)
    first = keep(archive, 1, 5)
    rest = [each for each in COMMITS if each.first > first.last]
    second = archive.store(BOX, rest, before(rest[0]))
    Path(archive.files(BOX)[0].path).unlink()
    filled = pl.read_parquet(archive.files(BOX)[0].path).filter(pl.col("sent_position") <= first.last)
    assert filled.height
    archive.verify(second)
