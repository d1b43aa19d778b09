"""Commits decoded into columns have the values of their records, and only the columns that are wanted."""

from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.codec import to_records
from postroom.application.mailbox.event_columns import RUNS
from postroom.domain.commit import Commit, Run
from postroom.domain.errors import BrokenLog
from postroom.projections import commit_columns
from postroom.projections.commit_columns import to_batches
from postroom.projections.log_reader import Bucket, IsIn, LogExtent
from postroom.projections.projection import COLUMNS, arrow_schema
from tests.conformance.records import after, append, life, mixed, received, sent, stored, subscribed
from tests.projections.log_rows import Row, log_row

MAILBOX = "acme@one"


def commits() -> list[Commit]:
    """Return commits of one event and of many, with every type of event and absent and present values."""
    log = MemoryEventLog(MAILBOX)
    append(log, mixed(40, MAILBOX))
    append(log, [sent(9_000, at=2_000)])
    append(log, [received(9_000, at=2_001)])
    append(log, subscribed(9_100, at=2_001))
    append(log, [stored(9_001, at=2_002), stored(9_002, at=2_002), *life(9_003, at=2_003)])
    return list(log.commits())


COMMITS = commits()
EXTENT = LogExtent(7, MAILBOX, 1, COMMITS[-1].last, 2_003)
ROWS = [log_row(EXTENT, record) for commit in COMMITS for record in to_records(commit)]


def rows(batches: Sequence[pa.RecordBatch]) -> list[Row]:
    return [row for batch in batches for row in batch.to_pylist()]


@given(st.lists(st.sampled_from(list(COLUMNS)), min_size=1, unique=True))
def test_columns_have_the_values_of_the_records(columns: list[str]) -> None:
    found = list(to_batches(COMMITS, EXTENT, columns))
    assert rows(found) == [{name: row[name] for name in columns} for row in ROWS]
    assert all(batch.schema == arrow_schema(columns) for batch in found)


@given(st.tuples(st.integers(1, EXTENT.last), st.integers(1, EXTENT.last)).map(sorted), st.integers(1, 60))
def test_events_outside_the_bounds_are_left_out_however_commits_are_batched(
    bounds: list[int], batch_rows: int
) -> None:
    first, last = bounds
    within = [each for each in COMMITS if each.last >= first and each.first <= last]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commit_columns, "ROWS_PER_BATCH", batch_rows)
        found = rows(list(to_batches(within, EXTENT, list(COLUMNS), first=first, last=last)))
    assert found == ROWS[first - 1 : last]


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        (IsIn("event", ("MessageSent",)), lambda row: row["event"] == "MessageSent"),
        (IsIn("attempt", (1, 2)), lambda row: row["attempt"] in (1, 2)),
        (Bucket("stream", 0, 5), lambda row: row["stream"][-1] < 5),
        (IsIn("event", ("NoSuchEvent",)), lambda row: False),
    ],
)
def test_conditions_leave_out_events_whatever_columns_are_wanted(condition, holds) -> None:
    found = rows(list(to_batches(COMMITS, EXTENT, ["position", "envelope"], [condition])))
    assert found == [{name: row[name] for name in ("position", "envelope")} for row in ROWS if holds(row)]


def test_every_field_of_a_message_is_a_column() -> None:
    fields = {
        field
        for event, run in RUNS.items()
        if event.__name__.startswith("Message")
        for field in run.__struct_fields__
        if field not in Run.__struct_fields__
    }
    joined = {field for field, _ in commit_columns.JOINED.values()}
    assert fields == set(commit_columns.FIELDS.values()) - {"versions", "distances"} | joined - {"streams"}


def test_a_commit_whose_columns_do_not_fit_together_is_named() -> None:
    log = MemoryEventLog(MAILBOX)
    (commit,) = after(log, [sent(1), sent(2)])
    for broken in (
        commit._replace(events=b"\xc1"),
        commit._replace(events=commit.events.replace(b"\x02", b"\x01", 1)),
    ):
        with pytest.raises(BrokenLog, match="The commit of positions 1 to 2 can't be decoded"):
            list(to_batches([broken], EXTENT, list(COLUMNS)))


def test_altered_envelopes_are_empty_as_they_are_for_every_reader() -> None:
    log = MemoryEventLog(MAILBOX)
    (commit,) = after(log, [sent(1), sent(2)])
    altered = commit._replace(envelopes=b"\x91\xc4\x00")
    found = rows(list(to_batches([altered], EXTENT, ["position", "envelope"])))
    assert found == [{"position": 1, "envelope": b""}, {"position": 2, "envelope": b""}]
