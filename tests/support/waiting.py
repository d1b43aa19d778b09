"""Waits for a condition, each with a deadline."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 240
"""Long enough for a machine on which many other processes run."""
_PAUSE_SECONDS = 0.01


def wait_until(is_true: Callable[[], object], seconds: float = SECONDS) -> None:
    """Return once a condition holds.

    Raises: TimeoutError when it does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"The condition did not hold within {seconds:g} s.")
        time.sleep(_PAUSE_SECONDS)


async def until(is_true: Callable[[], object], seconds: float = SECONDS) -> None:
    """Return once a condition holds, while other tasks run.

    Raises: TimeoutError when it does not hold in time.
    """
    async with asyncio.timeout(seconds):
        while not is_true():
            await asyncio.sleep(_PAUSE_SECONDS)


async def until_answer(ask: Callable[[], Awaitable[object]], seconds: float = SECONDS) -> None:
    """Return once the answer to a question is true.

    Raises: TimeoutError when it is not in time.
    """
    async with asyncio.timeout(seconds):
        while not await ask():
            await asyncio.sleep(_PAUSE_SECONDS)


async def within(awaitable: Awaitable[T], seconds: float = SECONDS) -> T:
    """Return the result of an awaitable.

    Raises: TimeoutError when there is none in time.
    """
    async with asyncio.timeout(seconds):
        return await awaitable
