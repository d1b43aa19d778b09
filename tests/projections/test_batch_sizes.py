"""How many records the follower takes into a batch."""

import pytest

from postroom.projections.incremental import (
    INITIAL_EVENTS,
    MAX_BYTES,
    MIN_EVENTS,
    TARGET_SECONDS,
    BatchSize,
    through_record,
)
from postroom.projections.log_reader import LogExtent, Range


@pytest.fixture
def size() -> BatchSize:
    return BatchSize(max_events=1_000_000)


def test_after_a_full_batch_the_next_one_may_take_as_long_as_a_batch_should(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS, 0, TARGET_SECONDS / 20)
    assert size.events == 20 * INITIAL_EVENTS


def test_however_quick_a_batch_was_the_next_one_has_at_most_the_maximum(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS, 0, 0.0)
    assert size.events == 1_000_000


def test_a_batch_that_was_not_full_does_not_make_the_next_one_larger(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS - 1, 0, 0.01)
    assert size.events == INITIAL_EVENTS


def test_while_the_first_batch_is_timed_the_largest_one_is_folded_ahead(size: BatchSize) -> None:
    assert size.events_ahead == 1_000_000
    size.adapt(INITIAL_EVENTS, 0, TARGET_SECONDS)
    assert size.events_ahead == size.events == INITIAL_EVENTS


def test_what_was_folded_ahead_is_not_applied_if_it_would_take_far_too_long(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS, 0, TARGET_SECONDS / 5)
    assert size.allows(10 * INITIAL_EVENTS)
    assert not size.allows(10 * INITIAL_EVENTS + 1)


@pytest.mark.parametrize("events", [INITIAL_EVENTS, 5_000])
def test_a_batch_that_took_too_long_makes_the_next_one_smaller(size: BatchSize, events: int) -> None:
    size.adapt(events, 0, 2 * TARGET_SECONDS)
    assert size.events == events // 2


def test_a_batch_of_large_records_makes_the_next_one_smaller(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS, 4 * MAX_BYTES, 0.1)
    assert size.events == INITIAL_EVENTS // 4


def test_however_slow_batches_are_they_do_not_become_tiny(size: BatchSize) -> None:
    size.adapt(INITIAL_EVENTS, 0, 1_000 * TARGET_SECONDS)
    assert size.events == MIN_EVENTS


def test_a_maximum_below_the_minimum_is_kept() -> None:
    size = BatchSize(max_events=10)
    size.adapt(10, 0, 1_000 * TARGET_SECONDS)
    assert size.events == 10


def test_a_batch_is_cut_behind_a_record() -> None:
    ranges = [Range(LogExtent(id_, f"box{id_}@test", 1, 9, 0), 3, 9) for id_ in (1, 2, 3)]
    assert through_record(ranges, "box2@test", 5) == [ranges[0], Range(ranges[1].extent, 3, 5)]
    assert through_record(ranges, "box1@test", 9) == ranges[:1]
