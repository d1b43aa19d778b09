"""Rows of `postroom_events`: typed, each with its message's id and topic, however the log is divided."""

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from postroom.adapters.compose.store import open_store
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import MessageSent
from postroom.domain.names import message_id
from postroom.projections.log_reader import Range
from postroom.projections.spark.columns import (
    EVENTS,
    MESSAGES,
    PAYLOADS,
    select_columns,
    spark_schema,
)
from postroom.projections.spark.event_rows import EventFilter, EventRows
from postroom.projections.spark.message_rows import MessageRows, message_parts
from postroom.projections.spark.options import LogSelection, Options
from tests.projections.histories import send
from tests.projections.stored_logs import ONE, TWO, Kept, keep, rows
from tests.support.fixtures import CreateDatabase

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ALL = "*"


@pytest.fixture(scope="module", params=["sqlite python", "archive postgres python"])
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    """Two logs in a store of some kind."""
    kind, folder = str(request.param), tmp_path_factory.mktemp("kept")
    store = str(folder / "store.db")
    if "postgres" in kind:
        create: CreateDatabase = request.getfixturevalue("create_shared_database")
        store = create(request.getfixturevalue("postgres_store_template"))
    with ExitStack() as stack:
        yield keep(kind, store, folder / "archive", stack)


def event_rows(kept: Kept, names: str | None = None, **filters: Any) -> EventRows:
    """Return the reader of some columns; those that are read by default if none are named."""
    columns = select_columns("postroom_events", EVENTS, names)
    schema = to_arrow_schema(spark_schema(columns), timezone="UTC")
    return EventRows(kept.log, schema, EventFilter(**filters))


def whole(kept: Kept) -> list[Range]:
    """Return the range of each log."""
    return [Range(extent, extent.first, extent.last) for extent in kept.log.extents()]


def expected_rows(kept: Kept) -> list[dict[str, Any]]:
    """Return all columns of all events, made one by one."""
    expected = []
    for name, records in kept.records.items():
        messages: dict[bytes, MessageSent] = {}
        positions: dict[bytes, int] = {}
        for record in records:
            event = record.event
            row: dict[str, Any] = {column.name: getattr(event, column.name, None) for column in EVENTS}
            if isinstance(event, MessageSent):
                messages[event.stream], positions[event.stream] = event, record.position
                row |= msgspec.structs.asdict(event.headers)
                row["timestamp"] = EPOCH + timedelta(milliseconds=event.headers.timestamp)
                row["custom_headers"] = event.headers.custom_headers and list(
                    event.headers.custom_headers.items()
                )
                row["envelope_hash"] = record.envelope_hash
            sent = messages.get(event.stream) if record.type.startswith("Message") else None
            if sent is not None:
                row["message_id"] = message_id(sent.stream, sent.headers.message_id)
                row |= {"topic": sent.topic, "shard": sent.shard}
                row |= {"sent_position": positions[sent.stream], "sent_at": sent.at}
            row |= {"mailbox": name, "position": record.position, "event": record.type, "epoch": record.epoch}
            row |= {"chain": record.chain}
            for time in ("at", "due", "expires_at", "sent_at"):
                row[time] = None if row[time] is None else EPOCH + timedelta(microseconds=row[time])
            expected.append(row)
    return expected


def test_every_event_has_its_types_and_the_id_and_topic_of_its_message(kept: Kept) -> None:
    assert rows(event_rows(kept, ALL).read(whole(kept))) == expected_rows(kept)


@pytest.mark.parametrize("size", [1, 7])
def test_messages_that_were_sent_in_another_range_are_found(kept: Kept, size: int) -> None:
    names = "mailbox,position,message_id,topic,shard,sent_position,sent_at"
    parts = [
        Range(extent, first, min(first + size - 1, last))
        for extent, start, last in whole(kept)
        for first in range(start, last + 1, size)
    ]
    read = [row for part in parts for row in rows(event_rows(kept, names).read([part]))]
    assert read == [{name: row[name] for name in names.split(",")} for row in expected_rows(kept)]


@pytest.mark.parametrize(
    "filters",
    [
        {"events": ("MessageSent",)},
        {"topic": "orders", "events": ("MessageSent",)},
        {"events": ("MessageAcked", "MessageReceived")},
        {"topic": "orders"},
        {"topic": "orders*"},
        {"topic": "%_", "events": ("MessageReceived",)},
        {"topic": "*"},
        {"events": ("MailboxCreated",)},
    ],
    ids=str,
)
def test_filters_give_the_rows_that_match(kept: Kept, filters: dict[str, Any]) -> None:
    def matches(row: dict[str, Any]) -> bool:
        topic = filters.get("topic")
        is_event = row["event"] in filters.get("events", (row["event"],))
        if topic is None or row["topic"] is None:
            return is_event and topic is None
        return is_event and (
            row["topic"].startswith(topic[:-1]) if topic.endswith("*") else row["topic"] == topic
        )

    names = ("position", "sent_position", "sent_at", "message_id")
    expected = [{name: row[name] for name in names} for row in expected_rows(kept) if matches(row)]
    assert rows(event_rows(kept, ",".join(names), **filters).read(whole(kept))) == expected
    assert len(expected) > 0


