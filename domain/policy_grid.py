"""Grids of policies: the outcomes of a message under each of several changes, and how they compare."""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, NamedTuple

from postroom.domain.errors import InvalidRequest
from postroom.domain.message_history import MessageHistory
from postroom.domain.policy import Changes
from postroom.domain.policy_simulation import Outcome, is_unaffected, observe, simulate

MAX_POLICIES = 60
"""Maximum number of policies in a grid; each has a bit of an integer."""

Effect = Literal["unchanged", "avoided", "pending", "caused", "other"]
"""Effect of changes on a message, if it is the same in the best and in the worst case.

`avoided`: it was dead-lettered, and is settled. `pending`: it was dead-lettered, and waits at the end of the
log. `caused`: it was not dead-lettered, and is. `other`: none of these, or not in both cases.
"""


class GridOutcomes(NamedTuple):
    """The best and the worst outcome of a message, and the policies of a grid under which it has them.

    Arguments:
        policies: bit n is set for the policy with index n.
    """

    policies: int
    best: Outcome
    worst: Outcome


def policy_grid(
    *,
    max_attempts: Iterable[int] = (),
    backoff_base_ms: Iterable[int] = (),
    backoff_max_ms: Iterable[int] = (),
    visibility_ms: Iterable[int] = (),
) -> list[Changes]:
    """Return the changes for each combination of values; a field without values is not changed.

    Raises: InvalidRequest when there are no values or more than 60 combinations, or a value is out of bounds.
    """
    fields: list[list[int | None]] = [
        list(dict.fromkeys(values)) or [None]
        for values in (max_attempts, backoff_base_ms, backoff_max_ms, visibility_ms)
    ]
    if fields == [[None]] * len(fields):
        raise InvalidRequest("A grid of policies needs values of at least one field.")
    count = 1
    for values in fields:
        count *= len(values)
    if count > MAX_POLICIES:
        raise InvalidRequest(
            f"The values combine to {count:,} policies; leave some out, so that there are at most "
            f"{MAX_POLICIES}."
        )
    return [
        Changes(max_attempts=attempts, backoff_base_ms=base, backoff_max_ms=longest, visibility_ms=visibility)
        for attempts, base, longest, visibility in product(*fields)
    ]


def simulate_grid(history: MessageHistory, grid: Sequence[Changes], end: int) -> list[GridOutcomes]:
    """Return the outcomes of a message at `end` (µs) under each policy of a grid; equal ones once."""
    visibilities = [each.visibility_ms for each in grid if each.visibility_ms is not None]
    if is_unaffected(history, Changes(visibility_ms=min(visibilities, default=None))):
        outcome = observe(history, end)
        return [GridOutcomes((1 << len(grid)) - 1, outcome, outcome)]
    outcomes: list[GridOutcomes] = []
    for index, changes in enumerate(grid):
        best, worst = simulate(history, changes, end)
        for number, (policies, *others) in enumerate(outcomes):
            if others == [best, worst]:
                outcomes[number] = GridOutcomes(policies | 1 << index, best, worst)
                break
        else:
            outcomes.append(GridOutcomes(1 << index, best, worst))
    return outcomes


def effect_of(actual: Outcome, best: Outcome, worst: Outcome) -> Effect:
    """Return the effect of changes on a message with these outcomes."""
    if best == actual == worst:
        return "unchanged"
    if actual.dead_letterings:
        if not worst.dead_letterings and worst.status == "settled":
            return "avoided"
        if not worst.dead_letterings and best.status == worst.status == "waiting":
            return "pending"
    elif best.dead_letterings:
        return "caused"
    return "other"
