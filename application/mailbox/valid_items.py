"""Calls on many items, each of which is accepted or refused individually."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from postroom.domain.errors import Rejected

S = TypeVar("S")
T = TypeVar("T")
A = TypeVar("A")


async def submit_valid(
    items: Sequence[S],
    check: Callable[[S], T],
    submit: Callable[[list[T]], Awaitable[Sequence[A]]],
) -> list[A | Rejected]:
    """Submit the valid items together, and return an answer for each item, in their order.

    Arguments:
        check: returns what to submit for an item, or raises Rejected, which is its answer.
        submit: returns an answer for each thing it is given; not called without any.
    """
    valid: list[T] = []
    refused: dict[int, Rejected] = {}
    for index, item in enumerate(items):
        try:
            valid.append(check(item))
        except Rejected as refusal:
            refused[index] = refusal
    answers = await submit(valid) if valid else ()
    if not refused:
        return list(answers)
    others = iter(answers)
    return [refused[index] if index in refused else next(others) for index in range(len(items))]