@pytest.mark.parametrize(
    "options",
    [
        {"mailbox": TWO},
        {"mailbox": "acme@*", "from_position": "9"},
        {"to_position": "5"},
        {"since": "1970-01-01T00:00:00.001100Z"},
        {"since": "1970-01-01T00:00:00.001100Z", "until": "1970-01-01T00:00:00.001140+00:00"},
        {"until": "1970-01-01T00:00:00.001031Z", "mailbox": ONE},
        {"mailbox": "no@such"},
        {"since": "2026-01-01T00:00:00Z"},
    ],
    ids=str,
)
def test_options_select_what_is_read_at_all(kept: Kept, options: dict[str, str]) -> None:
    def time(name: str, default: datetime) -> datetime:
        return datetime.fromisoformat(options[name]) if name in options else default

    mailbox = options.get("mailbox", "*")
    selection = LogSelection.of(Options("postroom_events", options))
    ranges = list(selection.ranges(kept.log, kept.log.extents()))
    assert rows(event_rows(kept, "mailbox,position").read(ranges)) == [
        {"mailbox": row["mailbox"], "position": row["position"]}
        for row in expected_rows(kept)
        if (row["mailbox"].startswith(mailbox[:-1]) if "*" in mailbox else row["mailbox"] == mailbox)
        and int(options.get("from_position", 1)) <= row["position"] <= int(options.get("to_position", 999))
        and time("since", EPOCH) <= row["at"] < time("until", datetime(9999, 1, 1, tzinfo=UTC))
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"event": "MessageSend"}, "expected names separated by commas, from .*MessageSent"),
        ({"mailbox": " "}, "expected a text that is not blank"),
        ({"since": "yesterday"}, "expected a time with its offset"),
        ({"until": "2026-01-01"}, "expected a time with its offset"),
        ({"from_position": "0"}, "expected 1 or more"),
        ({"to_position": "²"}, "expected 1 or more"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(options: dict[str, str], says: str) -> None:
    def read(options: Options) -> object:
        return LogSelection.of(options), options.event_filter()

    with pytest.raises(InvalidRequest, match=rf"option \w+ of postroom_events is .*; {says}"):
        read(Options("postroom_events", options))


@pytest.mark.parametrize("positions", [5, 20, 1_000])
def test_messages_are_the_same_however_their_logs_are_divided(kept: Kept, positions: int) -> None:
    schema = to_arrow_schema(
        spark_schema(select_columns("postroom_messages", MESSAGES, None)), timezone="UTC"
    )
    messages = MessageRows(kept.log, schema)
    parts = message_parts(whole(kept), positions=positions)
    read = [row for part in parts for row in rows(messages.read(part.ranges, part.bucket))]
    sent = [row for row in expected_rows(kept) if row["event"] == "MessageSent"]
    assert sorted(
        (row["mailbox"], row["position"], row["topic"], row["message_id"]) for row in read
    ) == sorted((row["mailbox"], row["position"], row["topic"], row["message_id"]) for row in sent)
    assert len(parts) == {5: 14, 20: 4, 1_000: 1}[positions]


def bytes_read(reader: EventRows, ranges: list[Range]) -> int:
    """Return how many bytes this process read from files while it read rows."""

    def total() -> int:
        lines = Path("/proc/self/io").read_text("ascii").splitlines()
        return int(next(line for line in lines if line.startswith("rchar")).split()[1])

    before = total()
    assert sum(batch.num_rows for batch in reader.read(ranges)) > 0
    return total() - before


def test_envelopes_are_read_only_for_their_column(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    payload = Random(1).randbytes(100_000)
    send(store, ONE, [NewMessage(topic="large", payload=payload + bytes([number])) for number in range(30)])
    kept = Kept(open_store(store).log_reader("python"), {}, lambda *_: None, {})
    ranges = whole(kept)
    without, with_envelopes = (bytes_read(event_rows(kept, names), ranges) for names in (None, ALL))
    assert without < 5 * len(payload) < 25 * len(payload) < with_envelopes


def test_the_documentation_lists_the_columns_with_their_types_and_comments() -> None:
    page = (Path(__file__).parents[2] / "docs/spark-data.md").read_text("utf-8")
    for columns in (EVENTS, MESSAGES, PAYLOADS):
        for column, field in zip(columns, spark_schema(columns), strict=True):
            null = "never" if column.required else "may be"
            type_ = field.dataType.simpleString()
            assert f"| `{column.name}` | {type_} | {null} | {column.comment} |\n" in page
