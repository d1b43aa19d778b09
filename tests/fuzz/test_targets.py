"""Whatever bytes come from outside, they are read or refused by a documented error; see `make fuzz`."""

import tracemalloc
from random import Random

import pytest

from tests.fuzz.target import TARGETS, Target, mutate

INPUTS = 400
"""Inputs of a target made here; `make fuzz` makes more."""
MAX_MEMORY = 64 << 20


@pytest.mark.parametrize("name", TARGETS)
def test_any_bytes_are_read_or_refused(name: str) -> None:
    target, random = Target(name), Random(1)
    seeds = target.seeds
    with target.opened() as check:
        for data in [b"", *seeds, *(mutate(random, seeds) for _ in range(INPUTS))]:
            try:
                check(data)
            except Exception as error:
                pytest.fail(f"{name} failed on {data[:2_000]!r}: {error!r}")


@pytest.mark.parametrize("name", TARGETS)
def test_long_and_deeply_nested_bytes_take_memory_in_proportion(name: str) -> None:
    target = Target(name)
    with target.opened() as check:
        tracemalloc.start()
        try:
            for bomb in target.bombs:
                tracemalloc.reset_peak()
                before, _ = tracemalloc.get_traced_memory()
                check(bomb)
                _, peak = tracemalloc.get_traced_memory()
                assert peak - before < MAX_MEMORY, bomb[:40]
        finally:
            tracemalloc.stop()
