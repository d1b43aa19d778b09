"""Every way to read a log gives the records that were written, the columns wanted, and nothing twice."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from postroom.adapters.compose.store import open_store
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.message import Headers, MessageSent
from postroom.domain.record import Record
from postroom.projections import commit_columns
from postroom.projections.log_reader import Bucket, Condition, IsIn, LogExtent, Range
from postroom.projections.projection import COLUMNS, arrow_schema
from tests.conformance.records import sent
from tests.projections.histories import read_range, take_extents
from tests.projections.log_rows import Row, log_row
from tests.projections.stored_logs import (
    ARCHIVED,
    KINDS,
    LATER,
    ONE,
    TOPICS,
    TWO,
    Kept,
    keep,
    past,
    rows,
)
from tests.support.examples import examples
from tests.support.fixtures import CreateDatabase


@pytest.fixture(scope="module", params=KINDS)
def kept(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Kept]:
    """Two logs in a store of every kind, read by every driver."""
    kind, folder = str(request.param), tmp_path_factory.mktemp("kept")
    if "postgres" in kind:
        create: CreateDatabase = request.getfixturevalue("create_shared_database")
        store = create(request.getfixturevalue("postgres_store_template"))
    elif "jetstream" in kind:
        store = f"{request.getfixturevalue('shared_nats_url')}/{kind.replace(' ', '_').upper()}"
    else:
        store = str(folder / "store.db")
    with ExitStack() as stack:
        yield keep(kind, store, folder / "archive", stack)


def test_every_column_is_read_as_it_was_written(kept: Kept) -> None:
    found = rows(
        kept.log.read(
            [Range(extent, extent.first, extent.last) for extent in kept.log.extents()], list(COLUMNS)
        )
    )
    wanted = [log_row(extent, record) for extent, record in kept.everything()]
    assert found == [{name: row[name] for name in COLUMNS} for row in wanted]


def test_batches_have_the_columns_and_types_that_were_asked_for(kept: Kept) -> None:
    extent = kept.extent()
    for columns in (["envelope"], ["mailbox", "as_of"], ["topic", "place", "event"], list(COLUMNS)):
        for batch in read_range(kept.log, extent, extent.first, extent.last, columns):
            assert batch.schema == arrow_schema(columns)


@given(
    bounds=st.tuples(st.integers(1, 70), st.integers(1, 70)).map(sorted),
    columns=st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True),
)
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_and_columns_are_those_of_its_records(
    kept: Kept, bounds: list[int], columns: list[str]
) -> None:
    first, last = bounds
    extent = kept.extent()
    wanted = [log_row(extent, each) for each in kept.records[ONE] if first <= each.position <= last]
    found = rows(read_range(kept.log, extent, first, last, columns))
    assert found == [{name: row[name] for name in columns} for row in wanted]


TEXTS = (*TOPICS, "orders%", "o", "", "Message", "MessageSent", "me", "o'", "max_attempts", "nacked")
_columns = st.sampled_from(
    ["event", "topic", "principal", "reason", "last_error", "at", "attempt", "due", "version", "shard"]
)


@st.composite
def conditions(draw: st.DrawFn) -> Condition:
    """Return a condition on any column."""
    if draw(st.booleans()):
        return Bucket("stream", *sorted(draw(st.tuples(st.integers(0, 255), st.integers(0, 256)))))
    column = draw(_columns)
    values: st.SearchStrategy[int | str] = st.sampled_from(
        (0, 1, 2, 5, 1_050, 1_100) if COLUMNS[column] == pa.int64() else TEXTS
    )
    return IsIn(column, tuple(draw(st.lists(values, min_size=1, max_size=3))))


def holds(condition: Condition, row: Row) -> bool:
    """Tell whether a record meets a condition."""
    value = row[condition.column]
    match condition:
        case IsIn(_, values):
            return value in values
        case Bucket(_, low, high):
            return bool(low <= value[-1] < high)


@given(where=st.lists(conditions(), min_size=1, max_size=3))
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_conditions_leave_out_exactly_the_records_for_which_they_do_not_hold(
    kept: Kept, where: list[Condition]
) -> None:
    extent = kept.extent()
    records = [log_row(extent, record) for record in kept.records[ONE]]
    wanted = [row["position"] for row in records if all(holds(each, row) for each in where)]
    found = rows(read_range(kept.log, extent, extent.first, extent.last, ["position"], where))
    assert [row["position"] for row in found] == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 16])
def test_buckets_part_the_records_by_message(kept: Kept, count: int) -> None:
    extent = kept.extent()
    bounds = [256 * number // count for number in range(count + 1)]
    parts = [
        rows(
            read_range(
                kept.log, extent, extent.first, extent.last, ["position", "stream"], [Bucket("stream", *pair)]
            )
        )
        for pair in pairwise(bounds)
    ]
    streams = [{row["stream"] for row in part} for part in parts]
    assert sum(map(len, streams)) == len(set().union(*streams))
    assert sorted(row["position"] for part in parts for row in part) == list(range(1, extent.last + 1))


def test_a_statement_covers_no_more_positions_than_it_may(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    extent = kept.extent()
    wanted = rows(read_range(kept.log, extent, 1, extent.last, ["place", "last_error"]))
    assert len(wanted) == extent.last
    monkeypatch.setattr(commit_columns, "POSITIONS_PER_READ", 7)
    assert rows(read_range(kept.log, extent, 1, extent.last, ["place", "last_error"])) == wanted


def test_cuts_reach_to_the_present_or_as_far_as_is_asked(kept: Kept) -> None:
    records, extent = kept.records[ONE], kept.extent()
    assert [(each.name, each.first, each.last, each.at) for each in kept.log.extents()] == [
        (name, 1, len(written), written[-1].at) for name, written in kept.records.items()
    ]
    for last in (1, ARCHIVED[ONE], ARCHIVED[ONE] + 1, len(records)):
        assert kept.log.extents({ONE: last}) == [ending(extent, records[last - 1])]
    assert kept.log.extents({ONE: 10**6, "no@such": 5, TWO: 0}) == [extent]


def ending(extent: LogExtent, last: Record) -> LogExtent:
    """Return an extent that ends with another record."""
    return LogExtent(extent.id, extent.name, extent.first, last.position, last.at, last.chain.hex())


def test_heads_are_the_last_positions(kept: Kept) -> None:
    assert kept.log.heads() == {name: len(written) for name, written in kept.records.items()}
    assert list(kept.log.mailboxes()) == list(kept.records)


def test_a_mailbox_that_appears_is_read_from_then_on(kept: Kept) -> None:
    before = kept.log.heads()
    kept.write(LATER, past(LATER, 2))
    assert kept.log.heads() == before | {LATER: len(kept.records[LATER])}
    extent = kept.extent(LATER)
    found = rows(read_range(kept.log, extent, 1, extent.last, ["mailbox", "position"]))
    assert found == [{"mailbox": LATER, "position": each.position} for each in kept.records[LATER]]


def test_envelopes_flow_through_as_bytes_whatever_they_hold(kept: Kept) -> None:
    extent = kept.extent()
    foreign = [b"", b"\x00", b"\xff" * 300, b"not protobuf", bytes(range(256))]
    messages = [opaque(envelope, number) for number, envelope in enumerate(foreign)]
    kept.write(ONE, messages)
    after = kept.extent()
    found = rows(read_range(kept.log, after, extent.last + 1, after.last, ["envelope", "encryption"]))
    assert found == [{"envelope": envelope, "encryption": "aes-256-gcm"} for envelope in foreign]


def opaque(envelope: bytes, number: int) -> MessageSent:
    """Return the event that a message with this envelope was sent, encrypted or shredded as it may be."""
    headers = Headers(1, encryption="aes-256-gcm")
    return sent(2 * 10**6 + number, at=10**6, headers=headers, envelope=envelope)


# -- what can't be read ---


def test_a_store_that_is_not_there_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"There is no store at .*none\.db; name one with --store"):
        take_extents(str(tmp_path / "none.db"))


@pytest.mark.parametrize("driver", ["adbc", "python"])
def test_what_is_no_store_is_said_to_be_unreadable(tmp_path: Path, driver: Any) -> None:
    path = tmp_path / "text.db"
    path.write_text("this is no database " * 100)
    log = open_store(str(path)).log_reader(driver)
    with pytest.raises(Unavailable, match=r"text\.db can't be read"):
        log.extents()
    with pytest.raises(Unavailable, match=r"text\.db can't be read"):
        rows(log.read([Range(LogExtent(1, ONE, 1, 1, 0), 1, 1)], ["event"]))


@pytest.mark.parametrize("driver", ["adbc", "python"])
def test_a_database_that_is_away_is_named_without_its_password(driver: Any) -> None:
    log = open_store("postgresql://me:secret@127.0.0.1:1/gone").log_reader(driver)
    assert "secret" not in repr(log)
    with pytest.raises(Unavailable) as refused:
        rows(log.read([Range(LogExtent(1, ONE, 1, 1, 0), 1, 1)], ["event"]))
    assert "me@127.0.0.1:1/gone" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_without_adbc_the_ordinary_drivers_read_the_same(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    extent = kept.extent()
    wanted = rows(read_range(kept.log, extent, 1, extent.last, list(COLUMNS)))
    monkeypatch.setattr("postroom.adapters.postgres.log_reader.adbc_database", lambda *_: None)
    monkeypatch.setattr("postroom.adapters.sqlite.log_reader._has_adbc", lambda: False)
    assert rows(read_range(kept.log, extent, 1, extent.last, list(COLUMNS))) == wanted
