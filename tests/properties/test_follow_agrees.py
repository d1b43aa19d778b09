"""Followed in batches of any size, the read models say at every cursor what the reference says there."""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from postroom.domain.record import Record
from postroom.projections.follow import Follower
from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import MODULES, Column, MessageProjection, Row
from tests.projections import following
from tests.projections.histories import (
    STORY,
    VARIED,
    Step,
    Store,
    live,
    new_follower,
    open_log,
    steps,
    take_extents,
)
from tests.projections.reference import fold
from tests.support.examples import examples
from tests.support.fixtures import CreateDatabase

histories = st.lists(st.lists(steps, max_size=60), min_size=1, max_size=3)
sizes = st.lists(st.integers(1, 60), min_size=1, max_size=5)
AS_APPLIED, AHEAD = 1_000, 0
ways = st.sampled_from([AS_APPLIED, AHEAD, 20])


def _as_seen(messages: pl.DataFrame) -> pl.DataFrame:
    """Return each message that a projection is given, with all its columns."""
    columns = [repr(row) for row in messages.iter_rows(named=True)]
    return messages.select("mailbox", "status", pl.Series("greatest", columns, pl.String))


PROJECTION = MessageProjection(
    "as_seen",
    (Column("mailbox", "text", "key"), Column("status", "text", "key"), Column("greatest", "text", "max")),
    derive=_as_seen,
)

allowances = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@settings(suppress_health_check=allowances, max_examples=examples(40))
@given(histories, sizes, ways)
@example([STORY, STORY], [3, 1, 7], AS_APPLIED)
@example([STORY, STORY], [3, 1, 7], AHEAD)
@example([VARIED, STORY], [1_000], AHEAD)
@example([STORY], [1], AS_APPLIED)
def test_read_models_in_sqlite_agree_with_the_reference_at_every_cursor(
    taken: list[list[Step]], most: list[int], few_events: int
) -> None:
    with TemporaryDirectory() as folder:
        agree(Path(folder) / "store.db", taken, most, few_events)


@pytest.mark.extended
@settings(suppress_health_check=allowances, max_examples=4)
@given(taken=histories, most=sizes, few_events=ways)
@example(taken=[STORY, STORY], most=[5, 11], few_events=AS_APPLIED)
@example(taken=[STORY, VARIED], most=[13], few_events=AHEAD)
def test_read_models_in_postgresql_agree_with_the_reference_at_every_cursor(
    create_database: CreateDatabase,
    postgres_store_template: str,
    taken: list[list[Step]],
    most: list[int],
    few_events: int,
) -> None:
    agree(create_database(postgres_store_template), taken, most, few_events)


@settings(suppress_health_check=allowances, max_examples=examples(15))
@given(histories, histories, sizes, ways)
@example([STORY, VARIED], [STORY, STORY], [9], AS_APPLIED)
@example([STORY, VARIED], [STORY, STORY], [9], AHEAD)
def test_a_rebuild_and_following_from_there_amount_to_a_rebuild_in_the_end(
    before: list[list[Step]], after: list[list[Step]], most: list[int], few_events: int
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODULES, __name__)
        store = Path(folder) / "store.db"
        lived(store, before)
        following.build(store, take_extents(store) if store.exists() else ())
        lived(store, after)
        with followed(store, most[0], few_events) as follower:
            follower.advance()
        came_to = following.rows(store)
        following.build(store, take_extents(store))
        assert came_to == following.rows(store)


def agree(store: Store, taken: list[list[Step]], most: list[int], few_events: int) -> None:
    """See that after every batch the rows are those of the reference."""
    lived(store, taken)
    following.build(store)
    logs = {extent: list(_records(store, extent)) for extent in take_extents(store)}
    turn = 0
    while True:
        # A new one each time, as another process would be: it knows nothing but what the database says.
        with followed(store, most[turn % len(most)], few_events) as follower:
            found, positions = follower.step(), follower.positions()
        if not found:
            break
        assert following.rows(store) == at_positions(logs, positions)
        turn += 1
    assert positions == {extent.name: extent.last for extent in logs}


@contextmanager
def followed(store: Store, most: int, few_events: int) -> Iterator[Follower]:
    with closing(new_follower(store, max_events=most, few_events=few_events)) as follower:
        yield follower


def lived(store: Store, taken: list[list[Step]]) -> None:
    for number, history in enumerate(taken):
        live(store, f"box{number}@test", history, mode="archive" if number == 1 else "queue")


def at_positions(
    logs: Mapping[LogExtent, list[Record]], positions: Mapping[str, int]
) -> dict[str, list[Row]]:
    """Return what the reference makes of logs as they were at positions, without envelopes."""
    extents = {
        LogExtent(extent.id, extent.name, 1, last, records[last - 1].at): records[:last]
        for extent, records in logs.items()
        if (last := positions.get(extent.name, 0))
    }
    rows = fold(extents).rows
    for row in rows["mailbox"]:
        del row["envelope_blob"]
    return rows


def _records(store: Store, extent: LogExtent) -> Iterator[Record]:
    with closing(open_log(store, extent.name, create_missing=False)) as log:
        yield from log.read()
