"""Leases and routes, decided by the product's rules, under crashes, pauses, bad networks and bad clocks.

`make simulation` runs 10,000 seeds and more.
"""

import pytest

from tests.simulation.cluster.cluster import run

SEEDS = 3_000
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mailbox_has_at_most_one_owner_and_soon_one_when_all_is_healed(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        run(seed)


def test_the_same_seed_makes_the_same_run() -> None:
    assert run(4711).world.trace == run(4711).world.trace
